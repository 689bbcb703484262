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
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


@FAKE("moh_vision::attend")
def _(q, k, v, token, offsets, heads, tokens, source, is_causal, mask):
    return q.new_empty(q.shape), q.new_empty(q.shape[0], dtype=torch.float32)


@FAKE("moh_vision::attend_backward")
def _(grad, q, k, v, o, lse, token, offsets, heads, tokens, source, is_causal, mask):
    B, G, M, D = k.shape
    dk, dv = (k.new_empty(B, M, G, D).transpose(1, 2) for _ in range(2))
    return q.new_empty(q.shape), dk, dv


@FAKE("moh_vision::combine")
def _(o, weights, weight, bias, token, offsets, heads):
    return o.new_empty(weights.shape[0], weight.shape[0])


@FAKE("moh_vision::combine_backward")
def _(grad, o, weights, weight, token, offsets, heads):
    return o.new_empty(o.shape), weights.new_empty(weights.shape), weight.new_empty(weight.shape)


@FAKE("moh_vision::route")
def _(x, weight, candidates, shared, routed, kind, padding):
    B, N, H = x.shape[0], x.shape[1], shared + candidates
    outputs = (B, N, H), (B, N, H), (B, N, weight.shape[0]), (B, N, candidates), (B, H)
    weights, active, rows, probs, counts = (x.new_empty(shape, dtype=torch.float32) for shape in outputs)
    token, offsets = (x.new_empty(n, dtype=torch.int32) for n in (B * N * (shared + routed), H * B + 1))
    return weights, active.bool(), rows, probs, counts, token, offsets


@FAKE("moh_vision::route_backward")
def _(dweights, dprobs, drows, rows, x, weight, candidates, shared, routed, kind, padding):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@FAKE("moh_vision::pairs")
def _(active):
    B, _, H = active.shape
    count = torch.library.get_ctx().new_dynamic_size()
    return active.new_empty(count, dtype=torch.int32), active.new_empty(H * B + 1, dtype=torch.int32)


def _keep_route(ctx, inputs, output):
    x, weight, *ctx.arguments, padding = inputs
    _, active, rows, _, counts, token, offsets = output
    ctx.mark_non_differentiable(active, counts, token, offsets)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, x, weight, padding)


def _route(ctx, dweights, _active, drows, dprobs, *_):
    rows, x, weight, padding = ctx.saved_tensors
    dx, dweight = OPS.route_backward(dweights, dprobs, drows, rows, x, weight, *ctx.arguments, padding)
    return dx, dweight, None, None, None, None, None


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


AUTOGRAD("moh_vision::route", _route, setup_context=_keep_route)
AUTOGRAD("moh_vision::project", _project, setup_context=_keep_project)
AUTOGRAD("moh_vision::attend", _attend, setup_context=_keep_attend)
AUTOGRAD("moh_vision::combine", _combine, setup_context=_keep_combine)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "the C++ operators cannot be differentiated twice: MOH_VISION_KERNELS=off and executor='masked' leave them out"
    )


for name in ("route_backward", "project_backward", "attend_backward", "combine_backward"):
    AUTOGRAD(f"moh_vision::{name}", _no_second_derivative)
