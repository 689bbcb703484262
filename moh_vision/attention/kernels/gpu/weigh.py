"""Multiply the outputs of all heads by their gates, in Triton.

Each output is read once. Consecutive programs take the heads of the same tokens, which are neighbours in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.blocks import cdiv, next_power_of_2
from moh_vision.attention.kernels.gpu.launch import launch

TOKENS = 64  # tokens of a program


@triton.jit(do_not_specialize=["T", "N"])
def _weigh_kernel(
    o, weights, y, T, N, H, o_by, weights_by, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """A program multiplies the outputs of one head by its gates, for TOKENS tokens: o [B, H, N, D] -> y [B, N, H * D]."""
    h = tl.program_id(0) % H
    t = (tl.program_id(0) // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    b = t // N
    n = t % N
    d = tl.arange(0, WIDTH)
    real = (t < T)[:, None] & (d < D)[None, :]
    # o_by: strides of o along b and n. The heads of a token are contiguous, see `lies_by_token`.
    o_rows = (b * o_by[0] + n * o_by[1])[:, None] + h * D + d[None, :]
    outputs = tl.load(o + o_rows, mask=real, other=0.0)
    # Gates beyond T are undefined: what they multiply is not stored.
    gate = tl.load(weights + b * weights_by[0] + n * weights_by[1] + h * weights_by[2], mask=t < T)
    weighted = outputs.to(tl.float32) * gate.to(tl.float32)[:, None]
    rows = (t * H * D)[:, None] + h * D + d[None, :]
    tl.store(y + rows, weighted.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["T", "N"])
def _weigh_backward_kernel(
    dy, o, weights, do, dweights, T, N, H, o_by, weights_by, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """A program computes the gradients of one head's outputs and gates, for TOKENS tokens.

    do: [B, N, H, D]; dweights: [B, N, H].
    """
    h = tl.program_id(0) % H
    t = (tl.program_id(0) // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    b = t // N
    n = t % N
    d = tl.arange(0, WIDTH)
    real = (t < T)[:, None] & (d < D)[None, :]
    rows = (t * H * D)[:, None] + h * D + d[None, :]
    grad = tl.load(dy + rows, mask=real, other=0.0).to(tl.float32)
    o_rows = (b * o_by[0] + n * o_by[1])[:, None] + h * D + d[None, :]
    outputs = tl.load(o + o_rows, mask=real, other=0.0).to(tl.float32)
    # Gates beyond T are undefined: what they multiply is not stored.
    gate = tl.load(weights + b * weights_by[0] + n * weights_by[1] + h * weights_by[2], mask=t < T)
    tl.store(dweights + t * H + h, tl.sum(grad * outputs, 1), mask=t < T)
    doutputs = grad * gate.to(tl.float32)[:, None]
    tl.store(do + rows, doutputs.to(do.dtype.element_ty), mask=real)


def lies_by_token(o: Tensor) -> bool:
    """Return whether o [B, H, N, D] is a transposed [B, N, H, D] whose last two dimensions are contiguous.

    Outputs of fused attention are.
    """
    return o.stride(3) == 1 and o.stride(1) == o.shape[3]


def weights_by(weights: Tensor) -> tuple[int, int, int]:
    """Return the strides of weights [B, N or 1, H] along b, n and h; 0 along n if there is one weight per sequence."""
    by = weights.stride()
    if weights.shape[1] == 1:  # all tokens of a sequence share its weights
        return by[0], 0, by[2]
    return by


def options(D: int) -> dict[str, int]:
    """Return the compile-time constants and launch options of both kernels."""
    warps = 4
    if D > 128:  # the registers of 4 warps would not hold a wider tile
        warps = 8
    return dict(D=D, WIDTH=next_power_of_2(D), TOKENS=TOKENS, num_warps=warps)


def forward(o: Tensor, weights: Tensor) -> Tensor:
    """Multiply outputs by weights: o [B, H, N, D], weights [B, N or 1, H] -> [B, N, H*D]."""
    if not lies_by_token(o):
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    B, H, N, D = o.shape
    y = o.new_empty(B, N, H * D)
    programs = cdiv(B * N, TOKENS) * H
    if programs:
        o_by = (o.stride(0), o.stride(2))
        numbers = (B * N, N, H, o_by, weights_by(weights))
        launch(_weigh_kernel, programs, (o, weights, y), numbers, **options(D))
    return y


def backward(dy: Tensor, o: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of o and weights, from `dy`, the gradient of the result of `forward`."""
    if not lies_by_token(o):
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    B, H, N, D = o.shape
    do = o.new_empty(B, N, H, D)
    dweights = torch.empty((B, N, H), dtype=torch.float32, device=o.device)
    programs = cdiv(B * N, TOKENS) * H
    if programs:
        tensors = (dy.contiguous(), o, weights, do, dweights)
        o_by = (o.stride(0), o.stride(2))
        numbers = (B * N, N, H, o_by, weights_by(weights))
        launch(_weigh_backward_kernel, programs, tensors, numbers, **options(D))
    if weights.shape[1] == 1:
        dweights = dweights.sum(1, keepdim=True)
    return do.transpose(1, 2), dweights.to(weights.dtype)
