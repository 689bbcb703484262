"""Attention of the pairs that run, gated and put in place: Triton kernels, forward and backward.

Letters as in `moh_vision.attention.kernels`. Segment s = h * B + b of the list holds the tokens of sequence b that run
head h. A tile is up to BLOCK_M neighbouring pairs of one segment: its queries lie apart in memory, and all of them read
the keys and values of sequence b and head h.

    forward   one program a tile: all keys, then gate, then store
    queries   the same for the gradients of queries and gates; it also writes the delta that the next kernel reads
    keys      one program a block of keys: all tiles of the query heads that read it, so the sums need no atomics

The grid is an upper bound known from shapes: programs find their tile from `offsets` and stop where there is none.

A head width is computed as one power of two, or as two where that pads less: 72 = 64 + 16 - 8, not 128. The parts are
WIDTH0 and WIDTH1 (0: there is one part).
"""

import math
from typing import Dict, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
NO_MASK, BOOL_MASK, FLOAT_MASK = 0, 1, 2


def blocks(
    kernel: str, D: int, dtype: torch.dtype, exact: bool, masked: bool, tokens: int, memory: int
) -> Dict[str, int]:
    """Queries and keys of a block, warps and stages: the one place that says them.

    With few exceptions ptxas spills nothing (Triton 3.6 for an H100). None is timed yet.

    Args:
        kernel: "forward", "queries" or "keys".
        D: head width.
        dtype: of the queries.
        exact: float32 without tf32, for which tensor cores are no use.
        masked: there is a mask, which takes registers.
        tokens: N. Few tokens: small blocks of queries, because the last tile of a segment is half empty on average.
        memory: bytes of shared memory that a program may use; 227 KB on an H100, 99 KB on small GPUs.
    """
    warps = 4 if D <= 80 else 8
    if dtype == torch.float32 and exact:
        if D <= 80:
            block = dict(forward=(32, 32, 4, 2), queries=(32, 32, 4, 2), keys=(16, 32, 4, 1))
        else:
            block = dict(forward=(16, 32, 8, 1), queries=(16, 16, 8, 1), keys=(16, 16, 8, 1))
    elif dtype == torch.float32:
        if D <= 80:
            block = dict(forward=(64, 32, 4, 2), queries=(64, 32, 4, 2), keys=(32, 32, 4, 1))
        elif D <= 128:
            block = dict(forward=(32, 32, 8, 1), queries=(32, 32, 8, 1), keys=(16, 32, 8, 1))
        else:
            block = dict(forward=(32, 32, 8, 1), queries=(16, 32, 8, 1), keys=(16, 16, 8, 1))
    elif memory < 160 * 1024:
        rows = 64 if D <= 128 else 32
        block = dict(forward=(rows, 32, 4, 2), queries=(rows, 32, warps, 2), keys=(32, 32, warps, 1))
    elif D > 128:
        block = dict(forward=(64, 64, 8, 2), queries=(64, 32, 8, 2), keys=(32, 64, 8, 1))
    else:
        block = dict(forward=(128, 128 if D <= 64 else 64, 8, 3), queries=(128, 64, 8, 2), keys=(64, 64, warps, 2))
        if tokens <= 512 or masked:
            block.update(forward=(64, 64, warps if masked else 4, 2 if masked else 3), queries=(64, 64, warps, 2))
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), block[kernel]))


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use; the interpreter has no limit."""
    if device.type != "cuda":
        return 2**31
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def uses_tf32() -> bool:
    """Whether PyTorch multiplies float32 in tf32 on a GPU.

    Not torch.get_float32_matmul_precision, which raises where this was set the newer way, by `fp32_precision`.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def widths(D: int) -> Tuple[int, int]:
    """The parts of a head width: powers of two, 16 at least. 64 -> 64, 0; 72 -> 64, 16; 96 -> 64, 32; 256 -> 256, 0."""
    whole = max(16, triton.next_power_of_2(D))
    first = whole // 2
    second = max(16, triton.next_power_of_2(D - first)) if D > first else 0
    return (first, second) if first >= 16 and first + second < whole else (whole, 0)


# Triton would compile a kernel for each of these that is 1 or divisible by 16, and make a constant of a 1.
SIZES = ["B", "N", "M", "H", "G", "group", "tiles", "key_blocks"]


# ---- What the kernels share


@triton.jit
def load_rows(pointer, rows, real, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr):
    """WIDTH numbers of each row from FIRST on, 0 beyond D and in rows that are not `real`; ALL: all rows are."""
    column = FIRST + tl.arange(0, WIDTH)
    pointers = pointer + rows[:, None] + column[None, :]
    if FIRST + WIDTH <= D:
        if ALL:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, mask=real[:, None], other=0.0)
    else:
        if ALL:
            x = tl.load(pointers, mask=(column < D)[None, :], other=0.0)
        else:
            x = tl.load(pointers, mask=real[:, None] & (column < D)[None, :], other=0.0)
    return x


@triton.jit
def store_rows(pointer, rows, x, real, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    pointers = pointer + rows[:, None] + column[None, :]
    tl.store(pointers, x.to(pointer.dtype.element_ty), mask=real[:, None] & (column < D)[None, :])


@triton.jit
def product(a0, a1, b0, b1, WIDTH1: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T in float32, both in their parts."""
    x = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if WIDTH1 > 0:
        x = tl.dot(a1, tl.trans(b1), x, input_precision=PRECISION)
    return x


@triton.jit
def see(scores, mask_rows, n, key, M, root, MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """Mask the scores [queries, keys], which are not yet divided by `root` = sqrt(D).

    mask_rows: pointers to the queries' rows of the mask. EDGE: some keys may lie beyond M or after a token.
    """
    real = (key < M)[None, :]
    if MASK == 1:
        allowed = tl.load(mask_rows[:, None] + key[None, :], mask=real, other=0)
        scores = tl.where(allowed != 0, scores, -float("inf"))
    if MASK == 2:
        bias = tl.load(mask_rows[:, None] + key[None, :], mask=real, other=0.0).to(tl.float32)
        scores += bias * root
    if EDGE:
        if CAUSAL:
            real = real & (key[None, :] <= n[:, None])
        scores = tl.where(real, scores, -float("inf"))
    return scores


@triton.jit
def find_tile(offsets, B, H, tiles, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tile of this program: (b, h, first pair, pair after the last, pair after the segment's last, whether it is
    the segment's first tile, whether there is such a tile).

    Neighbouring programs are tiles of one segment, then of the next head, which may read the same keys and values. A
    segment without pairs has one tile without pairs: it writes the zeros.
    """
    program = tl.program_id(0)
    index = program % tiles
    h = (program // tiles) % H
    b = program // (tiles * H)
    begin = tl.load(offsets + h * B + b)
    end = tl.load(offsets + h * B + b + 1)
    count = tl.maximum(tl.cdiv(end - begin, BLOCK_M), 1)
    exists = index < count
    if CAUSAL:
        index = count - 1 - index  # the tiles with the most keys start first
    first = begin + index * BLOCK_M
    return b, h, first, tl.minimum(first + BLOCK_M, end), end, index == 0, exists


@triton.jit
def key_range(token, first, stop, shift, M, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of a tile: all its queries see those before the first number; none sees one from the second on."""
    last = M
    if CAUSAL:
        earliest = tl.load(token + first, mask=first < stop, other=0) - shift
        latest = tl.load(token + stop - 1, mask=first < stop, other=0) - shift
        last = tl.minimum(M, latest + 1)
        full = tl.minimum(M, earliest + 1) // BLOCK_N * BLOCK_N
    else:
        full = M // BLOCK_N * BLOCK_N
    if first >= stop:
        last = 0
        full = 0
    return full, last


@triton.jit
def free_range(token, first, stop, end, is_first, shift, N):
    """The tokens that a tile answers for: from its first (0 for the segment's first tile) to the next tile's first."""
    low = tl.load(token + first, mask=(first < stop) & (is_first == 0), other=shift) - shift
    high = tl.load(token + stop, mask=stop < end, other=shift + N) - shift
    return low, high


@triton.jit
def free_tokens(token, first, stop, start, high, shift, BLOCK_M: tl.constexpr):
    """Tokens start .. start + BLOCK_M - 1, and which of them are before `high` and not in the tile."""
    pair = first + tl.arange(0, BLOCK_M)
    taken = tl.load(token + pair, mask=pair < stop, other=-1) - shift
    n = start + tl.arange(0, BLOCK_M)
    found = tl.max((n[:, None] == taken[None, :]).to(tl.int32), 1)
    return n, (n < high) & (found == 0)


@triton.jit
def count_below(token, begin, end, limit):
    """How many of the pairs begin .. end - 1, whose tokens rise, have a token below `limit`."""
    count = 0
    for start in range(begin, end, 1024):
        pair = start + tl.arange(0, 1024)
        n = tl.load(token + pair, mask=pair < end, other=2147483647)
        count += tl.sum((n < limit).to(tl.int32), 0)
    return count


# ---- Forward


@triton.jit
def attend_keys(
    acc0,
    acc1,
    top,
    total,
    q0,
    q1,
    n,
    mask_rows,
    k,
    v,
    k_m,
    v_m,
    M,
    low,
    high,
    scale,
    root,
    D: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys low .. high - 1 into the running sums; `top` is the largest score so far, before scaling."""
    rows = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        key = start + rows
        real = key < M
        k_block = k + tl.cast(start, tl.int64) * k_m
        v_block = v + tl.cast(start, tl.int64) * v_m
        k0 = load_rows(k_block, rows * k_m, real, 0, WIDTH0, D, not EDGE)
        k1 = k0
        if WIDTH1 > 0:
            k1 = load_rows(k_block, rows * k_m, real, WIDTH0, WIDTH1, D, not EDGE)
        scores = product(q0, q1, k0, k1, WIDTH1, PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = see(scores, mask_rows, n, key, M, root, MASK, CAUSAL, EDGE)

        new = tl.maximum(top, tl.max(scores, 1))
        base = new
        if MASK > 0:  # nothing seen so far: -inf minus -inf would be NaN
            base = tl.where(new == -float("inf"), 0.0, new)
        if MASK == 2:  # where a bias of -1e9 hides all keys, a rounded product would miss a fused one by up to 2^64
            p = tl.exp2((scores - base[:, None]) * scale)
            shrink = tl.exp2((top - base) * scale)
        else:
            p = tl.exp2(scores * scale - (base * scale)[:, None])
            shrink = tl.exp2(top * scale - base * scale)
        top = new
        total = total * shrink + tl.sum(p, 1)
        v0 = load_rows(v_block, rows * v_m, real, 0, WIDTH0, D, not EDGE)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * shrink[:, None], input_precision=PRECISION)
        if WIDTH1 > 0:
            v1 = load_rows(v_block, rows * v_m, real, WIDTH0, WIDTH1, D, not EDGE)
            acc1 = tl.dot(p, v1, acc1 * shrink[:, None], input_precision=PRECISION)
    return acc0, acc1, top, total


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q,
    k,
    v,
    weights,
    mask,
    token,
    offsets,
    o,
    lse,
    q_b,
    q_h,
    q_n,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    w_b,
    w_n,
    w_h,
    mask_b,
    mask_h,
    mask_n,
    B,
    N,
    M,
    H,
    group,
    tiles,
    root,
    D: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    UNIT: tl.constexpr,
    GATED: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    b, h, first, stop, end, is_first, exists = find_tile(offsets, B, H, tiles, CAUSAL, BLOCK_M)
    if exists == 0:
        return
    shift = b * N
    pair = first + tl.arange(0, BLOCK_M)
    real = pair < stop
    n = tl.load(token + pair, mask=real, other=shift) - shift
    n64 = n.to(tl.int64)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    g64 = (h // group).to(tl.int64)

    q += b64 * q_b * UNIT + h64 * q_h * UNIT
    q0 = load_rows(q, n64 * (q_n * UNIT), real, 0, WIDTH0, D, False)
    q1 = q0
    if WIDTH1 > 0:
        q1 = load_rows(q, n64 * (q_n * UNIT), real, WIDTH0, WIDTH1, D, False)
    k += b64 * k_b * UNIT + g64 * k_g * UNIT
    v += b64 * v_b * UNIT + g64 * v_g * UNIT
    mask_rows = n64
    if MASK > 0:
        mask_rows = mask + b64 * mask_b + h64 * mask_h + n64 * mask_n

    scale = LOG2E / root
    acc0 = tl.zeros([BLOCK_M, WIDTH0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, WIDTH1 if WIDTH1 > 0 else 16], tl.float32)
    top = tl.zeros([BLOCK_M], tl.float32) - float("inf")
    total = tl.zeros([BLOCK_M], tl.float32)
    full, last = key_range(token, first, stop, shift, M, CAUSAL, BLOCK_N)
    # fmt: off
    acc0, acc1, top, total = attend_keys(
        acc0, acc1, top, total, q0, q1, n, mask_rows, k, v, k_m * UNIT, v_m * UNIT, M, 0, full, scale, root,
        D, WIDTH0, WIDTH1, MASK, CAUSAL, False, PRECISION, BLOCK_N,
    )
    acc0, acc1, top, total = attend_keys(
        acc0, acc1, top, total, q0, q1, n, mask_rows, k, v, k_m * UNIT, v_m * UNIT, M, full, last, scale, root,
        D, WIDTH0, WIDTH1, MASK, CAUSAL, True, PRECISION, BLOCK_N,
    )
    # fmt: on

    total = tl.where(total == 0.0, 1.0, total)  # it saw no key: output 0, and -inf from `top`
    tl.store(lse + pair, (top * scale + tl.log2(total)) / LOG2E, mask=real)
    factor = 1.0 / total
    if GATED:
        gate = tl.load(weights + b64 * w_b + n64 * w_n + h64 * w_h, mask=real, other=0.0)
        factor *= gate.to(tl.float32)
    o += (b64 * N * H + h64) * D
    row = tl.cast(H, tl.int64) * D
    store_rows(o, n64 * row, acc0 * factor[:, None], real, 0, WIDTH0, D)
    if WIDTH1 > 0:
        store_rows(o, n64 * row, acc1 * factor[:, None], real, WIDTH0, WIDTH1, D)

    low, high = free_range(token, first, stop, end, is_first, shift, N)
    if high - low > stop - first:
        for start in range(low, high, BLOCK_M):
            n, free = free_tokens(token, first, stop, start, high, shift, BLOCK_M)
            zero = tl.zeros([BLOCK_M, WIDTH0], tl.float32)
            store_rows(o, n.to(tl.int64) * row, zero, free, 0, WIDTH0, D)
            if WIDTH1 > 0:
                zero = tl.zeros([BLOCK_M, WIDTH1], tl.float32)
                store_rows(o, n.to(tl.int64) * row, zero, free, WIDTH0, WIDTH1, D)


# ---- Backward
#
# With p = softmax of the scores, gate w, and do the gradient of the gated output o:
#     d gate     = sum_j p_j (do . v_j), exact where the gate is 0
#     d score_j  = p_j (w (do . v_j) - delta),  delta = do . o
#     d v_j      = sum over queries of p_j w do


@triton.jit
def probabilities(scores, scale, lse, MASK: tl.constexpr):
    """lse: to base 2."""
    power = scores * scale - lse[:, None]
    if MASK == 2:  # at most 1, also where a bias of -1e9 hides all keys: `lse` has no digits left for its sum then
        power = tl.minimum(power, 0.0)
    return tl.exp2(power)


@triton.jit
def queries_keys(
    dq0,
    dq1,
    dgate,
    q0,
    q1,
    do0,
    do1,
    n,
    gate,
    delta,
    lse,
    mask_rows,
    k,
    v,
    k_m,
    v_m,
    M,
    low,
    high,
    scale,
    root,
    D: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What keys low .. high - 1 add to the gradients of queries and gates."""
    rows = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        key = start + rows
        real = key < M
        k_block = k + tl.cast(start, tl.int64) * k_m
        v_block = v + tl.cast(start, tl.int64) * v_m
        k0 = load_rows(k_block, rows * k_m, real, 0, WIDTH0, D, not EDGE)
        v0 = load_rows(v_block, rows * v_m, real, 0, WIDTH0, D, not EDGE)
        k1 = k0
        v1 = v0
        if WIDTH1 > 0:
            k1 = load_rows(k_block, rows * k_m, real, WIDTH0, WIDTH1, D, not EDGE)
            v1 = load_rows(v_block, rows * v_m, real, WIDTH0, WIDTH1, D, not EDGE)
        scores = product(q0, q1, k0, k1, WIDTH1, PRECISION)
        scores = see(scores, mask_rows, n, key, M, root, MASK, CAUSAL, EDGE)
        p = probabilities(scores, scale, lse, MASK)
        dp = product(do0, do1, v0, v1, WIDTH1, PRECISION)
        dgate += tl.sum(p * dp, 1)
        ds = (p * (dp * gate[:, None] - delta[:, None])).to(k0.dtype)
        dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
        if WIDTH1 > 0:
            dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return dq0, dq1, dgate


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    q,
    k,
    v,
    do,
    o,
    weights,
    mask,
    lse,
    token,
    offsets,
    dq,
    dgates,
    delta,
    q_b,
    q_h,
    q_n,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    do_b,
    do_n,
    w_b,
    w_n,
    w_h,
    mask_b,
    mask_h,
    mask_n,
    B,
    N,
    M,
    H,
    group,
    tiles,
    root,
    D: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    UNIT: tl.constexpr,
    GATED: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    b, h, first, stop, end, is_first, exists = find_tile(offsets, B, H, tiles, CAUSAL, BLOCK_M)
    if exists == 0:
        return
    shift = b * N
    pair = first + tl.arange(0, BLOCK_M)
    real = pair < stop
    n = tl.load(token + pair, mask=real, other=shift) - shift
    n64 = n.to(tl.int64)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    g64 = (h // group).to(tl.int64)
    row = tl.cast(H, tl.int64) * D

    q += b64 * q_b * UNIT + h64 * q_h * UNIT
    do += b64 * do_b * UNIT + h64 * D
    o += (b64 * N * H + h64) * D
    q0 = load_rows(q, n64 * (q_n * UNIT), real, 0, WIDTH0, D, False)
    do0 = load_rows(do, n64 * (do_n * UNIT), real, 0, WIDTH0, D, False)
    o0 = load_rows(o, n64 * row, real, 0, WIDTH0, D, False)
    row_delta = tl.sum(do0.to(tl.float32) * o0.to(tl.float32), 1)
    q1 = q0
    do1 = do0
    if WIDTH1 > 0:
        q1 = load_rows(q, n64 * (q_n * UNIT), real, WIDTH0, WIDTH1, D, False)
        do1 = load_rows(do, n64 * (do_n * UNIT), real, WIDTH0, WIDTH1, D, False)
        o1 = load_rows(o, n64 * row, real, WIDTH0, WIDTH1, D, False)
        row_delta += tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
    tl.store(delta + pair, row_delta, mask=real)
    gate = tl.zeros([BLOCK_M], tl.float32) + 1.0
    if GATED:
        gate = tl.load(weights + b64 * w_b + n64 * w_n + h64 * w_h, mask=real, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + pair, mask=real, other=0.0) * LOG2E
    row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse)  # it saw no key: exp2 gives 0, not NaN
    k += b64 * k_b * UNIT + g64 * k_g * UNIT
    v += b64 * v_b * UNIT + g64 * v_g * UNIT
    mask_rows = n64
    if MASK > 0:
        mask_rows = mask + b64 * mask_b + h64 * mask_h + n64 * mask_n

    scale = LOG2E / root
    dq0 = tl.zeros([BLOCK_M, WIDTH0], tl.float32)
    dq1 = tl.zeros([BLOCK_M, WIDTH1 if WIDTH1 > 0 else 16], tl.float32)
    dgate = tl.zeros([BLOCK_M], tl.float32)
    full, last = key_range(token, first, stop, shift, M, CAUSAL, BLOCK_N)
    # fmt: off
    dq0, dq1, dgate = queries_keys(
        dq0, dq1, dgate, q0, q1, do0, do1, n, gate, row_delta, row_lse, mask_rows,
        k, v, k_m * UNIT, v_m * UNIT, M, 0, full, scale, root,
        D, WIDTH0, WIDTH1, MASK, CAUSAL, False, PRECISION, BLOCK_N,
    )
    dq0, dq1, dgate = queries_keys(
        dq0, dq1, dgate, q0, q1, do0, do1, n, gate, row_delta, row_lse, mask_rows,
        k, v, k_m * UNIT, v_m * UNIT, M, full, last, scale, root,
        D, WIDTH0, WIDTH1, MASK, CAUSAL, True, PRECISION, BLOCK_N,
    )
    # fmt: on

    dq += (b64 * N * H + h64) * D
    store_rows(dq, n64 * row, dq0 / root, real, 0, WIDTH0, D)
    if WIDTH1 > 0:
        store_rows(dq, n64 * row, dq1 / root, real, WIDTH0, WIDTH1, D)
    if GATED:
        dgates += b64 * N * H + h64
        tl.store(dgates + n64 * H, dgate, mask=real)

    low, high = free_range(token, first, stop, end, is_first, shift, N)
    if high - low > stop - first:
        for start in range(low, high, BLOCK_M):
            n, free = free_tokens(token, first, stop, start, high, shift, BLOCK_M)
            n64 = n.to(tl.int64)
            zero = tl.zeros([BLOCK_M, WIDTH0], tl.float32)
            store_rows(dq, n64 * row, zero, free, 0, WIDTH0, D)
            if WIDTH1 > 0:
                zero = tl.zeros([BLOCK_M, WIDTH1], tl.float32)
                store_rows(dq, n64 * row, zero, free, WIDTH0, WIDTH1, D)
            if GATED:
                tl.store(dgates + n64 * H, tl.zeros([BLOCK_M], tl.float32), mask=free)


@triton.jit
def keys_queries(
    dk0,
    dk1,
    dv0,
    dv1,
    k0,
    k1,
    v0,
    v1,
    key,
    q,
    do,
    weights,
    mask,
    lse,
    delta,
    token,
    q_n,
    do_n,
    w_n,
    mask_n,
    low,
    high,
    shift,
    M,
    scale,
    root,
    D: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    GATED: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What pairs low .. high - 1 add to the gradients of a block of keys and values.

    Keys beyond M need no mask: their rows are not stored.
    """
    for start in range(low, high, BLOCK_M):
        pair = start + tl.arange(0, BLOCK_M)
        real = pair < high
        n = tl.load(token + pair, mask=real, other=shift) - shift
        n64 = n.to(tl.int64)
        row_lse = tl.load(lse + pair, mask=real, other=-float("inf")) * LOG2E
        row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse)  # no key or no pair: exp2 gives 0
        row_delta = tl.load(delta + pair, mask=real, other=0.0)
        q0 = load_rows(q, n64 * q_n, real, 0, WIDTH0, D, False)
        do0 = load_rows(do, n64 * do_n, real, 0, WIDTH0, D, False)
        q1 = q0
        do1 = do0
        if WIDTH1 > 0:
            q1 = load_rows(q, n64 * q_n, real, WIDTH0, WIDTH1, D, False)
            do1 = load_rows(do, n64 * do_n, real, WIDTH0, WIDTH1, D, False)
        mask_rows = n64
        if MASK > 0:
            mask_rows = mask + n64 * mask_n
        scores = product(q0, q1, k0, k1, WIDTH1, PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = see(scores, mask_rows, n, key, M, root, MASK, CAUSAL, CAUSAL)
        p = probabilities(scores, scale, row_lse, MASK)
        dp = product(do0, do1, v0, v1, WIDTH1, PRECISION)
        if GATED:
            gate = tl.load(weights + n64 * w_n, mask=real, other=0.0).to(tl.float32)
            ds = p * (dp * gate[:, None] - row_delta[:, None])
            p = p * gate[:, None]
        else:
            ds = p * (dp - row_delta[:, None])
        p = tl.trans(p.to(do0.dtype))
        ds = tl.trans(ds.to(q0.dtype))
        dv0 = tl.dot(p, do0, dv0, input_precision=PRECISION)
        dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
        if WIDTH1 > 0:
            dv1 = tl.dot(p, do1, dv1, input_precision=PRECISION)
            dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    q,
    k,
    v,
    do,
    weights,
    mask,
    lse,
    delta,
    token,
    offsets,
    dk,
    dv,
    q_b,
    q_h,
    q_n,
    k_b,
    k_g,
    k_m,
    v_b,
    v_g,
    v_m,
    do_b,
    do_n,
    w_b,
    w_n,
    w_h,
    mask_b,
    mask_h,
    mask_n,
    B,
    N,
    M,
    G,
    group,
    key_blocks,
    root,
    D: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    UNIT: tl.constexpr,
    GATED: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    start = (program % key_blocks) * BLOCK_N
    g = (program // key_blocks) % G
    b = program // (key_blocks * G)
    shift = b * N
    key = start + tl.arange(0, BLOCK_N)
    real = key < M
    key64 = key.to(tl.int64)
    b64 = b.to(tl.int64)
    g64 = g.to(tl.int64)

    k += b64 * k_b * UNIT + g64 * k_g * UNIT
    v += b64 * v_b * UNIT + g64 * v_g * UNIT
    k0 = load_rows(k, key64 * (k_m * UNIT), real, 0, WIDTH0, D, False)
    v0 = load_rows(v, key64 * (v_m * UNIT), real, 0, WIDTH0, D, False)
    k1 = k0
    v1 = v0
    if WIDTH1 > 0:
        k1 = load_rows(k, key64 * (k_m * UNIT), real, WIDTH0, WIDTH1, D, False)
        v1 = load_rows(v, key64 * (v_m * UNIT), real, WIDTH0, WIDTH1, D, False)

    scale = LOG2E / root
    dk0 = tl.zeros([BLOCK_N, WIDTH0], tl.float32)
    dv0 = tl.zeros([BLOCK_N, WIDTH0], tl.float32)
    dk1 = tl.zeros([BLOCK_N, WIDTH1 if WIDTH1 > 0 else 16], tl.float32)
    dv1 = tl.zeros([BLOCK_N, WIDTH1 if WIDTH1 > 0 else 16], tl.float32)
    for h in range(g * group, g * group + group):
        h64 = tl.cast(h, tl.int64)
        q_head = q + b64 * q_b * UNIT + h64 * q_h * UNIT
        do_head = do + b64 * do_b * UNIT + h64 * D
        weights_head = weights
        if GATED:
            weights_head = weights + b64 * w_b + h64 * w_h
        mask_head = mask
        if MASK > 0:
            mask_head = mask + b64 * mask_b + h64 * mask_h
        low = tl.load(offsets + h * B + b)
        high = tl.load(offsets + h * B + b + 1)
        if CAUSAL:  # pairs before see none of these keys
            low += count_below(token, low, high, shift + start)
        # fmt: off
        dk0, dk1, dv0, dv1 = keys_queries(
            dk0, dk1, dv0, dv1, k0, k1, v0, v1, key, q_head, do_head, weights_head, mask_head, lse, delta, token,
            q_n * UNIT, do_n * UNIT, w_n, mask_n, low, high, shift, M, scale, root,
            D, WIDTH0, WIDTH1, GATED, MASK, CAUSAL, PRECISION, BLOCK_M,
        )
        # fmt: on

    dk += (b64 * M * G + g64) * D
    dv += (b64 * M * G + g64) * D
    row = tl.cast(G, tl.int64) * D
    store_rows(dk, key64 * row, dk0 / root, real, 0, WIDTH0, D)
    store_rows(dv, key64 * row, dv0, real, 0, WIDTH0, D)
    if WIDTH1 > 0:
        store_rows(dk, key64 * row, dk1 / root, real, WIDTH0, WIDTH1, D)
        store_rows(dv, key64 * row, dv1, real, WIDTH0, WIDTH1, D)


# ---- Launches


def contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def gate_strides(weights: Optional[Tensor]) -> Tuple[int, int, int]:
    """Strides over B, N, H; one gate per sequence serves all tokens."""
    if weights is None:
        return 0, 0, 0
    b, n, h = weights.stride()
    return b, n if weights.shape[1] > 1 else 0, h


def prepare_mask(mask: Optional[Tensor], shape: Tuple[int, int, int, int]) -> Tuple[int, Optional[Tensor], tuple]:
    """Which kind of mask, the mask as [B, H, N, M] with keys side by side, and its strides over B, H, N."""
    if mask is None:
        return NO_MASK, None, (0, 0, 0)
    kind = BOOL_MASK if mask.dtype == torch.bool else FLOAT_MASK
    mask = contiguous_rows(mask)
    if kind == BOOL_MASK:
        mask = mask.view(torch.uint8)
    mask = mask.expand(shape)
    return kind, mask, mask.stride()[:3]


def constants(kernel: str, rows: Tuple[Tensor, ...], tokens: int, gated: bool, mask: int, is_causal: bool):
    """The compile-time arguments of a kernel, and the strides of `rows` in units of UNIT elements.

    Triton knows that a number is divisible by 16, but a row of 72 numbers is only by 8: unless it is told, it loads
    them one at a time.
    """
    dtype, D = rows[0].dtype, rows[1].shape[-1]
    strides = [stride for x in rows for stride in x.stride()[:-1]]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    width0, width1 = widths(D)
    exact = dtype != torch.float32 or not uses_tf32()
    return [stride // unit for stride in strides], dict(
        D=D,
        WIDTH0=width0,
        WIDTH1=width1,
        UNIT=unit,
        GATED=gated,
        MASK=mask,
        CAUSAL=is_causal,
        PRECISION="ieee" if exact else "tf32",
        **blocks(kernel, D, dtype, exact, mask != NO_MASK, tokens, shared_memory(rows[0].device)),
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Optional[Tensor],
    token: Tensor,
    offsets: Tensor,
    is_causal: bool,
    mask: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    """See `moh_vision.attention.kernels.gpu.library.attend`."""
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    o = q.new_empty(B, N, H * D)
    lse = q.new_empty(token.shape, dtype=torch.float32)
    rows = tuple(map(contiguous_rows, (q, k, v)))
    kind, mask, mask_strides = prepare_mask(mask, (B, H, N, M))
    strides, constant = constants("forward", rows, N, weights is not None, kind, is_causal)
    tiles = triton.cdiv(N, constant["BLOCK_M"])
    if tiles * B * H:
        # fmt: off
        forward_kernel[(tiles * B * H,)](
            *rows, weights, mask, token, offsets, o, lse, *strides, *gate_strides(weights), *mask_strides,
            B, N, M, H, H // G, tiles, math.sqrt(D), **constant,
        )
        # fmt: on
    return o, lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    weights: Optional[Tensor],
    token: Tensor,
    offsets: Tensor,
    is_causal: bool,
    mask: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and gates.

    dq [B, H, N, D] and dk, dv [B, G, M, D] lie in memory as [B, N, H, D] and [B, M, G, D], the order of the fused
    product's columns: to join them copies whole rows of H*D numbers. dq is 0 where a head is off. Gradients of gates
    have the shape of `weights`, float32; without weights there are none, and the tensor is empty.
    """
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    dq = q.new_empty(B, N, H, D)
    dk, dv = k.new_empty(B, M, G, D), v.new_empty(B, M, G, D)
    gated = weights is not None
    dgates = q.new_empty((B, N, H) if gated else (0,), dtype=torch.float32)
    delta = torch.empty_like(lse)
    rows = tuple(map(contiguous_rows, (q, k, v, do)))
    o = o.contiguous()
    kind, mask, mask_strides = prepare_mask(mask, (B, H, N, M))
    other_strides = *gate_strides(weights), *mask_strides
    # fmt: off
    strides, constant = constants("queries", rows, N, gated, kind, is_causal)
    tiles = triton.cdiv(N, constant["BLOCK_M"])
    if tiles * B * H:
        queries_kernel[(tiles * B * H,)](
            *rows, o, weights, mask, lse, token, offsets, dq, dgates, delta, *strides, *other_strides,
            B, N, M, H, H // G, tiles, math.sqrt(D), **constant,
        )
    strides, constant = constants("keys", rows, N, gated, kind, is_causal)
    key_blocks = triton.cdiv(M, constant["BLOCK_N"])
    if key_blocks * B * G:
        keys_kernel[(key_blocks * B * G,)](
            *rows, weights, mask, lse, delta, token, offsets, dk, dv, *strides, *other_strides,
            B, N, M, G, H // G, key_blocks, math.sqrt(D), **constant,
        )
    # fmt: on
    if gated and weights.shape[1] == 1:
        dgates = dgates.sum(1, keepdim=True)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dgates
