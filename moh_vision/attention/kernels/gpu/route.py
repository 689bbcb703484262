"""Route tokens in Triton: forward and backward.

The forward kernel reads a block of tokens once. It multiplies them by the router's weight, computes the gates and counts
how many tokens run each head. The backward kernel computes the gates again, from the saved logits.

The router has a kernel of its own, although its rows could be further columns of the product for queries, keys and
values. That product rounds its results to 16 bits: heads would change, and equal logits would become common.

Arguments, results and gradients are those of the C++ operator, see `kernels.route`, but this operator lists no pairs.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.contract import DTYPES, parts_of_weight
from moh_vision.attention.kernels.gpu.blocks import (
    cdiv,
    contiguous_rows,
    next_power_of_2,
)
from moh_vision.attention.kernels.gpu.launch import launch
from moh_vision.attention.linear import cast, uses_tf32

GATE_FORMS = ("released", "paper", "renormalised")
SMALLEST_GATE = tl.constexpr(1e-30)  # smaller gates become 0
WEIGHT_TOKENS = 64  # tokens of one step of the weight's gradient
LARGEST_SUM = 8192  # most elements [rows, channels] of the weight's gradient that a program holds in registers
PROGRAMS = 528  # of the weight's gradient: four for each multiprocessor of an H100


class Router(NamedTuple):
    """The compile-time constants of a router. The order of its rows is that of `kernels.route.LinearRouter.weight`."""

    CANDIDATES: int
    SHARED: int
    RELEASED: bool  # the gate form is "released"
    RENORMALISED: bool  # the gate form is "renormalised"
    BALANCED: bool
    ROWS: int
    SECOND: int  # the first row in the second tensor of the weight; 0: there is none
    THIRD: int  # the first row in the third tensor of the weight; 0: there is none


@functools.lru_cache
def router_of(
    candidates: int, shared: int, routed: int, gate_form: str, *rows_of_parts: int
) -> Router:
    """Return the compile-time constants of a router; raise ValueError if no router has these numbers.

    Args:
        candidates, shared, routed, gate_form: see `kernels.route.LinearRouter`.
        *rows_of_parts: numbers of rows of the tensors, up to three, that make up the router's weight.
    """
    rows = sum(rows_of_parts)
    if gate_form not in GATE_FORMS:
        raise ValueError(f"route: no kind {gate_form!r}")
    exists = (
        0 <= routed <= candidates
        and shared >= 0
        and shared + candidates > 0
        and (routed > 0 or candidates == 0)
    )
    if not exists or (shared > 0 and gate_form == "renormalised"):
        raise ValueError(
            f"route: {candidates} candidates, {shared} shared and {routed} routed heads, kind {gate_form!r}"
        )
    plain = candidates
    if shared > 1:  # one shared head has no row
        plain += shared
    balanced = shared > 0 and candidates > 0 and rows == plain + 2
    if rows != plain and not balanced:
        raise ValueError(
            f"route: a weight of {rows} rows for {candidates} candidates and {shared} shared heads"
        )
    second_row = third_row = 0
    if len(rows_of_parts) > 1:
        second_row = rows_of_parts[0]
    if len(rows_of_parts) > 2:
        third_row = sum(rows_of_parts[:2])
    return Router(
        candidates,
        shared,
        RELEASED=gate_form == "released",
        RENORMALISED=gate_form == "renormalised",
        BALANCED=balanced,
        ROWS=rows,
        SECOND=second_row,
        THIRD=third_row,
    )


@functools.cache
def tile(width: int) -> tuple[int, int, int]:
    """Return the size of a tile, and the number of warps whose registers hold it.

    Args:
        width: number of rows of the router's weight, or of heads.

    Returns:
        tokens, columns (a power of two, at least `width`) and warps.
    """
    columns = max(16, next_power_of_2(width))
    if columns <= 32:
        return 32, columns, 4
    if columns <= 64:
        return 32, columns, 8
    return 16, columns, 8


# ---- gates


@triton.jit
def _softmax(logits, member):
    """Return the softmax of a tile [BLOCK_N, COLUMNS] over the columns in `member`; 0 in the other columns."""
    logits = tl.where(member, logits, -float("inf"))
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    # Triton's usual division is approximate. With div_rn the gates of equal logits are exactly 1 where all heads run.
    return tl.where(
        member, tl.div_rn(powers, tl.broadcast_to(tl.sum(powers, 1)[:, None], logits.shape)), 0.0
    )


@triton.jit
def _chosen(logits, member, routed):
    """Return a mask of the `routed` largest logits of each token among the columns in `member`.

    Among equal logits the lower column wins. NaN counts as -inf.
    """
    COLUMNS: tl.constexpr = logits.shape[1]
    column = tl.arange(0, COLUMNS)[None, :]
    score = tl.where(logits == logits, logits, -float("inf"))
    left = tl.broadcast_to(member, logits.shape)
    for _ in range(routed):
        largest = tl.max(tl.where(left, score, -float("inf")), 1)
        # `left &` matters where the largest score left is -inf: columns that are chosen already may have the same score.
        first = tl.min(tl.where(left & (score == largest[:, None]), column, COLUMNS), 1)
        left = left & (column != first[:, None])
    return member & (left == 0)


@triton.jit
def _gates(logits, routed, router: tl.constexpr):
    """Return what gates and their gradients are computed from: logits [BLOCK_N, COLUMNS], a column per row of the weight.

    Returns:
        probs: [BLOCK_N, COLUMNS], probabilities of the candidates and, in the columns of shared heads, theirs.
        chosen: [BLOCK_N, COLUMNS], True for chosen candidates.
        shared_alpha, routed_alpha: [BLOCK_N], weights of both groups (Jin 2024, eq. 6).
        shared_factor, routed_factor: [BLOCK_N], a head's gate is its probability times its group's factor.
        selected_sum: [BLOCK_N], sum of the probabilities of chosen candidates.
    """
    column = tl.arange(0, logits.shape[1])[None, :]
    candidate = column < router.CANDIDATES
    probs = tl.zeros(logits.shape, tl.float32)
    chosen = tl.broadcast_to(candidate, logits.shape)
    if router.CANDIDATES > 0:
        probs = _softmax(logits, candidate)
        if routed < router.CANDIDATES:
            chosen = _chosen(logits, candidate, routed)
    selected_sum = tl.sum(tl.where(chosen, probs, 0.0), 1)
    if router.SHARED > 1:
        probs += _softmax(
            logits, (column >= router.CANDIDATES) & (column < router.CANDIDATES + router.SHARED)
        )

    TWO_GROUPS: tl.constexpr = router.SHARED > 0 and router.CANDIDATES > 0
    if router.BALANCED:
        balance = (column >= router.ROWS - 2) & (column < router.ROWS)
        alpha = _softmax(logits, balance)  # Jin 2024, eq. 6
        shared_alpha = tl.sum(tl.where(column == router.ROWS - 2, alpha, 0.0), 1)
        routed_alpha = tl.sum(tl.where(column == router.ROWS - 1, alpha, 0.0), 1)
    else:
        shared_alpha = tl.full([logits.shape[0]], 0.5 if TWO_GROUPS else 1.0, tl.float32)
        routed_alpha = shared_alpha
    shared_factor = shared_alpha
    routed_factor = routed_alpha
    if router.RELEASED:
        GROUPS: tl.constexpr = 2.0 if TWO_GROUPS else 1.0
        shared_factor = router.SHARED * (GROUPS * shared_alpha)
        routed_factor = routed * (GROUPS * routed_alpha)
        # Where all candidates run, the sum is 1 but for rounding, which would keep gates of equal logits from being 1.
        routed_factor = tl.div_rn(
            routed_factor, tl.where(routed < router.CANDIDATES, selected_sum, 1.0)
        )
    if router.RENORMALISED:
        routed_factor = tl.div_rn(routed_factor, selected_sum)
    return probs, chosen, shared_alpha, routed_alpha, shared_factor, routed_factor, selected_sum


@triton.jit
def _weight_rows(weight, second, third, column, C, router: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to the rows `column` of the router's weight, whose rows lie in up to three contiguous tensors.

    ALIGNED: each row begins at a multiple of 16 bytes. Triton cannot see it where there are two tensors, and would load one
    element at a time.
    """
    row = column.to(tl.int64)
    rows = weight + row * C
    if router.SECOND > 0:
        rows = tl.where(column < router.SECOND, rows, second + (row - router.SECOND) * C)
    if router.THIRD > 0:
        rows = tl.where(column < router.THIRD, rows, third + (row - router.THIRD) * C)
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return rows


# Kernels are not specialised to the numbers of tokens and of routed heads, so that a new batch size or budget compiles
# nothing.
@triton.jit(do_not_specialize=["B", "N", "routed"])
def _route_kernel(
    x, weight, second, third, padding, weights, active, rows, probs, counts, B, N, C, x_by, routed,
    router: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program routes BLOCK_N tokens of one sequence and adds their number of runs of each head to counts [B, H].

    Padding is not counted. Counts are integers below 2^24, so their float32 sum is exact, whatever the order of programs.

    WIDEN: x and weight are converted to float32 before they are multiplied.
    """
    HEADS: tl.constexpr = router.SHARED + router.CANDIDATES
    blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = n < N
    column = tl.arange(0, COLUMNS)

    logits = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    if router.ROWS > 0:
        x_rows = x + sequence.to(tl.int64) * x_by[0] + n.to(tl.int64)[:, None] * x_by[1]
        weight_columns = _weight_rows(weight, second, third, column, C, router, ALIGNED)[None, :]
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            x_tile = tl.load(
                x_rows + c[None, :], mask=exists[:, None] & (c < C)[None, :], other=0.0
            )
            w_tile = tl.load(
                weight_columns + c[:, None],
                mask=(c < C)[:, None] & (column < router.ROWS)[None, :],
                other=0.0,
            )
            if WIDEN:
                x_tile = x_tile.to(tl.float32)
                w_tile = w_tile.to(tl.float32)
            # "ieee", never tf32, because rounding must not decide which head wins. For 16-bit inputs it changes nothing:
            # the product of two of their elements is exact in float32.
            logits = tl.dot(x_tile, w_tile, logits, input_precision="ieee")

    probabilities, chosen, _, _, shared_factor, routed_factor, selected_sum = _gates(
        logits, routed, router
    )
    if router.RENORMALISED:
        # Not by way of the factor: the gate of a single chosen head is p / p, which is exactly 1.
        routed_gates = tl.div_rn(
            probabilities, tl.broadcast_to(selected_sum[:, None], probabilities.shape)
        )
    else:
        routed_gates = probabilities * routed_factor[:, None]
    candidate = (column < router.CANDIDATES)[None, :]
    runs = chosen | (column >= router.CANDIDATES)[None, :]
    gates = tl.where(candidate, routed_gates, probabilities * shared_factor[:, None])
    gates = tl.where(runs, gates, 0.0)
    gates = tl.where(gates < SMALLEST_GATE, 0.0, gates)  # NaN stays NaN

    token = sequence.to(tl.int64) * N + n  # [BLOCK_N]
    here = exists[:, None] & candidate
    tl.store(
        rows + token[:, None] * router.ROWS + column[None, :],
        logits,
        mask=exists[:, None] & (column < router.ROWS)[None, :],
    )
    shown = probabilities
    counted = exists
    if padding is not None:
        is_real = tl.load(padding + token, mask=exists, other=1) == 0
        shown = tl.where(is_real[:, None], probabilities, 0.0)
        counted = exists & is_real
    tl.store(probs + token[:, None] * router.CANDIDATES + column[None, :], shown, mask=here)

    # The order of heads is shared, then candidates; columns, like rows of the weight, begin with the candidates.
    head = tl.where(column < router.CANDIDATES, column + router.SHARED, column - router.CANDIDATES)
    is_head = column < (HEADS if router.SHARED != 1 else router.CANDIDATES)
    to = token[:, None] * HEADS + head[None, :]
    tl.store(weights + to, gates, mask=exists[:, None] & is_head[None, :])
    tl.store(active + to, runs.to(tl.uint8), mask=exists[:, None] & is_head[None, :])
    counts += sequence.to(tl.int64) * HEADS
    count = tl.sum((runs & counted[:, None]).to(tl.float32), 0)
    tl.atomic_add(counts + head, count, mask=is_head, sem="relaxed")
    if router.SHARED == 1:  # a single shared head has no column: its probability is 1
        gate = tl.where(shared_factor < SMALLEST_GATE, 0.0, shared_factor)
        tl.store(weights + token * HEADS, gate, mask=exists)
        tl.store(active + token * HEADS, tl.full([BLOCK_N], 1, tl.uint8), mask=exists)
        tl.atomic_add(counts, tl.sum(counted.to(tl.float32), 0), sem="relaxed")


@triton.jit(do_not_specialize=["T", "routed"])
def _route_backward_kernel(
    dlogits, dx, dweights, dprobs, drows, rows, padding, weight, second, third, T, C, dprobs_row, routed,
    router: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program computes the gradients of BLOCK_N tokens and of their logits; it computes their gates again from `rows`."""
    HEADS: tl.constexpr = router.SHARED + router.CANDIDATES
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = token < T
    column = tl.arange(0, COLUMNS)
    candidate = (column < router.CANDIDATES)[None, :]
    in_rows = exists[:, None] & (column < router.ROWS)[None, :]
    row = token[:, None] * router.ROWS + column[None, :]

    logits = tl.load(rows + row, mask=in_rows, other=0.0)
    probs, chosen, shared_alpha, routed_alpha, shared_factor, routed_factor, selected_sum = _gates(
        logits, routed, router
    )
    grad = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    if drows is not None:
        grad = tl.load(drows + row, mask=in_rows, other=0.0)

    dprob = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    if dprobs is not None:
        seen = exists
        if padding is not None:
            seen = exists & (tl.load(padding + token, mask=exists, other=1) == 0)
        dprob = tl.load(
            dprobs + token[:, None] * dprobs_row + column[None, :],
            mask=seen[:, None] & candidate,
            other=0.0,
        )

    if dweights is not None:
        head = tl.where(
            column < router.CANDIDATES, column + router.SHARED, column - router.CANDIDATES
        )
        is_head = column < (HEADS if router.SHARED != 1 else router.CANDIDATES)
        dgate = tl.load(
            dweights + token[:, None] * HEADS + head[None, :],
            mask=exists[:, None] & is_head[None, :],
            other=0.0,
        )
        routed_product = tl.sum(tl.where(chosen, dgate * probs, 0.0), 1)
        dchosen = dgate
        if router.RELEASED:
            # The gradient also flows through the sum of chosen probabilities, which MoA detaches.
            through_sum = tl.where(
                routed < router.CANDIDATES, tl.div_rn(routed_product, selected_sum), 0.0
            )
            dchosen = dgate - through_sum[:, None]
            # One chosen head has the gate p / p, whose gradient is exactly 0; rounding would be scaled to whole steps by Adam.
            constant = (routed == 1) & (routed < router.CANDIDATES)
            dchosen = tl.where(constant, 0.0, dchosen)
        dprob += tl.where(chosen, routed_factor[:, None] * dchosen, 0.0)

        if router.SHARED == 1:
            shared_product = tl.load(dweights + token * HEADS, mask=exists, other=0.0)
        else:
            shared = ((column >= router.CANDIDATES) & (column < HEADS))[None, :]
            shared_product = tl.sum(tl.where(shared, dgate * probs, 0.0), 1)
            dshared = shared_factor[:, None] * probs * (dgate - shared_product[:, None])
            grad += tl.where(shared, dshared, 0.0)
        if router.BALANCED:
            of_shared = shared_factor * shared_product
            of_routed = routed_factor * routed_product
            both = of_shared + of_routed
            grad += tl.where(
                (column == router.ROWS - 2)[None, :],
                (of_shared - shared_alpha * both)[:, None],
                0.0,
            )
            grad += tl.where(
                (column == router.ROWS - 1)[None, :],
                (of_routed - routed_alpha * both)[:, None],
                0.0,
            )

    if router.CANDIDATES > 0:
        mean = tl.sum(tl.where(candidate, probs * dprob, 0.0), 1)
        grad += tl.where(candidate, probs * (dprob - mean[:, None]), 0.0)
    tl.store(dlogits + row, grad, mask=in_rows)

    weight_rows = _weight_rows(weight, second, third, column, C, router, ALIGNED)[:, None]
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        w_tile = tl.load(
            weight_rows + c[None, :],
            mask=(column < router.ROWS)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        dx_tile = tl.dot(grad, w_tile.to(tl.float32), input_precision=PRECISION)
        dx_mask = exists[:, None] & (c < C)[None, :]
        tl.store(
            dx + token[:, None] * C + c[None, :], dx_tile.to(dx.dtype.element_ty), mask=dx_mask
        )


@triton.jit(do_not_specialize=["T", "parts"])
def _weight_gradient_kernel(
    dlogits, x, sums, T, R, C, x_row, parts,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program computes dlogits^T x for BLOCK_C channels and one of `parts` parts of the tokens, into sums [parts, R, C]."""
    tiles = tl.cdiv(C, BLOCK_C)
    c = (tl.program_id(0) % tiles) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.program_id(0) // tiles
    steps = tl.cdiv(T, BLOCK_T)
    first = steps * part // parts * BLOCK_T
    last = steps * (part + 1) // parts * BLOCK_T
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS, BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        real = t < T
        t64 = t.to(tl.int64)
        grad_mask = real[None, :] & (column < R)[:, None]
        grad = tl.load(dlogits + t64[None, :] * R + column[:, None], mask=grad_mask, other=0.0)
        x_mask = real[:, None] & (c < C)[None, :]
        x_tile = tl.load(x + t64[:, None] * x_row + c[None, :], mask=x_mask, other=0.0)
        total = tl.dot(grad, x_tile.to(tl.float32), total, input_precision=PRECISION)
    sums += part.to(tl.int64) * R * C
    out_mask = (column < R)[:, None] & (c < C)[None, :]
    tl.store(sums + column[:, None] * C + c[None, :], total, mask=out_mask)


# ---- the operators


def check(x: Tensor, parts: list[Tensor], padding: Tensor | None) -> None:
    """Raise ValueError for tensors that the kernels cannot read; `parts` are those of the router's weight."""
    dtype = parts[0].dtype
    for given in (x.dtype, dtype):
        if given not in DTYPES:
            raise ValueError(f"route: float32, bfloat16 or float16, not {given}")
    width = x.shape[-1]
    for part in parts:
        if x.dim() != 3 or part.dim() != 2 or part.shape[1] != width:
            raise ValueError(f"route: x {list(x.shape)}, weight {list(part.shape)}")
        if part.dtype != dtype:
            raise ValueError(f"route: weights of two dtypes, {dtype} and {part.dtype}")
    if padding is not None and (padding.dtype != torch.bool or padding.shape != x.shape[:2]):
        raise ValueError("route: padding must be bool [B, N]")


def rows_of(parts: list[Tensor]) -> list[int]:
    """Return the numbers of rows of the tensors that make up the router's weight."""
    return [part.shape[0] for part in parts]  # len(part) takes several times as long


def for_kernels(parts: list[Tensor]) -> tuple[list[Tensor | None], bool]:
    """Prepare the tensors that have the rows of the router's weight.

    Returns:
        The three tensors that kernels read, None for those that do not exist, and ALIGNED of `_weight_rows`.
    """
    contiguous: list[Tensor | None] = [part.contiguous() for part in parts]
    aligned = parts[0].shape[1] * parts[0].itemsize % 16 == 0
    for part in contiguous:
        aligned = aligned and part.data_ptr() % 16 == 0
    return contiguous + [None] * (3 - len(parts)), aligned


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return a bool mask as contiguous uint8, which kernels read; None stays None."""
    if mask is None:
        return None
    return mask.contiguous().view(torch.uint8)


def forward(
    x: Tensor,
    weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    gate_form: str,
    padding: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Route tokens.

    Args:
        x: tokens [B, N, C].
        weight, candidates, shared, routed, gate_form, second, third: see `kernels.route.LinearRouter`.
        padding: bool [B, N], True at padding, where probs are 0 and which counts leave out; or None.

    Returns:
        weights [B, N, H], active (bool) [B, N, H], rows [B, N, R] (outputs of the router's linear layer, the logits),
        probs [B, N, E], counts [B, H].
    """
    parts = parts_of_weight(weight, second, third)
    check(x, parts, padding)
    router = router_of(candidates, shared, routed, gate_form, *rows_of(parts))
    B, N, C = x.shape
    H = shared + candidates
    weights = x.new_empty((B, N, H), dtype=torch.float32)
    rows = weights.new_empty((B, N, router.ROWS))
    probs = weights.new_empty((B, N, candidates))
    counts = weights.new_zeros((B, H))
    active = x.new_empty((B, N, H), dtype=torch.bool)
    if B * N == 0:
        return weights, active, rows, probs, counts

    x = contiguous_rows(x)
    block, columns, warps = tile(max(router.ROWS, H))
    channels = 32
    if x.dtype == weight.dtype != torch.float32:  # 16 bits
        if columns <= 128:
            channels = 64
        if columns == 16:  # measured, see docs/results/speed.md
            channels = 128
            warps = 2
    # Triton's interpreter would multiply the bits of bfloat16 as integers.
    widen = x.dtype != weight.dtype or not x.is_cuda
    outputs = (weights, active.view(torch.uint8), rows, probs, counts)
    weights_of_router, aligned = for_kernels(parts)
    launch(
        _route_kernel,
        B * cdiv(N, block),
        (x, *weights_of_router, as_bytes(padding), *outputs),
        (B, N, C, x.stride()[:2], routed),
        router=router,
        BLOCK_N=block,
        BLOCK_C=channels,
        COLUMNS=columns,
        WIDEN=widen,
        ALIGNED=aligned,
        num_warps=warps,
    )
    return weights, active, rows, probs, counts


def backward(
    dweights: Tensor | None,
    dprobs: Tensor | None,
    drows: Tensor | None,
    rows: Tensor,
    x: Tensor,
    weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    gate_form: str,
    padding: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of all rows of the router's weight [R, C].

    Args:
        dweights, dprobs, drows: gradients of the outputs of `forward` with these names, or None.
        rows: output of `forward`.
        x, weight, ..., third: see `forward`.
    """
    parts = parts_of_weight(weight, second, third)
    check(x, parts, padding)
    router = router_of(candidates, shared, routed, gate_form, *rows_of(parts))
    C = x.shape[2]
    T = x.shape[0] * x.shape[1]
    if T * router.ROWS == 0:
        return x.new_zeros(x.shape), weight.new_zeros(router.ROWS, C)
    dprobs_row = candidates
    if dprobs is not None and dprobs.stride() == (0, 0, 1):
        dprobs_row = (
            0  # one gradient for all tokens, as that of the balance loss, is read where it lies
        )
    else:
        dprobs = float_rows(dprobs)
    dweights = float_rows(dweights)
    drows = float_rows(drows)
    precision = "ieee"
    # For 16-bit tokens tf32 costs nothing: it rounds less than the dtype of their gradients.
    if x.dtype != torch.float32 or uses_tf32():
        precision = "tf32"
    block, columns, warps = tile(router.ROWS)
    channels = 64
    if columns > 128:
        channels = 32
    dlogits = x.new_empty((T, router.ROWS), dtype=torch.float32)
    dx = x.new_empty(x.shape)
    weights_of_router, aligned = for_kernels(parts)
    grads = (dweights, dprobs, drows)
    launch(
        _route_backward_kernel,
        cdiv(T, block),
        (dlogits, dx, *grads, rows.contiguous(), as_bytes(padding), *weights_of_router),
        (T, C, dprobs_row, routed),
        router=router,
        BLOCK_N=block,
        BLOCK_C=channels,
        COLUMNS=columns,
        PRECISION=precision,
        ALIGNED=aligned,
        num_warps=warps,
    )
    dweight = weight_gradient(dlogits, x.reshape(T, C), precision)
    return dx, cast(dweight, weight.dtype)


def float_rows(grad: Tensor | None) -> Tensor | None:
    """Return a gradient as kernels read it, contiguous and in float32; None stays None."""
    if grad is None:
        return None
    return grad.float().contiguous()


def weight_gradient(dlogits: Tensor, x: Tensor, precision: str) -> Tensor:
    """Return dlogits^T x in float32: dlogits [T, R] float32, x [T, C] -> [R, C].

    x is read once, in its own dtype.
    """
    T, R = dlogits.shape
    C = x.shape[1]
    x = contiguous_rows(x)
    _, columns, warps = tile(R)
    # The registers and shared memory that a program needs grow with the rows of the weight.
    channels = min(128, LARGEST_SUM // columns)
    tokens = WEIGHT_TOKENS
    if columns > 64:
        tokens = WEIGHT_TOKENS // 2
    # Programs that share channels sum different parts of the tokens. The partial sums are added in a fixed order, without
    # atomics.
    parts = min(cdiv(T, tokens), max(1, PROGRAMS // cdiv(C, channels)))
    sums = x.new_empty((parts, R, C), dtype=torch.float32)
    launch(
        _weight_gradient_kernel,
        cdiv(C, channels) * parts,
        (dlogits, x, sums),
        (T, R, C, x.stride(0), parts),
        BLOCK_T=tokens,
        BLOCK_C=channels,
        COLUMNS=columns,
        PRECISION=precision,
        num_warps=warps,
    )
    if parts == 1:
        return sums.squeeze(0)
    return sums.sum(0)
