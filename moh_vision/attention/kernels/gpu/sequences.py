"""Multiply each sequence by the weights of the heads that it runs, in Triton, without a gathered copy of the weights.

Every sequence s runs K heads; slot j holds the j-th of them, head(s, j). A tile of a product looks up the rows or
columns of the weight that belong to its slots:

    q, k, v   y[s, t, j, d] = sum_c x[s, t, c] W[head(s, j) * D + d, c]     looks up rows of W, the columns of the result
    output    y[s, t, c] = sum_jd o[s, t, j, d] W[c, head(s, j) * D + d]    looks up columns of W, over which it sums

The gate g of a head multiplies its values: softmax(q k) (g v) = g softmax(q k) v. Groups of an MLP's hidden channels are
heads that have one product instead of three. An activation stands between it and the gate, so that their gates multiply
what the product of the output reads.

One choice for all sequences needs no looking up: the weight is sliced once, and PyTorch multiplies.

This is for inference only. In training, on an H100 and with half of the heads of ViT-B, the gradient of x would take 1.3
times and that of the weight 2.7 times as long as PyTorch's product for all heads (docs/results/speed.md).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.blocks import (
    cdiv,
    contiguous_rows,
    next_power_of_2,
    precision_of,
)
from moh_vision.attention.kernels.gpu.launch import launch
from moh_vision.attention.linear import uses_tf32

# Arguments that kernels are not specialised to, so that other sizes compile nothing.
SIZES = ["S", "T"]
# Width of a step in which `_plan_kernel` writes the indices of a head: wider ones would not fit a warp's registers.
INDICES = 128
# Which part of the product for q, k and v a program computes. The part of queries is 0.
KEYS = tl.constexpr(1)
VALUES = tl.constexpr(2)


class ProductBlock(NamedTuple):
    """Block sizes and launch options of a product."""

    rows: int
    columns: int
    inner: int  # length of a step along the sum
    warps: int
    stages: int


# The block of `_rows_kernel`, by precision (see `blocks.precision_of`).
ROWS = {
    "16 bits": ProductBlock(128, 128, 64, 4, 3),
    "tf32": ProductBlock(128, 64, 32, 8, 2),
    "float32": ProductBlock(32, 32, 32, 4, 1),
}
# The block of `_columns_kernel`, by precision. Where loads are pipelined it has one stage more than ROWS, because the
# indices of the weight's columns are loaded one stage before the columns.
COLUMNS = {
    "16 bits": ProductBlock(128, 128, 64, 8, 4),
    "tf32": ProductBlock(128, 64, 32, 8, 3),
    "float32": ProductBlock(32, 32, 32, 4, 1),
}
# Rows and columns of a weight that a program of the slicing kernels copies.
SLICED_ROWS = 16
SLICED_COLUMNS = 128


# ---- Plan


@triton.jit
def _plan_kernel(
    active, weights, heads, gates, index, H, K, D, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A program plans one sequence: it fills the slots with the heads that run, and what is left with idle heads.

    Both are in ascending order. Idle heads get gate 0.
    """
    s = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, COLUMNS)
    runs = (tl.load(active + s * H + head, mask=head < H, other=0) != 0).to(tl.int32)
    idle = ((runs == 0) & (head < H)).to(tl.int32)
    after = tl.sum(runs, 0) + tl.cumsum(idle, 0) - 1
    slot = tl.where(runs != 0, tl.cumsum(runs, 0) - 1, after)
    taken = (head < H) & (slot < K)
    gate = tl.load(weights + s * H + head, mask=head < H, other=0.0)
    tl.store(heads + s * K + slot, head, mask=taken)
    tl.store(gates + s * K + slot, tl.where(runs != 0, gate, 0.0), mask=taken)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)
        at = (s * K + slot)[:, None] * D + d[None, :]
        tl.store(index + at, head[:, None] * D + d[None, :], mask=taken[:, None] & (d < D)[None, :])


def plan(active: Tensor, weights: Tensor, count: int, head_dim: int) -> tuple[Tensor, ...]:
    """Prepare `project`, `project_groups`, `combine` and the slices for the heads that each sequence runs.

    Args:
        active: bool [S, 1, H].
        weights: float32 [S, 1, H].
        count: K, at least the largest number of heads that a sequence runs.
        head_dim: D.

    Returns:
        heads: int32 [S, K], the head in each slot.
        gates: float32 [S, K], its gate.
        index: int32 [S, K * D], for each column of the slots its row or column in the weight of all heads, head * D + d.
    """
    S, _, H = active.shape
    heads = torch.empty((S, count), dtype=torch.int32, device=active.device)
    gates = torch.empty((S, count), dtype=torch.float32, device=active.device)
    index = torch.empty((S, count * head_dim), dtype=torch.int32, device=active.device)
    if S * count:
        tensors = (active.contiguous().view(torch.uint8), weights.contiguous(), heads, gates, index)
        width = min(next_power_of_2(head_dim), INDICES)
        options = dict(COLUMNS=next_power_of_2(H), WIDTH=width, num_warps=1)
        launch(_plan_kernel, S, tensors, (H, count, head_dim), **options)
    return heads, gates, index


# ---- Products


@triton.jit
def _tile_of(tiles_m, tiles_n):
    """Return the sequence, the tile of rows and the tile of columns of this program; tiles of a sequence are consecutive."""
    program = tl.program_id(0)
    s = program // (tiles_m * tiles_n)
    left = program % (tiles_m * tiles_n)
    return s, left % tiles_m, left // tiles_m


@triton.jit(do_not_specialize=SIZES)
def _rows_kernel(
    x, w, bias, gates, index, q, k, v, S, T, C, K, H, x_by, w_row,
    PARTS: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply x [S, T, C] by the rows of W [PARTS * H * D, C] of each sequence's heads -> [S, T, K * D], PARTS times.

    PARTS: 3: the results are q, k and gated v; 1: there is one, q, and gates, k and v are None. EVEN: C is a multiple of
    BLOCK_K.
    """
    width = K * D
    tiles_of_part = tl.cdiv(width, BLOCK_N)
    s, m, n = _tile_of(tl.cdiv(T, BLOCK_M), PARTS * tiles_of_part)
    part = n // tiles_of_part
    t = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (n % tiles_of_part) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns beyond `width` read the first rows again; what they compute is not stored.
    inside = column % width
    row = part * H * D + tl.load(index + s * width + inside)
    c = tl.arange(0, BLOCK_K)
    x_tiles = (
        x
        + s.to(tl.int64) * x_by[0]
        + tl.minimum(t, T - 1).to(tl.int64)[:, None] * x_by[1]
        + c[None, :]
    )
    w_tiles = w + row.to(tl.int64)[:, None] * w_row + c[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, C, BLOCK_K):
        if EVEN:
            x_tile = tl.load(x_tiles)
            w_tile = tl.load(w_tiles)
        else:
            real = (start + c < C)[None, :]
            x_tile = tl.load(x_tiles, mask=real, other=0.0)
            w_tile = tl.load(w_tiles, mask=real, other=0.0)
        total = tl.dot(x_tile, tl.trans(w_tile), total, input_precision=PRECISION)
        x_tiles += BLOCK_K
        w_tiles += BLOCK_K
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    y = q
    if PARTS == 3:
        if part == KEYS:
            y = k
        if part == VALUES:
            y = v
            total *= tl.load(gates + s * K + inside // D)[None, :]
    rows = (s.to(tl.int64) * T + t)[:, None] * width
    mask = (t < T)[:, None] & (column < width)[None, :]
    tl.store(
        tl.multiple_of(y, 16) + rows + column[None, :], total.to(y.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=SIZES)
def _columns_kernel(
    o, w, bias, gates, index, y, S, T, C, width, w_row,
    GATED: tl.constexpr, UNIT: tl.constexpr, UNIT_C: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply o [S, T, K * D] by the columns of W [C, H * D] of each sequence's heads -> y [S, T, C].

    GATED: D if o is multiplied by the gates, else 0, and gates is None. UNIT, UNIT_C: see `_unit`, of D and of C. EVEN:
    K * D is a multiple of BLOCK_K.
    """
    s, m, n = _tile_of(tl.cdiv(T, BLOCK_M), tl.cdiv(C, BLOCK_N))
    t = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.max_contiguous(tl.multiple_of(column % C, UNIT_C), UNIT_C)
    i = tl.arange(0, BLOCK_K)
    o_tiles = o + (s.to(tl.int64) * T + tl.minimum(t, T - 1))[:, None] * width + i[None, :]
    w_rows = w + c.to(tl.int64)[:, None] * w_row
    slots = index + s * width + i
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        if EVEN:
            w_column = tl.load(slots)
            o_tile = tl.load(o_tiles)
        else:
            real = start + i < width
            w_column = tl.load(slots, mask=real, other=0)
            o_tile = tl.load(o_tiles, mask=real[None, :], other=0.0)
        if GATED:
            slot = tl.minimum(start + i, width - 1) // GATED
            gate = tl.load(gates + s * (width // GATED) + slot)
            o_tile = (o_tile * gate[None, :]).to(o.dtype.element_ty)
        w_column = tl.max_contiguous(tl.multiple_of(w_column, UNIT), UNIT)
        w_tile = tl.load(w_rows + w_column[None, :])
        total = tl.dot(o_tile, tl.trans(w_tile), total, input_precision=PRECISION)
        o_tiles += BLOCK_K
        slots += BLOCK_K
    if bias is not None:
        total += tl.load(bias + c).to(tl.float32)[None, :]
    to = (s.to(tl.int64) * T + t)[:, None] * C + column[None, :]
    mask = (t < T)[:, None] & (column < C)[None, :]
    tl.store(y + to, total.to(y.dtype.element_ty), mask=mask)


# ---- Launches


def _unit(number: int) -> int:
    """Return 8 if a number is a multiple of 8, else 1.

    Indices into the weight then come in runs of so many consecutive ones, which Triton can load at once.
    """
    if number % 8 == 0:
        return 8
    return 1


def _options(block: ProductBlock, dtype: torch.dtype) -> dict:
    """Return the compile-time constants and launch options that both products have."""
    return dict(
        PRECISION="tf32" if precision_of(dtype, uses_tf32()) == "tf32" else "ieee",
        BLOCK_M=block.rows,
        BLOCK_N=block.columns,
        BLOCK_K=block.inner,
        num_warps=block.warps,
        num_stages=block.stages,
    )


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, heads: Tensor, gates: Tensor, index: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and gated values of the heads that each sequence runs.

    Args:
        x: [S, T, C].
        weight: [3 * H * D, C] in the dtype of x; its rows are grouped q | k | v, and by head in each group.
        bias: [3 * H * D] in the dtype of x, or None.
        heads, gates, index: see `plan`.

    Returns:
        Three tensors [S, T, K, D].
    """
    q, k, v = (_empty(x, heads, index) for _ in range(3))
    _multiply_rows(x, weight, bias, gates, index, (q, k, v))
    return q, k, v


def project_groups(
    x: Tensor, weight: Tensor, bias: Tensor | None, heads: Tensor, index: Tensor
) -> Tensor:
    """Compute the hidden channels of the groups that each sequence runs: x [S, T, C] -> [S, T, K, D].

    Args:
        x: [S, T, C].
        weight: [H * D, C] in the dtype of x.
        bias: [H * D] in the dtype of x, or None.
        heads, index: see `plan`.
    """
    hidden = _empty(x, heads, index)
    _multiply_rows(x, weight, bias, None, index, (hidden,))
    return hidden


def _empty(x: Tensor, heads: Tensor, index: Tensor) -> Tensor:
    """Return memory for a result [S, T, K, D] of the heads [S, K] for x [S, T, C]."""
    S, T, _ = x.shape
    K = heads.shape[1]
    return x.new_empty(S, T, K, index.shape[1] // K)


def _multiply_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    index: Tensor,
    results: tuple[Tensor, ...],
) -> None:
    """Launch `_rows_kernel`, which fills the results, one or three [S, T, K, D]; see `project`."""
    S, T, C = x.shape
    K, D = results[0].shape[2:]
    parts = len(results)
    x = contiguous_rows(x)
    weight = contiguous_rows(weight)
    block = ROWS[precision_of(x.dtype, uses_tf32())]
    programs = S * cdiv(T, block.rows) * parts * cdiv(K * D, block.columns)
    if programs:
        q, k, v = (*results, None, None)[:3]
        tensors = (x, weight, bias, gates, index, q, k, v)
        sizes = (S, T, C, K, weight.shape[0] // (parts * D))
        strides = (x.stride()[:2], weight.stride(0))
        options = dict(PARTS=parts, D=D, EVEN=C % block.inner == 0, **_options(block, x.dtype))
        launch(_rows_kernel, programs, tensors, (*sizes, *strides), **options)


def combine(
    o: Tensor, weight: Tensor, bias: Tensor | None, gates: Tensor | None, index: Tensor
) -> Tensor:
    """Project the outputs of the heads that each sequence runs: o [S, T, K, D] -> [S, T, C].

    Args:
        o: outputs of heads, or hidden channels of groups.
        weight: [C, H * D] in the dtype of o.
        bias: [C] in the dtype of o, or None.
        gates: see `plan`; None: o is already multiplied by them, because the values were.
        index: see `plan`.
    """
    S, T, K, D = o.shape
    o = o.contiguous()
    weight = contiguous_rows(weight)
    C = weight.shape[0]
    y = o.new_empty(S, T, C)
    block = COLUMNS[precision_of(o.dtype, uses_tf32())]
    programs = S * cdiv(T, block.rows) * cdiv(C, block.columns)
    if programs:
        tensors = (o, weight, bias, gates, index, y)
        gated = 0
        if gates is not None:
            gated = D
        options = dict(GATED=gated, UNIT=_unit(D), UNIT_C=_unit(C))
        options.update(EVEN=K * D % block.inner == 0, **_options(block, o.dtype))
        launch(_columns_kernel, programs, tensors, (S, T, C, K * D, weight.stride(0)), **options)
    return y


# ---- One choice for all sequences: a smaller weight, for PyTorch's products


@triton.jit(do_not_specialize=["rows", "R"])
def _slice_rows_kernel(
    weight, bias, index, rows_out, bias_out, rows, R, C, all_rows, w_row,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program copies BLOCK_R x BLOCK_C elements: row p * R + i of the result is row p * all_rows + index[i] of the weight."""
    columns = tl.cdiv(C, BLOCK_C)
    row = (tl.program_id(0) // columns) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tl.program_id(0) % columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = row < rows
    source = (row // R) * all_rows + tl.load(index + row % R, mask=exists, other=0)
    source = source.to(tl.int64)
    here = exists[:, None] & (c < C)[None, :]
    tile = tl.load(weight + source[:, None] * w_row + c[None, :], mask=here, other=0.0)
    to = row.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(rows_out + to, tile.to(rows_out.dtype.element_ty), mask=here)
    if bias is not None:
        if tl.program_id(0) % columns == 0:
            of_bias = tl.load(bias + source, mask=exists, other=0.0)
            tl.store(bias_out + row, of_bias.to(bias_out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["J"])
def _slice_columns_kernel(
    weight, gates, index, out, C, J, D, w_row, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """A program copies BLOCK_C x BLOCK_J elements: column j of the result is column index[j] of the weight times gates[j // D]."""
    columns = tl.cdiv(J, BLOCK_J)
    c = (tl.program_id(0) // columns) * BLOCK_C + tl.arange(0, BLOCK_C)
    j = (tl.program_id(0) % columns) * BLOCK_J + tl.arange(0, BLOCK_J)
    column = tl.load(index + j, mask=j < J, other=0)
    gate = tl.load(gates + j // D, mask=j < J, other=0.0)
    here = (c < C)[:, None] & (j < J)[None, :]
    row = c.to(tl.int64)[:, None]
    tile = tl.load(weight + row * w_row + column[None, :], mask=here, other=0.0)
    weighted = tile.to(tl.float32) * gate[None, :]
    tl.store(out + row * J + j[None, :], weighted.to(out.dtype.element_ty), mask=here)


def slice_rows(
    weight: Tensor, bias: Tensor | None, index: Tensor, parts: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rows of a weight and a bias for the heads that all sequences run, in the dtype of the tokens.

    Args:
        weight, bias: [parts * H * D, C], and [parts * H * D] or None, of all heads; each part has the rows of every head.
        index: of the only sequence of a plan [1, K * D], see `plan`.
        parts: number of parts, 3 for queries, keys and values.
        x: tokens, of which the dtype alone is used.

    Returns:
        [parts * K * D, C], and [parts * K * D] or an empty tensor.
    """
    weight = contiguous_rows(weight)
    C = weight.shape[1]
    R = index.shape[1]
    rows = parts * R
    sliced = x.new_empty(rows, C)
    sliced_bias = x.new_empty(0)
    if bias is not None:
        sliced_bias = x.new_empty(rows)
        bias = bias.contiguous()
    programs = cdiv(rows, SLICED_ROWS) * cdiv(C, SLICED_COLUMNS)
    if programs:
        tensors = (weight, bias, index, sliced, sliced_bias)
        numbers = (rows, R, C, weight.shape[0] // parts, weight.stride(0))
        blocks = dict(BLOCK_R=SLICED_ROWS, BLOCK_C=SLICED_COLUMNS, num_warps=4)
        launch(_slice_rows_kernel, programs, tensors, numbers, **blocks)
    return sliced, sliced_bias


def slice_columns(weight: Tensor, gates: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """Return the columns of a weight for the heads that all sequences run times their gates, in the dtype of the tokens.

    Args:
        weight: [C, H * D], of all heads.
        gates, index: of the only sequence of a plan, [1, K] and [1, K * D], see `plan`.
        x: tokens, of which the dtype alone is used.

    Returns:
        [C, K * D].
    """
    weight = contiguous_rows(weight)
    C = weight.shape[0]
    J = index.shape[1]
    sliced = x.new_empty(C, J)
    programs = cdiv(C, SLICED_ROWS) * cdiv(J, SLICED_COLUMNS)
    if programs:
        numbers = (C, J, J // gates.shape[1], weight.stride(0))
        blocks = dict(BLOCK_C=SLICED_ROWS, BLOCK_J=SLICED_COLUMNS, num_warps=4)
        tensors = (weight, gates, index, sliced)
        launch(_slice_columns_kernel, programs, tensors, numbers, **blocks)
    return sliced
