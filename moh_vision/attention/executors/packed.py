"""Only the heads that run, out of queries that are projected for all; and what `HeadMixtureAttention.packed` decides by."""

from typing import Optional

import torch
from torch import Tensor

from moh_vision.attention import kernels
from moh_vision.attention.executors.masked import masked
from moh_vision.attention.routing import Call, Pairs, Routing

# Numbers of a sequence's tokens, times the share of heads that do not run, from which products of its own pay in 16 bits.
# Measured by benchmarks/attention.py on 2 EPYC cores: 38,000 to 49,000 took 1.1 to 1.3 of one product for all heads,
# 74,000 to 390,000 took 0.66 to 0.94.
LEFT_OUT = 60_000


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Routing,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of the heads that run. It cannot be differentiated twice.

    On a CPU, and on a GPU where heads are chosen per sequence, a layer skips projections too (`HeadMixtureAttention.packed`)
    and comes here only where they must be called.
    """
    active = routing.active
    if active is None or q.numel() == 0 or k.numel() == 0:
        return masked(q, k, v, routing, attn_mask, is_causal, dropout_p)
    path = kernels.attend_path(q.device, v.dtype, q.shape[3], attn_mask, dropout_p)
    if torch.compiler.is_compiling() and not has_static_shapes(routing, path):
        return masked(q, k, v, routing, attn_mask, is_causal, dropout_p)
    # A norm leaves queries and keys in float32 under autocast. One context may serve all sequences.
    q, k, v = q.to(v.dtype), k.to(v.dtype).expand(q.shape[0], -1, -1, -1), v.expand(q.shape[0], -1, -1, -1)
    pairs = pairs_of(routing, q.shape[2], path)
    return kernels.attend_placed(q, k, v, in_float(routing.weights), pairs, is_causal, attn_mask, dropout_p)


def in_float(weights: Tensor) -> Tensor:
    """In float32 or better."""
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def pairs_of(routing: Routing, tokens: int, path: str) -> Pairs:
    """The pairs of all tokens, N of each sequence, for `attend` on a path."""
    pairs = routing.pairs if routing.pairs is not None else kernels.list_pairs(routing.active, path == "triton")
    return kernels.spread(pairs, tokens) if routing.active.shape[1] == 1 else pairs


def gates_of(routing: Routing, batch: int, tokens: int) -> Tensor:
    """[B * N, H], in float32 or better."""
    return in_float(routing.weights).expand(batch, tokens, -1).reshape(batch * tokens, -1).contiguous()


def has_static_shapes(routing: Routing, path: str) -> bool:
    """Whether no shape depends on which heads run: C++ needs the list of a top-k router for that, Triton any list."""
    return path == "triton" or (path == "cpp" and routing.pairs is not None)


def products_of_sequences(call: Call, x: Tensor, path: str) -> bool:
    """Whether to multiply each sequence by the weights of its own heads, keys and values too. path: of `attend`.

    In 16 bits beside the C++ `attend` one product for all heads is faster where little can be left out of the others,
    unless all sequences chose the same heads and share a product.
    """
    active = call.routing.active
    if active.shape[1] != 1:
        return False
    if kernels.native(x.device, x.dtype):
        return True
    if path != "cpp":
        return True
    if torch.compiler.is_compiling():  # these products have shapes that depend on the choice
        return False
    _, N, C = x.shape
    left_out = 1 - active.sum().item() / active.numel()
    return N * C * left_out >= LEFT_OUT or alike(active)


def alike(active: Tensor) -> bool:
    """Whether several sequences all chose the same heads, active [B, 1, H]."""
    return active.shape[0] > 1 and bool((active == active[:1]).all())
