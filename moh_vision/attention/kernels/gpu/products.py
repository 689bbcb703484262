"""Projections of whole sequences to the heads that each of them chose, in Triton.

Every sequence b runs the same number K of heads, `heads[b]`, all of its tokens the same ones. The K heads are the
columns of one matrix product: column i = k * D + d reads row heads[b, k] * D + d of the weight. So a tile may span several
heads, no head width wastes columns, and no weight is copied. Rows of heads that a sequence does not run are never read.

Three kernels serve forward and backward of both projections:

    chosen_columns   out[b, m, i] = sum_c  x[b, m, c] weight[row(b, i), c]
    chosen_inner     out[b, m, c] = sum_i  a[b, m, i] weight[row(b, i), c]
    weight_gradient  out[row, c]  = sum    a[b, m, i] x[b, m, c] over all b, m, i with row(b, i) = row

The third reads which sequences run a head from a list that `list_runs` makes; `bias_gradient` does so too.
W_O [C, H*D] is read by the same code with its two strides exchanged. Sums are in float32 and in a fixed order: there are no
atomic additions. Letters as in `moh_vision.attention`; K heads run.
"""

from typing import NamedTuple, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.attend import uses_tf32, widths

# ---- kernels


@triton.jit
def chosen_columns(
    x,  # [B, M, C]
    weight,  # element (row, c) at row * weight_row + c * weight_c
    bias,  # [H*D] or None
    heads,  # [B, K]
    gates,  # [B, K] float32, or None: 1
    o,  # [B, M, K, D] with gates only: what the gates weighed in forward
    out,  # [B, M, K*D]
    gate_gradients,  # [B, tiles of M, K*D] float32 with gates only: sums of (ungated output) * o over the tokens of a tile
    M,
    C,
    K,
    x_b,
    x_m,
    weight_row,
    weight_c,
    o_b,
    o_m,
    o_k,
    D: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # Programs that read the same tokens are neighbours; all of them share the weight, which stays in L2.
    tiles_i, tiles_m = tl.cdiv(K * D, BLOCK_I), tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    tile_i = tile % tiles_i
    tile_m = (tile // tiles_i) % tiles_m
    b = (tile // (tiles_i * tiles_m)).to(tl.int64)

    first = tile_m * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    has_token = first + m < M
    i = tile_i * BLOCK_I + tl.arange(0, BLOCK_I)
    has_column = i < K * D
    k = i // D
    d = i % D
    head = tl.load(heads + b * K + k, mask=has_column, other=0)
    # The heads are known at run time only. VECTOR divides D, so that many neighbours are of one head, and aligned.
    row = tl.max_contiguous(tl.multiple_of(head * D + d, VECTOR), VECTOR)

    x += b * x_b + first.to(tl.int64) * x_m
    total = tl.zeros([BLOCK_M, BLOCK_I], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        has_c = c < C
        tokens = tl.load(x + m[:, None] * x_m + c[None, :], mask=has_token[:, None] & has_c[None, :], other=0.0)
        at = weight + c[:, None] * weight_c + row[None, :] * weight_row
        w = tl.load(at, mask=has_c[:, None] & has_column[None, :], other=0.0)
        total = tl.dot(tokens, w, total, input_precision=PRECISION)

    if bias is not None:
        total += tl.load(bias + row, mask=has_column, other=0.0).to(tl.float32)[None, :]
    inside = has_token[:, None] & has_column[None, :]
    if gates is not None:
        column = tl.max_contiguous(tl.multiple_of(k * o_k + d, VECTOR), VECTOR)
        token = tl.multiple_of(m * o_m, VECTOR)
        o += tl.multiple_of(b * o_b + first.to(tl.int64) * o_m, VECTOR)
        outputs = tl.load(o + token[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(gate_gradients + (b * tiles_m + tile_m) * K * D + i, tl.sum(total * outputs, 0), mask=has_column)
        total *= tl.load(gates + b * K + k, mask=has_column, other=0.0)[None, :]
    out += (b * M + first) * K * D
    tl.store(out + m[:, None] * (K * D) + i[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def chosen_inner(
    a,  # [B, M, K, D]
    weight,  # element (row, c) at row * weight_row + c * weight_c
    bias,  # [C] or None
    heads,  # [B, K]
    gates,  # [B, K] float32, or None: 1
    out,  # [B, M, C]
    M,
    C,
    K,
    a_b,
    a_m,
    a_k,
    weight_row,
    weight_c,
    D: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    tiles_c, tiles_m = tl.cdiv(C, BLOCK_C), tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    tile_c = tile % tiles_c
    tile_m = (tile // tiles_c) % tiles_m
    b = (tile // (tiles_c * tiles_m)).to(tl.int64)

    first = tile_m * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    has_token = first + m < M
    c = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    has_c = c < C

    token = tl.multiple_of(m * a_m, VECTOR)
    a += tl.multiple_of(b * a_b + first.to(tl.int64) * a_m, VECTOR)
    total = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    for start in range(0, K * D, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        has_i = i < K * D
        k = i // D
        d = i % D
        head = tl.load(heads + b * K + k, mask=has_i, other=0)
        row = tl.max_contiguous(tl.multiple_of(head * D + d, VECTOR), VECTOR)  # see chosen_columns
        column = tl.max_contiguous(tl.multiple_of(k * a_k + d, VECTOR), VECTOR)
        inputs = tl.load(a + token[:, None] + column[None, :], mask=has_token[:, None] & has_i[None, :], other=0.0)
        if gates is not None:
            gate = tl.load(gates + b * K + k, mask=has_i, other=0.0)
            inputs = (inputs.to(tl.float32) * gate[None, :]).to(a.dtype.element_ty)
        at = weight + row[:, None] * weight_row + c[None, :] * weight_c
        w = tl.load(at, mask=has_i[:, None] & has_c[None, :], other=0.0)
        total = tl.dot(inputs, w, total, input_precision=PRECISION)

    if bias is not None:
        total += tl.load(bias + c, mask=has_c, other=0.0).to(tl.float32)[None, :]
    out += (b * M + first) * C
    inside = has_token[:, None] & has_c[None, :]
    tl.store(out + m[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient(
    a,  # [B, M, K, D]
    x,  # [B, M, C]
    gates,  # [B, K] float32 that weigh a, or None: 1
    runs,  # see list_runs
    counts,
    out,  # [splits, H*D, C] or [splits, C, H*D], element (row, c) at row * out_row + c * out_c
    B,
    M,
    C,
    K,
    H,
    a_b,
    a_m,
    a_k,
    x_b,
    x_m,
    out_row,
    out_c,
    D: tl.constexpr,
    VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # One program: a tile of one head's weight, summed over a share of the tokens of all sequences that run the head.
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_c = c < C
    tiles_d: tl.constexpr = 1 if REST_D else (D + BLOCK_D - 1) // BLOCK_D
    h = tl.program_id(1) // tiles_d
    d = (tl.program_id(1) % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    has_d = d < D
    tiles_m = tl.cdiv(M, BLOCK_M)
    steps = tl.load(counts + h).to(tl.int64) * tiles_m
    split, splits = tl.program_id(2), tl.num_programs(2)
    m = tl.arange(0, BLOCK_M)
    token = tl.multiple_of(m * a_m, VECTOR)

    total = tl.zeros([BLOCK_C, BLOCK_D], dtype=tl.float32)
    if REST_D:  # columns BLOCK_D .. D - 1 are a second, smaller tile: less waste where D is no power of 2
        rest = BLOCK_D + tl.arange(0, REST_D)
        has_rest = rest < D
        total_rest = tl.zeros([BLOCK_C, REST_D], dtype=tl.float32)
    lo, hi = (steps * split // splits).to(tl.int32), (steps * (split + 1) // splits).to(tl.int32)
    for step in range(lo, hi):
        place = tl.load(runs + h * B + step // tiles_m)
        b = (place // K).to(tl.int64)
        k = (place % K).to(tl.int64)
        first = (step % tiles_m) * BLOCK_M
        has_token = first + m < M
        from_x = x + b * x_b + first.to(tl.int64) * x_m
        from_a = a + tl.multiple_of(b * a_b + k * a_k + first.to(tl.int64) * a_m, VECTOR)
        inside = has_token[:, None] & has_c[None, :]
        tokens = tl.trans(tl.load(from_x + m[:, None] * x_m + c[None, :], mask=inside, other=0.0))
        values = tl.load(from_a + token[:, None] + d[None, :], mask=has_token[:, None] & has_d[None, :], other=0.0)
        if gates is not None:
            gate = tl.load(gates + place)
            values = (values.to(tl.float32) * gate).to(a.dtype.element_ty)
        total = tl.dot(tokens, values, total, input_precision=PRECISION)
        if REST_D:
            inside = has_token[:, None] & has_rest[None, :]
            values = tl.load(from_a + token[:, None] + rest[None, :], mask=inside, other=0.0)
            if gates is not None:
                values = (values.to(tl.float32) * gate).to(a.dtype.element_ty)
            total_rest = tl.dot(tokens, values, total_rest, input_precision=PRECISION)

    out += split.to(tl.int64) * H * D * C + h * D * out_row
    at = out + c[:, None] * out_c + d[None, :] * out_row
    tl.store(at, total.to(out.dtype.element_ty), mask=has_c[:, None] & has_d[None, :])
    if REST_D:
        at = out + c[:, None] * out_c + rest[None, :] * out_row
        tl.store(at, total_rest.to(out.dtype.element_ty), mask=has_c[:, None] & has_rest[None, :])


@triton.jit
def list_runs(
    heads,  # [B, K]
    runs,  # [H, B] of every head the places b * K + k in `heads` where it stands, by rising b; the rest is not written
    counts,  # [H] how many they are
    B,
    K,
    BLOCK: tl.constexpr,
):
    h = tl.program_id(0)
    found = 0
    for start in range(0, B * K, BLOCK):
        place = start + tl.arange(0, BLOCK)
        hit = tl.load(heads + place, mask=place < B * K, other=-1) == h
        one = hit.to(tl.int32)
        at = found + tl.cumsum(one, 0) - one
        tl.store(runs + h * B + at, place, mask=hit & (at < B))
        found += tl.sum(one, 0)
    tl.store(counts + h, tl.minimum(found, B))


@triton.jit
def bias_gradient(
    sums,  # [B, K, D] float32, over tokens
    runs,  # see list_runs
    counts,
    out,  # [H*D]
    B,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    h = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    count = tl.load(counts + h)
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, count, BLOCK_B):
        j = start + tl.arange(0, BLOCK_B)
        place = tl.load(runs + h * B + j, mask=j < count, other=0)
        inside = (j < count)[:, None] & (d < D)[None, :]
        total += tl.sum(tl.load(sums + place[:, None] * D + d[None, :], mask=inside, other=0.0), 0)
    tl.store(out + h * D + d, total.to(out.dtype.element_ty), mask=d < D)


# ---- block sizes


DIRECT = 3  # num_stages: how many steps of a loop are under way at once
INDIRECT = 5  # where a load gives the address of the next, the compiler puts half as many tiles under way


class Tiling(NamedTuple):
    """Block sizes of one kernel: rows and columns of the output, and of what is summed over."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int

    @property
    def launch(self) -> dict:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def tiling(dtype: torch.dtype, rows: int, columns: int, num_stages: int) -> Tiling:
    """Block sizes of `chosen_columns` and `chosen_inner`.

    In 16 bits two programs fit on a multiprocessor of an H100, by registers and by shared memory, and ptxas spills
    nothing. Speed is not measured. This function and `weight_tiling` are the places to change.
    """
    if dtype == torch.float32:  # registers and shared memory hold half as many numbers
        return Tiling(64, 64, 32, 4, 2)
    return Tiling(block(rows), block(columns), 64, 4, num_stages)


def block(size: int) -> int:
    """128, or 64 where tiles of 128 would compute an eighth more than tiles of 64."""
    return 128 if triton.cdiv(size, 128) * 128 <= triton.cdiv(size, 64) * 64 * 1.125 else 64


def weight_tiling(dtype: torch.dtype, D: int) -> Tuple[Tiling, int]:
    """Block sizes of `weight_gradient` (rows are C, columns are D), and those of the second tile of D, or 0."""
    columns, rest = widths(D)
    if dtype == torch.float32:  # larger ones or fewer warps spill registers
        columns, rest = (columns, rest) if columns + rest <= 80 else (32 if rest == 32 else 64, 0)
        return Tiling(64, columns, 32, 8, 2), rest
    columns, rest = (columns, rest) if columns <= 128 else (128, 0)
    # Of tiles of 128 x 128, 4 warps of an A100 spill 8 KB a thread. Two programs fit on an H100 with 8 warps too.
    return Tiling(128, columns, 64, 8 if columns == 128 else 4, INDIRECT), rest


def splits(programs: int, steps: int) -> int:
    """How many programs share the sum of one tile of a weight gradient, from shapes alone.

    Enough to fill a GPU twice (an H100 has 132 multiprocessors), each with 8 steps or more. Their parts are added in
    float32 afterwards.
    """
    return max(1, min(triton.cdiv(264, programs), steps // 8))


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies float32; it has no effect in 16 bits."""
    return "tf32" if dtype == torch.float32 and uses_tf32() else "ieee"


def vector(D: int) -> int:
    """The largest power of 2 that divides D, up to 16: how many neighbouring columns surely lie side by side."""
    return min(D & -D, 16)


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself where its last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def heads_contiguous(a: Tensor) -> Tensor:
    """a [B, M, K, D] itself where kernels can read it in vectors, with offsets of heads in 32 bits."""
    aligned = all(stride % vector(a.shape[3]) == 0 for stride in a.stride()[:3])
    return a if a.stride(3) == 1 and aligned and a.shape[2] * a.stride(2) < 2**31 else a.contiguous()


# ---- launches


def columns(
    x: Tensor,
    weight: Tensor,
    weight_strides: Tuple[int, int],
    bias: Optional[Tensor],
    heads: Tensor,
    D: int,
    gates: Optional[Tensor] = None,
    o: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """out [B, M, K, D], and with gates their gradient [B, K]: see `chosen_columns`."""
    (B, M, C), K = x.shape, heads.shape[1]
    size = tiling(x.dtype, M, K * D, DIRECT)
    tiles_m, tiles_i = triton.cdiv(M, size.rows), triton.cdiv(K * D, size.columns)
    out = x.new_empty(B, M, K, D)
    parts = None if gates is None else x.new_empty(B, tiles_m, K, D, dtype=torch.float32)
    chosen_columns[(B * tiles_m * tiles_i,)](
        x,
        weight,
        None if bias is None else bias.contiguous(),
        heads.contiguous(),
        gates,
        o,
        out,
        parts,
        M,
        C,
        K,
        *x.stride()[:2],
        *weight_strides,
        *((0, 0, 0) if o is None else o.stride()[:3]),
        D=D,
        VECTOR=vector(D),
        PRECISION=precision(x.dtype),
        BLOCK_M=size.rows,
        BLOCK_I=size.columns,
        BLOCK_C=size.inner,
        **size.launch,
    )
    return out, None if parts is None else parts.sum((1, 3))


def inner(
    a: Tensor,
    weight: Tensor,
    weight_strides: Tuple[int, int],
    bias: Optional[Tensor],
    heads: Tensor,
    C: int,
    gates: Optional[Tensor] = None,
) -> Tensor:
    """out [B, M, C]: see `chosen_inner`."""
    B, M, K, D = a.shape
    size = tiling(a.dtype, M, C, INDIRECT)
    out = a.new_empty(B, M, C)
    chosen_inner[(B * triton.cdiv(M, size.rows) * triton.cdiv(C, size.columns),)](
        a,
        weight,
        None if bias is None else bias.contiguous(),
        heads.contiguous(),
        gates,
        out,
        M,
        C,
        K,
        *a.stride()[:3],
        *weight_strides,
        D=D,
        VECTOR=vector(D),
        PRECISION=precision(a.dtype),
        BLOCK_M=size.rows,
        BLOCK_C=size.columns,
        BLOCK_I=size.inner,
        **size.launch,
    )
    return out


def list_sequences(heads: Tensor, H: int) -> Tuple[Tensor, Tensor]:
    """Which sequences run each head, runs [H, B] and counts [H]: see `list_runs`."""
    (B, K), heads = heads.shape, heads.contiguous()
    runs, counts = heads.new_empty(H, B), heads.new_empty(H)
    list_runs[(H,)](heads, runs, counts, B, K, BLOCK=1024, num_warps=4)
    return runs, counts


def gradient_of_weight(
    a: Tensor,
    x: Tensor,
    gates: Optional[Tensor],
    runs: Tensor,
    counts: Tensor,
    weight: Tensor,
    transposed: bool,
) -> Tensor:
    """Like `weight` [H*D, C], or [C, H*D] if transposed: see `weight_gradient`."""
    (B, M, C), (_, _, K, D), H = x.shape, a.shape, counts.shape[0]
    size, rest = weight_tiling(a.dtype, D)
    tiles_c, tiles_d = triton.cdiv(C, size.rows), 1 if rest else triton.cdiv(D, size.columns)
    parts = splits(tiles_c * tiles_d * H, B * K * triton.cdiv(M, size.inner) // H)
    out = weight.new_empty(parts, *weight.shape, dtype=weight.dtype if parts == 1 else torch.float32)
    weight_gradient[(tiles_c, H * tiles_d, parts)](
        a,
        x,
        gates,
        runs,
        counts,
        out,
        B,
        M,
        C,
        K,
        H,
        *a.stride()[:3],
        *x.stride()[:2],
        *((1, H * D) if transposed else (C, 1)),
        D=D,
        VECTOR=vector(D),
        PRECISION=precision(a.dtype),
        BLOCK_D=size.columns,
        REST_D=rest,
        BLOCK_C=size.rows,
        BLOCK_M=size.inner,
        **size.launch,
    )
    return out[0] if parts == 1 else out.sum(0).to(weight.dtype)


# ---- the operators


def project(x: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor, head_dim: int) -> Tensor:
    """Project every sequence to the heads that it runs; same as `kernels.eager.project_heads`, which explains it."""
    weight = rows_contiguous(weight)
    return columns(rows_contiguous(x), weight, weight.stride(), bias, heads, head_dim)[0]


def project_backward(
    grad: Tensor, x: Tensor, weight: Tensor, heads: Tensor, has_bias: bool
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias for grad [B, M, K, D]; the last is empty without a bias."""
    D, H = grad.shape[3], weight.shape[0] // grad.shape[3]
    grad, x, weight = heads_contiguous(grad), rows_contiguous(x), rows_contiguous(weight)
    dx = inner(grad, weight, weight.stride(), None, heads, x.shape[2])
    runs, counts = list_sequences(heads, H)
    dweight = gradient_of_weight(grad, x, None, runs, counts, weight, transposed=False)
    dbias = weight.new_empty(H * D if has_bias else 0)
    if has_bias:
        width = triton.next_power_of_2(D)
        sums = grad.sum(1, dtype=torch.float32)
        bias_gradient[(H,)](sums, runs, counts, dbias, x.shape[0], D=D, BLOCK_B=16, BLOCK_D=width, num_warps=4)
    return dx, dweight, dbias


def combine(o: Tensor, gates: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor) -> Tensor:
    """Weigh the heads of every sequence and send them through W_O; same as `kernels.eager.combine_heads`."""
    weight = rows_contiguous(weight)
    return inner(heads_contiguous(o), weight, weight.stride()[::-1], bias, heads, weight.shape[0], gates.contiguous())


def combine_backward(
    grad: Tensor, o: Tensor, gates: Tensor, weight: Tensor, heads: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of o, gates and weight for grad [B, N, C]."""
    grad, o, weight, gates = rows_contiguous(grad), heads_contiguous(o), rows_contiguous(weight), gates.contiguous()
    do, dgates = columns(grad, weight, weight.stride()[::-1], None, heads, o.shape[3], gates, o)
    runs, counts = list_sequences(heads, weight.shape[1] // o.shape[3])
    return do, dgates, gradient_of_weight(o, grad, gates, runs, counts, weight, transposed=True)
