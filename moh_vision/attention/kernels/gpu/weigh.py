"""Outputs of all heads times their gates, in Triton: each number is read once, in the order in which they lie."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moh_vision.attention.kernels.gpu.blocks import cdiv, next_power_of_2

TOKENS = 64  # of a program


@triton.jit(do_not_specialize=["T", "N"])
def _weigh_kernel(
    o, weights, y, T, N, H, o_by, weights_by, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """A program weighs one head of TOKENS tokens."""
    h = tl.program_id(0) % H
    t = (tl.program_id(0) // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    b = t // N
    n = t % N
    d = tl.arange(0, WIDTH)
    real = (t < T)[:, None] & (d < D)[None, :]
    o_rows = (b * o_by[0] + n * o_by[1])[:, None] + h * D + d[None, :]
    x = tl.load(o + o_rows, mask=real, other=0.0)
    gate = tl.load(weights + b * weights_by[0] + n * weights_by[1] + h * weights_by[2], mask=t < T)
    x = x.to(tl.float32) * gate.to(tl.float32)[:, None]
    rows = (t * H * D)[:, None] + h * D + d[None, :]
    tl.store(y + rows, x.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["T", "N"])
def _weigh_backward_kernel(
    dy, o, weights, do, dweights, T, N, H, o_by, weights_by, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """A program computes both gradients of one head of TOKENS tokens: do [B, N, H, D], dweights [B, N, H]."""
    h = tl.program_id(0) % H
    t = (tl.program_id(0) // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    b = t // N
    n = t % N
    d = tl.arange(0, WIDTH)
    real = (t < T)[:, None] & (d < D)[None, :]
    rows = (t * H * D)[:, None] + h * D + d[None, :]
    grad = tl.load(dy + rows, mask=real, other=0.0).to(tl.float32)
    o_rows = (b * o_by[0] + n * o_by[1])[:, None] + h * D + d[None, :]
    x = tl.load(o + o_rows, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(weights + b * weights_by[0] + n * weights_by[1] + h * weights_by[2], mask=t < T)
    tl.store(dweights + t * H + h, tl.sum(grad * x, 1), mask=t < T)
    x = grad * gate.to(tl.float32)[:, None]
    tl.store(do + rows, x.to(do.dtype.element_ty), mask=real)


def lies_by_token(o: Tensor) -> bool:
    """Return whether the heads of a token lie side by side in o [B, H, N, D], as fused attention leaves them."""
    return o.stride(3) == 1 and o.stride(1) == o.shape[3]


def weights_by(weights: Tensor) -> tuple[int, int, int]:
    """Strides of weights [B, N or 1, H]."""
    by = weights.stride()
    if weights.shape[1] == 1:  # one weight of a sequence serves all tokens
        return by[0], 0, by[2]
    return by


def options(D: int) -> dict[str, int]:
    """Return what a kernel is compiled for."""
    warps = 4
    if D > 128:  # 4 would not hold a wider tile in their registers
        warps = 8
    return dict(D=D, WIDTH=next_power_of_2(D), TOKENS=TOKENS, num_warps=warps)


def forward(o: Tensor, weights: Tensor) -> Tensor:
    """o [B, H, N, D] times weights [B, N or 1, H] -> [B, N, H*D]."""
    if not lies_by_token(o):
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    B, H, N, D = o.shape
    y = o.new_empty(B, N, H * D)
    programs = cdiv(B * N, TOKENS) * H
    if programs:
        o_by = (o.stride(0), o.stride(2))
        _weigh_kernel[(programs,)](
            o, weights, y, B * N, N, H, o_by, weights_by(weights), **options(D)
        )
    return y


def backward(dy: Tensor, o: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of o and weights, from the gradient of the result of `forward`."""
    if not lies_by_token(o):
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    B, H, N, D = o.shape
    do = o.new_empty(B, N, H, D)
    dweights = torch.empty((B, N, H), dtype=torch.float32, device=o.device)
    programs = cdiv(B * N, TOKENS) * H
    if programs:
        tensors = (dy.contiguous(), o, weights, do, dweights)
        o_by = (o.stride(0), o.stride(2))
        _weigh_backward_kernel[(programs,)](
            *tensors, B * N, N, H, o_by, weights_by(weights), **options(D)
        )
    if weights.shape[1] == 1:
        dweights = dweights.sum(1, keepdim=True)
    return do.transpose(1, 2), dweights.to(weights.dtype)
