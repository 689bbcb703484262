"""What torch must know of the C++ operators beside their code: shapes without values, and gradients.

Imported once the library is loaded (see `build.load`). Gradients are operators themselves, so autograd keeps what
they read and nothing else. They cannot be differentiated again.
"""

from typing import Optional

import torch
from torch import Tensor

FAKE, AUTOGRAD = torch.library.register_fake, torch.library.register_autograd
OPS = torch.ops.moh_vision


@FAKE("moh_vision::project")
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor], token: Tensor, offsets: Tensor, heads: int) -> Tensor:
    return x.new_empty(token.shape[0], weight.shape[0] // heads)


@FAKE("moh_vision::project_backward")
def _(grad, x, weight, token, offsets, heads):
    return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])


@FAKE("moh_vision::attend")
def _(q, k, v, token, offsets, heads, tokens, source, is_causal, mask):
    return torch.empty_like(q), q.new_empty(q.shape[0], dtype=torch.float32)


@FAKE("moh_vision::attend_backward")
def _(grad, q, k, v, o, lse, token, offsets, heads, tokens, source, is_causal, mask):
    B, G, M, D = k.shape
    dk, dv = (k.new_empty(B, M, G, D).transpose(1, 2) for _ in range(2))
    return torch.empty_like(q), dk, dv


@FAKE("moh_vision::combine")
def _(o, weights, weight, bias, token, offsets, heads):
    return o.new_empty(weights.shape[0], weight.shape[0])


@FAKE("moh_vision::combine_backward")
def _(grad, o, weights, weight, token, offsets, heads):
    return torch.empty_like(o), torch.empty_like(weights), torch.empty_like(weight)


def _keep_project(ctx, inputs, output):
    x, weight, bias, token, offsets, ctx.heads = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, token, offsets)


def _project(ctx, grad):
    dx, dweight, dbias = OPS.project_backward(grad, *ctx.saved_tensors, ctx.heads)
    return dx, dweight, dbias if ctx.has_bias else None, None, None, None


def _keep_attend(ctx, inputs, output):
    q, k, v, token, offsets, ctx.heads, ctx.tokens, source, ctx.is_causal, mask = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, token, offsets, source, mask)


def _attend(ctx, grad, _):
    q, k, v, o, lse, token, offsets, source, mask = ctx.saved_tensors
    grads = OPS.attend_backward(
        grad, q, k, v, o, lse, token, offsets, ctx.heads, ctx.tokens, source, ctx.is_causal, mask
    )
    return *grads, None, None, None, None, None, None, None


def _keep_combine(ctx, inputs, output):
    o, weights, weight, bias, token, offsets, ctx.heads = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(o, weights, weight, token, offsets)


def _combine(ctx, grad):
    do, dweights, dweight = OPS.combine_backward(grad, *ctx.saved_tensors, ctx.heads)
    return do, dweights, dweight, grad.sum(0) if ctx.has_bias else None, None, None, None


AUTOGRAD("moh_vision::project", _project, setup_context=_keep_project)
AUTOGRAD("moh_vision::attend", _attend, setup_context=_keep_attend)
AUTOGRAD("moh_vision::combine", _combine, setup_context=_keep_combine)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "the C++ operators cannot be differentiated twice: set executor='masked', or MOH_VISION_KERNELS=off"
    )


for name in ("project_backward", "attend_backward", "combine_backward"):
    AUTOGRAD(f"moh_vision::{name}", _no_second_derivative)
