"""What passes between router, executor and block: `Routing`, `RoutingStats`, `Call`, `run_block`."""

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from torch import Tensor, nn


class RoutingStats(NamedTuple):
    """What losses and analysis need to know of one layer's routing. All tensors, never None.

    Which heads each token runs is in `Routing.active`; `token_heads` reads it from a model.
    """

    probs: Tensor  # [B, N, E] softmax over the routed candidates (E = 0 without routing); 0 at padding
    counts: Tensor  # [B, H] how many tokens of each sequence ran each head; no gradient
    logits: Tensor  # [B, N, E] before the softmax


class Pairs(NamedTuple):
    """The (head, sequence, token) triples that run, sorted in this order: what the operators in `kernels` go through."""

    token: Tensor  # [P] int32, b * N + n; longer where Triton listed them, and what follows the last pair means nothing
    offsets: Tensor  # [H * B + 1] int32, where segment h * B + b begins


class Routing(NamedTuple):
    """Who works, and how much: the answer of a router, all that an executor needs of it.

    Heads that are not active have weight 0. Both have the same second dimension, 1 for one choice per sequence.
    """

    weights: Optional[Tensor]  # [B, N, H] or [B, 1, H] final weight of each head; None: every head counts as 1
    active: Optional[Tensor]  # [B, N, H] or [B, 1, H] True where a head must run; None: all
    stats: RoutingStats
    pairs: Optional[Pairs] = None  # of active, [P] exactly, from a router that runs as many heads for every token


class Call(NamedTuple):
    """One call of an attention layer, once it is routed."""

    x: Tensor  # [B, N, C] query tokens
    routing: Routing
    context: Optional[Tensor] = None  # [B, M, C] where keys and values come from; None: x
    q: Optional[Tensor] = None  # [B, H, N, D] queries as projected, where the router had to see them
    attn_mask: Optional[Tensor] = None  # [B or 1, H or 1, N, M] True (attend) or an additive float
    is_causal: bool = False  # token n attends to keys 0 .. n; not together with attn_mask
    dropout_p: float = 0.0  # of the attention matrix
    rotary: Optional[Tuple[Tensor, Tensor]] = None  # see HeadMixtureAttention.forward
    cache: Any = None  # likewise


def run_block(
    block: nn.Module, x: Tensor, *args: Any, stats: Optional[List[RoutingStats]], checkpoint: Optional[Callable] = None
) -> Tensor:
    """Call `block(x, *args, stats=stats)`, under activation checkpointing if asked.

    Reentrant checkpointing sees only top-level tensors: a list filled inside the block would hold values without
    a graph, and the router's gradient would be silently 0. So the list is made inside the checkpointed function,
    which returns flat tensors, and is rebuilt here.

    Args:
        block: takes `stats` and appends its RoutingStats to it.
        x: tokens [B, N, C].
        *args: further arguments of the block.
        stats: list to extend, or None.
        checkpoint: called as `checkpoint(function, *args)`, such as torch.utils.checkpoint.checkpoint with its
            use_reentrant bound.
    """
    if checkpoint is None:
        return block(x, *args, stats=stats)

    def flat(x: Tensor, *args: Any) -> Tuple[Tensor, ...]:
        inner: List[RoutingStats] = []
        x = block(x, *args, stats=inner)
        return (x, *(tensor for entry in inner for tensor in entry))

    x, *tensors = checkpoint(flat, x, *args)
    if stats is not None:
        stats.extend(RoutingStats(*tensors[i : i + 3]) for i in range(0, len(tensors), 3))
    return x
