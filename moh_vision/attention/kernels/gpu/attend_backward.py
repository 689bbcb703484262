"""The backward pass of attention for pairs, in Triton: three kernels without atomics.

    pack      a program per tile: copies its queries and output gradients into contiguous rows, in the order of the list of
              pairs, and computes their delta; writes zeros into the gradients of (head, token) without a pair
    queries   a program per tile: goes over all keys, for the gradients of queries and gates
    keys      a program per block of keys: goes over the pairs of all query heads that read it, for the gradients of keys
              and values

Let p be the softmax of the scores, w the gate and `do` the gradient of the gated output o. Then
    d gate     = sum_j p_j (do . v_j), exact where the gate is 0
    d score_j  = p_j (w (do . v_j) - delta),  delta = do . o
    d v_j      = sum over queries of p_j w do

The keys kernel reads every pair once for each block of keys. So it pays to pack pairs first: the rows of a tile are
contiguous, which lets Triton prefetch them, and no token has to be looked up in the list.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.attend import (
    Given,
    Layout,
    Strides,
    find_launch,
    in_units,
    key_tiles,
    unit_of,
)
from moh_vision.attention.kernels.gpu.blocks import cdiv, contiguous_rows
from moh_vision.attention.kernels.gpu.launch import launch
from moh_vision.attention.kernels.gpu.rows import (
    FLOAT_MASK,
    LOG2E,
    NO_MASK,
    SIZES,
    Spec,
    add_product,
    count_below,
    find_tile,
    key_range,
    load,
    load_keys,
    load_packed,
    mask_scores,
    product,
    row_products,
    store,
    store_part,
    times,
    widths,
    write_zeros,
    zeros,
)

PACKED_PAIRS = 32  # pairs that a program of `pack_kernel` packs


@triton.jit
def probabilities(scores, scale, lse, spec: tl.constexpr):
    """Return softmax probabilities from scores and their log-sum-exp to base 2."""
    power = scores * scale - lse
    if spec.MASK == FLOAT_MASK:
        # Keep probabilities at most 1: where a bias of -1e9 hides all keys, `lse` is so large that rounding loses its sum.
        power = tl.minimum(power, 0.0)
    return tl.exp2(power)


# ---- Pack


@triton.jit
def store_packed(pointer, pair, x, real, spec: tl.constexpr):
    """Store x as rows `pair` of width WIDTH0 + WIDTH1, with the zeros that `load` put beyond column D."""
    WIDTH: tl.constexpr = spec.WIDTH0 + spec.WIDTH1
    rows = pair.to(tl.int64) * WIDTH
    store_part(pointer, rows, x[0], real, 0, WIDTH)
    if spec.WIDTH1 > 0:
        store_part(pointer, rows, x[1], real, spec.WIDTH0, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def pack_kernel(
    q, do, o, weights, lse, token, offsets, q_packed, do_packed, gates, lse2, delta, dq, dgates,
    q_by, do_by, gates_by, dq_by, B, N, H, spec: tl.constexpr,
):  # fmt: skip
    """A program packs the pairs of one tile, see `Packed`, and writes zeros into dq and dgates for tokens without a pair."""
    exists, b, h, first, stop, n, zero_from, zero_to = find_tile(token, offsets, B, N, H, spec)
    if exists == 0:
        return
    pair = first + tl.arange(0, spec.BLOCK_M)
    real = pair < stop
    n64 = n.to(tl.int64)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)

    q_head = q + (b64 * q_by[0] + h64 * q_by[1]) * spec.UNIT
    q_rows = load(q_head, n64 * (q_by[2] * spec.UNIT), real, spec)
    do_head = do + b64 * do_by[0] * spec.UNIT + h64 * spec.D
    do_rows = load(do_head, n64 * (do_by[1] * spec.UNIT), real, spec)
    o_rows = load(o + (b64 * N * H + h64) * spec.D, n64 * (H * spec.D), real, spec)
    store_packed(q_packed, pair, q_rows, real, spec)
    store_packed(do_packed, pair, do_rows, real, spec)
    tl.store(delta + pair, row_products(do_rows, o_rows, spec), mask=real)
    # A pair that saw no key has lse -inf. It is stored as +inf, so that its probabilities become 0 and not NaN.
    row_lse = tl.load(lse + pair, mask=real, other=0.0) * LOG2E
    tl.store(lse2 + pair, tl.where(row_lse == -float("inf"), float("inf"), row_lse), mask=real)
    if spec.GATED:
        gate_rows = weights + b64 * gates_by[0] + n64 * gates_by[1] + h64 * gates_by[2]
        gate = tl.load(gate_rows, mask=real, other=0.0)
        tl.store(gates + pair, gate.to(tl.float32), mask=real)
        dgates += b64 * N * H + h64
    dq_head = dq + (b64 * dq_by[0] + h64 * dq_by[1]) * spec.UNIT
    dq_step = dq_by[2] * spec.UNIT
    write_zeros(dq_head, dq_step, dgates, H, n, first, stop, zero_from, zero_to, spec)


# ---- Queries


@triton.jit
def queries_keys(
    sums, q, do, n, gate, delta, lse, mask_rows, k_tiles, v_tiles, k, v, b, g, k_row_by, v_row_by, M, low, high,
    scale, root, EDGE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Add to `sums`, the gradients of queries and gates, what keys low .. high - 1 contribute; see `attend_keys`."""
    dq, dgate = sums
    BLOCK: tl.constexpr = spec.EDGE_N if EDGE else spec.BLOCK_N
    for start in range(low, high, BLOCK):
        key = start + tl.arange(0, BLOCK)
        real = key < M
        k_block = load_keys(k_tiles, k, b, g, start, k_row_by, real, EDGE, spec)
        v_block = load_keys(v_tiles, v, b, g, start, v_row_by, real, EDGE, spec)
        scores = product(q, k_block, spec)
        mask_tile = mask_rows[:, None] + key[None, :]
        scores = mask_scores(scores, mask_tile, n[:, None], key[None, :], M, root, EDGE, spec)
        p = probabilities(scores, scale, lse[:, None], spec)
        dp = product(do, v_block, spec)
        if spec.GATED:
            dgate += tl.sum(p * dp, 1)
            ds = p * (dp * gate[:, None] - delta[:, None])
        else:
            ds = p * (dp - delta[:, None])
        dq = add_product(dq, ds, k_block, spec)
    return dq, dgate


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    q_packed, do_packed, gates, lse2, delta, k, v, mask, token, offsets, dq, dgates, k_tiles, v_tiles,
    k_by, v_by, mask_by, dq_by, B, N, M, H, G, root, spec: tl.constexpr,
):  # fmt: skip
    """A program computes the gradients of the queries and gates of one tile, see `find_tile`."""
    exists, b, h, first, stop, n, _, _ = find_tile(token, offsets, B, N, H, spec)
    if exists == 0:
        return
    g = h // (H // G)
    pair = first + tl.arange(0, spec.BLOCK_M)
    real = pair < stop
    n64 = n.to(tl.int64)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    g64 = g.to(tl.int64)

    q_rows = load_packed(q_packed, first, real, spec.BLOCK_M, spec)
    do_rows = load_packed(do_packed, first, real, spec.BLOCK_M, spec)
    row_delta = tl.load(delta + pair, mask=real, other=0.0)
    row_lse = tl.load(lse2 + pair, mask=real, other=float("inf"))
    gate = tl.zeros(n.shape, tl.float32) + 1.0
    if spec.GATED:
        gate = tl.load(gates + pair, mask=real, other=0.0)
    k += (b64 * k_by[0] + g64 * k_by[1]) * spec.UNIT
    v += (b64 * v_by[0] + g64 * v_by[1]) * spec.UNIT
    mask_rows = n64  # not read without a mask
    if spec.MASK != NO_MASK:
        mask_rows = mask + b64 * mask_by[0] + h64 * mask_by[1] + n64 * mask_by[2]

    scale = LOG2E / root
    sums = (zeros(spec.BLOCK_M, spec), tl.zeros(n.shape, tl.float32))
    full, last = key_range(n, first, stop, M, spec)
    k_row_by = k_by[2] * spec.UNIT
    v_row_by = v_by[2] * spec.UNIT
    # fmt: off
    sums = queries_keys(
        sums, q_rows, do_rows, n, gate, row_delta, row_lse, mask_rows, k_tiles, v_tiles, k, v, b, g, k_row_by, v_row_by,
        M, 0, full, scale, root, False, spec,
    )
    dq_rows, dgate = queries_keys(
        sums, q_rows, do_rows, n, gate, row_delta, row_lse, mask_rows, k_tiles, v_tiles, k, v, b, g, k_row_by, v_row_by,
        M, full, last, scale, root, True, spec,
    )
    # fmt: on

    dq_head = dq + (b64 * dq_by[0] + h64 * dq_by[1]) * spec.UNIT
    store(dq_head, n64 * (dq_by[2] * spec.UNIT), times(dq_rows, 1.0 / root, spec), real, spec)
    if spec.GATED:
        tl.store(dgates + (b64 * N + n64) * H + h64, dgate, mask=real)


# ---- Keys


@triton.jit
def keys_pairs(
    sums, k, v, key, q, do, gates, lse2, delta, token, mask_head, mask_row_by, low, high, shift, M,
    scale, root, EDGE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Add to `sums`, the gradients of a block of keys and values, what pairs low .. high - 1 contribute.

    Scores are [keys, queries] here, so that the products with them need no transposed tile of scores. Keys beyond M need
    no mask, because the rows of their gradients are not stored.

    EDGE: a block of pairs may reach beyond `high`, where rows belong to another segment or are undefined.
    """
    dk, dv = sums
    for first in range(low, high, spec.BLOCK_M):
        pair = first + tl.arange(0, spec.BLOCK_M)
        real = pair < high
        q_rows = load_packed(q, first, real, spec.BLOCK_M, spec, not EDGE)
        do_rows = load_packed(do, first, real, spec.BLOCK_M, spec, not EDGE)
        if EDGE:
            row_lse = tl.load(lse2 + pair, mask=real, other=float("inf"))
            row_delta = tl.load(delta + pair, mask=real, other=0.0)
        else:
            row_lse = tl.load(lse2 + pair)
            row_delta = tl.load(delta + pair)
        scores = product(k, q_rows, spec)  # [BLOCK_N, BLOCK_M]
        if spec.MASK != NO_MASK or spec.CAUSAL:
            n = tl.load(token + pair, mask=real, other=shift) - shift
            mask_rows = n.to(tl.int64)  # not read without a mask
            if spec.MASK != NO_MASK:
                mask_rows = mask_head + mask_rows * mask_row_by
            mask_tile = mask_rows[None, :] + key[:, None]
            scores = mask_scores(
                scores, mask_tile, n[None, :], key[:, None], M, root, spec.CAUSAL, spec
            )
        p = probabilities(scores, scale, row_lse[None, :], spec)
        dp = product(v, do_rows, spec)
        if spec.GATED:
            if EDGE:
                gate = tl.load(gates + pair, mask=real, other=0.0)
            else:
                gate = tl.load(gates + pair)
            ds = p * (dp * gate[None, :] - row_delta[None, :])
            p = p * gate[None, :]
        else:
            ds = p * (dp - row_delta[None, :])
        dv = add_product(dv, p, do_rows, spec)
        dk = add_product(dk, ds, q_rows, spec)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    q_packed, do_packed, gates, lse2, delta, k, v, mask, token, offsets, dk, dv,
    k_by, v_by, mask_by, dk_by, dv_by, B, N, M, H, G, root, spec: tl.constexpr,
):  # fmt: skip
    """A program computes the gradients of one block of keys and values of a sequence and key-value head."""
    program = tl.program_id(0)
    key_blocks = tl.cdiv(M, spec.BLOCK_N)
    start = (program % key_blocks) * spec.BLOCK_N
    g = (program // key_blocks) % G
    b = program // (key_blocks * G)
    shift = b * N
    key = start + tl.arange(0, spec.BLOCK_N)
    real = key < M
    key64 = key.to(tl.int64)
    b64 = b.to(tl.int64)
    g64 = g.to(tl.int64)

    k_head = k + (b64 * k_by[0] + g64 * k_by[1]) * spec.UNIT
    v_head = v + (b64 * v_by[0] + g64 * v_by[1]) * spec.UNIT
    k_rows = load(k_head, key64 * (k_by[2] * spec.UNIT), real, spec)
    v_rows = load(v_head, key64 * (v_by[2] * spec.UNIT), real, spec)

    scale = LOG2E / root
    sums = (zeros(spec.BLOCK_N, spec), zeros(spec.BLOCK_N, spec))
    for h in range(g * (H // G), (g + 1) * (H // G)):
        mask_head = mask
        mask_row_by = 0
        if spec.MASK != NO_MASK:
            mask_head = mask + b64 * mask_by[0] + tl.cast(h, tl.int64) * mask_by[1]
            mask_row_by = mask_by[2]
        low = tl.load(offsets + h * B + b)
        high = tl.load(offsets + h * B + b + 1)
        if spec.CAUSAL:  # skip the pairs whose tokens come before the block's first key: they see none of its keys
            low += count_below(token, low, high, shift + start)
        full = low + (high - low) // spec.BLOCK_M * spec.BLOCK_M
        # fmt: off
        sums = keys_pairs(
            sums, k_rows, v_rows, key, q_packed, do_packed, gates, lse2, delta, token,
            mask_head, mask_row_by, low, full, shift, M, scale, root, False, spec,
        )
        sums = keys_pairs(
            sums, k_rows, v_rows, key, q_packed, do_packed, gates, lse2, delta, token,
            mask_head, mask_row_by, full, high, shift, M, scale, root, True, spec,
        )
        # fmt: on

    dk_head = dk + (b64 * dk_by[0] + g64 * dk_by[1]) * spec.UNIT
    dv_head = dv + (b64 * dv_by[0] + g64 * dv_by[1]) * spec.UNIT
    dk_rows = times(sums[0], 1.0 / root, spec)
    store(dk_head, key64 * (dk_by[2] * spec.UNIT), dk_rows, real, spec)
    store(dv_head, key64 * (dv_by[2] * spec.UNIT), sums[1], real, spec)


# ---- Launches


class Packed(NamedTuple):
    """What the kernels of queries and keys read of every pair, in the order of the list."""

    q: Tensor  # [P, WIDTH0 + WIDTH1] queries
    do: Tensor  # [P, WIDTH0 + WIDTH1] gradients of the outputs
    gates: Tensor | None  # [P]
    lse2: Tensor  # [P], log-sum-exp of the scores to base 2; +inf where the pair saw no key
    delta: Tensor  # [P], do . o


class Gradients(NamedTuple):
    """Memory for the gradients of queries, keys, values and gates; the first three may be parts of one buffer."""

    q: Tensor  # of any shape, like k and v: `by` says where their rows lie
    k: Tensor
    v: Tensor
    gates: Tensor  # [B, N, H] float32, or empty
    by: tuple[Strides, Strides, Strides]  # of the rows of q, k and v


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
    """Return the gradients of queries [B, H, N, D], keys and values [B, G, M, D], and gates.

    The gradients of queries and gates are 0 where a head is off. Those of the gates are float32, of the shape of `weights`; an
    empty tensor if `weights` is None.

    Args:
        do: gradients of the outputs, [B, N, H * D].
        o, lse: results of the forward pass.
        q, ..., mask: see `moh_vision.attention.kernels.gpu.library.attend`.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    layout = Layout.of(q, k, v)
    # The memory layout is [B, N, H, D] and [B, M, G, D], like the outputs of a projection.
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    by = tuple(x.stride()[:3] for x in (dq, dk, dv))
    grads = Gradients(dq, dk, dv, new_gates(layout, lse, weights), by)
    lists = (token, offsets)
    dgates = write_gradients(
        layout, do, q, k, v, o, lse, weights, *lists, is_causal, mask, grads=grads
    )
    return dq, dk, dv, dgates


def backward_of_product(
    do: Tensor,
    product: Tensor,
    o: Tensor,
    lse: Tensor,
    heads: int,
    kv_heads: int,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the product, see `library.attend_product`, and of the gates, see `backward`."""
    product = contiguous_rows(product)
    layout = Layout.of_product(product, heads, kv_heads)
    dproduct = torch.empty_like(product, memory_format=torch.contiguous_format)
    width = product.shape[2]
    by = (layout.N * width, layout.D, width)
    dgates = new_gates(layout, lse, weights)
    grads = Gradients(*layout.parts(dproduct), dgates, (by, by, by))
    parts = layout.parts(product)
    lists = (token, offsets)
    dgates = write_gradients(
        layout, do, *parts, o, lse, weights, *lists, is_causal, mask, grads=grads
    )
    return dproduct, dgates


def new_gates(layout: Layout, lse: Tensor, weights: Tensor | None) -> Tensor:
    """Return memory for the gradients of gates [B, N, H], or an empty tensor if there are no gates."""
    if weights is None:
        return lse.new_empty(0)
    return lse.new_empty((layout.B, layout.N, layout.H))


def write_gradients(  # noqa: PLR0913
    layout: Layout,
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
    grads: Gradients,
) -> Tensor:
    """Launch the three kernels, which write `grads`; return the gradients of the gates in the shape of `weights`.

    Args:
        layout: how queries, keys and values lie in memory.
        q, k, v: tensors that begin with their first elements, of any shape.
        do, ..., mask: see `backward`.
        grads: memory for the gradients.
    """
    do = contiguous_rows(do)
    given, mask = Given.of(layout, weights, mask, is_causal)
    tf32 = layout.multiplies_in_tf32()
    dq_by, dk_by, dv_by = grads.by
    packed = pack(do, q, o.contiguous(), lse, weights, token, offsets, layout, given, grads)

    plan = find_launch("queries", layout, given, tf32, (dq_by,))
    if plan.programs:
        _, k_by, v_by = plan.rows_by
        tiles = key_tiles(plan.spec, layout, k, v)
        tensors = (*packed, k, v, mask, token, offsets, grads.q, grads.gates, *tiles)
        numbers = (k_by, v_by, given.mask_by, *plan.grads_by, *layout.sizes)
        launch(queries_kernel, plan.programs, tensors, numbers, spec=plan.spec, **plan.options)

    plan = find_launch("keys", layout, given, tf32, (dk_by, dv_by))
    if plan.programs:
        _, k_by, v_by = plan.rows_by
        tensors = (*packed, k, v, mask, token, offsets, grads.k, grads.v)
        numbers = (k_by, v_by, given.mask_by, *plan.grads_by, *layout.sizes)
        launch(keys_kernel, plan.programs, tensors, numbers, spec=plan.spec, **plan.options)
    if weights is not None and weights.shape[1] == 1:
        return grads.gates.sum(1, keepdim=True)
    return grads.gates


def pack(
    do: Tensor,
    q: Tensor,
    o: Tensor,
    lse: Tensor,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    layout: Layout,
    given: Given,
    grads: Gradients,
) -> Packed:
    """Pack the rows of pairs, and write zeros into the gradients of queries and gates where a head is off.

    Arguments are those of `write_gradients`; `given` says how the gates are read.
    """
    pairs = token.shape[0]
    spec, q_by, do_by, dq_by = pack_spec(layout, given.gated, do.stride()[:2], grads.by[0])
    packed_q, packed_do = q.new_empty((2, pairs, spec.WIDTH0 + spec.WIDTH1)).unbind()
    lse2, delta, gates = lse.new_empty((3, pairs)).unbind()
    dgates = grads.gates
    if not given.gated:
        gates = None
        dgates = None
    packed = Packed(packed_q, packed_do, gates, lse2, delta)
    programs = cdiv(layout.N, PACKED_PAIRS) * layout.B * layout.H
    if programs:
        tensors = (q, do, o, weights, lse, token, offsets, *packed, grads.q, dgates)
        numbers = (q_by, do_by, given.gates_by, dq_by, layout.B, layout.N, layout.H)
        launch(pack_kernel, programs, tensors, numbers, spec=spec, num_warps=4)
    return packed


@functools.lru_cache(maxsize=4096)
def pack_spec(
    layout: Layout, gated: bool, do_by: tuple[int, int], dq_by: Strides
) -> tuple[Spec, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the constants of `pack_kernel`, and the strides of queries, `do` and `dq` in units of spec.UNIT.

    Args:
        layout: how queries lie in memory.
        gated: whether there are gates.
        do_by: strides of the gradients of the outputs, along b and n.
        dq_by: strides of the gradients of queries.
    """
    unit = unit_of(layout.q_by, do_by, dq_by)
    spec = Spec(
        layout.D,
        *widths(layout.D),
        UNIT=unit,
        GATED=gated,
        BLOCK_M=PACKED_PAIRS,
        # The kernel reads no keys and makes no product, so what follows has no effect.
        MASK=NO_MASK.value,
        CAUSAL=False,
        PRECISION="ieee",
        BLOCK_N=16,
        EDGE_N=16,
        TMA=False,
    )
    return spec, in_units(layout.q_by, unit), in_units(do_by, unit), in_units(dq_by, unit)
