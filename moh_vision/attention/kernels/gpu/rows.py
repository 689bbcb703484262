"""Functions that the attention kernels share: they load and store rows, multiply tiles, apply masks and find tiles.

Triton's tiles have widths that are powers of two. A head width D is padded to one such width, or to the sum of two where
this pads less: 72 to 64 + 16, not to 128. So a tile with D columns is a tuple of one or two tensors, its parts.
"""

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from moh_vision.attention.kernels.gpu.blocks import next_power_of_2

# Kernels may read a global only if it is a tl.constexpr; the host uses its `value`.
LOG2E = tl.constexpr(math.log2(math.e))
LARGEST_INT32 = tl.constexpr(2**31 - 1)
# The values of `Spec.MASK`.
NO_MASK = tl.constexpr(0)
BOOL_MASK = tl.constexpr(1)
FLOAT_MASK = tl.constexpr(2)

# Arguments that kernels are not specialised to: Triton would compile another kernel where one is divisible by 16, and
# one where it is 1, which becomes a constant.
SIZES = ["B", "N", "M", "H", "G"]


class Spec(NamedTuple):
    """The compile-time constants of an attention kernel."""

    D: int
    WIDTH0: int  # width of the first part, see `widths`
    WIDTH1: int  # width of the second part; 0: there is one part
    UNIT: int  # row strides are given in units of so many elements, see `attend.unit_of`
    GATED: bool  # whether outputs are multiplied by gates
    MASK: int  # NO_MASK, BOOL_MASK or FLOAT_MASK
    CAUSAL: bool
    PRECISION: str  # input_precision of tl.dot: "ieee" or "tf32"
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a block
    EDGE_N: int  # keys of a block at the edge, see `attend.Given.edge`
    TMA: bool  # whether blocks of keys and values are read through tensor descriptors


@functools.cache
def widths(D: int) -> tuple[int, int]:
    """Return the widths of the two parts of a head width; the second is 0 if there is one part.

    Both are powers of two, at least 16, the least that tl.dot takes: 64 -> 64, 0; 72 -> 64, 16; 96 -> 64, 32.
    """
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
    """Load columns FIRST .. FIRST + WIDTH - 1 of the rows at offsets `rows`; see `load`."""
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
    """Load the rows at offsets `rows` as a tuple of parts: 0 in columns beyond D, and in rows that are not `real`.

    ALL: all rows are real, and `real` is not read.
    """
    x = (load_part(pointer, rows, real, 0, spec.WIDTH0, spec.D, ALL),)
    if spec.WIDTH1 > 0:
        x = (x[0], load_part(pointer, rows, real, spec.WIDTH0, spec.WIDTH1, spec.D, ALL))
    return x


@triton.jit
def load_packed(pointer, first, real, ROWS: tl.constexpr, spec: tl.constexpr, ALL: tl.constexpr = False):  # fmt: skip
    """Load rows `first`, `first` + 1, ... of the contiguous rows that `pack_kernel` wrote; see `load`."""
    WIDTH: tl.constexpr = spec.WIDTH0 + spec.WIDTH1
    rows = (tl.cast(first, tl.int64) + tl.arange(0, ROWS)) * WIDTH
    x = (load_part(pointer, rows, real, 0, spec.WIDTH0, WIDTH, ALL),)
    if spec.WIDTH1 > 0:
        x = (x[0], load_part(pointer, rows, real, spec.WIDTH0, spec.WIDTH1, WIDTH, ALL))
    return x


@triton.jit
def load_tile(tiles, b, g, row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows `row`, `row` + 1, ... through `tiles`, a descriptor of a tensor [B, G, M, D]; rows beyond M are 0."""
    return tl.reshape(tiles.load([b, g, row, 0]), [ROWS, WIDTH])


@triton.jit
def store_part(pointer, rows, x, real, FIRST: tl.constexpr, D: tl.constexpr):
    """Store x in columns FIRST, FIRST + 1, ... of the rows at offsets `rows`, up to column D - 1."""
    column = FIRST + tl.arange(0, x.shape[1])
    pointers = pointer + rows[:, None] + column[None, :]
    mask = real[:, None] & (column < D)[None, :]
    tl.store(pointers, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store(pointer, rows, x, real, spec: tl.constexpr):
    """Store the parts of x as rows of D elements at offsets `rows`, where `real`."""
    store_part(pointer, rows, x[0], real, 0, spec.D)
    if spec.WIDTH1 > 0:
        store_part(pointer, rows, x[1], real, spec.WIDTH0, spec.D)


@triton.jit
def zeros_part(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return zeros [ROWS, WIDTH]; a function because Triton 3.6 does not accept `spec.WIDTH0` in the list of a shape."""
    return tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def zeros(ROWS: tl.constexpr, spec: tl.constexpr):
    """Return ROWS rows of zeros as a tuple of parts."""
    x = (zeros_part(ROWS, spec.WIDTH0),)
    if spec.WIDTH1 > 0:
        x = (x[0], zeros_part(ROWS, spec.WIDTH1))
    return x


@triton.jit
def times(x, factor, spec: tl.constexpr):
    """Return x * factor for x in parts."""
    y = (x[0] * factor,)
    if spec.WIDTH1 > 0:
        y = (y[0], x[1] * factor)
    return y


@triton.jit
def product(a, b, spec: tl.constexpr):
    """Return a b^T in float32, for a and b in parts."""
    x = tl.dot(a[0], tl.trans(b[0]), input_precision=spec.PRECISION)
    if spec.WIDTH1 > 0:
        x = tl.dot(a[1], tl.trans(b[1]), x, input_precision=spec.PRECISION)
    return x


@triton.jit
def add_product(total, p, x, spec: tl.constexpr):
    """Return total + p x, for `total` and x in parts and p a plain tensor, in the dtype of x."""
    p = p.to(x[0].dtype)
    y = (tl.dot(p, x[0], total[0], input_precision=spec.PRECISION),)
    if spec.WIDTH1 > 0:
        y = (y[0], tl.dot(p, x[1], total[1], input_precision=spec.PRECISION))
    return y


@triton.jit
def row_products(a, b, spec: tl.constexpr):
    """Return the dot product of each row of a with the same row of b, in float32."""
    x = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if spec.WIDTH1 > 0:
        x += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return x


# ---- Keys and masks


@triton.jit
def load_keys(tiles, pointer, b, g, start, rows_by, real, EDGE: tl.constexpr, spec: tl.constexpr):
    """Load a block of keys or values of sequence b and key-value head g, from row `start` on.

    Args:
        tiles: descriptor of all keys or values [B, G, M, D]; used if spec.TMA, but not at the edge.
        pointer: pointer to row 0 of b and g; used otherwise.
        b, g: sequence and key-value head.
        start: first row of the block.
        rows_by: row stride, in elements.
        real: which rows exist; only read at the edge.
        EDGE: some rows of the block may not exist.
    """
    if spec.TMA and not EDGE:
        x = (load_tile(tiles, b, g, start, spec.BLOCK_N, spec.WIDTH0),)
    else:
        BLOCK: tl.constexpr = spec.EDGE_N if EDGE else spec.BLOCK_N
        rows = tl.arange(0, BLOCK) * rows_by
        x = load(pointer + tl.cast(start, tl.int64) * rows_by, rows, real, spec, not EDGE)
    return x


@triton.jit
def mask_scores(scores, mask, n, key, M, root, EDGE: tl.constexpr, spec: tl.constexpr):
    """Mask the scores, which are not yet divided by `root` = sqrt(D).

    Args:
        scores: one row per query and one column per key, or the other way round.
        mask: pointers to the mask's elements, of the shape of `scores`.
        n, key: indices of queries and keys, one of them a row and the other a column.
        M: number of keys.
        root: sqrt(D).
        EDGE: some keys may not exist, or come after a query in a causal call.
    """
    real = key < M
    if spec.MASK == BOOL_MASK:
        scores = tl.where(tl.load(mask, mask=real, other=0) != 0, scores, -float("inf"))
    if spec.MASK == FLOAT_MASK:
        scores += tl.load(mask, mask=real, other=0.0).to(tl.float32) * root
    if EDGE:
        if spec.CAUSAL:
            real = real & (key <= n)
        scores = tl.where(real, scores, -float("inf"))
    return scores


# ---- Tiles of the list


@triton.jit
def find_tile(token, offsets, B, N, H, spec: tl.constexpr):
    """Find the tile of this program in the list of pairs.

    Consecutive programs have the tiles of one segment, then those of the next head of the same sequence, which may read
    the same keys and values. A segment without pairs has one tile without pairs, which only writes zeros.

    Returns:
        exists: whether this program has a tile.
        b, h: its sequence and head.
        first, stop: its pairs are first .. stop - 1 of the list.
        n: the tokens of its pairs, [BLOCK_M].
        zero_from, zero_to: among tokens zero_from .. zero_to - 1 the tile writes zeros for those without a pair. The range
            begins at the tile's first token, or at 0 for the first tile of a segment. It ends before the next tile's
            first token, or at N for the last tile.
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
    # Not mask=exists & (pair < stop): in the interpreter of Triton 3.9 a scalar bool becomes an int32, which is no mask.
    n = tl.load(token + pair, mask=pair < tl.where(exists, stop, first), other=shift) - shift
    zero_from = (
        tl.load(token + first, mask=exists & (first < stop) & (index > 0), other=shift) - shift
    )
    zero_to = tl.load(token + stop, mask=exists & (stop < end), other=shift + N) - shift
    return exists, b, h, first, stop, n, zero_from, zero_to


@triton.jit
def key_range(n, first, stop, M, spec: tl.constexpr):
    """Return `full` and `last`: all queries of a tile see the keys before `full`, and none sees a key from `last` on.

    `full` is a multiple of BLOCK_N. Keys full .. last - 1 are at the edge, see EDGE of `mask_scores`.
    """
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
def write_zeros(x, x_by, gates, gates_by, n, first, stop, zero_from, zero_to, spec: tl.constexpr):
    """Write zeros for the tokens zero_from .. zero_to - 1 that have no pair in the tile.

    Args:
        x: pointer to the rows of b and h that get zeros.
        x_by: stride of these rows, in elements.
        gates: pointer to further elements that get zeros, one per token, or None.
        gates_by: stride of these elements.
        n, first, stop, zero_from, zero_to: see `find_tile`.
    """
    if zero_to - zero_from > stop - first:
        taken = tl.where(first + tl.arange(0, spec.BLOCK_M) < stop, n, -1)
        for start in range(zero_from, zero_to, spec.BLOCK_M):
            free = start + tl.arange(0, spec.BLOCK_M)
            is_taken = tl.max((free[:, None] == taken[None, :]).to(tl.int32), 1)
            real = (free < zero_to) & (is_taken == 0)
            row = free.to(tl.int64)
            store(x, row * x_by, zeros(spec.BLOCK_M, spec), real, spec)
            if gates is not None:
                tl.store(gates + row * gates_by, tl.zeros(free.shape, tl.float32), mask=real)


@triton.jit
def count_below(token, begin, end, limit):
    """Return how many of the pairs begin .. end - 1 have a token below `limit`."""
    BLOCK: tl.constexpr = 1024
    count = 0
    for start in range(begin, end, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        n = tl.load(token + pair, mask=pair < end, other=LARGEST_INT32)
        count += tl.sum((n < limit).to(tl.int32), 0)
    return count
