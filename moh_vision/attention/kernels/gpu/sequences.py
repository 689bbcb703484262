"""Products of sequences with the weights of their own heads, in Triton: no weight is gathered.

Every sequence s runs K heads, heads[s, 0 .. K - 1]; slot j is the j-th of them. A tile of a product looks up which rows or
columns of the weight belong to its slots:

    q, k, v   y[s, t, j, d] = sum_c x[s, t, c] W[head * D + d, c]     rows looked up along the result
    output    y[s, t, c] = sum_jd o[s, t, j, d] W[c, head * D + d]    columns looked up along the sum
    backward  the gradients of x and o likewise, that of a weight head by head over the sequences that chose it

The gate of a head is a factor of its values: softmax(q k) (g v) = g softmax(q k) v. A slot whose gate is 0 keeps its values,
so that the gate has its gradient, and takes part in nothing else: `live` says -1 for it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.blocks import numbers_of
from moh_vision.attention.kernels.gpu.rows import widths

SIZES = ["S", "T"]


class ProductBlock(NamedTuple):
    """How a product divides its work."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# By numbers: the products of tokens, and those whose result is the gradient of a weight (tokens, channels, warps, stages).
PRODUCTS = {
    "16 bits": ProductBlock(128, 128, 64, 8, 3),
    "tf32": ProductBlock(128, 64, 32, 8, 2),
    "float32": ProductBlock(32, 32, 32, 4, 1),
}
WEIGHT_GRADIENTS = {
    "16 bits": (64, 128, 8, 3),
    "tf32": (32, 64, 8, 2),
    "float32": (32, 32, 4, 1),
}
PARTS = 8  # of the sequences of a head, whose sums are added up in a fixed order


# ---- Plan


class Plan(NamedTuple):
    """Which heads each sequence runs, and which sequences each head: int32, but for the gates."""

    heads: Tensor  # [S, K]
    live: Tensor  # [S, K], -1 where the gate is 0
    gates: Tensor  # [S, K] float32, 1 where the gate is 0
    order: Tensor  # [S * K], s * K + j of what is live, sorted by head, then s
    offsets: Tensor  # [H + 1], where a head begins in `order`


@triton.jit(do_not_specialize=["S"])
def _plan_kernel(
    active, weights, heads, live, gates, order, offsets, S, H, K, active_by, weights_by,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program lists the sequences of one head, and writes the slot that it has in each.

    Slots are the heads that run, in rising order; where a sequence runs fewer than K, heads that do not run follow.
    """
    h = tl.program_id(0)
    head = tl.arange(0, COLUMNS)
    before = 0  # live slots of lower heads
    for start in range(0, S, ROWS):
        s = start + tl.arange(0, ROWS)
        real = (s < S)[:, None] & (head < H)[None, :]
        at = s.to(tl.int64)[:, None]
        runs = tl.load(active + at * active_by + head[None, :], mask=real, other=0) != 0
        gate = tl.load(weights + at * weights_by + head[None, :], mask=real, other=0.0)
        before += tl.sum(tl.sum((runs & (gate != 0.0) & (head < h)[None, :]).to(tl.int32), 1), 0)
    tl.store(offsets + h, before)
    count = before
    for start in range(0, S, ROWS):
        s = start + tl.arange(0, ROWS)
        real = (s < S)[:, None] & (head < H)[None, :]
        at = s.to(tl.int64)[:, None]
        runs = (tl.load(active + at * active_by + head[None, :], mask=real, other=0) != 0).to(
            tl.int32
        )
        mine = tl.sum(tl.where((head == h)[None, :], runs, 0), 1)
        lower = tl.sum(tl.where((head < h)[None, :], runs, 0), 1)
        slot = tl.where(mine != 0, lower, tl.sum(runs, 1) + h - lower)
        taken = (s < S) & (slot < K)
        gate = tl.load(weights + s.to(tl.int64) * weights_by + h, mask=s < S, other=0.0)
        is_live = taken & (mine != 0) & (gate != 0.0)
        to = s * K + slot
        tl.store(heads + to, tl.zeros([ROWS], tl.int32) + h, mask=taken)
        tl.store(live + to, tl.where(is_live, h, -1), mask=taken)
        tl.store(gates + to, tl.where(is_live, gate, 1.0), mask=taken)
        place = count + tl.cumsum(is_live.to(tl.int32), 0) - 1
        tl.store(order + place, to, mask=is_live)
        count += tl.sum(is_live.to(tl.int32), 0)
    if h == H - 1:
        tl.store(offsets + H, count)


def plan(active: Tensor, weights: Tensor, count: int) -> tuple[Tensor, ...]:
    """The fields of a `Plan`.

    Args:
        active: bool [S, 1, H].
        weights: float32 [S, 1, H].
        count: K, at least as many as any sequence runs.
    """
    S, _, H = active.shape
    heads = torch.empty((S, count), dtype=torch.int32, device=active.device)
    live = torch.empty_like(heads)
    gates = torch.empty((S, count), dtype=torch.float32, device=active.device)
    order = torch.empty(S * count, dtype=torch.int32, device=active.device)
    offsets = torch.empty(H + 1, dtype=torch.int32, device=active.device)
    active = active.contiguous().view(torch.uint8)
    weights = weights.contiguous()
    _plan_kernel[(H,)](
        active, weights, heads, live, gates, order, offsets, S, H, count, H, H,
        COLUMNS=max(16, triton.next_power_of_2(H)), ROWS=128, num_warps=4,
    )  # fmt: skip
    return heads, live, gates, order, offsets


# ---- Products


@triton.jit
def _tile_of(tiles_m, tiles_n):
    """Sequence, tile of rows and tile of columns of this program. Tiles of one sequence follow each other."""
    program = tl.program_id(0)
    s = program // (tiles_m * tiles_n)
    left = program % (tiles_m * tiles_n)
    return s, left % tiles_m, left // tiles_m


@triton.jit(do_not_specialize=SIZES)
def _rows_kernel(
    a, w, bias, heads, gates, y0, y1, y2, S, T, INNER, K, H, a_by, w_row,
    D: tl.constexpr, PARTS: tl.constexpr, ALONG_INNER: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """a [S, T, INNER] times rows of W that the slots of a sequence look up -> PARTS results [S, T, K * D].

    ALONG_INNER: W is [PARTS * H * D, INNER], so that a row lies along the sum; else W is [INNER, H * D]. The third result is
    that of the values, and multiplied by the gates.
    """
    width = K * D
    tiles_m = tl.cdiv(T, BLOCK_M)
    tiles_of_part = tl.cdiv(width, BLOCK_N)
    s, m, n = _tile_of(tiles_m, tiles_of_part * PARTS)
    part = n // tiles_of_part
    t = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (n % tiles_of_part) * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies beyond the end is read again from the beginning, and not stored.
    inside = column % width
    slot = s * K + inside // D
    row = (part * H + tl.load(heads + slot)) * D + inside % D
    row = tl.max_contiguous(tl.multiple_of(row, UNIT), UNIT)
    k = tl.arange(0, BLOCK_K)
    a_rows = a + s.to(tl.int64) * a_by[0] + tl.minimum(t, T - 1).to(tl.int64)[:, None] * a_by[1]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        i = start + k
        if EVEN:
            a_tile = tl.load(a_rows + i[None, :])
        else:
            a_tile = tl.load(a_rows + i[None, :], mask=(i < INNER)[None, :], other=0.0)
        if ALONG_INNER:
            pointers = w + row.to(tl.int64)[:, None] * w_row + i[None, :]
            if EVEN:
                w_tile = tl.load(pointers)
            else:
                w_tile = tl.load(pointers, mask=(i < INNER)[None, :], other=0.0)
            total = tl.dot(a_tile, tl.trans(w_tile), total, input_precision=PRECISION)
        else:
            pointers = w + i.to(tl.int64)[:, None] * w_row + row[None, :]
            if EVEN:
                w_tile = tl.load(pointers)
            else:
                w_tile = tl.load(pointers, mask=(i < INNER)[:, None], other=0.0)
            total = tl.dot(a_tile, w_tile, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    y = y0
    if PARTS == 3:
        if part == 1:
            y = y1
        if part == 2:
            y = y2
            total *= tl.load(gates + slot)[None, :]
    rows = (s.to(tl.int64) * T + t)[:, None] * width
    mask = (t < T)[:, None] & (column < width)[None, :]
    tl.store(y + rows + column[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _add_columns(
    total, a_rows, w, live, gates, s, width, K, first_row, c, w_row,
    D: tl.constexpr, GATED: tl.constexpr, ALONG_INNER: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add a [.., K * D] times the rows or columns of W that belong to the slots of a sequence."""
    for start in range(0, width, BLOCK_K):
        i = start + tl.arange(0, BLOCK_K)
        inside = i % width
        slot = s * K + inside // D
        head = tl.load(live + slot)
        index = first_row + tl.maximum(head, 0) * D + inside % D
        index = tl.max_contiguous(tl.multiple_of(index, UNIT), UNIT)
        is_live = (head >= 0) & (i < width)
        if EVEN:
            a_tile = tl.load(a_rows + i[None, :])
        else:
            a_tile = tl.load(a_rows + i[None, :], mask=(i < width)[None, :], other=0.0)
        if GATED:
            a_tile = (a_tile.to(tl.float32) * tl.load(gates + slot)[None, :]).to(a_tile.dtype)
        if ALONG_INNER:
            pointers = w + c.to(tl.int64)[:, None] * w_row + index[None, :]
            w_tile = tl.load(pointers, mask=is_live[None, :], other=0.0)
            total = tl.dot(a_tile, tl.trans(w_tile), total, input_precision=PRECISION)
        else:
            pointers = w + index.to(tl.int64)[:, None] * w_row + c[None, :]
            w_tile = tl.load(pointers, mask=is_live[:, None], other=0.0)
            total = tl.dot(a_tile, w_tile, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=SIZES)
def _columns_kernel(
    a0, a1, a2, w, bias, live, gates, y, S, T, C, K, H, w_row,
    D: tl.constexpr, PARTS: tl.constexpr, ALONG_INNER: tl.constexpr, UNIT: tl.constexpr, UNIT_C: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """PARTS results of slots [S, T, K * D] times what W has for them, added up -> y [S, T, C].

    ALONG_INNER: W is [C, H * D]; else it is [PARTS * H * D, C]. The third part is multiplied by the gates.
    """
    width = K * D
    s, m, n = _tile_of(tl.cdiv(T, BLOCK_M), tl.cdiv(C, BLOCK_N))
    t = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.max_contiguous(tl.multiple_of(column % C, UNIT_C), UNIT_C)
    rows = (s.to(tl.int64) * T + tl.minimum(t, T - 1))[:, None] * width
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = _add_columns(
        total, a0 + rows, w, live, gates, s, width, K, 0, c, w_row,
        D, False, ALONG_INNER, UNIT, EVEN, PRECISION, BLOCK_K,
    )  # fmt: skip
    if PARTS == 3:
        total = _add_columns(
            total, a1 + rows, w, live, gates, s, width, K, H * D, c, w_row,
            D, False, ALONG_INNER, UNIT, EVEN, PRECISION, BLOCK_K,
        )  # fmt: skip
        total = _add_columns(
            total, a2 + rows, w, live, gates, s, width, K, 2 * H * D, c, w_row,
            D, True, ALONG_INNER, UNIT, EVEN, PRECISION, BLOCK_K,
        )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + c).to(tl.float32)[None, :]
    to = (s.to(tl.int64) * T + t)[:, None] * C + column[None, :]
    mask = (t < T)[:, None] & (column < C)[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), mask=mask)


# ---- Gradients of weights and gates


@triton.jit
def _add_tile(total, sums, x, pointer, rows, real, gate, D: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """total + x^T g for WIDTH columns g of a slot's gradient, and `sums` + their sum over the tokens."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = real[:, None] & (d < D)[None, :]
    grad = tl.load(pointer + rows[:, None] + d[None, :], mask=mask, other=0.0)
    grad = (grad.to(tl.float32) * gate).to(grad.dtype)
    total = tl.dot(tl.trans(x), grad, total, input_precision=PRECISION)
    return total, sums + tl.sum(grad.to(tl.float32), 0)


@triton.jit
def _zero_tile(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)


@triton.jit
def _store_tile(out, sums_out, total, sums, c, C, out_d, out_c, has_sums, D: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    d = FIRST + tl.arange(0, total.shape[1])
    mask = (c < C)[:, None] & (d < D)[None, :]
    tl.store(out + c[:, None] * out_c + d[None, :] * out_d, total, mask=mask)
    if has_sums:
        tl.store(sums_out + d, sums, mask=d < D)


@triton.jit(do_not_specialize=SIZES)
def _weight_kernel(
    x, g0, g1, g2, gates, order, offsets, out, sums_out, S, T, C, K, H, x_by, out_by,
    D: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """sum over the sequences of a head, and their tokens, of x^T g: x [S, T, C], g [S, T, K * D], up to three of them.

    A program adds up one of SPLIT parts of a head's sequences for BLOCK_C channels; the tokens are read once for all g. The
    third g is multiplied by the gates. The sums of g over the tokens are written too, [SPLIT, PARTS, H, D].
    """
    tiles = tl.cdiv(C, BLOCK_C)
    program = tl.program_id(0)
    tile = program % tiles
    split = (program // tiles) % SPLIT
    h = program // (tiles * SPLIT)
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.load(offsets + h)
    count = tl.load(offsets + h + 1) - first
    steps = tl.cdiv(T, BLOCK_T)
    low = (first + count * split // SPLIT) * steps
    high = (first + count * (split + 1) // SPLIT) * steps
    a0, b0 = _zero_tile(BLOCK_C, WIDTH0)
    a1, b1 = _zero_tile(BLOCK_C, WIDTH0)
    a2, b2 = _zero_tile(BLOCK_C, WIDTH0)
    if WIDTH1 > 0:
        e0, f0 = _zero_tile(BLOCK_C, WIDTH1)
        e1, f1 = _zero_tile(BLOCK_C, WIDTH1)
        e2, f2 = _zero_tile(BLOCK_C, WIDTH1)
    for step in range(low, high):
        entry = tl.load(order + step // steps)
        s = (entry // K).to(tl.int64)
        t = (step % steps) * BLOCK_T + tl.arange(0, BLOCK_T)
        real = t < T
        x_mask = real[:, None] & (c < C)[None, :]
        x_tile = tl.load(
            x + s * x_by[0] + t[:, None] * x_by[1] + c[None, :], mask=x_mask, other=0.0
        )
        rows = (s * T + t) * (K * D) + (entry % K) * D
        a0, b0 = _add_tile(a0, b0, x_tile, g0, rows, real, 1.0, D, 0, WIDTH0, PRECISION)
        if WIDTH1 > 0:
            e0, f0 = _add_tile(e0, f0, x_tile, g0, rows, real, 1.0, D, WIDTH0, WIDTH1, PRECISION)
        if PARTS == 3:
            gate = tl.load(gates + entry)
            a1, b1 = _add_tile(a1, b1, x_tile, g1, rows, real, 1.0, D, 0, WIDTH0, PRECISION)
            a2, b2 = _add_tile(a2, b2, x_tile, g2, rows, real, gate, D, 0, WIDTH0, PRECISION)
            if WIDTH1 > 0:
                e1, f1 = _add_tile(
                    e1, f1, x_tile, g1, rows, real, 1.0, D, WIDTH0, WIDTH1, PRECISION
                )
                e2, f2 = _add_tile(
                    e2, f2, x_tile, g2, rows, real, gate, D, WIDTH0, WIDTH1, PRECISION
                )
    out += split.to(tl.int64) * out_by[0] + h.to(tl.int64) * out_by[2]
    sums_out += (split * PARTS * H + h) * D
    has_sums = tile == 0
    by_d, by_c = out_by[3], out_by[4]
    _store_tile(out, sums_out, a0, b0, c, C, by_d, by_c, has_sums, D, 0)
    if WIDTH1 > 0:
        _store_tile(out, sums_out, e0, f0, c, C, by_d, by_c, has_sums, D, WIDTH0)
    if PARTS == 3:
        out1 = out + out_by[1]
        out2 = out + 2 * out_by[1]
        sums1 = sums_out + H * D
        sums2 = sums_out + 2 * H * D
        _store_tile(out1, sums1, a1, b1, c, C, by_d, by_c, has_sums, D, 0)
        _store_tile(out2, sums2, a2, b2, c, C, by_d, by_c, has_sums, D, 0)
        if WIDTH1 > 0:
            _store_tile(out1, sums1, e1, f1, c, C, by_d, by_c, has_sums, D, WIDTH0)
            _store_tile(out2, sums2, e2, f2, c, C, by_d, by_c, has_sums, D, WIDTH0)


@triton.jit(do_not_specialize=SIZES)
def _gate_kernel(
    dv, v, heads, gates, dweights, S, T, K, H, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """A program computes the gradient of one gate: dv . v over all tokens, v being what the gate has multiplied."""
    slot = tl.program_id(0)
    s = slot // K
    d = tl.arange(0, WIDTH)
    total = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        rows = (s.to(tl.int64) * T + t) * (K * D) + (slot % K) * D
        mask = (t < T)[:, None] & (d < D)[None, :]
        grad = tl.load(dv + rows[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(v + rows[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(grad * value, 1)
    gradient = tl.sum(total, 0) / tl.load(gates + slot)
    tl.store(dweights + s * H + tl.load(heads + slot), gradient)


# ---- Launches


def _unit(*numbers: int) -> int:
    """8 where all numbers are multiples of it, else 1: how many neighbours lie side by side in memory."""
    return 8 if all(number % 8 == 0 for number in numbers) else 1


def _block(dtype: torch.dtype) -> tuple[ProductBlock, str]:
    numbers = numbers_of(dtype)
    return PRODUCTS[numbers], "tf32" if numbers == "tf32" else "ieee"


def _rows(
    a: Tensor, w: Tensor, bias: Tensor | None, plan: Plan, results: list[Tensor], along_inner: bool, heads: int
) -> None:  # fmt: skip
    """Launch `_rows_kernel` for results [S, T, K, D]."""
    S, T, inner = a.shape
    K, D = results[0].shape[2:]
    block, precision = _block(a.dtype)
    tiles = triton.cdiv(K * D, block.columns) * len(results)
    programs = S * triton.cdiv(T, block.rows) * tiles
    if programs == 0:
        return
    y = [*results, *results[:1] * (3 - len(results))]
    _rows_kernel[(programs,)](
        a, w, bias, plan.heads, plan.gates, *y, S, T, inner, K, heads, a.stride()[:2], w.stride(0),
        D=D, PARTS=len(results), ALONG_INNER=along_inner, UNIT=_unit(D), EVEN=inner % block.inner == 0,
        PRECISION=precision, BLOCK_M=block.rows, BLOCK_N=block.columns, BLOCK_K=block.inner,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


def _columns(
    parts: list[Tensor], w: Tensor, bias: Tensor | None, plan: Plan, y: Tensor, along_inner: bool, heads: int
) -> None:  # fmt: skip
    """Launch `_columns_kernel` for parts [S, T, K, D] and y [S, T, C]."""
    S, T, C = y.shape
    K, D = parts[0].shape[2:]
    block, precision = _block(y.dtype)
    programs = S * triton.cdiv(T, block.rows) * triton.cdiv(C, block.columns)
    if programs == 0:
        return
    a = [*parts, *parts[:1] * (3 - len(parts))]
    _columns_kernel[(programs,)](
        *a, w, bias, plan.live, plan.gates, y, S, T, C, K, heads, w.stride(0),
        D=D, PARTS=len(parts), ALONG_INNER=along_inner, UNIT=_unit(D), UNIT_C=_unit(C), EVEN=K * D % block.inner == 0,
        PRECISION=precision, BLOCK_M=block.rows, BLOCK_N=block.columns, BLOCK_K=block.inner,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


def _weight_gradient(
    x: Tensor, grads: list[Tensor], plan: Plan, heads: int, rows_first: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of a weight and of its bias, float32, from x [S, T, C] and grads [S, T, K, D].

    rows_first: the weight is [len(grads) * H * D, C], and its bias [len(grads) * H * D]; else the weight is [C, H * D].
    """
    S, T, C = x.shape
    K, D = grads[0].shape[2:]
    parts = len(grads)
    numbers = numbers_of(x.dtype)
    tokens, channels, warps, stages = WEIGHT_GRADIENTS[numbers]
    shape = (PARTS, parts, heads, D, C) if rows_first else (PARTS, parts, C, heads, D)
    out = x.new_empty(shape, dtype=torch.float32)
    out_by = out.stride() if rows_first else (*out.stride()[:2], D, 1, heads * D)
    sums = x.new_empty((PARTS, parts, heads, D), dtype=torch.float32)
    g = [*grads, *grads[:1] * (3 - parts)]
    _weight_kernel[(heads * PARTS * triton.cdiv(C, channels),)](
        x, *g, plan.gates, plan.order, plan.offsets, out, sums, S, T, C, K, heads, x.stride()[:2], out_by,
        D=D, WIDTH0=widths(D)[0], WIDTH1=widths(D)[1], PARTS=parts, SPLIT=PARTS,
        PRECISION="tf32" if numbers == "tf32" else "ieee", BLOCK_T=tokens, BLOCK_C=channels,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.sum(0), sums.sum(0)


# ---- The operators


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    heads: Tensor,
    live: Tensor,
    gates: Tensor,
    order: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and gated values of the heads that each sequence runs.

    Args:
        x: [S, T, C].
        weight: [3 * H * D, C], rows grouped q | k | v and by head; bias [3 * H * D] or None. Numbers as x.
        weights: float32 [S, 1, H], whose gradient is that of the gates.
        heads, live, gates, order, offsets: a `Plan`.

    Returns:
        Three tensors [S, T, K, D].
    """
    given = Plan(heads, live, gates, order, offsets)
    H = offsets.shape[0] - 1
    D = weight.shape[0] // (3 * H)
    x = x if x.stride(2) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    results = [x.new_empty(*x.shape[:2], heads.shape[1], D) for _ in range(3)]
    _rows(x, weight, bias, given, results, True, H)
    return tuple(results)


def project_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    v: Tensor,
    heads: Tensor,
    live: Tensor,
    gates: Tensor,
    order: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias (empty for None) and weights [S, 1, H]."""
    given = Plan(heads, live, gates, order, offsets)
    H = offsets.shape[0] - 1
    S, T, C = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    grads = [grad.contiguous() for grad in (dq, dk, dv)]
    K, D = v.shape[2:]
    dx = x.new_empty(x.shape)
    _columns(grads, weight, None, given, dx, False, H)
    dweight, dbias = _weight_gradient(x, grads, given, H, True)
    dweights = torch.zeros((S, 1, H), dtype=torch.float32, device=x.device)
    if S * K:
        _gate_kernel[(S * K,)](
            grads[2], v, heads, gates, dweights, S, T, K, H,
            D=D, WIDTH=triton.next_power_of_2(D), BLOCK_T=64, num_warps=4,
        )  # fmt: skip
    dbias = weight.new_empty(0) if bias is None else dbias.flatten().to(bias.dtype)
    return dx, dweight.view(weight.shape).to(weight.dtype), dbias, dweights


def combine(
    o: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: Tensor,
    live: Tensor,
    gates: Tensor,
    order: Tensor,
    offsets: Tensor,
) -> Tensor:
    """The output projection of the heads that each sequence runs: o [S, T, K, D] -> [S, T, C].

    Args:
        o: gated already, through the values.
        weight: [C, H * D]; bias [C] or None. Numbers as o.
        heads, live, gates, order, offsets: a `Plan`.
    """
    given = Plan(heads, live, gates, order, offsets)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    y = o.new_empty(*o.shape[:2], weight.shape[0])
    _columns([o.contiguous()], weight, bias, given, y, True, offsets.shape[0] - 1)
    return y


def combine_backward(
    dy: Tensor,
    o: Tensor,
    weight: Tensor,
    heads: Tensor,
    live: Tensor,
    gates: Tensor,
    order: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of o and weight; that of o also for slots whose gate is 0, because that gate has a gradient."""
    given = Plan(heads, live, gates, order, offsets)
    H = offsets.shape[0] - 1
    o = o.contiguous()
    dy = dy if dy.stride(2) == 1 else dy.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    do = torch.empty_like(o)
    _rows(dy, weight, None, given, [do], False, H)
    dweight, _ = _weight_gradient(dy, [o], given, H, False)
    return do, dweight.view(weight.shape).to(weight.dtype)
