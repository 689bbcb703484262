"""A dense LLaMA-style model of transformers becomes one with routed heads, in place."""

import copy
from typing import Iterable, List, Optional, Union

import torch
from torch import Tensor, nn

from moh_vision.attention import BudgetSpec
from moh_vision.attention.routers import MoHRouter
from moh_vision.language.models.llama.model import FAMILIES
from moh_vision.models.head_strength import Batch, mean_lengths

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

TextBatch = Union[Tensor, dict]  # input_ids [B, N], or a dict with input_ids and perhaps attention_mask


def convert_llama(
    model: nn.Module,
    head_budget: Optional[BudgetSpec] = None,
    router: Optional[str] = None,
    scope: str = "token",
    executor: str = "auto",
    router_kwargs: Optional[dict] = None,
    calibrate: Optional[Iterable[TextBatch]] = None,
    group: bool = False,
) -> nn.Module:
    """Give a LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM routed heads, in place.

    Its class and that of its config become ours (`MoHLlamaForCausalLM`, ...), its modules and weights stay the same
    objects. "query_norm" adds no parameters; those of "moh" start at zero. Either way, with all heads active the output
    is that of the dense model, bit for bit.

    Args:
        model: of transformers, or one of ours that is dense.
        head_budget: a share such as 0.75, which as everywhere rises with depth, "uniform:0.75", or one (shared, routed)
            per layer; None: all heads active. Of a share, "query_norm" makes the first min(half of all heads, half of the
            active ones) of each layer shared, "moh" 40 % of the active ones. The released MoH-LLaMA3-8B is
            [(16, 8)] * 32.
        router: "query_norm" (Jin 2024, section 4.4; the default) or "moh" (its eq. 5 and 6).
        scope: "token"; a causal model has no other.
        executor: a name in `moh_vision.attention.EXECUTORS`.
        router_kwargs: gate_scale and two_stage of "moh".
        group: choose whole groups of the query heads that share a key-value head, by the norm of their queries together.
            Only so does decoding read fewer keys and values: a key-value head is skipped where its whole group is off.
        calibrate: a few batches, input_ids [B, N] or dicts with input_ids and attention_mask. The heads of every layer are
            then ordered by how much they contribute, so that the shared heads are the strongest; without it they are the
            first. Key-value heads move with all their query heads, the strongest group first, and within a group the
            strongest head. The dense output stays, up to the order of its sums.

    Returns:
        the model.

    Raises:
        ValueError: for another kind of model, one that has routed heads already, projections that are not plain linear
            layers, or an impossible budget; the model is unchanged then.
    """
    if scope != "token":
        raise ValueError(f"scope {scope!r}: the tokens of a causal model are routed one by one, scope is 'token'")
    router = "query_norm" if router is None else router
    ours = family_of(model)
    moh = dict(
        router=router, head_budget=head_budget, executor=executor, group=group, router_kwargs=router_kwargs or None
    )
    config = model.config
    probe = ours.config_class(**{**config.to_dict(), "moh": moh})  # checks; the model's own config is left as it is
    attentions = ours.routed_attentions(model, probe)
    if calibrate is not None:
        order_heads(model, calibrate)
    routed_config = copy.deepcopy(config)  # other models may have the same object
    routed_config.__class__ = ours.config_class
    routed_config.moh, routed_config.head_dim = probe.moh, probe.head_dim
    for layer, attention in zip(model.model.layers, attentions, strict=True):
        layer.self_attn = attention
        if isinstance(attention.router, MoHRouter):
            for p in attention.router.parameters():
                nn.init.zeros_(p)
    for module in model.modules():
        if type(getattr(module, "config", None)) is type(config):
            module.config = routed_config
    model.__class__ = ours
    return model


def family_of(model: nn.Module) -> type:
    """Our class for a dense model.

    Raises:
        ValueError: if it is of no known family, routed already, or its projections are not plain linear layers.
    """
    ours = FAMILIES.get(type(model))
    if type(model) in FAMILIES.values():
        ours = type(model)
        if model.config.moh is not None:
            raise ValueError("the model has routed heads already: set_head_budget changes how many run")
    if ours is None:
        raise ValueError(
            f"convert takes {', '.join(family.__name__ for family in FAMILIES)} of transformers, not {type(model).__name__}"
        )
    for i, layer in enumerate(model.model.layers):
        attn = layer.self_attn
        if type(attn) not in (ours.attention_class, ours.attention_class.__bases__[1]):
            raise ValueError(f"model.layers.{i}.self_attn is a {type(attn).__name__}, whose heads are not known")
        for name in PROJECTIONS:
            linear = getattr(attn, name)
            if type(linear) is not nn.Linear:
                raise ValueError(
                    f"model.layers.{i}.self_attn.{name} is a {type(linear).__name__}: convert takes plain linear layers, "
                    "so convert first and quantise or add adapters afterwards"
                )
    return ours


def order_heads(model: nn.Module, batches: Iterable[TextBatch]) -> None:
    """Put the heads of a dense model in order, in every layer what contributes most first.

    Raises:
        ValueError: if there is no batch, or the weights are offloaded and cannot be ordered.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("calibrate orders the heads of weights that are loaded: convert before offloading the model")
    for layer, strength in zip(model.model.layers, head_contributions(model, batches)):
        permute_heads(layer.self_attn, strength)


def head_contributions(model: nn.Module, batches: Iterable[TextBatch]) -> List[Tensor]:
    """How much each head of a dense model adds to the residual stream.

    Args:
        batches: see `convert_llama`.

    Returns:
        for every layer [H]: the mean over tokens, without padding, of |W_O^h o_h|.

    Raises:
        ValueError: if there is no batch.
    """

    def call(batch: TextBatch) -> Batch:
        inputs = {k: v for k, v in batch.items() if k != "labels"} if hasattr(batch, "items") else dict(input_ids=batch)
        return Batch(kwargs=dict(inputs, use_cache=False), real=inputs.get("attention_mask"))

    heads = model.config.num_attention_heads
    projections = [(layer.self_attn.o_proj, heads) for layer in model.model.layers]
    return mean_lengths(model.model, projections, map(call, batches))


@torch.no_grad()
def permute_heads(attn: nn.Module, strength: Tensor) -> None:
    """Groups of query heads by their summed strength [H], with their key-value heads; in each, heads by their own."""
    size, D = attn.num_key_value_groups, attn.head_dim
    by_group = strength.view(-1, size)  # [G, heads of a group]
    groups = by_group.sum(1).argsort(descending=True, stable=True)
    inside = by_group[groups].argsort(dim=1, descending=True, stable=True)
    heads = (groups.unsqueeze(1) * size + inside).flatten()

    def rows(order: Tensor) -> Tensor:
        places = order.unsqueeze(1) * D + torch.arange(D)
        return places.flatten().to(attn.q_proj.weight.device)

    for linear, order in ((attn.q_proj, heads), (attn.k_proj, groups), (attn.v_proj, groups)):
        linear.weight.copy_(linear.weight[rows(order)])
        if linear.bias is not None:
            linear.bias.copy_(linear.bias[rows(order)])
    attn.o_proj.weight.copy_(attn.o_proj.weight[:, rows(heads)])
