"""LLaMA-style causal language models with heads as experts: transformers' LLaMA, Qwen2 and Qwen3 with other attention
layers and the config field `moh`. Importing this module registers them with AutoConfig and AutoModelForCausalLM."""

import os
from collections import UserList
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from moh_vision.attention import BudgetSpec, RoutingStats
from moh_vision.language.models.base import RoutedLoss, register
from moh_vision.language.models.configs import (
    MoHLlamaConfig,
    MoHQwen2Config,
    MoHQwen3Config,
    checked_moh,
    config_budgets,
)
from moh_vision.language.models.llama.attention import (
    MoHLlamaAttention,
    MoHQwen2Attention,
    MoHQwen3Attention,
    RoutedAttention,
)
from moh_vision.models.head_order import Batch, order_by_contribution


class Collected(UserList):
    """The statistics of a forward pass, collected from layer to layer.

    Not a list: FSDP rebuilds lists among a module's arguments, so a layer's entries would be lost.
    """

    def take(self) -> list[RoutingStats]:
        """Return the entries, and replace them by None here.

        A checkpointed layer keeps this object until backward, so the object must not hold the graph. Its length stays,
        so that a recomputation appends nothing.
        """
        entries = self.data
        self.data = [None] * len(entries)
        return entries


class RoutedCausalLM(RoutedLoss):
    """Mixin that gives a transformers model routed attention and its losses; it comes before transformers' class.

    The loss of `forward(labels=...)` is only cross-entropy: to train routers use `routed_loss` and add their losses, as
    `moh_vision.language.task.LanguageTask` does.
    """

    attention_class: type = RoutedAttention

    @property
    def fsdp_layers(self) -> list[str]:
        """Return the layer classes that FSDP may gather one by one without losing their statistics."""
        return sorted(self._no_split_modules)

    def __init__(self, config: PreTrainedConfig):
        if config.moh is not None:  # from_pretrained(..., moh=...) sets the field without a check
            config.moh = checked_moh(config.moh, config)
        super().__init__(config)
        for layer, attention in zip(
            self.model.layers, self.routed_attentions(self, config), strict=True
        ):
            layer.self_attn = attention

    @property
    def head_budget_shape(self) -> str | None:
        """Return how a share of heads is spread over the layers, "ramp" or "uniform"; None: it is not known."""
        if self.config.moh is None:
            return None
        return self.config.moh["head_budget_shape"]

    @classmethod
    def routed_attentions(cls, model: nn.Module, config: PreTrainedConfig) -> list[RoutedAttention]:
        """Make the attention layers that a config describes from those of a model, which is not changed.

        A new layer has the projections of the old one.
        """
        moh = dict(config.moh or {"router": "dense"})
        for name in ("head_budget", "head_budget_shape"):  # every layer gets its own budget instead
            moh.pop(name, None)
        layers = zip(model.model.layers, config_budgets(config), strict=True)
        return [cls.attention_class(layer.self_attn, budget, **moh) for layer, budget in layers]

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return logits, as transformers' models do, not log-probabilities."""
        return self.lm_head(hidden)

    def token_losses(
        self, hidden: Tensor, labels: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """Return smoothed and plain losses [T] of hidden [T, C] and labels [T], in float32."""
        logits = self.lm_head(hidden).float()  # [T, V]
        nll = F.cross_entropy(logits, labels, reduction="none")
        if not label_smoothing:
            return nll, nll
        loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
        return loss, nll

    def states_and_stats(
        self, attention_mask: Tensor | None = None, **inputs
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Return the last layer's normalised output [B, N, C], and the statistics of every layer.

        Statistics leave out the tokens that a mask [B, past + N] hides. Takes the arguments of forward but labels.
        """
        self.refuse_reentrant()
        padded = None
        if attention_mask is not None and attention_mask.dim() == 2:
            tokens = inputs.get("input_ids")
            if tokens is None:
                tokens = inputs["inputs_embeds"]
            padded = attention_mask[:, -tokens.shape[1] :] == 0
        has_cache = any(inputs.get(name) is not None for name in ("cache", "past_key_values"))
        inputs.setdefault("use_cache", has_cache)
        stats = Collected()
        output = self.model(attention_mask=attention_mask, stats=stats, padded=padded, **inputs)
        return output.last_hidden_state, stats.take()

    def refuse_reentrant(self) -> None:
        """Raise ValueError for reentrant activation checkpointing: its first pass records no graph, so routers would
        silently learn nothing from the balance loss."""
        if not self.training or not torch.is_grad_enabled():
            return
        for layer in self.model.layers:
            function = getattr(layer, "_gradient_checkpointing_func", None)
            reentrant = getattr(function, "keywords", {}).get("use_reentrant", True)
            if getattr(layer, "gradient_checkpointing", False) and reentrant:
                raise ValueError(
                    "reentrant activation checkpointing would lose the routers' balance loss: enable it with "
                    "use_reentrant=False"
                )


class MoHLlamaForCausalLM(RoutedCausalLM, LlamaForCausalLM):
    config_class = MoHLlamaConfig
    attention_class = MoHLlamaAttention


class MoHQwen2ForCausalLM(RoutedCausalLM, Qwen2ForCausalLM):
    config_class = MoHQwen2Config
    attention_class = MoHQwen2Attention


class MoHQwen3ForCausalLM(RoutedCausalLM, Qwen3ForCausalLM):
    config_class = MoHQwen3Config
    attention_class = MoHQwen3Attention


# transformers' class -> ours.
FAMILIES = {
    ours.__bases__[1]: ours
    for ours in (MoHLlamaForCausalLM, MoHQwen2ForCausalLM, MoHQwen3ForCausalLM)
}

register(AutoModelForCausalLM, *FAMILIES.values())


def convert_llama(
    model: nn.Module,
    head_budget: BudgetSpec | None = None,
    router: str | None = None,
    scope: str = "token",
    executor: str = "auto",
    router_kwargs: dict | None = None,
    calibrate: Iterable[Batch] | None = None,
    group: bool = False,
) -> nn.Module:
    """Give a LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM routed heads, in place.

    The class of the model and of its config become ours (`MoHLlamaForCausalLM`, ...); modules and weights stay the same
    objects. "query_norm" adds no parameters; the parameters of "moh" start at zero. With all heads active the output
    equals the dense model's, bit for bit. Arguments that differ from those of `moh_vision.convert`:

    Args:
        model: of transformers, or a dense one of ours.
        head_budget: with a share, each layer's shared heads are min(half of all, half of the active) for "query_norm",
            40 % of the active ones for "moh". The released MoH-LLaMA3-8B is [(16, 8)] * 32.
        router: "query_norm" (Jin 2024, section 4.4; the default) or "moh" (its eq. 5 and 6).
        scope: "token"; a causal model has no other.
        router_kwargs: gate_scale and two_stage of "moh".
        group: choose query heads by whole key-value groups, by the norm of the group's queries. Only then does decoding
            read fewer keys and values, because it skips those of a group that is off.
        calibrate: a few batches, input_ids [B, N] or dicts with input_ids and attention_mask, by which each layer's
            heads are sorted by contribution, so that the shared heads are the strongest, not the first. Key-value
            heads move with all their query heads: first the strongest group, and within a group the strongest
            head. The dense output stays the same, up to the order of its sums.
    """
    if scope != "token":
        raise ValueError(
            f"scope {scope!r}: the tokens of a causal model are routed one by one, scope is 'token'"
        )
    if router is None:
        router = "query_norm"
    ours = family_of(model)
    moh = dict(
        router=router,
        head_budget=head_budget,
        head_budget_shape="uniform",  # for a share without a shape of its own
        executor=executor,
        group=group,
        router_kwargs=router_kwargs or None,
    )
    config = model.config
    # Make a new config, because other models may share the old one. Making it also checks the options.
    fields = dict(config.to_dict(), model_type=ours.config_class.model_type, moh=moh)
    routed_config = ours.config_class(**fields)
    routed_config._attn_implementation = config._attn_implementation
    attentions = ours.routed_attentions(model, routed_config)
    if calibrate is not None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                "calibrate orders the heads of weights that are loaded: convert before offloading the model"
            )
        order_by_contribution(
            model.model,
            [layer.self_attn for layer in model.model.layers],
            (),
            calibrate,
            use_cache=False,
        )
    for layer, attention in zip(model.model.layers, attentions, strict=True):
        layer.self_attn = attention
        attention.router.become_dense()
    for module in model.modules():
        if type(getattr(module, "config", None)) is type(config):
            module.config = routed_config
    model.__class__ = ours  # in place: callers keep their object
    return model


def family_of(model: nn.Module) -> type:
    """Return our class for a dense model; raise ValueError for models that `convert_llama` cannot change."""
    ours = FAMILIES.get(type(model), type(model))
    if ours not in FAMILIES.values():
        raise ValueError(
            f"convert takes {', '.join(family.__name__ for family in FAMILIES)} of transformers, not {type(model).__name__}"
        )
    if getattr(model.config, "moh", None) is not None:
        raise ValueError("the model has routed heads already: set_head_budget changes how many run")
    for i, layer in enumerate(model.model.layers):
        attn = layer.self_attn
        if type(attn) not in (ours.attention_class, ours.attention_class.__bases__[1]):
            raise ValueError(
                f"model.layers.{i}.self_attn is a {type(attn).__name__}, whose heads are not known"
            )
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(attn, name)
            if type(linear) is not nn.Linear:
                raise ValueError(
                    f"model.layers.{i}.self_attn.{name} is a {type(linear).__name__}: convert takes plain linear layers, "
                    "so convert first and quantise or add adapters afterwards"
                )
    return ours


def load_moh_llama3(
    path: str | os.PathLike, executor: str = "auto", **kwargs
) -> MoHLlamaForCausalLM:
    """Load a folder laid out as the released MoH-LLaMA3-8B (Jin 2024, section 4.4), without running its code.

    The folder's config.json is LLaMA's and does not mention routing, which the released code fixes: the first half of
    the heads is shared, and each token chooses 50 % of the other half, by the norm of the queries. In 16 bits the
    released code also computes these norms in 16 bits, which gives ties; here the norms are float32.

    Args:
        path: the folder, or its name on the hub.
        **kwargs: of from_pretrained, such as dtype.
    """
    described, _ = PreTrainedConfig.get_config_dict(path, **kwargs)
    model_type = described.get("model_type")
    routed = described.get("moh") is not None
    if model_type != "llama" or routed:
        found = f"model_type {model_type!r}"
        if routed:
            found += " and says itself how heads are routed: use from_pretrained"
        raise ValueError(f"{path}: config.json has {found}, expected 'llama' without a field 'moh'")
    kwargs["trust_remote_code"] = False
    model = LlamaForCausalLM.from_pretrained(path, **kwargs)
    if hasattr(model.config, "auto_map"):
        del model.config.auto_map  # the code it names is not needed any more
    heads = model.config.num_attention_heads
    pairs = [(int(heads * 0.5), int(heads * 0.25))] * model.config.num_hidden_layers
    return convert_llama(model, pairs, executor=executor)
