"""Attention for the active (head, token) pairs, multiplied by their gates, in Triton: the forward pass and its launch.

Letters are those of `moh_vision.attention.kernels`. Segment s = h * B + b of the list of pairs holds the tokens of
sequence b that run head h. A tile is up to BLOCK_M consecutive pairs of one segment. Its queries are not contiguous in
memory, but all of them read the keys and values of sequence b and head h. A program computes one tile: it goes over all
keys, multiplies by the gates and stores the outputs. The size of the grid is an upper bound that follows from shapes
alone, so that the host need not wait for `offsets`: each program finds its tile in `offsets`, and returns if it has none.

Keys and values are read through tensor descriptors (TMA) where the card has them and `blocks.TABLE` asks for them, and
through pointers elsewhere. The host makes the descriptors. A kernel that made them would need an allocator, which Triton
sets for each thread, and autograd's thread has none.
"""

import functools
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
    precision_of,
    row_of,
)
from moh_vision.attention.kernels.gpu.launch import launch
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
    mask_scores,
    product,
    store,
    times,
    widths,
    write_zeros,
    zeros,
)
from moh_vision.attention.linear import uses_tf32

# ---- Forward


@triton.jit
def attend_keys(
    sums, q, n, mask_rows, k_tiles, v_tiles, k, v, b, g, k_row_by, v_row_by, M, low, high, scale, root,
    EDGE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Add keys low .. high - 1 to the running sums of an online softmax.

    Args:
        sums: acc, the sum of values weighted by exponentials, in one or two parts (see `rows`); top, the largest score,
            before scaling; total, the sum of exponentials.
        q, n: queries of the tile, and their tokens.
        mask_rows: pointers to the mask's rows of these queries; not used without a mask.
        k_tiles, v_tiles, k, v, b, g: see `load_keys`.
        k_row_by, v_row_by: row strides of keys and values, in elements.
        M: number of keys.
        low, high: the keys.
        scale, root: log2(e) / sqrt(D), and sqrt(D).
        EDGE: see `mask_scores`; blocks have EDGE_N keys then, else BLOCK_N.
    """
    acc, top, total = sums
    BLOCK: tl.constexpr = spec.EDGE_N if EDGE else spec.BLOCK_N
    for start in range(low, high, BLOCK):
        key = start + tl.arange(0, BLOCK)
        real = key < M
        k_block = load_keys(k_tiles, k, b, g, start, k_row_by, real, EDGE, spec)
        scores = product(q, k_block, spec)  # [BLOCK_M, BLOCK_N]
        mask_tile = mask_rows[:, None] + key[None, :]
        scores = mask_scores(scores, mask_tile, n[:, None], key[None, :], M, root, EDGE, spec)

        new = tl.maximum(top, tl.max(scores, 1))
        base = new
        if spec.MASK != NO_MASK:
            # A query that has seen no key yet has top -inf, and -inf minus -inf would be NaN.
            base = tl.where(new == -float("inf"), 0.0, new)
        if spec.MASK == FLOAT_MASK:
            # Subtract before scaling. The other form subtracts two products. With a bias of -1e9 on all keys both are huge,
            # and if the compiler fuses one into the subtraction, only the other is rounded: the exponent is off by up to 64.
            p = tl.exp2((scores - base[:, None]) * scale)
            shrink = tl.exp2((top - base) * scale)
        else:
            p = tl.exp2(scores * scale - (base * scale)[:, None])
            shrink = tl.exp2(top * scale - base * scale)
        top = new
        total = total * shrink + tl.sum(p, 1)
        v_block = load_keys(v_tiles, v, b, g, start, v_row_by, real, EDGE, spec)
        acc = add_product(times(acc, shrink[:, None], spec), p, v_block, spec)
    return acc, top, total


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, weights, mask, token, offsets, o, lse, k_tiles, v_tiles,
    q_by, k_by, v_by, gates_by, mask_by, B, N, M, H, G, root, spec: tl.constexpr,
):  # fmt: skip
    """A program computes the outputs of one tile, see `find_tile`.

    Arguments are those of `forward`, and: k_tiles, v_tiles, descriptors of k and v or None; q_by .. mask_by, strides (see
    `Given`; those of q, k and v in units of spec.UNIT); root, sqrt(D).
    """
    exists, b, h, first, stop, n, zero_from, zero_to = find_tile(token, offsets, B, N, H, spec)
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
    mask_rows = n64  # not read without a mask
    if spec.MASK != NO_MASK:
        mask_rows = mask + b64 * mask_by[0] + h64 * mask_by[1] + n64 * mask_by[2]

    scale = LOG2E / root
    top = tl.full(n.shape, -float("inf"), tl.float32)
    total = tl.zeros(n.shape, tl.float32)
    sums = (zeros(spec.BLOCK_M, spec), top, total)
    # First the blocks whose keys all queries of the tile see, then the blocks at the edge, see EDGE of `mask_scores`.
    full, last = key_range(n, first, stop, M, spec)
    k_row_by = k_by[2] * spec.UNIT
    v_row_by = v_by[2] * spec.UNIT
    # fmt: off
    sums = attend_keys(
        sums, q_rows, n, mask_rows, k_tiles, v_tiles, k, v, b, g, k_row_by, v_row_by, M, 0, full, scale, root, False, spec,
    )
    acc, top, total = attend_keys(
        sums, q_rows, n, mask_rows, k_tiles, v_tiles, k, v, b, g, k_row_by, v_row_by, M, full, last, scale, root, True, spec,
    )
    # fmt: on

    # A query that sees no key has total 0 and top -inf: its output becomes 0, and its lse -inf.
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + pair, (top * scale + tl.log2(total)) / LOG2E, mask=real)
    factor = 1.0 / total
    if spec.GATED:
        gate_rows = weights + b64 * gates_by[0] + n64 * gates_by[1] + h64 * gates_by[2]
        factor *= tl.load(gate_rows, mask=real, other=0.0).to(tl.float32)
    o += (b64 * N * H + h64) * spec.D
    o_by = H * spec.D
    store(o, n64 * o_by, times(acc, factor[:, None], spec), real, spec)
    # None, 0: there are no gates to write zeros into.
    write_zeros(o, o_by, None, 0, n, first, stop, zero_from, zero_to, spec)


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
    """Return outputs and lse, see `moh_vision.attention.kernels.gpu.library.attend`."""
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    return attend(Layout.of(q, k, v), q, k, v, weights, token, offsets, is_causal, mask)


def forward_of_product(
    product: Tensor,
    heads: int,
    kv_heads: int,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do as `forward` with queries, keys and values that are one tensor, see `library.attend_product`."""
    product = contiguous_rows(product)
    layout = Layout.of_product(product, heads, kv_heads)
    return attend(layout, *layout.parts(product), weights, token, offsets, is_causal, mask)


def attend(
    layout: "Layout",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        layout: how queries, keys and values lie in memory.
        q, k, v: tensors that begin with their first elements, of any shape.
        weights, token, offsets, is_causal, mask: see `forward`.
    """
    given, mask = Given.of(layout, weights, mask, is_causal)
    o = q.new_empty((layout.B, layout.N, layout.H * layout.D))
    lse = q.new_empty(token.shape, dtype=torch.float32)
    plan = find_launch("forward", layout, given, layout.multiplies_in_tf32())
    if plan.programs:
        tiles = key_tiles(plan.spec, layout, k, v)
        tensors = (q, k, v, weights, mask, token, offsets, o, lse, *tiles)
        numbers = (*plan.rows_by, given.gates_by, given.mask_by, *layout.sizes)
        launch(forward_kernel, plan.programs, tensors, numbers, spec=plan.spec, **plan.options)
    return o, lse


# ---- What decides a launch, for forward and backward

Strides = tuple[int, int, int]  # along b, head and token, in elements


class Layout(NamedTuple):
    """Sizes of a call, and where the rows of queries, keys and values lie in memory."""

    dtype: torch.dtype
    card: int  # see `blocks.card_of`
    B: int
    N: int
    M: int
    H: int
    G: int
    D: int
    q_by: Strides
    k_by: Strides
    v_by: Strides
    described: bool  # whether keys and values can be read through descriptors

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "Layout":
        """Return the layout of q [B, H, N, D], k and v [B, G, M, D], whose last dimensions are contiguous."""
        B, H, N, D = q.shape
        _, G, M, _ = k.shape
        described = fits_descriptor(k) and fits_descriptor(v)
        strides = (q.stride()[:3], k.stride()[:3], v.stride()[:3])
        return cls(q.dtype, card_of(q.device), B, N, M, H, G, D, *strides, described)

    @classmethod
    def of_product(cls, product: Tensor, heads: int, kv_heads: int) -> "Layout":
        """Return the layout of the parts of a product [B, N, (H + 2 * G) * D], grouped q | k | v, and by head in each."""
        aligned = product.data_ptr() % 16 == 0
        device = product.device
        shape = (product.shape, product.stride(), product.dtype)
        return layout_of_product(*shape, card_of(device), heads, kv_heads, aligned)

    def parts(self, product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, N, H * D], keys and values [B, N, G * D] of a product."""
        keys = self.G * self.D
        return torch.split_with_sizes(product, (self.H * self.D, keys, keys), 2)

    def multiplies_in_tf32(self) -> bool:
        """Return whether PyTorch multiplies such tensors in tf32."""
        return self.dtype == torch.float32 and uses_tf32()

    @property
    def sizes(self) -> tuple[int, int, int, int, int, float]:
        """B, N, M, H, G and sqrt(D), the last arguments of the kernels."""
        return self.B, self.N, self.M, self.H, self.G, math.sqrt(self.D)


@functools.lru_cache(maxsize=4096)
def layout_of_product(
    shape: tuple[int, int, int],
    by: Strides,
    dtype: torch.dtype,
    card: int,
    heads: int,
    kv_heads: int,
    aligned: bool,
) -> Layout:
    """Return what `Layout.of_product` does; `by` has the strides, `aligned` says whether its address is a multiple of 16."""
    B, N, width = shape
    D = width // (heads + 2 * kv_heads)
    sequence_by, token_by, _ = by
    rows_by = (sequence_by, D, token_by)
    # Each part begins at a multiple of D elements; see `fits_descriptor`.
    steps_fit = all(step > 0 and step * dtype.itemsize % 16 == 0 for step in rows_by)
    described = aligned and steps_fit and B * N > 0
    return Layout(dtype, card, B, N, N, heads, kv_heads, D, rows_by, rows_by, rows_by, described)


class Given(NamedTuple):
    """How kernels read the gates and the mask of a call."""

    gated: bool
    mask_type: int  # the value of NO_MASK, BOOL_MASK or FLOAT_MASK
    is_causal: bool
    gates_by: Strides  # along b, n and h; 0 along n if there is one gate per sequence
    mask_by: Strides  # along b, h and n

    @classmethod
    def of(
        cls, layout: Layout, weights: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> tuple["Given", Tensor | None]:
        """Prepare the gates and the mask of a call.

        Args:
            layout: the sizes of the call.
            weights, mask, is_causal: see `library.attend`.

        Returns:
            How they are read, and the mask as kernels read it: [B, H, N, M], contiguous along M, uint8 or float.
        """
        gates_by = (0, 0, 0)
        if weights is not None:
            gates_by = weights.stride()
            if weights.shape[1] == 1:  # all tokens of a sequence share its gates
                gates_by = (gates_by[0], 0, gates_by[2])
        mask_type = NO_MASK.value
        mask_by = (0, 0, 0)
        if mask is not None:
            mask_type = FLOAT_MASK.value
            mask = contiguous_rows(mask)
            if mask.dtype == torch.bool:
                mask_type = BOOL_MASK.value
                mask = mask.view(torch.uint8)
            mask = mask.expand(layout.B, layout.H, layout.N, layout.M)
            mask_by = mask.stride()[:3]
        return cls(weights is not None, mask_type, is_causal, gates_by, mask_by), mask


class Launch(NamedTuple):
    """What is the same in all launches of a kernel for calls of one layout."""

    spec: Spec
    options: dict[str, int]  # num_warps and num_stages
    programs: int
    rows_by: tuple[Strides, ...]  # strides of queries, keys and values in units of spec.UNIT
    grads_by: tuple[Strides, ...]  # the same of the gradients that the kernel writes


@functools.lru_cache(maxsize=4096)  # texts of every length have a layout each
def find_launch(
    kernel: str, layout: Layout, given: Given, tf32: bool, grads_by: tuple[Strides, ...] = ()
) -> Launch:
    """Return how a kernel is launched.

    Args:
        kernel: "forward", "queries" or "keys".
        layout, given: of the call.
        tf32: whether PyTorch multiplies float32 in tf32.
        grads_by: strides of the gradients that the kernel writes.
    """
    c = layout
    precision = precision_of(c.dtype, tf32)
    masked = given.mask_type != NO_MASK.value
    block: Block = getattr(row_of(precision, c.card, c.D, masked, c.N), kernel)
    # TMA loads tiles of width D: a head width that is padded or split into two parts needs pointers.
    is_whole = widths(c.D) == (c.D, 0)
    rows_by = (c.q_by, c.k_by, c.v_by)
    unit = unit_of(*rows_by, *grads_by)
    spec = Spec(
        c.D,
        *widths(c.D),
        UNIT=unit,
        GATED=given.gated,
        MASK=given.mask_type,
        CAUSAL=given.is_causal,
        PRECISION="tf32" if precision == "tf32" else "ieee",
        BLOCK_M=block.queries,
        BLOCK_N=block.keys,
        EDGE_N=edge(block.keys, c.M, given.is_causal),
        TMA=block.tma and is_whole and c.described,
    )
    programs = cdiv(c.N, spec.BLOCK_M) * c.B * c.H
    if kernel == "keys":
        programs = cdiv(c.M, spec.BLOCK_N) * c.B * c.G
    return Launch(
        spec,
        dict(num_warps=block.warps, num_stages=block.stages),
        programs,
        rows_by=tuple(in_units(by, unit) for by in rows_by),
        grads_by=tuple(in_units(by, unit) for by in grads_by),
    )


def unit_of(*rows_by: tuple[int, ...]) -> int:
    """Return 8 if all row strides are multiples of 8 elements, else 1: the unit in which kernels get these strides.

    If Triton knows that a stride is divisible by 8, it loads several elements at a time. By itself it only finds out
    whether a stride is divisible by 16, which that of rows of 72 elements is not. A kernel that gets a stride in units
    and multiplies it by 8 tells Triton.
    """
    if all(stride % 8 == 0 for by in rows_by for stride in by):
        return 8
    return 1


def in_units(by: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Return strides in units of `unit` elements."""
    return tuple(stride // unit for stride in by)


def edge(block: int, keys: int, is_causal: bool) -> int:
    """Return the size of blocks of keys at the edge, see EDGE of `mask_scores`.

    Without a causal mask the edge is what remains of the keys after the full blocks. Its size is a power of two, at
    least 16: 197 keys in blocks of 64 leave 5, and the block at the edge has size 16.

    Args:
        block: size of the full blocks.
        keys: M.
        is_causal: blocks on the diagonal are at the edge too, and have up to `block` keys.
    """
    if is_causal:
        return block
    remaining = keys % block  # if 0, there is no block at the edge
    return min(block, max(16, next_power_of_2(remaining)))


def fits_descriptor(x: Tensor) -> bool:
    """Return whether a tensor can be read through a descriptor.

    Its strides must be multiples of 16 bytes, none of them 0 (an expanded dimension), and its rows contiguous.
    """
    size = x.element_size()
    strides = [stride for length, stride in zip(x.shape[:-1], x.stride()[:-1]) if length > 1]
    aligned = all(stride > 0 and stride * size % 16 == 0 for stride in strides)
    return x.data_ptr() % 16 == 0 and aligned and x.numel() > 0 and x.stride(-1) == 1


def key_tiles(
    spec: Spec, layout: Layout, k: Tensor, v: Tensor
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return descriptors of keys and values, or None for both if the kernel reads them through pointers."""
    if not spec.TMA:
        return None, None
    return descriptor(k, layout, layout.k_by, spec), descriptor(v, layout, layout.v_by, spec)


def descriptor(x: Tensor, layout: Layout, by: Strides, spec: Spec) -> TensorDescriptor:
    """Return a descriptor that loads tiles of spec.BLOCK_N rows of keys or values [B, G, M, D] at x.

    Rows beyond M are loaded as 0.
    """
    lengths = (layout.B, layout.G, layout.M)
    # The stride of a dimension of size 1 has no effect but must be valid: 16 elements always are.
    strides = [16 if length == 1 else stride for length, stride in zip(lengths, by)]
    return TensorDescriptor(x, [*lengths, layout.D], [*strides, 1], [1, 1, spec.BLOCK_N, layout.D])
