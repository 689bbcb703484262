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

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.attend import Given, in_units, unit_of
from moh_vision.attention.kernels.gpu.blocks import cdiv, contiguous_rows
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
    """Memory for the gradients that backward computes; those of queries, keys and values may be views of one buffer."""

    q: Tensor  # [B, H, N, D]
    k: Tensor  # [B, G, M, D]
    v: Tensor  # [B, G, M, D]
    gates: Tensor  # [B, N, H] float32, or empty


def pack(
    do: Tensor,
    q: Tensor,
    o: Tensor,
    lse: Tensor,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    given: Given,
    grads: Gradients,
) -> Packed:
    """Pack the rows of pairs, and write zeros into the gradients of queries and gates where a head is off.

    Arguments are those of `backward`; `given` has its gates and mask.
    """
    B, H, N, D = q.shape
    pairs = token.shape[0]
    rows = q.new_empty(2, pairs, sum(widths(D)))
    scalars = lse.new_empty(3, pairs)  # lse2, delta and gates
    gates = None
    dgates = None
    if given.gated:
        gates = scalars[2]
        dgates = grads.gates
    packed = Packed(rows[0], rows[1], gates, scalars[0], scalars[1])
    unit = unit_of(q, do, grads.q)
    spec = Spec(
        D,
        *widths(D),
        UNIT=unit,
        GATED=given.gated,
        BLOCK_M=PACKED_PAIRS,
        # The kernel reads no keys and makes no product, so what follows has no effect.
        MASK=NO_MASK.value,
        CAUSAL=False,
        PRECISION="ieee",
        BLOCK_N=16,
        EDGE_N=16,
        TMA=False,
    )
    programs = cdiv(N, PACKED_PAIRS) * B * H
    if programs:
        tensors = (q, do, o, weights, lse, token, offsets)
        q_by, do_by, dq_by = (in_units(x, unit) for x in (q, do, grads.q))
        strides = (q_by, do_by, given.gates_by, dq_by)
        pack_kernel[(programs,)](
            *tensors, *packed, grads.q, dgates, *strides, B, N, H, spec=spec, num_warps=4
        )
    return packed


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
    grads: Gradients,
) -> Tensor:
    """Write the gradients of queries, keys and values into `grads`; return the gradients of the gates.

    The gradients of queries and gates are 0 where a head is off.

    Args:
        do: gradients of the outputs, [B, N, H * D].
        o, lse: results of the forward pass.
        grads: memory for the gradients.
        q, ..., mask: see `moh_vision.attention.kernels.gpu.library.attend`.

    Returns:
        The gradients of the gates in float32, of the shape of `weights`; an empty tensor if `weights` is None.
    """
    B, H, N, D = q.shape
    _, G, M, _ = k.shape
    q, k, v, do = (contiguous_rows(x) for x in (q, k, v, do))
    given = Given.of(q, k, weights, mask, is_causal)
    packed = pack(do, q, o.contiguous(), lse, weights, token, offsets, given, grads)
    sizes = (B, N, M, H, G, math.sqrt(D))

    spec, options = given.spec("queries", q, k, v, grads.q)
    programs = cdiv(N, spec.BLOCK_M) * B * H
    if programs:
        tiles = given.key_tiles(spec, k, v)
        tensors = (k, v, given.mask, token, offsets, grads.q, grads.gates)
        k_by, v_by, dq_by = (in_units(x, spec.UNIT) for x in (k, v, grads.q))
        strides = (k_by, v_by, given.mask_by, dq_by)
        queries_kernel[(programs,)](
            *packed, *tensors, *tiles, *strides, *sizes, spec=spec, **options
        )

    spec, options = given.spec("keys", q, k, v, grads.k, grads.v)
    programs = cdiv(M, spec.BLOCK_N) * B * G
    if programs:
        tensors = (k, v, given.mask, token, offsets, grads.k, grads.v)
        rows_by = [in_units(x, spec.UNIT) for x in (k, v)]
        grads_by = [in_units(x, spec.UNIT) for x in (grads.k, grads.v)]
        strides = (*rows_by, given.mask_by, *grads_by)
        keys_kernel[(programs,)](*packed, *tensors, *strides, *sizes, spec=spec, **options)
    if given.gated and weights.shape[1] == 1:
        return grads.gates.sum(1, keepdim=True)
    return grads.gates
