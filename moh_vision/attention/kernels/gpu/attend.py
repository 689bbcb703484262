"""Attention of the pairs that run, gated and put in place: Triton kernels, forward and backward.

Letters as in `moh_vision.attention.kernels`. Segment s = h * B + b of the list holds the tokens of sequence b that run
head h. A tile is up to BLOCK_M neighbouring pairs of one segment: its queries lie apart in memory, and all of them read
the keys and values of sequence b and head h.

    forward   one program a tile: all keys, then gate, then store
    queries   the same for the gradients of queries and gates; it also writes the delta that the next kernel reads
    keys      one program a block of keys: all tiles of the query heads that read it, so the sums need no atomics

The grid is an upper bound known from shapes: programs find their tile from `offsets` and stop where there is none.

A head width is computed as one power of two, or as two where that pads less: 72 = 64 + 16 - 8, not 128. So what has D
columns is a tuple of one or two parts. Strides are tuples too, `x_by`; what else a kernel is compiled for is a `How`.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
NO_MASK, BOOL_MASK, FLOAT_MASK = 0, 1, 2


class How(NamedTuple):
    """What a kernel is compiled for."""

    D: int
    WIDTH0: int
    WIDTH1: int  # 0: there is one part
    UNIT: int  # strides of queries, keys, values and the output's gradient are in units of so many elements
    GATED: bool
    MASK: int
    CAUSAL: bool
    PRECISION: str
    BLOCK_M: int
    BLOCK_N: int


def blocks(
    kernel: str, D: int, dtype: torch.dtype, exact: bool, masked: bool, tokens: int, memory: int
) -> dict[str, int]:
    """Queries and keys of a block, warps and stages: the one place that says them.

    ptxas spills 32 registers at most, 80 for float32 of width 256 (tests/attention/test_gpu_compiles.py). None is timed
    yet. The kernel of keys reads its queries through the list: only from three stages on do both loads run ahead.

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
            block = dict(
                forward=(64, 32, 4, 2),
                queries=(32 if masked else 64, 32, 4, 2),
                keys=(16, 32, 4, 3),
            )
        elif D <= 128:
            block = dict(forward=(32, 32, 8, 1), queries=(32, 32, 8, 1), keys=(16, 32, 8, 3))
        else:
            block = dict(forward=(32, 32, 8, 1), queries=(16, 32, 8, 1), keys=(16, 16, 8, 1))
    elif memory < 160 * 1024:
        rows, stages = (64, 3) if D <= 128 else (32, 2)
        block = dict(
            forward=(rows, 32, 4, 2), queries=(rows, 32, warps, 2), keys=(32, 32, warps, stages)
        )
        if masked:
            block.update(queries=(rows, 32, 8, 2), keys=(16, 32, warps, stages))
    elif D > 128:
        block = dict(
            forward=(64, 32 if masked else 64, 8, 2), queries=(32, 32, 8, 2), keys=(32, 32, 8, 3)
        )
    elif masked:
        block = dict(
            forward=(64, 64 if D <= 80 else 32, warps, 2),
            queries=(64, 32, 8, 2),
            keys=(16, 64, warps, 3),
        )
    elif tokens <= 512:
        block = dict(forward=(64, 64, 4, 3), queries=(64, 64, warps, 2), keys=(64, 64, warps, 3))
    else:
        rows = 128 if D <= 64 or memory > 200 * 1024 else 64  # an A100 has not the registers
        block = dict(
            forward=(128, 128 if D <= 64 else 64, 8, 3),
            queries=(rows, 64, 8, 2),
            keys=(64, 64, warps, 3),
        )
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


def widths(D: int) -> tuple[int, int]:
    """The parts of a head width: powers of two, 16 at least. 64 -> 64, 0; 72 -> 64, 16; 96 -> 64, 32; 256 -> 256, 0."""
    whole = max(16, triton.next_power_of_2(D))
    first = whole // 2
    second = max(16, triton.next_power_of_2(D - first)) if D > first else 0
    return (first, second) if first >= 16 and first + second < whole else (whole, 0)


# Triton would compile a kernel for each of these that is 1 or divisible by 16, and make a constant of a 1.
SIZES = ["B", "N", "M", "H", "G"]


# ---- Parts of rows


@triton.jit
def load_part(
    pointer,
    rows,
    real,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    ALL: tl.constexpr,
):
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
def load(pointer, rows, real, how: tl.constexpr, ALL: tl.constexpr = False):
    """The rows in their parts; 0 beyond D and in rows that are not `real`. ALL: all rows are."""
    x = (load_part(pointer, rows, real, 0, how.WIDTH0, how.D, ALL),)
    if how.WIDTH1 > 0:
        x = (x[0], load_part(pointer, rows, real, how.WIDTH0, how.WIDTH1, how.D, ALL))
    return x


@triton.jit
def store_part(pointer, rows, x, real, FIRST: tl.constexpr, D: tl.constexpr):
    column = FIRST + tl.arange(0, x.shape[1])
    pointers = pointer + rows[:, None] + column[None, :]
    tl.store(pointers, x.to(pointer.dtype.element_ty), mask=real[:, None] & (column < D)[None, :])


@triton.jit
def store(pointer, rows, x, real, how: tl.constexpr):
    store_part(pointer, rows, x[0], real, 0, how.D)
    if how.WIDTH1 > 0:
        store_part(pointer, rows, x[1], real, how.WIDTH0, how.D)


@triton.jit
def zeros_part(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Triton 3.6 takes no `how.X` in a list."""
    return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def zeros(ROWS: tl.constexpr, how: tl.constexpr):
    x = (zeros_part(ROWS, how.WIDTH0),)
    if how.WIDTH1 > 0:
        x = (x[0], zeros_part(ROWS, how.WIDTH1))
    return x


@triton.jit
def times(x, factor, how: tl.constexpr):
    y = (x[0] * factor,)
    if how.WIDTH1 > 0:
        y = (y[0], x[1] * factor)
    return y


@triton.jit
def product(a, b, how: tl.constexpr):
    """a b^T in float32."""
    x = tl.dot(a[0], tl.trans(b[0]), input_precision=how.PRECISION)
    if how.WIDTH1 > 0:
        x = tl.dot(a[1], tl.trans(b[1]), x, input_precision=how.PRECISION)
    return x


@triton.jit
def add_product(total, p, x, how: tl.constexpr):
    """total + p x, for p of one part."""
    p = p.to(x[0].dtype)
    y = (tl.dot(p, x[0], total[0], input_precision=how.PRECISION),)
    if how.WIDTH1 > 0:
        y = (y[0], tl.dot(p, x[1], total[1], input_precision=how.PRECISION))
    return y


@triton.jit
def row_products(a, b, how: tl.constexpr):
    """a . b of every row, in float32."""
    x = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if how.WIDTH1 > 0:
        x += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return x


# ---- What the kernels share


@triton.jit
def see(scores, mask, n, key, M, root, EDGE: tl.constexpr, how: tl.constexpr):
    """Mask the scores, which are not yet divided by `root` = sqrt(D).

    mask: pointers to its numbers; n, key: the tokens and keys, one a row, the other a column. EDGE: some keys may lie
    beyond M or after a token.
    """
    real = key < M
    if how.MASK == 1:
        scores = tl.where(tl.load(mask, mask=real, other=0) != 0, scores, -float("inf"))
    if how.MASK == 2:
        scores += tl.load(mask, mask=real, other=0.0).to(tl.float32) * root
    if EDGE:
        if how.CAUSAL:
            real = real & (key <= n)
        scores = tl.where(real, scores, -float("inf"))
    return scores


@triton.jit
def find_tile(token, offsets, B, N, H, how: tl.constexpr):
    """The tile of this program.

    Neighbouring programs are tiles of one segment, then of the next head, which may read the same keys and values. A
    segment without pairs has one tile without pairs: it writes the zeros.

    Returns:
        whether there is such a tile; b, h; the first pair, the pair after the last, the tokens of its pairs; and the
        tokens that it answers for, from its first (0 for the segment's first tile) to the next tile's first.
    """
    tiles = tl.cdiv(N, how.BLOCK_M)
    program = tl.program_id(0)
    index = program % tiles
    h = (program // tiles) % H
    b = program // (tiles * H)
    begin = tl.load(offsets + h * B + b)
    end = tl.load(offsets + h * B + b + 1)
    count = tl.maximum(tl.cdiv(end - begin, how.BLOCK_M), 1)
    exists = index < count
    if how.CAUSAL:
        index = count - 1 - index  # the tiles with the most keys start first
    first = begin + index * how.BLOCK_M
    stop = tl.minimum(first + how.BLOCK_M, end)
    shift = b * N
    pair = first + tl.arange(0, how.BLOCK_M)
    # `exists & (pair < stop)` is no mask to the interpreter of Triton 3.9: a scalar bool becomes an int32 there.
    n = tl.load(token + pair, mask=pair < tl.where(exists, stop, first), other=shift) - shift
    low = tl.load(token + first, mask=exists & (first < stop) & (index > 0), other=shift) - shift
    high = tl.load(token + stop, mask=exists & (stop < end), other=shift + N) - shift
    return exists, b, h, first, stop, n, low, high


@triton.jit
def key_range(n, first, stop, M, how: tl.constexpr):
    """Keys of a tile: all its queries see those before the first number; none sees one from the second on."""
    last = M
    full = M // how.BLOCK_N * how.BLOCK_N
    if how.CAUSAL:
        real = first + tl.arange(0, how.BLOCK_M) < stop
        full = tl.minimum(M, tl.min(tl.where(real, n, M), 0) + 1) // how.BLOCK_N * how.BLOCK_N
        last = tl.minimum(M, tl.max(tl.where(real, n, 0), 0) + 1)
    if first >= stop:
        last = 0
        full = 0
    return full, last


@triton.jit
def write_zeros(x, gates, n, first, stop, low, high, H, how: tl.constexpr):
    """Zeros for the tokens low .. high - 1 that are not among the tile's, n.

    x: pointer to the rows of b and h; gates: likewise, or None.
    """
    if high - low > stop - first:
        taken = tl.where(first + tl.arange(0, how.BLOCK_M) < stop, n, -1)
        for start in range(low, high, how.BLOCK_M):
            free = start + tl.arange(0, how.BLOCK_M)
            is_taken = tl.max((free[:, None] == taken[None, :]).to(tl.int32), 1)
            real = (free < high) & (is_taken == 0)
            row = free.to(tl.int64) * H
            store(x, row * how.D, zeros(how.BLOCK_M, how), real, how)
            if gates is not None:
                tl.store(gates + row, tl.zeros(free.shape, tl.float32), mask=real)


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
    sums,
    q,
    n,
    mask,
    k,
    v,
    k_by,
    v_by,
    M,
    low,
    high,
    scale,
    root,
    EDGE: tl.constexpr,
    how: tl.constexpr,
):
    """Keys low .. high - 1 into the running sums (the values, the largest score before scaling, the exponentials)."""
    acc, top, total = sums
    rows = tl.arange(0, how.BLOCK_N)
    for start in range(low, high, how.BLOCK_N):
        key = start + rows
        real = key < M
        k_block = load(k + tl.cast(start, tl.int64) * k_by, rows * k_by, real, how, not EDGE)
        scores = product(q, k_block, how)  # [BLOCK_M, BLOCK_N]
        scores = see(
            scores, mask[:, None] + key[None, :], n[:, None], key[None, :], M, root, EDGE, how
        )

        new = tl.maximum(top, tl.max(scores, 1))
        base = new
        if how.MASK > 0:  # nothing seen so far: -inf minus -inf would be NaN
            base = tl.where(new == -float("inf"), 0.0, new)
        if (
            how.MASK == 2
        ):  # where a bias of -1e9 hides all keys, a rounded product would miss a fused one by up to 2^64
            p = tl.exp2((scores - base[:, None]) * scale)
            shrink = tl.exp2((top - base) * scale)
        else:
            p = tl.exp2(scores * scale - (base * scale)[:, None])
            shrink = tl.exp2(top * scale - base * scale)
        top = new
        total = total * shrink + tl.sum(p, 1)
        v_block = load(v + tl.cast(start, tl.int64) * v_by, rows * v_by, real, how, not EDGE)
        acc = add_product(times(acc, shrink[:, None], how), p, v_block, how)
    return acc, top, total


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, weights, mask, token, offsets, o, lse,
    q_by, k_by, v_by, gates_by, mask_by, B, N, M, H, G, root, how: tl.constexpr,
):  # fmt: skip
    exists, b, h, first, stop, n, low, high = find_tile(token, offsets, B, N, H, how)
    if exists == 0:
        return
    pair = first + tl.arange(0, how.BLOCK_M)
    real = pair < stop
    n64, b64, h64, g64 = (
        n.to(tl.int64),
        b.to(tl.int64),
        h.to(tl.int64),
        (h // (H // G)).to(tl.int64),
    )

    q_rows = load(
        q + (b64 * q_by[0] + h64 * q_by[1]) * how.UNIT, n64 * (q_by[2] * how.UNIT), real, how
    )
    k += (b64 * k_by[0] + g64 * k_by[1]) * how.UNIT
    v += (b64 * v_by[0] + g64 * v_by[1]) * how.UNIT
    mask_rows = n64
    if how.MASK > 0:
        mask_rows = mask + b64 * mask_by[0] + h64 * mask_by[1] + n64 * mask_by[2]

    scale = LOG2E / root
    nothing = tl.zeros(n.shape, tl.float32)
    sums = (zeros(how.BLOCK_M, how), nothing - float("inf"), nothing)
    full, last = key_range(n, first, stop, M, how)
    # fmt: off
    by = k_by[2] * how.UNIT, v_by[2] * how.UNIT
    sums = attend_keys(sums, q_rows, n, mask_rows, k, v, by[0], by[1], M, 0, full, scale, root, False, how)
    acc, top, total = attend_keys(sums, q_rows, n, mask_rows, k, v, by[0], by[1], M, full, last, scale, root, True, how)
    # fmt: on

    total = tl.where(total == 0.0, 1.0, total)  # it saw no key: output 0, and -inf from `top`
    tl.store(lse + pair, (top * scale + tl.log2(total)) / LOG2E, mask=real)
    factor = 1.0 / total
    if how.GATED:
        gate = tl.load(
            weights + b64 * gates_by[0] + n64 * gates_by[1] + h64 * gates_by[2],
            mask=real,
            other=0.0,
        )
        factor *= gate.to(tl.float32)
    o += (b64 * N * H + h64) * how.D
    store(o, n64 * H * how.D, times(acc, factor[:, None], how), real, how)
    write_zeros(o, None, n, first, stop, low, high, H, how)


# ---- Backward
#
# With p = softmax of the scores, gate w, and do the gradient of the gated output o:
#     d gate     = sum_j p_j (do . v_j), exact where the gate is 0
#     d score_j  = p_j (w (do . v_j) - delta),  delta = do . o
#     d v_j      = sum over queries of p_j w do


@triton.jit
def probabilities(scores, scale, lse, how: tl.constexpr):
    """lse: to base 2."""
    power = scores * scale - lse
    if (
        how.MASK == 2
    ):  # at most 1, also where a bias of -1e9 hides all keys: `lse` has no digits left for its sum then
        power = tl.minimum(power, 0.0)
    return tl.exp2(power)


@triton.jit
def load_lse(lse, pair, real):
    """To base 2; infinity where there is no pair or it saw no key: exp2 gives 0, not NaN."""
    x = tl.load(lse + pair, mask=real, other=-float("inf")) * LOG2E
    return tl.where(x == -float("inf"), float("inf"), x)


@triton.jit
def queries_keys(
    sums, q, do, n, gate, delta, lse, mask, k, v, k_by, v_by, M, low, high, scale, root,
    EDGE: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """What keys low .. high - 1 add to the gradients of queries and gates."""
    dq, dgate = sums
    rows = tl.arange(0, how.BLOCK_N)
    for start in range(low, high, how.BLOCK_N):
        key = start + rows
        real = key < M
        k_block = load(k + tl.cast(start, tl.int64) * k_by, rows * k_by, real, how, not EDGE)
        v_block = load(v + tl.cast(start, tl.int64) * v_by, rows * v_by, real, how, not EDGE)
        scores = product(q, k_block, how)
        scores = see(
            scores, mask[:, None] + key[None, :], n[:, None], key[None, :], M, root, EDGE, how
        )
        p = probabilities(scores, scale, lse[:, None], how)
        dp = product(do, v_block, how)
        dgate += tl.sum(p * dp, 1)
        dq = add_product(dq, p * (dp * gate[:, None] - delta[:, None]), k_block, how)
    return dq, dgate


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    q, k, v, do, o, weights, mask, lse, token, offsets, dq, dgates, delta,
    q_by, k_by, v_by, do_by, gates_by, mask_by, B, N, M, H, G, root, how: tl.constexpr,
):  # fmt: skip
    exists, b, h, first, stop, n, low, high = find_tile(token, offsets, B, N, H, how)
    if exists == 0:
        return
    pair = first + tl.arange(0, how.BLOCK_M)
    real = pair < stop
    n64, b64, h64, g64 = (
        n.to(tl.int64),
        b.to(tl.int64),
        h.to(tl.int64),
        (h // (H // G)).to(tl.int64),
    )
    place = (b64 * N * H + h64) * how.D

    q_rows = load(
        q + (b64 * q_by[0] + h64 * q_by[1]) * how.UNIT, n64 * (q_by[2] * how.UNIT), real, how
    )
    do_rows = load(
        do + b64 * do_by[0] * how.UNIT + h64 * how.D, n64 * (do_by[1] * how.UNIT), real, how
    )
    row_delta = row_products(do_rows, load(o + place, n64 * H * how.D, real, how), how)
    tl.store(delta + pair, row_delta, mask=real)
    gate = tl.zeros(n.shape, tl.float32) + 1.0
    if how.GATED:
        gate = tl.load(
            weights + b64 * gates_by[0] + n64 * gates_by[1] + h64 * gates_by[2],
            mask=real,
            other=0.0,
        )
        gate = gate.to(tl.float32)
    row_lse = load_lse(lse, pair, real)
    k += (b64 * k_by[0] + g64 * k_by[1]) * how.UNIT
    v += (b64 * v_by[0] + g64 * v_by[1]) * how.UNIT
    mask_rows = n64
    if how.MASK > 0:
        mask_rows = mask + b64 * mask_by[0] + h64 * mask_by[1] + n64 * mask_by[2]

    scale = LOG2E / root
    sums = (zeros(how.BLOCK_M, how), tl.zeros(n.shape, tl.float32))
    full, last = key_range(n, first, stop, M, how)
    # fmt: off
    by = k_by[2] * how.UNIT, v_by[2] * how.UNIT
    sums = queries_keys(
        sums, q_rows, do_rows, n, gate, row_delta, row_lse, mask_rows, k, v, by[0], by[1], M, 0, full, scale, root,
        False, how,
    )
    dq_rows, dgate = queries_keys(
        sums, q_rows, do_rows, n, gate, row_delta, row_lse, mask_rows, k, v, by[0], by[1], M, full, last, scale, root,
        True, how,
    )
    # fmt: on

    store(dq + place, n64 * H * how.D, times(dq_rows, 1.0 / root, how), real, how)
    if how.GATED:
        dgates += b64 * N * H + h64
        tl.store(dgates + n64 * H, dgate, mask=real)
    write_zeros(dq + place, dgates if how.GATED else None, n, first, stop, low, high, H, how)


@triton.jit
def keys_queries(
    sums, k, v, key, q, do, weights, mask, lse, delta, token, q_by, do_by, gates_by, mask_by, low, high, shift, M,
    scale, root, how: tl.constexpr,
):  # fmt: skip
    """What pairs low .. high - 1 add to the gradients of a block of keys and values.

    Scores are [keys, queries], so that no product needs a transposed one. Keys beyond M need no mask: their rows are
    not stored.
    """
    dk, dv = sums
    for start in range(low, high, how.BLOCK_M):
        pair = start + tl.arange(0, how.BLOCK_M)
        real = pair < high
        n = tl.load(token + pair, mask=real, other=shift) - shift
        n64 = n.to(tl.int64)
        row_lse = load_lse(lse, pair, real)
        row_delta = tl.load(delta + pair, mask=real, other=0.0)
        q_rows = load(q, n64 * q_by, real, how)
        do_rows = load(do, n64 * do_by, real, how)
        mask_rows = n64
        if how.MASK > 0:
            mask_rows = mask + n64 * mask_by
        scores = product(k, q_rows, how)  # [BLOCK_N, BLOCK_M]
        scores = see(
            scores,
            mask_rows[None, :] + key[:, None],
            n[None, :],
            key[:, None],
            M,
            root,
            how.CAUSAL,
            how,
        )
        p = probabilities(scores, scale, row_lse[None, :], how)
        dp = product(v, do_rows, how)
        if how.GATED:
            gate = tl.load(weights + n64 * gates_by, mask=real, other=0.0).to(tl.float32)
            ds = p * (dp * gate[None, :] - row_delta[None, :])
            p = p * gate[None, :]
        else:
            ds = p * (dp - row_delta[None, :])
        dv = add_product(dv, p, do_rows, how)
        dk = add_product(dk, ds, q_rows, how)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    q, k, v, do, weights, mask, lse, delta, token, offsets, dk, dv,
    q_by, k_by, v_by, do_by, gates_by, mask_by, B, N, M, H, G, root, how: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    key_blocks = tl.cdiv(M, how.BLOCK_N)
    start = (program % key_blocks) * how.BLOCK_N
    g = (program // key_blocks) % G
    b = program // (key_blocks * G)
    shift = b * N
    key = start + tl.arange(0, how.BLOCK_N)
    real = key < M
    key64, b64, g64 = key.to(tl.int64), b.to(tl.int64), g.to(tl.int64)

    k_rows = load(
        k + (b64 * k_by[0] + g64 * k_by[1]) * how.UNIT, key64 * (k_by[2] * how.UNIT), real, how
    )
    v_rows = load(
        v + (b64 * v_by[0] + g64 * v_by[1]) * how.UNIT, key64 * (v_by[2] * how.UNIT), real, how
    )

    scale = LOG2E / root
    sums = (zeros(how.BLOCK_N, how), zeros(how.BLOCK_N, how))
    for h in range(g * (H // G), (g + 1) * (H // G)):
        h64 = tl.cast(h, tl.int64)
        q_head = q + (b64 * q_by[0] + h64 * q_by[1]) * how.UNIT
        do_head = do + b64 * do_by[0] * how.UNIT + h64 * how.D
        weights_head = weights
        if how.GATED:
            weights_head = weights + b64 * gates_by[0] + h64 * gates_by[2]
        mask_head = mask
        if how.MASK > 0:
            mask_head = mask + b64 * mask_by[0] + h64 * mask_by[1]
        low = tl.load(offsets + h * B + b)
        high = tl.load(offsets + h * B + b + 1)
        if how.CAUSAL:  # pairs before see none of these keys
            low += count_below(token, low, high, shift + start)
        sums = keys_queries(
            sums, k_rows, v_rows, key, q_head, do_head, weights_head, mask_head, lse, delta, token,
            q_by[2] * how.UNIT, do_by[1] * how.UNIT, gates_by[1], mask_by[2], low, high, shift, M, scale, root, how,
        )  # fmt: skip

    place = (b64 * M * G + g64) * how.D
    store(dk + place, key64 * G * how.D, times(sums[0], 1.0 / root, how), real, how)
    store(dv + place, key64 * G * how.D, sums[1], real, how)


# ---- Launches


def contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def prepare(q, k, weights, mask) -> tuple[int, Tensor | None, tuple, tuple]:
    """Which kind of mask, the mask as [B, H, N, M] with keys side by side; strides of gates (B, N, H) and mask (B, H, N)."""
    gates_by = (0, 0, 0) if weights is None else weights.stride()
    if weights is not None and weights.shape[1] == 1:  # one gate of a sequence serves all tokens
        gates_by = gates_by[0], 0, gates_by[2]
    if mask is None:
        return NO_MASK, None, gates_by, (0, 0, 0)
    kind = BOOL_MASK if mask.dtype == torch.bool else FLOAT_MASK
    mask = contiguous_rows(mask)
    if kind == BOOL_MASK:
        mask = mask.view(torch.uint8)
    mask = mask.expand(*q.shape[:3], k.shape[2])
    return kind, mask, gates_by, mask.stride()[:3]


def prepare_rows(*rows: Tensor) -> tuple[int, list[tuple[int, ...]]]:
    """UNIT, and strides in its units.

    Triton knows that a number is divisible by 16, but a row of 72 numbers is only by 8: unless it is told, it loads
    them one at a time.
    """
    strides = [x.stride()[:-1] for x in rows]
    unit = 8 if all(number % 8 == 0 for by in strides for number in by) else 1
    return unit, [tuple(number // unit for number in by) for by in strides]


def compile_for(
    kernel: str, q: Tensor, v: Tensor, unit: int, gated: bool, mask: int, is_causal: bool
) -> tuple[How, dict]:
    """What the kernel is compiled for, and its warps and stages."""
    dtype, D = q.dtype, v.shape[3]
    exact = dtype != torch.float32 or not uses_tf32()
    block = dict(
        blocks(kernel, D, dtype, exact, mask != NO_MASK, q.shape[2], shared_memory(q.device))
    )
    sizes = block.pop("BLOCK_M"), block.pop("BLOCK_N")
    return How(
        D, *widths(D), unit, gated, mask, is_causal, "ieee" if exact else "tf32", *sizes
    ), block


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `moh_vision.attention.kernels.gpu.library.attend`."""
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    o = q.new_empty(B, N, H * D)
    lse = q.new_empty(token.shape, dtype=torch.float32)
    rows = [contiguous_rows(x) for x in (q, k, v)]
    unit, strides = prepare_rows(*rows)
    kind, mask, *others_by = prepare(q, k, weights, mask)
    how, options = compile_for("forward", q, v, unit, weights is not None, kind, is_causal)
    programs = triton.cdiv(N, how.BLOCK_M) * B * H
    if programs:
        others = weights, mask, token, offsets, o, lse
        sizes = B, N, M, H, G, math.sqrt(D)
        forward_kernel[(programs,)](
            *rows, *others, *strides, *others_by, *sizes, how=how, **options
        )
    return o, lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    rows = [contiguous_rows(x) for x in (q, k, v, do)]
    unit, strides = prepare_rows(*rows)
    kind, mask, *others_by = prepare(q, k, weights, mask)
    sizes = B, N, M, H, G, math.sqrt(D)

    how, options = compile_for("queries", q, v, unit, gated, kind, is_causal)
    programs = triton.cdiv(N, how.BLOCK_M) * B * H
    if programs:
        others = o.contiguous(), weights, mask, lse, token, offsets, dq, dgates, delta
        queries_kernel[(programs,)](
            *rows, *others, *strides, *others_by, *sizes, how=how, **options
        )

    how, options = compile_for("keys", q, v, unit, gated, kind, is_causal)
    programs = triton.cdiv(M, how.BLOCK_N) * B * G
    if programs:
        others = weights, mask, lse, delta, token, offsets, dk, dv
        keys_kernel[(programs,)](*rows, *others, *strides, *others_by, *sizes, how=how, **options)
    if gated and weights.shape[1] == 1:
        dgates = dgates.sum(1, keepdim=True)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dgates
