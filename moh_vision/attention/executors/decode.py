"""One new token: of the cached keys and values, only those of the heads that run are read.

A decoding step reads the whole cache and does little with it, so its time is what it reads. Heads are therefore read
where they lie, through views: a copy of the chosen heads costs several times what leaving the others out saves.
"""

import math
from typing import List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention import kernels
from moh_vision.attention.executors.masked import has_head_masks, masked
from moh_vision.attention.routing import Routing

# Number of other heads that a head is paired with in the search for evenly spaced heads. Any two are evenly spaced.
PARTNERS = 4

# `decode` must leave so many numbers of the cached keys unread to pay, for each thread: a fixed cost and one for each of
# its attention calls. Measured with attend_chosen against attention of all heads and their weights on an idle machine of
# 2 Xeon cores (AVX-512), on one thread and two: 32 to 2048 keys of 12 to 32 heads of 64 and 128, also 4 and 8 key-value
# heads, batches of 1 and 4, half and three quarters of the heads, float32 and bfloat16; medians of 40 interleaved rounds.
# Where these limits take it the ratio was 0.53 to 1.01; below them 0.61 to 3.2.
UNREAD, UNREAD_PER_CALL = 150_000, 30_000
# More threads have not been measured. In every call they wait for each other.
DECODE_THREADS = 2


def pieces(heads: Sequence[int], threads: int) -> List[slice]:
    """Sorted heads as slices, each of which is one attention call on a view.

    A call hands whole heads to threads. On one thread a slice is a run of neighbours. On more, a run is cut to a multiple
    of the threads, and what is left over is put together by even spacing, up to `threads` heads in one slice (any two
    heads are evenly spaced), for a call with one head would leave the other threads idle.
    """
    runs: List[List[int]] = []  # [first, end]
    for h in heads:
        if runs and runs[-1][1] == h:
            runs[-1][1] = h + 1
        else:
            runs.append([h, h + 1])
    result, left = [], []
    for first, end in runs:
        cut = end - (end - first) % threads
        if cut > first:
            result.append(slice(first, cut, 1))
        left += range(cut, end)
    while left:
        among, best = set(left), left[:1]
        for second in left[1 : 1 + PARTNERS]:
            line = list(range(left[0], left[-1] + 1, second - left[0]))[:threads]
            count = next((i for i, h in enumerate(line) if h not in among), len(line))
            if count > len(best):
                best = line[:count]
        step = best[1] - best[0] if len(best) > 1 else 1
        result.append(slice(best[0], best[-1] + 1, step))
        left = sorted(among.difference(best))
    return result


class Reading(NamedTuple):
    """What one token reads of a cache."""

    heads: List[int]  # key-value heads, those of sequence b counted from b * kv_heads
    whole: bool  # all query heads of these run


def reading(active: Tensor, kv_heads: int) -> Reading:
    """active [B, 1, H] -> the key-value heads with a query head that runs."""
    # In Python, once the numbers are here: there are few, and a tensor operation takes longer than a loop over them.
    groups = active.reshape(-1, active.shape[-1] // kv_heads).tolist()  # [B*G, H/G]
    heads = [g for g, on in enumerate(groups) if True in on]
    return Reading(heads, not any(False in groups[g] for g in heads))


def attend_chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Optional[Tensor],
    active: Tensor,
    attn_mask: Optional[Tensor] = None,
) -> Tensor:
    """Weighted attention of one token that reads only the keys and values of the heads that run. For inference.

    Query heads of one key-value head are computed together, so a key-value head is left out only where all of them are
    off; under grouped-query attention with heads chosen one by one that is rare.

    Args:
        q: queries [B, H, 1, D], ready for attention.
        k, v: [B, G, M, D], G a divisor of H; what they hold for heads that are not read may be anything, also NaN.
        weights: [B, 1, H], 0 where a head is off; None: 1 for those that run.
        active: [B, 1, H], True where a head runs; sequences may run different ones and different numbers of them.
        attn_mask: [B or 1, H or 1, 1, M], True (attend) or additive; None: all keys.

    Returns:
        o [B, 1, H * D], 0 for heads that do not run.
    """
    B, H, _, D = q.shape
    G, M = k.shape[1:3]
    if B > 1 and not (one_list(k) and one_list(v)):
        rows = []
        for b in range(B):
            mask = attn_mask if attn_mask is None or len(attn_mask) == 1 else attn_mask[b : b + 1]
            w = None if weights is None else weights[b : b + 1]
            rows.append(attend_chosen(*(t[b : b + 1] for t in (q, k, v)), w, active[b : b + 1], mask))
        return torch.cat(rows)

    q = q.reshape(1, B * G, H // G, D)
    k, v = k.view(1, B * G, M, D), v.view(1, B * G, M, D)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # once, and not again in every call
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        rows = H if has_head_masks(attn_mask) else G
        attn_mask = attn_mask.expand(B, rows, 1, M).reshape(1, B * G, rows // G, M)
    heads, whole = reading(active, G)
    if len(heads) == B * G:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    else:
        o = torch.zeros_like(q)  # [1, B*G, H/G, D]
        for part in pieces(heads, torch.get_num_threads()):
            mask = None if attn_mask is None else attn_mask[:, part]
            o[:, part] = F.scaled_dot_product_attention(q[:, part], k[:, part], v[:, part], attn_mask=mask)
    o = o.view(B, 1, H, D)
    if weights is None and not whole:
        weights = active  # heads that are off beside heads of their group that run
    if weights is not None:
        o = o * weights.unsqueeze(-1).to(o.dtype)
    return o.flatten(2)


def one_list(x: Tensor) -> bool:
    """Whether the heads of all sequences lie evenly spaced, so that x [B, G, M, D] has a view [B*G, M, D]."""
    return x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def decoding_pays(active: Tensor, kv_heads: int, keys: int, head_dim: int) -> bool:
    """Whether `attend_chosen` is known to take less time than attention of all heads, on a CPU.

    Args:
        active: [B, 1, H], True where a head runs.
        kv_heads, keys, head_dim: G, M and D of the cache.
    """
    B, numbers, threads = len(active), keys * head_dim, torch.get_num_threads()  # numbers of one head
    if threads > DECODE_THREADS or B * kv_heads * numbers < threads * UNREAD:
        return False
    parts = pieces(reading(active, kv_heads).heads, threads)
    # A thread that has no head while another has one takes as long.
    read = sum(threads * math.ceil(len(range(p.start, p.stop, p.step)) / threads) for p in parts)
    return (B * kv_heads - read) * numbers >= threads * (UNREAD + len(parts) * UNREAD_PER_CALL)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    routing: Routing,
    attn_mask: Optional[Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """`attend_chosen` for one query token where no gradient is recorded; anything else is `masked`."""
    elsewhere = torch.compiler.is_compiling() or torch.is_grad_enabled()
    if routing.active is None or q.shape[2] != 1 or is_causal or dropout_p > 0 or elsewhere:
        return masked(q, k, v, routing, attn_mask, is_causal, dropout_p)
    weights = None if routing.weights is routing.active else routing.weights
    if kernels.attend_path(q.device, v.dtype, q.shape[3], attn_mask) == "triton":
        from moh_vision.attention.kernels import gpu  # imports Triton

        return gpu.decode(q.to(v.dtype), k.to(v.dtype), v, weights, routing.active, attn_mask)
    if q.device.type != "cpu":  # it would wait for the device
        return masked(q, k, v, routing, attn_mask, is_causal, dropout_p)
    return attend_chosen(q, k, v, weights, routing.active, attn_mask)
