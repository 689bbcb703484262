"""What torch knows of the Triton operators: schemas, shapes without values, and gradients.

torch.compile sees each of them as one call that it does not look into.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moh_vision.attention.kernels import eager
from moh_vision.attention.kernels.contract import DTYPES, WIDEST, describe_route, differentiate
from moh_vision.attention.kernels.gpu import route
from moh_vision.attention.kernels.gpu.attend import backward as attend_backward
from moh_vision.attention.kernels.gpu.attend import forward as attend_forward

NAME = "moh_vision_triton"
LIBRARY = torch.library.Library(NAME, "DEF")
OPS = torch.ops.moh_vision_triton


def define(schema: str, run: Callable, fake: Callable | None = None) -> None:
    """Add an operator. Triton launches on the current device: `run` gets that of its first tensor.

    On a CPU `run` works in Triton's interpreter only (TRITON_INTERPRET=1).
    """

    @functools.wraps(run)
    def on_its_device(*args):
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return run(*args)

    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, on_its_device, "CUDA")
    LIBRARY.impl(name, on_its_device, "CPU")
    if fake is not None:
        torch.library.register_fake(f"{NAME}::{name}", fake)


# ---- attend


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the pairs that run, times their gates; scores are divided by sqrt(D).

    Queries, keys and values may have any strides: views of one fused product are not copied, if a head's numbers lie
    side by side.

    Args:
        q: queries of all heads [B, H, N, D], float32, bfloat16 or float16, D at most 256; those of heads that are off
            are not read.
        k, v: [B, G, M, D] of the same dtype, G a divisor of H.
        weights: gates [B, N, H] or [B, 1, H], float32; None: all 1.
        token, offsets: the list of pairs, see `moh_vision.attention.routing.Pairs`. `token` may be longer than the
            list: what follows it is not read.
        is_causal: a query at token n sees keys 0 .. n.
        mask: [B or 1, H or 1, N or 1, M], True (attend) or an additive float; it gets no gradient.

    Returns:
        o [B, N, H*D], 0 where a head is off or a query sees no key; and the log of the sum of exponentials of every
        pair's scores [P], float32, -inf where it sees no key. The second has no gradient.
    """
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}; not one of {DTYPES}"
        )
    if D > WIDEST or k.shape != (B, G, M, D) or v.shape != k.shape or H % G:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
        )
    if weights is not None and (
        weights.dtype != torch.float32 or weights.shape not in ((B, N, H), (B, 1, H))
    ):
        raise ValueError(
            f"weights are {weights.dtype} {tuple(weights.shape)}, not float32 {(B, N, H)}"
        )
    if offsets.shape != (H * B + 1,) or token.dtype != torch.int32 or offsets.dtype != torch.int32:
        raise ValueError(
            f"token {token.dtype}, offsets {offsets.dtype} {tuple(offsets.shape)}, not int32 {H * B + 1}"
        )
    if mask is not None and (mask.dim() != 4 or mask.shape[3] != M):
        raise ValueError(f"mask {tuple(mask.shape)}, not [{B} or 1, {H} or 1, {N} or 1, {M}]")
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("the mask requires a gradient, and this operator has none for it")
    return OPS.attend(q, k, v, weights, token, offsets, is_causal, mask)


def _fake_attend(q, k, v, weights, token, offsets, is_causal, mask):
    B, H, N, D = q.shape
    return q.new_empty(B, N, H * D), q.new_empty(token.shape, dtype=torch.float32)


def _fake_attend_backward(do, q, k, v, o, lse, weights, token, offsets, is_causal, mask):
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    dq, dk, dv = q.new_empty(B, N, H, D), k.new_empty(B, M, G, D), v.new_empty(B, M, G, D)
    dgates = q.new_empty((0,) if weights is None else weights.shape, dtype=torch.float32)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dgates


def _attend(grads, inputs, outputs):
    *computed, dgates = OPS.attend_backward(grads[0], *inputs[:3], *outputs, *inputs[3:])
    return *computed, None if inputs[3] is None else dgates


def _attend_oracle(q, k, v, weights, token, offsets, is_causal, mask):
    B, H, N, D = q.shape
    pairs = token[: offsets[-1]], offsets
    where = eager.places(*pairs, H)
    rows = q.transpose(1, 2).reshape(-1, D).index_select(0, where)
    o = eager.attend(rows, k, v, *pairs, H, N, None, is_causal, mask)
    if weights is not None:
        o = (o * weights.expand(B, N, H).flatten().index_select(0, where).unsqueeze(1)).to(q.dtype)
    return (eager.place(o, where, B * N * H).view(B, N, H * D),)


_LISTS = "Tensor? weights, Tensor token, Tensor offsets, bool is_causal, Tensor? mask"
define(
    f"attend(Tensor q, Tensor k, Tensor v, {_LISTS}) -> (Tensor, Tensor)",
    attend_forward,
    _fake_attend,
)
define(
    f"attend_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_LISTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    attend_backward,
    _fake_attend_backward,
)
differentiate(f"{NAME}::attend", _attend_oracle, _attend, kept=(0, 1), constant=(1,))


# ---- route


def _fake_pairs(active):
    B, N, H = active.shape
    return tuple(active.new_empty(n, dtype=torch.int32) for n in (B * N * H, H * B + 1))


define(
    "route(Tensor x, Tensor weight, int candidates, int shared, int routed, str kind, Tensor? padding) -> "
    "(Tensor weights, Tensor active, Tensor rows, Tensor probs, Tensor counts, Tensor token, Tensor offsets)",
    route.forward,
)
define(
    "route_backward(Tensor? dweights, Tensor? dprobs, Tensor? drows, Tensor rows, Tensor x, Tensor weight, "
    "int candidates, int shared, int routed, str kind, Tensor? padding) -> (Tensor dx, Tensor dweight)",
    route.backward,
)
define("pairs(Tensor active) -> (Tensor token, Tensor offsets)", route.pairs, _fake_pairs)
describe_route(NAME)
