"""Make models compute only active heads, with standard operations, for `moh_vision.commands.export`.

`keep_heads` removes all heads but a fixed selection. `gather_heads` gathers the weights of the heads that each
image chooses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    attention_layers,
    mlp_layers,
)
from moh_vision.attention.executors import Sequences
from moh_vision.attention.executors.groups import GroupsOfSequences
from moh_vision.attention.executors.reasons import HIDDEN_WEIGHTS
from moh_vision.attention.linear import is_around, plain
from moh_vision.attention.model_heads import new_router
from moh_vision.models.convert import linear


def keep_heads(model: nn.Module, kept: Sequence[Sequence[int]]) -> None:
    """Remove all but some heads of every layer, with their keys and values; all tokens then run the kept heads.

    Routers still weigh the kept heads for each token: a token that had chosen exactly these keeps its output.

    Args:
        model: a ViT or DiT with routed heads, changed in place.
        kept: for every layer the heads to keep, in rising order, shared heads included.

    Raises:
        ValueError: naming the layer whose heads cannot leave; the model is unchanged then.
    """
    layers = attention_layers(model)
    for number, (layer, heads) in enumerate(zip(layers, kept, strict=True)):
        if problem := _why_not(layer, list(heads)):
            raise ValueError(f"layer {number}: {problem}")
    for layer, heads in zip(layers, kept):
        if len(heads) == layer.num_heads:
            continue
        S = layer.budget.shared
        candidates = torch.tensor(heads[S:]) - S
        state = layer.router.kept_weights(candidates)
        budget = HeadBudget(len(heads), layer.head_dim, S, len(heads) - S)
        layer.router = new_router(layer, budget)
        layer.router.load_state_dict(state)
        _cut(layer, heads)


def gather_heads(model: nn.Module) -> int:
    """Make a model compute only the heads and MLP groups that an image chose, by gathering their weights.

    Layers that choose heads for each token, run all heads (MAE), or whose weights may not be read (see `plain`), are not
    changed. The output stays the same.

    Returns:
        Number of heads computed for an image, summed over layers.
    """
    computed = 0
    for layer in attention_layers(model):
        known = type(layer) is HeadMixtureAttention and not layer.grouped and not layer.needs_query
        readable = all(map(plain, layer.projections))
        skips_heads = layer.budget.active < layer.num_heads and layer.router.counted
        if known and readable and skips_heads and layer.scope == "sample":
            layer.executor = Sequences
        if layer.executor is Sequences:
            computed += layer.budget.active
        else:
            computed += layer.num_heads
    for mlp in mlp_layers(model):
        readable = all(map(plain, mlp.projections))
        if readable and mlp.budget.active < mlp.num_heads and mlp.router.counted:
            mlp.executor = GroupsOfSequences
    return computed


def computed_groups(model: nn.Module) -> tuple[int, int]:
    """Return how many groups of routed MLPs are computed for an image after `gather_heads`, and how many there are."""
    computed = 0
    for mlp in mlp_layers(model):
        computed += mlp.budget.active if mlp.executor is GroupsOfSequences else mlp.num_heads
    return computed, sum(mlp.num_heads for mlp in mlp_layers(model))


def busiest(shares: Tensor, shared: int, active: int) -> list[int]:
    """Return which heads to keep: the shared heads, and the routed heads that most tokens ran.

    Args:
        shares: [H], the share of tokens that ran each head.
        shared: number of shared heads.
        active: number of heads to keep.
    """
    routed = shares[shared:].argsort(descending=True, stable=True)[: active - shared] + shared
    return [*range(shared), *sorted(routed.tolist())]


def _why_not(layer: HeadMixtureAttention, heads: list[int]) -> str | None:
    """Return why a layer cannot keep just these heads; None if it can."""
    S = layer.budget.shared
    H = layer.num_heads
    if heads != sorted(set(heads)) or not set(range(S)) <= set(heads) <= set(range(H)):
        return f"heads {heads} are not some of its {H} with the {S} shared ones, in rising order"
    if len(heads) == H:
        return None
    if type(layer) is not HeadMixtureAttention or layer.kv_heads not in (1, H):
        return (
            f"heads of a {type(layer).__name__} with {layer.kv_heads} key-value heads cannot leave"
        )
    if layer.router.all_heads or len(heads) == S:
        return "its router needs all its heads, or one routed head at least"
    if not all(map(plain, layer.projections)):
        return f"{HIDDEN_WEIGHTS}, so that no head can be cut out of their weights"
    if any(map(is_around, layer.router.modules())):
        return "its router has an adapter, out of which no head can be cut"
    return layer.router.why_not_keep() or None


@torch.no_grad()
def _cut(layer: HeadMixtureAttention, heads: list[int]) -> None:
    """Remove the rows and columns of all other heads from a layer's projections."""
    D = layer.head_dim
    H = layer.num_heads
    G = layer.kv_heads
    of_heads = (torch.tensor(heads).unsqueeze(1) * D + torch.arange(D)).flatten()  # channels
    if G == H:  # every head has its own keys and values, which leave with the head
        of_keys = of_heads
        layer.kv_heads = len(heads)
    else:
        of_keys = torch.arange(G * D)
    rows = torch.cat([of_heads, H * D + of_keys, (H + G) * D + of_keys])
    bias = layer.qkv.bias
    if bias is not None:
        bias = bias[rows]
    layer.qkv = linear(layer.qkv.weight[rows], bias).requires_grad_()
    layer.proj = linear(layer.proj.weight[:, of_heads], layer.proj.bias).requires_grad_()
    layer.num_heads = len(heads)
    layer.q_dim = len(heads) * D
    layer.grouped = layer.kv_heads < layer.num_heads
