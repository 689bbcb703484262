"""Attention of one new token to a cache, for generation: the keys and values of heads that are off are not read.

A decoding step reads the cache and computes little with it, so it takes the time that memory takes. A few sequences have
too few heads to fill a GPU. So the keys of every head are split, one program attends to each part, and a second kernel
merges the parts (Flash-Decoding, Dao et al. 2023). A program ends at once where its heads are off.
"""

import math
from typing import Dict, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.attend import uses_tf32

# Programs of the first kernel for each multiprocessor. Those of heads that are off end at once.
PROGRAMS = 4
# Multiprocessors of an H100: what Triton's interpreter, which has no GPU, cuts the keys for.
MULTIPROCESSORS = 132
# Query heads of a key-value head in one program: the fewest rows that a matrix product takes. Programs of the same keys
# are neighbours. More rows would not fit the registers in every dtype.
ROWS = 16
# Splits that the second kernel reads at a time.
MERGED = 16


# ---- kernels
#
# The first kernel, in two forms, writes for every split and active head
#
#     top [splits, B*H]        the highest score of the split, -inf where no key is visible
#     total [splits, B*H]      the sum of exp(score - top)
#     acc [splits, B*H, D]     the sum of exp(score - top) * value
#
# and nothing for other heads. Keys that a mask hides are not read, so that the empty end of a static cache costs nothing.


@triton.jit(do_not_specialize=["M", "split_size", "mask_b", "mask_h"])
def _attend_one(
    queries,  # [B, H, D]
    keys,  # [B, H, M, D]
    values,
    active,  # uint8 [B, H]
    mask,  # [B, H, M] uint8 or float, or None
    top_out,
    total_out,
    acc_out,
    heads,
    rows,  # B * H
    M,
    split_size,
    scale,
    q_b,
    q_h,
    k_b,
    k_h,
    k_m,
    v_b,
    v_h,
    v_m,
    mask_b,
    mask_h,
    mask_m,
    MASK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Every query head has keys of its own. One row is too few for a matrix product: products are taken elementwise."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(active + row) == 0:
        return
    b, h = row // heads, row % heads
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    q = tl.load(queries + b * q_b + h * q_h + d, mask=in_d, other=0.0).to(tl.float32) * scale
    keys += b * k_b + h * k_h
    values += b * v_b + h * v_h
    if MASK != "none":
        mask += b * mask_b + h * mask_h

    # Every slot of a block keeps a softmax of its own until the end. Reductions over keys in the loop would make the warps
    # wait for each other.
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = split * split_size
    end = tl.minimum(begin + split_size, M)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        seen = m < end
        m = m.to(tl.int64)
        if MASK == "bool":
            seen = seen & (tl.load(mask + m * mask_m, mask=seen, other=0) != 0)
        if MASK == "additive":
            bias = tl.load(mask + m * mask_m, mask=seen, other=0.0).to(tl.float32)
            seen = seen & (bias != float("-inf"))
        read = seen[:, None] & in_d[None, :]
        k = tl.load(keys + m[:, None] * k_m + d[None, :], mask=read, other=0.0)
        v = tl.load(values + m[:, None] * v_m + d[None, :], mask=read, other=0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], 1)
        if MASK == "additive":
            score += bias
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf is NaN
        p = tl.exp(score - base)
        fade = tl.exp(top - base)
        total = total * fade + p
        acc = acc * fade[:, None] + p[:, None] * v.to(tl.float32)
        top = higher

    highest = tl.max(top, 0)
    fade = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    place = split.to(tl.int64) * rows + row
    tl.store(top_out + place, highest)
    tl.store(total_out + place, tl.sum(total * fade, 0))
    tl.store(acc_out + place * D + d, tl.sum(acc * fade[:, None], 0), mask=in_d)


@triton.jit(do_not_specialize=["M", "split_size", "mask_b", "mask_h"])
def _attend_group(
    queries,  # [B, H, D]
    keys,  # [B, G, M, D]
    values,
    active,  # uint8 [B, H]
    mask,  # [B, H, M] uint8 or float, or None
    top_out,
    total_out,
    acc_out,
    groups,
    rows,  # B * H
    M,
    split_size,
    scale,
    q_b,
    q_h,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    mask_b,
    mask_h,
    mask_m,
    SIZE: tl.constexpr,  # H / G
    ROWS: tl.constexpr,
    MASK: tl.constexpr,
    PER_HEAD: tl.constexpr,  # whether heads have masks of their own
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Up to ROWS query heads of one key-value head, as rows of one product, so that the keys are read once."""
    tiles = tl.cdiv(SIZE, ROWS)
    tile = tl.program_id(0) % tiles
    group = (tl.program_id(0) // tiles).to(tl.int64)  # b * G + g
    split = tl.program_id(1)
    b, g = group // groups, group % groups
    i = tile * ROWS + tl.arange(0, ROWS)
    h = g * SIZE + i  # [ROWS]
    row = group * SIZE + i  # b * H + h
    on = tl.load(active + row, mask=i < SIZE, other=0) != 0
    if tl.max(on.to(tl.int32), 0) == 0:
        return
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    # Rows of heads that are off are 0, whatever their queries hold.
    q = tl.load(queries + b * q_b + h[:, None] * q_h + d[None, :], mask=on[:, None] & in_d[None, :], other=0.0)
    keys += b * k_b + g * k_g
    values += b * v_b + g * v_g
    if MASK != "none":
        mask += b * mask_b

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    begin = split * split_size
    end = tl.minimum(begin + split_size, M)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = m < end
        m = m.to(tl.int64)
        seen = on[:, None] & inside[None, :]  # [ROWS, BLOCK_M]
        if MASK != "none":
            if PER_HEAD:
                given = tl.load(mask + h[:, None] * mask_h + m[None, :] * mask_m, mask=seen, other=0)
            else:
                given = tl.load(mask + m * mask_m, mask=inside, other=0)
            if MASK == "bool":
                visible = given != 0
            else:
                bias = given.to(tl.float32)
                visible = bias != float("-inf")
            if PER_HEAD:
                seen = seen & visible
                inside = tl.max(seen.to(tl.int32), 0) != 0
            else:
                inside = inside & visible
                seen = on[:, None] & inside[None, :]
        read = inside[:, None] & in_d[None, :]
        k = tl.load(keys + m[:, None] * k_m + d[None, :], mask=read, other=0.0)
        v = tl.load(values + m[:, None] * v_m + d[None, :], mask=read, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASK == "additive":
            score += bias if PER_HEAD else bias[None, :]
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf is NaN
        p = tl.exp(score - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = higher

    place = split.to(tl.int64) * rows + row
    tl.store(top_out + place, top, mask=on)
    tl.store(total_out + place, total, mask=on)
    tl.store(acc_out + place[:, None] * D + d[None, :], acc, mask=on[:, None] & in_d[None, :])


@triton.jit(do_not_specialize=["splits"])
def _merge(
    top_in,
    total_in,
    acc_in,
    active,  # uint8 [B*H]
    weights,  # float32 [B*H] or None
    out,  # [B*H, D]
    rows,
    splits,
    WEIGHTED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the splits of one head, times its weight; 0 where it is off or sees no key."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    out += row * D
    if tl.load(active + row) == 0:
        tl.store(out + d, tl.zeros([BLOCK_D], tl.float32).to(out.dtype.element_ty), mask=in_d)
        return
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        inside = split < splits
        place = split.to(tl.int64) * rows + row
        part_top = tl.load(top_in + place, mask=inside, other=float("-inf"))
        part_total = tl.load(total_in + place, mask=inside, other=0.0)
        part_acc = tl.load(acc_in + place[:, None] * D + d[None, :], mask=inside[:, None] & in_d[None, :], other=0.0)
        higher = tl.maximum(top, part_top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, part_fade = tl.exp(top - base), tl.exp(part_top - base)
        total = total * fade + part_total * part_fade
        acc = acc * fade[:, None] + part_acc * part_fade[:, None]
        top = higher
    highest = tl.max(top, 0)
    fade = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    count = tl.sum(total * fade, 0)
    factor = 1.0 / tl.where(count == 0.0, 1.0, count)
    if WEIGHTED:
        factor *= tl.load(weights + row)
    o = tl.sum(acc * fade[:, None], 0) * factor
    tl.store(out + d, o.to(out.dtype.element_ty), mask=in_d)


# ---- operator


def blocks(head_dim: int, itemsize: int, exact: bool) -> Dict[str, int]:
    """Block sizes and warps of the first kernel, for numbers of `itemsize` bytes.

    A block of keys and one of values together are about 32 KB: enough to keep the memory busy with a few programs on a
    multiprocessor, and little enough for the registers, or for the shared memory of a product in two stages.

    exact: products of float32 without tensor cores, which need the registers of more warps.
    """
    D = max(32, triton.next_power_of_2(head_dim))
    return dict(BLOCK_D=D, BLOCK_M=min(128, 16384 // (D * itemsize)), num_warps=8 if exact else 4, num_stages=2)


def split_keys(programs: int, keys: int, block: int, multiprocessors: int) -> int:
    """How many keys a split takes, a multiple of `block`: so many that `programs` times the splits fill the GPU.

    It depends on shapes alone: a captured CUDA graph and repeated calls cut alike, and nothing waits for the device.
    """
    splits = max(1, min(PROGRAMS * multiprocessors // programs, triton.cdiv(keys, block)))
    return max(1, triton.cdiv(keys, splits * block)) * block


def forward(
    q: Tensor, k: Tensor, v: Tensor, weights: Optional[Tensor], active: Tensor, mask: Optional[Tensor]
) -> Tensor:
    """`library.decode` on the device of q."""
    B, H, _, D = q.shape
    G, M = k.shape[1:3]
    o = q.new_empty(B, 1, H * D)
    if o.numel() == 0:
        return o
    # The kernels walk along D and along these short lists without a stride.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q.squeeze(2), k, v))
    active = active.reshape(B, H).contiguous().view(torch.uint8)
    if weights is not None:
        weights = weights.reshape(B, H).float().contiguous()
    kind, per_head, mask_strides = "none", False, (0, 0, 0)
    if mask is not None:
        per_head = mask.shape[1] > 1
        kind = "bool" if mask.dtype == torch.bool else "additive"
        mask = mask.view(torch.uint8) if kind == "bool" else mask
        mask = mask.expand(B, H, 1, M).squeeze(2)
        mask_strides = mask.stride()

    size = H // G
    precision = "tf32" if uses_tf32() else "ieee"
    sizes = blocks(D, k.element_size(), size > 1 and k.dtype == torch.float32 and precision == "ieee")
    programs = B * H if size == 1 else B * G * triton.cdiv(size, ROWS)
    count = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else MULTIPROCESSORS
    split_size = split_keys(programs, M, sizes["BLOCK_M"], count)
    splits = max(1, triton.cdiv(M, split_size))
    top, total = torch.empty(2, splits, B * H, dtype=torch.float32, device=q.device)
    acc = torch.empty(splits, B * H, D, dtype=torch.float32, device=q.device)

    strides = (*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *mask_strides)
    arguments = (q, k, v, active, mask, top, total, acc, G, B * H, M, split_size, 1 / math.sqrt(D), *strides)
    if size == 1:
        _attend_one[programs, splits](*arguments, MASK=kind, D=D, **sizes)
    else:
        _attend_group[programs, splits](
            *arguments, SIZE=size, ROWS=ROWS, MASK=kind, PER_HEAD=per_head, PRECISION=precision, D=D, **sizes
        )
    _merge[(B * H,)](
        top,
        total,
        acc,
        active,
        weights,
        o,
        B * H,
        splits,
        WEIGHTED=weights is not None,
        D=D,
        BLOCK_D=sizes["BLOCK_D"],
        BLOCK_S=MERGED,
    )
    return o
