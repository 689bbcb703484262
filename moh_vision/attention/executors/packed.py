"""Only the heads that run, through the operators in `kernels`."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from moh_vision.attention import kernels
from moh_vision.attention.executors.masked import autocast, masked
from moh_vision.attention.linear import plain
from moh_vision.attention.routing import Call, Pairs

# Numbers of a sequence's tokens, times the share of heads that do not run, from which products of its own pay in 16 bits.
# Measured by benchmarks/attention.py on 2 EPYC cores: 38,000 to 49,000 took 1.1 to 1.3 of one product for all heads,
# 74,000 to 390,000 took 0.66 to 0.94.
LEFT_OUT = 60_000


def packed(call: Call) -> Tensor:
    """Compute what runs and nothing else. It cannot be differentiated twice.

    Heads chosen per token skip their queries, their attention and their part of the output projection; the keys and
    values of a head are needed by other tokens. Heads chosen per sequence skip their keys and values too.

    It reads the weights of layer.projections; where these carry hooks or are not plain linear layers (an adapter,
    pruning, offloading), it is `masked`, which calls them.
    """
    layer, active = call.layer, call.routing.active
    empty = call.x.numel() == 0 or (call.context is not None and call.context.numel() == 0)
    if active is None or empty or not all(map(plain, layer.projections)):
        return masked(call)
    x = autocast(call.x)
    if torch.compiler.is_compiling() and not has_static_shapes(call, x):
        return masked(call)
    (B, N, C), H, D = x.shape, layer.num_heads, layer.head_dim
    pairs = chosen = call.routing.pairs if call.routing.pairs is not None else kernels.list_pairs(active)
    if active.shape[1] == 1:
        pairs = kernels.spread(chosen, N)
    whole = active.shape[1] == 1 and products_of_sequences(call, x, chosen)
    queries, *keys = [(w.to(x.dtype), None if b is None else b.to(x.dtype)) for w, b in layer.row_blocks()]

    if call.q is None:
        q = kernels.project(x.flatten(0, 1), *queries, pairs, H, whole)
    else:
        q = kernels.select(call.q.transpose(1, 2), pairs, H)
    q = layer.prepare_queries(q.unsqueeze(1), of_pairs(call.rotary, pairs, x)).squeeze(1)  # [P, D]

    context = x if call.context is None else autocast(call.context).expand(B, -1, -1)
    source = None
    if whole and call.cache is None and layer.kv_heads == H:
        M = context.shape[1]
        key_pairs = pairs if M == N else kernels.spread(chosen, M)
        if len(keys) == 1:  # both in one block
            ((w, b),) = keys
            keys = list(zip(w.chunk(2), (None, None) if b is None else b.chunk(2)))
        k, v = (kernels.project(context.flatten(0, 1), *rows, key_pairs, H, True) for rows in keys)
        k = layer.prepare_keys(k.unsqueeze(1), of_pairs(call.rotary, key_pairs, context)).squeeze(1)
        k, v = (t.view(1, -1, M, D) for t in (k, v))
        source = (pairs.offsets.diff() > 0).cumsum(0, dtype=torch.int32) - 1
    else:
        k, v = layer.project_kv(context, call.rotary, call.cache, keys)
    # A norm leaves queries and keys in float32 under autocast.
    q, k = q.to(v.dtype), k.to(v.dtype)

    o = kernels.attend(q, k, v, pairs, H, N, source, call.is_causal, call.attn_mask, call.dropout_p)
    weights = call.routing.weights.to(torch.promote_types(x.dtype, torch.float32)).expand(B, N, H)
    weights = weights.reshape(B * N, H).contiguous()
    out = layer.proj
    bias = None if out.bias is None else out.bias.to(x.dtype)
    return kernels.combine(o.to(x.dtype), weights, out.weight.to(x.dtype), bias, pairs, H, whole).view(B, N, C)


def path_of(call: Call, dtype: torch.dtype) -> str:
    """Which path `kernels.attend` takes: what the C++ operators cannot do runs in PyTorch."""
    return "cpp" if kernels.attends_in_cpp(call.x.device, dtype, call.attn_mask, call.dropout_p) else "torch"


def has_static_shapes(call: Call, x: Tensor) -> bool:
    """Whether no shape on the way depends on which heads run: a top-k router made the list, and C++ goes through it."""
    return call.routing.pairs is not None and path_of(call, x.dtype) == "cpp"


def products_of_sequences(call: Call, x: Tensor, chosen: Pairs) -> bool:
    """Whether to multiply each sequence by the weights of its own heads, keys and values too; chosen: of sequences.

    In 16 bits beside the C++ `attend` one product for all heads is faster where little can be left out of the others,
    unless all sequences chose the same heads and share a product.
    """
    if kernels.native(x.device, x.dtype) or path_of(call, x.dtype) == "torch":
        return True
    if torch.compiler.is_compiling():  # these products have shapes that depend on the choice
        return False
    B, N, C = x.shape
    active = call.routing.active
    left_out = 1 - len(chosen.token) / (B * active.shape[-1])
    return N * C * left_out >= LEFT_OUT or alike(active)


def alike(active: Tensor) -> bool:
    """Whether several sequences all chose the same heads, active [B, 1, H]."""
    return active.shape[0] > 1 and bool((active == active[:1]).all())


def of_pairs(rotary: Optional[Tuple[Tensor, Tensor]], pairs: Pairs, x: Tensor) -> Optional[Tuple[Tensor, Tensor]]:
    """Cosines and sines of the pairs' tokens, [P, D] each, of those of x [B, N, C]."""
    if rotary is None:
        return None
    B, N, _ = x.shape
    cos, sin = (t.expand(B, N, t.shape[-1]).flatten(0, 1).index_select(0, pairs.token) for t in rotary)
    return cos, sin
