"""What the kernels of attention share: rows of D numbers, products of tiles, masks, and how a tile is found.

A head width is computed as one power of two, or as two where that pads less: 72 = 64 + 16 - 8, not 128. So what has D
columns is a tuple of one or two parts.
"""

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from moh_vision.attention.kernels.gpu.blocks import next_power_of_2

LOG2E = tl.constexpr(math.log2(math.e))
NO_MASK = 0
BOOL_MASK = 1
FLOAT_MASK = 2

# Triton would compile a kernel for each of these that is 1 or divisible by 16, and make a constant of a 1.
SIZES = ["B", "N", "M", "H", "G"]


class Spec(NamedTuple):
    """What a kernel is compiled for."""

    D: int
    WIDTH0: int
    WIDTH1: int  # 0: there is one part
    UNIT: int  # strides of rows are given in units of so many numbers
    GATED: bool
    MASK: int
    CAUSAL: bool
    PRECISION: str
    BLOCK_M: int  # queries
    BLOCK_N: int  # keys
    EDGE_N: int  # keys of a block at the edge
    TMA: bool


@functools.cache
def widths(D: int) -> tuple[int, int]:
    """The parts of a head width: powers of two, 16 at least. 64 -> 64, 0; 72 -> 64, 16; 96 -> 64, 32."""
    whole = max(16, next_power_of_2(D))
    first = whole // 2
    second = 0
    if D > first:
        second = max(16, next_power_of_2(D - first))
    if first >= 16 and first + second < whole:
        return first, second
    return whole, 0


# ---- Parts of rows


@triton.jit
def load_part(pointer, rows, real, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
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
def load(pointer, rows, real, spec: tl.constexpr, ALL: tl.constexpr = False):
    """The rows in their parts; 0 beyond D and in rows that are not `real`. ALL: all rows are."""
    x = (load_part(pointer, rows, real, 0, spec.WIDTH0, spec.D, ALL),)
    if spec.WIDTH1 > 0:
        x = (x[0], load_part(pointer, rows, real, spec.WIDTH0, spec.WIDTH1, spec.D, ALL))
    return x


@triton.jit
def load_packed(pointer, first, real, ROWS: tl.constexpr, spec: tl.constexpr, ALL: tl.constexpr = False):  # fmt: skip
    """Rows `first`, `first` + 1, ... of those that `pack_kernel` wrote side by side."""
    WIDTH: tl.constexpr = spec.WIDTH0 + spec.WIDTH1
    rows = (tl.cast(first, tl.int64) + tl.arange(0, ROWS)) * WIDTH
    x = (load_part(pointer, rows, real, 0, spec.WIDTH0, WIDTH, ALL),)
    if spec.WIDTH1 > 0:
        x = (x[0], load_part(pointer, rows, real, spec.WIDTH0, spec.WIDTH1, WIDTH, ALL))
    return x


@triton.jit
def load_tile(tiles, b, g, row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `row`, `row` + 1, ... of a descriptor over [B, G, M, D]; 0 beyond M."""
    return tl.reshape(tiles.load([b, g, row, 0]), [ROWS, WIDTH])


@triton.jit
def store_part(pointer, rows, x, real, FIRST: tl.constexpr, D: tl.constexpr):
    column = FIRST + tl.arange(0, x.shape[1])
    pointers = pointer + rows[:, None] + column[None, :]
    mask = real[:, None] & (column < D)[None, :]
    tl.store(pointers, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store(pointer, rows, x, real, spec: tl.constexpr):
    store_part(pointer, rows, x[0], real, 0, spec.D)
    if spec.WIDTH1 > 0:
        store_part(pointer, rows, x[1], real, spec.WIDTH0, spec.D)


@triton.jit
def zeros_part(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Triton 3.6 takes no `spec.X` in a list."""
    return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def zeros(ROWS: tl.constexpr, spec: tl.constexpr):
    x = (zeros_part(ROWS, spec.WIDTH0),)
    if spec.WIDTH1 > 0:
        x = (x[0], zeros_part(ROWS, spec.WIDTH1))
    return x


@triton.jit
def times(x, factor, spec: tl.constexpr):
    y = (x[0] * factor,)
    if spec.WIDTH1 > 0:
        y = (y[0], x[1] * factor)
    return y


@triton.jit
def product(a, b, spec: tl.constexpr):
    """a b^T in float32."""
    x = tl.dot(a[0], tl.trans(b[0]), input_precision=spec.PRECISION)
    if spec.WIDTH1 > 0:
        x = tl.dot(a[1], tl.trans(b[1]), x, input_precision=spec.PRECISION)
    return x


@triton.jit
def add_product(total, p, x, spec: tl.constexpr):
    """total + p x, for p of one part."""
    p = p.to(x[0].dtype)
    y = (tl.dot(p, x[0], total[0], input_precision=spec.PRECISION),)
    if spec.WIDTH1 > 0:
        y = (y[0], tl.dot(p, x[1], total[1], input_precision=spec.PRECISION))
    return y


@triton.jit
def row_products(a, b, spec: tl.constexpr):
    """a . b of every row, in float32."""
    x = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if spec.WIDTH1 > 0:
        x += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return x


# ---- Keys and masks


@triton.jit
def load_keys(tiles, pointer, b, g, start, rows_by, real, EDGE: tl.constexpr, spec: tl.constexpr):
    """Keys or values `start`, `start` + 1, ... of a sequence and key-value head.

    Args:
        tiles: descriptor of all of them, read where spec.TMA.
        pointer: to the first one, read elsewhere and at the edge.
        b, g: sequence and key-value head.
        rows_by: numbers from one row to the next.
        real: which rows exist; beside an edge all do.
    """
    if spec.TMA and not EDGE:
        x = (load_tile(tiles, b, g, start, spec.BLOCK_N, spec.WIDTH0),)
    else:
        BLOCK: tl.constexpr = spec.EDGE_N if EDGE else spec.BLOCK_N
        rows = tl.arange(0, BLOCK) * rows_by
        x = load(pointer + tl.cast(start, tl.int64) * rows_by, rows, real, spec, not EDGE)
    return x


@triton.jit
def see(scores, mask, n, key, M, root, EDGE: tl.constexpr, spec: tl.constexpr):
    """Mask the scores, which are not yet divided by `root` = sqrt(D).

    mask: pointers to its numbers; n, key: the tokens and keys, one a row, the other a column. EDGE: some keys may lie
    beyond M or after a token.
    """
    real = key < M
    if spec.MASK == 1:
        scores = tl.where(tl.load(mask, mask=real, other=0) != 0, scores, -float("inf"))
    if spec.MASK == 2:
        scores += tl.load(mask, mask=real, other=0.0).to(tl.float32) * root
    if EDGE:
        if spec.CAUSAL:
            real = real & (key <= n)
        scores = tl.where(real, scores, -float("inf"))
    return scores


# ---- Tiles of the list


@triton.jit
def find_tile(token, offsets, B, N, H, spec: tl.constexpr):
    """The tile of this program.

    Neighbouring programs are tiles of one segment, then of the next head, which may read the same keys and values. A
    segment without pairs has one tile without pairs: it writes the zeros.

    Returns:
        whether there is such a tile; b, h; the first pair, the pair after the last, the tokens of its pairs; and the
        tokens that it answers for, from its first (0 for the segment's first tile) to the next tile's first.
    """
    tiles = tl.cdiv(N, spec.BLOCK_M)
    program = tl.program_id(0)
    index = program % tiles
    h = (program // tiles) % H
    b = program // (tiles * H)
    begin = tl.load(offsets + h * B + b)
    end = tl.load(offsets + h * B + b + 1)
    count = tl.maximum(tl.cdiv(end - begin, spec.BLOCK_M), 1)
    exists = index < count
    if spec.CAUSAL:
        index = count - 1 - index  # the tiles with the most keys start first
    first = begin + index * spec.BLOCK_M
    stop = tl.minimum(first + spec.BLOCK_M, end)
    shift = b * N
    pair = first + tl.arange(0, spec.BLOCK_M)
    # `exists & (pair < stop)` is no mask to the interpreter of Triton 3.9: a scalar bool becomes an int32 there.
    n = tl.load(token + pair, mask=pair < tl.where(exists, stop, first), other=shift) - shift
    low = tl.load(token + first, mask=exists & (first < stop) & (index > 0), other=shift) - shift
    high = tl.load(token + stop, mask=exists & (stop < end), other=shift + N) - shift
    return exists, b, h, first, stop, n, low, high


@triton.jit
def key_range(n, first, stop, M, spec: tl.constexpr):
    """Return two keys: all queries of a tile see the keys before the first, none sees the second or one after it."""
    last = M
    full = M // spec.BLOCK_N * spec.BLOCK_N
    if spec.CAUSAL:
        real = first + tl.arange(0, spec.BLOCK_M) < stop
        seen_by_all = tl.minimum(M, tl.min(tl.where(real, n, M), 0) + 1)
        full = seen_by_all // spec.BLOCK_N * spec.BLOCK_N
        last = tl.minimum(M, tl.max(tl.where(real, n, 0), 0) + 1)
    if first >= stop:
        last = 0
        full = 0
    return full, last


@triton.jit
def write_zeros(x, x_by, gates, gates_by, n, first, stop, low, high, spec: tl.constexpr):
    """Write zeros for the tokens low .. high - 1 that are not among the tile's, n.

    x: pointer to the rows of b and h, `x_by` numbers apart; gates: likewise, or None.
    """
    if high - low > stop - first:
        taken = tl.where(first + tl.arange(0, spec.BLOCK_M) < stop, n, -1)
        for start in range(low, high, spec.BLOCK_M):
            free = start + tl.arange(0, spec.BLOCK_M)
            is_taken = tl.max((free[:, None] == taken[None, :]).to(tl.int32), 1)
            real = (free < high) & (is_taken == 0)
            row = free.to(tl.int64)
            store(x, row * x_by, zeros(spec.BLOCK_M, spec), real, spec)
            if gates is not None:
                tl.store(gates + row * gates_by, tl.zeros(free.shape, tl.float32), mask=real)


@triton.jit
def count_below(token, begin, end, limit):
    """Count how many of the pairs begin .. end - 1, whose tokens rise, have a token below `limit`."""
    count = 0
    for start in range(begin, end, 1024):
        pair = start + tl.arange(0, 1024)
        n = tl.load(token + pair, mask=pair < end, other=2147483647)
        count += tl.sum((n < limit).to(tl.int32), 0)
    return count
