"""Attention of the pairs of heads and tokens that run, times their gates, in Triton: forward, and what launches share.

Letters as in `moh_vision.attention.kernels`. Segment s = h * B + b of the list holds the tokens of sequence b that run
head h. A tile is up to BLOCK_M neighbouring pairs of one segment: its queries lie apart in memory, and all of them read
the keys and values of sequence b and head h. A program computes a tile: all keys, then gate, then store. The grid is an
upper bound known from shapes: programs find their tile from `offsets` and stop where there is none.

Keys and values are read by tensor descriptors (TMA) where the card has them and `blocks.TABLE` says that it pays, and by
pointers elsewhere. Descriptors are made on the host: made in a kernel they need memory from an allocator that belongs to a
thread, and autograd's thread has none.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moh_vision.attention.kernels.gpu.blocks import (
    Block,
    card_of,
    cdiv,
    contiguous_rows,
    next_power_of_2,
    numbers_of,
    row_of,
)
from moh_vision.attention.kernels.gpu.rows import (
    BOOL_MASK,
    FLOAT_MASK,
    LOG2E,
    NO_MASK,
    SIZES,
    Spec,
    add_product,
    find_tile,
    key_range,
    load,
    load_keys,
    product,
    see,
    store,
    times,
    widths,
    write_zeros,
    zeros,
)

# ---- Forward


@triton.jit
def attend_keys(
    sums, q, n, mask, k_tiles, v_tiles, k, v, b, g, k_by, v_by, M, low, high, scale, root,
    EDGE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Add keys low .. high - 1 to the running sums (the values, the largest score before scaling, the exponentials)."""
    acc, top, total = sums
    BLOCK: tl.constexpr = spec.EDGE_N if EDGE else spec.BLOCK_N
    for start in range(low, high, BLOCK):
        key = start + tl.arange(0, BLOCK)
        real = key < M
        k_block = load_keys(k_tiles, k, b, g, start, k_by, real, EDGE, spec)
        scores = product(q, k_block, spec)  # [BLOCK_M, BLOCK_N]
        mask_pointers = mask[:, None] + key[None, :]
        scores = see(scores, mask_pointers, n[:, None], key[None, :], M, root, EDGE, spec)

        new = tl.maximum(top, tl.max(scores, 1))
        base = new
        if spec.MASK > 0:  # nothing seen so far: -inf minus -inf would be NaN
            base = tl.where(new == -float("inf"), 0.0, new)
        if spec.MASK == 2:
            # Where a bias of -1e9 hides all keys, a rounded product would miss a fused one by up to 2^64.
            p = tl.exp2((scores - base[:, None]) * scale)
            shrink = tl.exp2((top - base) * scale)
        else:
            p = tl.exp2(scores * scale - (base * scale)[:, None])
            shrink = tl.exp2(top * scale - base * scale)
        top = new
        total = total * shrink + tl.sum(p, 1)
        v_block = load_keys(v_tiles, v, b, g, start, v_by, real, EDGE, spec)
        acc = add_product(times(acc, shrink[:, None], spec), p, v_block, spec)
    return acc, top, total


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, weights, mask, token, offsets, o, lse, k_tiles, v_tiles,
    q_by, k_by, v_by, gates_by, mask_by, B, N, M, H, G, root, spec: tl.constexpr,
):  # fmt: skip
    exists, b, h, first, stop, n, low, high = find_tile(token, offsets, B, N, H, spec)
    if exists == 0:
        return
    g = h // (H // G)
    pair = first + tl.arange(0, spec.BLOCK_M)
    real = pair < stop
    n64 = n.to(tl.int64)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    g64 = g.to(tl.int64)

    q_head = q + (b64 * q_by[0] + h64 * q_by[1]) * spec.UNIT
    q_rows = load(q_head, n64 * (q_by[2] * spec.UNIT), real, spec)
    k += (b64 * k_by[0] + g64 * k_by[1]) * spec.UNIT
    v += (b64 * v_by[0] + g64 * v_by[1]) * spec.UNIT
    mask_rows = n64
    if spec.MASK > 0:
        mask_rows = mask + b64 * mask_by[0] + h64 * mask_by[1] + n64 * mask_by[2]

    scale = LOG2E / root
    nothing = tl.zeros(n.shape, tl.float32)
    sums = (zeros(spec.BLOCK_M, spec), nothing - float("inf"), nothing)
    full, last = key_range(n, first, stop, M, spec)
    # fmt: off
    by = k_by[2] * spec.UNIT, v_by[2] * spec.UNIT
    sums = attend_keys(
        sums, q_rows, n, mask_rows, k_tiles, v_tiles, k, v, b, g, by[0], by[1], M, 0, full, scale, root, False, spec,
    )
    acc, top, total = attend_keys(
        sums, q_rows, n, mask_rows, k_tiles, v_tiles, k, v, b, g, by[0], by[1], M, full, last, scale, root, True, spec,
    )
    # fmt: on

    total = tl.where(total == 0.0, 1.0, total)  # no visible key: output 0, and -inf from `top`
    tl.store(lse + pair, (top * scale + tl.log2(total)) / LOG2E, mask=real)
    factor = 1.0 / total
    if spec.GATED:
        gate_rows = weights + b64 * gates_by[0] + n64 * gates_by[1] + h64 * gates_by[2]
        factor *= tl.load(gate_rows, mask=real, other=0.0).to(tl.float32)
    o += (b64 * N * H + h64) * spec.D
    o_by = H * spec.D
    store(o, n64 * o_by, times(acc, factor[:, None], spec), real, spec)
    write_zeros(o, o_by, None, 0, n, first, stop, low, high, spec)


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
    B, H, N, D = q.shape
    _, G, M, _ = k.shape
    o = q.new_empty(B, N, H * D)
    lse = q.new_empty(token.shape, dtype=torch.float32)
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    given = Given.of(q, k, weights, mask, is_causal)
    spec, options = given.spec("forward", q, k, v)
    programs = cdiv(N, spec.BLOCK_M) * B * H
    if programs:
        tiles = given.key_tiles(spec, k, v)
        tensors = (q, k, v, weights, given.mask, token, offsets, o, lse)
        rows_by = [in_units(x, spec.UNIT) for x in (q, k, v)]
        strides = (*rows_by, given.gates_by, given.mask_by)
        sizes = (B, N, M, H, G, math.sqrt(D))
        forward_kernel[(programs,)](*tensors, *tiles, *strides, *sizes, spec=spec, **options)
    return o, lse


# ---- What launches share


def unit_of(*rows: Tensor) -> int:
    """Return 8 if the strides of all rows are multiples of 8 numbers, else 1.

    Triton knows that a number is divisible by 16, but a row of 72 numbers is only by 8: unless it is told, it loads
    them one at a time.
    """
    strides = [stride for x in rows for stride in x.stride()[:-1]]
    if all(stride % 8 == 0 for stride in strides):
        return 8
    return 1


def in_units(x: Tensor, unit: int) -> tuple[int, ...]:
    """Strides of rows in units of so many numbers."""
    return tuple(stride // unit for stride in x.stride()[:-1])


def fits_descriptor(x: Tensor) -> bool:
    """Return whether a tensor can be read through a descriptor: 16-byte steps, and no dimension that repeats."""
    size = x.element_size()
    long = [stride for length, stride in zip(x.shape[:-1], x.stride()[:-1]) if length > 1]
    aligned = all(stride > 0 and stride * size % 16 == 0 for stride in long)
    return x.data_ptr() % 16 == 0 and aligned and x.numel() > 0 and x.stride(-1) == 1


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of x [B, G, M, D]: what lies beyond M reads as 0."""
    # The step of a dimension of length 1 is never taken, and may be anything.
    strides = list(x.stride()[:-1])
    for dimension, length in enumerate(x.shape[:-1]):
        if length == 1:
            strides[dimension] = 16
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, x.shape[-1]])


class Given(NamedTuple):
    """The gates and the mask of a call, as kernels read them."""

    gated: bool
    mask: Tensor | None  # [B, H, N, M], keys side by side
    mask_type: int  # NO_MASK, BOOL_MASK or FLOAT_MASK
    is_causal: bool
    gates_by: tuple[int, int, int]  # strides of b, n, h
    mask_by: tuple[int, int, int]  # strides of b, h, n

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        weights: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
    ) -> "Given":
        gates_by = (0, 0, 0)
        if weights is not None:
            gates_by = weights.stride()
            if weights.shape[1] == 1:  # one gate of a sequence serves all tokens
                gates_by = (gates_by[0], 0, gates_by[2])
        mask_type = NO_MASK
        mask_by = (0, 0, 0)
        if mask is not None:
            mask_type = FLOAT_MASK
            mask = contiguous_rows(mask)
            if mask.dtype == torch.bool:
                mask_type = BOOL_MASK
                mask = mask.view(torch.uint8)
            mask = mask.expand(*q.shape[:3], k.shape[2])
            mask_by = mask.stride()[:3]
        return cls(weights is not None, mask, mask_type, is_causal, gates_by, mask_by)

    def spec(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, *gradients: Tensor
    ) -> tuple[Spec, dict]:
        """Return what a kernel is compiled for, and its warps and stages.

        Args:
            kernel: "forward", "queries" or "keys".
            q, k, v: [B, H, N, D] and [B, G, M, D].
            *gradients: further tensors whose strides are given in units.
        """
        D = q.shape[3]
        numbers = numbers_of(q.dtype)
        row = row_of(numbers, card_of(q.device), D, self.mask is not None, q.shape[2])
        block: Block = getattr(row, kernel)
        # TMA reads one block of width D: head widths in two parts, or padded ones, need pointers.
        tma = block.tma and widths(D) == (D, 0) and fits_descriptor(k) and fits_descriptor(v)
        spec = Spec(
            D,
            *widths(D),
            UNIT=unit_of(q, k, v, *gradients),
            GATED=self.gated,
            MASK=self.mask_type,
            CAUSAL=self.is_causal,
            PRECISION="tf32" if numbers == "tf32" else "ieee",
            BLOCK_M=block.queries,
            BLOCK_N=block.keys,
            EDGE_N=self.edge(block.keys, k.shape[2]),
            TMA=tma,
        )
        return spec, dict(num_warps=block.warps, num_stages=block.stages)

    def edge(self, block: int, keys: int) -> int:
        """Keys of the last block: a power of two that just holds them. 197 = 3 * 64 + 5 takes 16 there, not 64."""
        if self.is_causal:  # the blocks on the diagonal are edges too
            return block
        return min(block, max(16, next_power_of_2(keys % block)))

    def key_tiles(self, spec: Spec, k: Tensor, v: Tensor) -> tuple[TensorDescriptor | None, ...]:
        """Descriptors of keys and values where a kernel reads them so."""
        if not spec.TMA:
            return None, None
        return descriptor(k, spec.BLOCK_N), descriptor(v, spec.BLOCK_N)
