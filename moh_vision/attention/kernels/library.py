"""Register fake implementations (shapes without values) and gradients of the C++ operators with torch.

`build.load` imports this module after it has loaded the library.
"""

import torch

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.contract import (
    add_operator,
    describe_attend,
    describe_route,
    differentiate,
)

OPS = torch.ops.moh_vision
FAKE = torch.library.register_fake


@FAKE("moh_vision::project")
def _(x, weight, bias, token, offsets, heads):
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


@FAKE("moh_vision::pairs")
def _(active):
    B, _, H = active.shape
    count = torch.library.get_ctx().new_dynamic_size()
    token = active.new_empty(count, dtype=torch.int32)
    offsets = active.new_empty(H * B + 1, dtype=torch.int32)
    return token, offsets


# Each function returns the gradients of an operator's inputs, see `contract.differentiate`, argument `backward`.


def _project(grads, inputs, _):
    x, weight, bias, token, offsets, heads = inputs
    dx, dweight, dbias = OPS.project_backward(grads[0], x, weight, token, offsets, heads)
    if bias is None:
        dbias = None
    return dx, dweight, dbias


def _attend(grads, inputs, outputs):
    return OPS.attend_backward(grads[0], *inputs[:3], *outputs, *inputs[3:])


def _combine(grads, inputs, _):
    o, weights, weight, bias, token, offsets, heads = inputs
    computed = OPS.combine_backward(grads[0], o, weights, weight, token, offsets, heads)
    dbias = None
    if bias is not None:
        dbias = grads[0].sum(0)
    return *computed, dbias


for name in (
    "project",
    "attend",
    "combine",
    "route",
    "route_backward",
    "attend_in_place",
    "attend_in_place_backward",
    "attend_product",
    "attend_product_backward",
):
    add_operator(f"moh_vision::{name}")
describe_route("moh_vision", lists_pairs=True)
describe_attend("moh_vision")
differentiate("moh_vision::project", lambda *inputs: (eager.project(*inputs),), _project)
differentiate(
    "moh_vision::attend",
    lambda *inputs: (eager.attend(*inputs),),
    _attend,
    kept=(0, 1),
    constant=(1,),
)
differentiate("moh_vision::combine", lambda *inputs: (eager.combine(*inputs),), _combine)
