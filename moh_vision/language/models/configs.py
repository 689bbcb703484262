"""Configurations of text models for transformers; attention is a plain dict."""

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from moh_vision.attention import (
    ROUTERS,
    BudgetSpec,
    HeadBudget,
    default_budget,
    full_budget,
    resolve_budget,
)
from moh_vision.attention.budget import parse_share, shape_of, shaped
from moh_vision.attention.routers import router_class
from moh_vision.common.errors import closest

# Keys of an attention dict whose heads are experts: how many a token runs, how many there are, and the width of one. They
# take the place of head_budget; the experts share one key-value head (Zhang 2022).
OF_EXPERTS = ("top_k", "experts", "head_dim")

# Keys of the field `moh` and their defaults; head_budget None: all heads are active.
MOH_FIELDS = {
    "router": "query_norm",
    "head_budget": None,
    "head_budget_shape": None,
    "executor": "auto",
    "group": False,
    "router_kwargs": None,
}
# Fields of every config that are whole numbers of at least 1.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")


def check_attention(spec: dict, where: str) -> None:
    """Raise ValueError unless `spec` is an attention dict; `where` names it in messages.

    An example is dict(router="moa", top_k=8, experts=32, head_dim=128).
    """
    if not isinstance(spec, dict) or "router" not in spec:
        raise ValueError(
            f"{where}: {spec!r} is not a dict with a router out of {', '.join(ROUTERS)}"
        )
    router = spec["router"]
    try:
        chooser = router_class(router)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    allowed = ["bias", "executor", *chooser.options()]
    if is_of_experts(spec):
        allowed += OF_EXPERTS
    elif not chooser.all_heads:
        allowed += ["head_budget", *OF_EXPERTS]
    if is_of_experts(spec) and chooser.all_heads:
        raise ValueError(
            f"{where}: router {router!r} runs all heads, and cannot choose among experts"
        )
    for key in spec:
        if key != "router" and key not in allowed:
            raise ValueError(f"{where}: router {router!r} has no {key!r}, {closest(key, allowed)}")
    if not is_of_experts(spec):
        return
    for key in OF_EXPERTS:
        if type(spec.get(key)) is not int or spec[key] < 1:
            raise ValueError(
                f"{where}: router {router!r} with experts needs {key}, a whole number of at least 1, not {spec.get(key)!r}"
            )
    if spec["top_k"] > spec["experts"]:
        raise ValueError(f"{where}: top_k={spec['top_k']} of only {spec['experts']} experts")


def is_of_experts(attention: dict) -> bool:
    """Return whether the heads of an attention dict are experts, of any number and width."""
    return any(key in attention for key in OF_EXPERTS)


def attention_budget(attention: dict) -> BudgetSpec | None:
    """Return the head_budget of an attention dict; None if the router runs all heads, or chooses among experts."""
    if is_of_experts(attention):
        return None
    return attention.get("head_budget", default_budget(attention["router"]))


def check_whole(config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Raise ValueError if one of these fields is not a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} is not a whole number of at least 1")


class TextConfig(PreTrainedConfig):
    """Base class of the text models' configurations.

    Args:
        num_attention_heads: H, unless the heads are experts.
        attention: dict of the router of all layers, with its options:
            dict(router="dense" | "gated"); dict(router="mae", leave_out=1, mode="soft" | "uniform");
            dict(router="moh" | "query_norm", head_budget=0.75); dict(router="moa", top_k, experts, head_dim): top_k of so
            many experts, each head_dim wide, which share one key-value head. Each may have bias=False (projections without
            biases), executor, and the router's options.
        dropout: after embeddings, attention and feed-forward layers; attention_dropout: of the attention
            matrix; activation_dropout: inside the feed-forward layers.
        layer_budgets: [shared, routed] of every attention layer after `set_head_budget`; None: it was never called.
        head_budget_shape: how `set_head_budget` spreads a share over the layers, "ramp" or "uniform"; None: as the
            head_budget of `attention` does.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    depths = ("num_hidden_layers",)  # names of the fields that hold a number of layers
    roles = ("attention",)  # names of the fields that hold an attention dict

    vocab_size: int = 37_000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    attention: dict | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    layer_budgets: list | None = None
    head_budget_shape: str | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2

    def __post_init__(self, **kwargs):
        if self.attention is None:
            self.attention = {"router": "dense"}
        check_whole(self, (*SIZES, *self.depths))
        if self.hidden_size % self.num_attention_heads or self.hidden_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not even, or no multiple of num_attention_heads={self.num_attention_heads}"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{name}={value!r} is out of range: 0 up to, but not, 1")
        for name in self.roles:
            if getattr(self, name) is not None:
                check_attention(getattr(self, name), name)
                setattr(self, name, dict(getattr(self, name)))  # a copy: presets share theirs
        super().__post_init__(**kwargs)

    def attentions(self) -> list[dict]:
        """Return the attention dict of every stack; one that has none has the model's `attention`."""
        stacks = [name for name in self.roles if name != "attention"]
        if not stacks:
            return [self.attention]
        return [getattr(self, name) or self.attention for name in stacks]


class TranslationConfig(TextConfig):
    """Encoder-decoder of Vaswani 2017, post-normalised.

    Args:
        target_vocab_size: size of a separate target vocabulary, which has its own embedding; None: one embedding
            for source, target and output.
        encoder_attention, decoder_attention, cross_attention: dicts that replace `attention`.
    """

    model_type = "moh_translation"
    attribute_map = {"num_hidden_layers": "encoder_layers"}
    depths = ("encoder_layers", "decoder_layers")
    roles = ("attention", "encoder_attention", "decoder_attention", "cross_attention")

    target_vocab_size: int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention: dict | None = None
    decoder_attention: dict | None = None
    cross_attention: dict | None = None
    is_encoder_decoder: bool = True
    decoder_start_token_id: int | None = 1


class MaskedLMConfig(TextConfig):
    """Encoder for masked language modelling, as RoBERTa: learned positions, embedding norm, post-normalised.

    Args:
        max_position_embeddings: learned positions; the longest text.
        initializer_range: standard deviation of the first weights.
    """

    model_type = "moh_masked_lm"

    num_hidden_layers: int = 8
    max_position_embeddings: int = 130
    initializer_range: float = 0.02
    vocab_size: int = 50_265
    mask_token_id: int | None = 4


class CausalLMConfig(TextConfig):
    """Decoder for language modelling with Baevski and Auli's adaptive input and output (2019), pre-normalised.

    Args:
        adaptive_cutoffs: word ids, sorted by frequency, that begin bands of narrower embeddings; empty: one
            embedding of full width, tied to an ordinary softmax.
        adaptive_factor: how many times narrower each band is than the one before.
        adaptive_dropout: inside the softmax of the narrower bands.
    """

    model_type = "moh_causal_lm"

    num_hidden_layers: int = 16
    adaptive_cutoffs: list | None = None
    adaptive_factor: int = 4
    adaptive_dropout: float = 0.2
    bos_token_id: int | None = 2  # eos stands before the first text too

    def __post_init__(self, **kwargs):
        cutoffs = []
        if self.adaptive_cutoffs is not None:
            cutoffs = list(self.adaptive_cutoffs)
        if cutoffs != sorted(set(cutoffs)) or any(not 0 < c < self.vocab_size for c in cutoffs):
            raise ValueError(
                f"adaptive_cutoffs={cutoffs} are not increasing numbers between 0 and vocab_size={self.vocab_size}"
            )
        if self.hidden_size // self.adaptive_factor ** len(cutoffs) < 1:
            raise ValueError(
                f"adaptive_factor={self.adaptive_factor}: {len(cutoffs)} narrower bands leave nothing of "
                f"hidden_size={self.hidden_size}"
            )
        self.adaptive_cutoffs = cutoffs
        super().__post_init__(**kwargs)


def resolve_pairs(
    spec: BudgetSpec | None, router: str, group: bool, config: PreTrainedConfig
) -> list[list[int]]:
    """Return a budget as the config stores it: one [shared, routed] per layer.

    If `spec` is a share that does not say how many heads are shared, the router does, see `Router.shared_of_text`.

    Args:
        spec: what `resolve_budget` takes; None: all heads run.
        router: a name in `moh_vision.attention.ROUTERS`.
        group: count heads in whole key-value groups.
        config: of the model.
    """
    chooser = router_class(router)
    heads = config.num_attention_heads
    depth = config.num_hidden_layers
    size = heads // config.num_key_value_heads if group else 1
    if spec is None:
        full = full_budget([heads // size] * depth, shares=chooser.shared_share > 0)
        spec = [[shared * size, routed * size] for shared, routed in full]
    budgets = resolve_budget(
        spec, depth, heads, config.head_dim, size, shared_share=chooser.shared_share
    )
    says_shared = isinstance(spec, (list, tuple)) or parse_share(spec).shared is not None
    pairs = []
    for budget in budgets:
        shared = budget.shared
        by_router = chooser.shared_of_text(budget.active // size, heads // size)
        if by_router is not None and not says_shared:
            shared = by_router * size
        pairs.append([shared, budget.active - shared])
    return pairs


def causal_routers() -> list[str]:
    """Return the routers for a LLaMA-style model: they choose heads by one token, and can start as its dense layer."""
    return [
        name
        for name, chooser in ROUTERS.items()
        if chooser.reads == "token"
        and "token" in chooser.scopes
        and not chooser.all_heads
        and chooser.can_become_dense()
    ]


def checked_moh(moh: dict, config: PreTrainedConfig) -> dict:
    """Check the field `moh`, and return it with every key of MOH_FIELDS and head_budget as pairs."""
    if not isinstance(moh, dict):
        raise ValueError(
            f"moh={moh!r} is not a dict with {', '.join(MOH_FIELDS)}, or None for a dense model"
        )
    for key in moh:
        if key not in MOH_FIELDS:
            raise ValueError(f"moh: there is no {key!r}, {closest(key, MOH_FIELDS)}")
    moh = {**MOH_FIELDS, **moh}
    router = moh["router"]
    chooser = router_class(router)
    if router not in causal_routers():
        if chooser.reads != "token":
            problem = (
                "reads other tokens, and a causal model of LLaMA's style routes each one by itself"
            )
        elif chooser.all_heads:
            problem = "runs all heads, and a LLaMA-style model takes routers with a head_budget"
        else:
            problem = "cannot start as plain attention, as a causal model of LLaMA's style does"
        raise ValueError(f"router {router!r} {problem}: give {' or '.join(causal_routers())}")
    if not isinstance(moh["group"], bool):
        raise ValueError(f"group={moh['group']!r} is not True or False")
    if moh["group"] and "group" not in chooser.layer_options:
        choosing = [name for name in causal_routers() if "group" in ROUTERS[name].layer_options]
        raise ValueError(
            f"group=True chooses whole key-value groups: it needs {' or '.join(map(repr, choosing))}, not {router!r}"
        )
    options = chooser.options()
    for key in moh["router_kwargs"] or {}:
        if key not in options:
            allowed = ", ".join(options) or "nothing"
            raise ValueError(f"router_kwargs: router {router!r} has no {key!r}, it takes {allowed}")
    spec = shaped(moh["head_budget"], moh["head_budget_shape"])
    moh["head_budget_shape"] = shape_of(spec) or moh["head_budget_shape"]
    moh["head_budget"] = resolve_pairs(spec, router, moh["group"], config)
    return moh


def config_budgets(config: PreTrainedConfig) -> list[HeadBudget]:
    """Return the budget of each layer; in a dense model all heads are shared."""
    heads = config.num_attention_heads
    if config.moh is None:
        pairs = [[heads, 0]] * config.num_hidden_layers
    else:
        pairs = config.moh["head_budget"]
    return [HeadBudget(heads, config.head_dim, *pair) for pair in pairs]


@dataclass
class RoutedConfig:
    """Mixin that adds the field `moh` to a transformers configuration; it comes before transformers' class.

    Args:
        moh: None: every head runs. Else a dict of
            router: "query_norm" (no parameters, Jin 2024, section 4.4), "moh" (its eq. 5 and 6), or one of your own, see
                `causal_routers`;
            head_budget: one [shared, routed] per layer, or what `resolve_budget` takes, see `resolve_pairs`;
            head_budget_shape: how a share is spread over the layers, "ramp" or "uniform"; None: not known;
            executor: a name in `moh_vision.attention.EXECUTORS`;
            group: choose query heads by whole key-value groups ("query_norm" only);
            router_kwargs: options of the router, such as gate_scale of "moh".
    """

    moh: dict | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_whole(
            self, (*SIZES, "num_hidden_layers", "num_key_value_heads", "max_position_embeddings")
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if getattr(self, "head_dim", None) is None:  # Qwen2's config has no such field
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.moh is not None:
            self.moh = checked_moh(self.moh, self)


class MoHLlamaConfig(RoutedConfig, LlamaConfig):
    model_type = "moh_llama"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.validate_architecture()  # LLaMA's own check, which transformers does not run for a subclass


class MoHQwen2Config(RoutedConfig, Qwen2Config):
    model_type = "moh_qwen2"


class MoHQwen3Config(RoutedConfig, Qwen3Config):
    model_type = "moh_qwen3"
