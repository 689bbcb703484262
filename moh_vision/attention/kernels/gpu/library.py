"""What torch knows of the Triton operators: schemas, shapes without values, and gradients.

torch.compile sees each of them as one call that it does not look into. Gradients are operators themselves, so autograd
keeps what they read and nothing else. They cannot be differentiated again.
"""

import functools
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from moh_vision.attention.kernels.gpu import products, route
from moh_vision.attention.kernels.gpu.attend import backward as attend_backward
from moh_vision.attention.kernels.gpu.attend import forward as attend_forward
from moh_vision.attention.kernels.gpu.decode import forward as decode_forward

NAME = "moh_vision_triton"
LIBRARY = torch.library.Library(NAME, "DEF")
OPS = torch.ops.moh_vision_triton
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # head width


def define(schema: str, run: Callable, fake: Callable) -> None:
    """Add an operator. Triton launches on the current device: `run` gets that of its first argument.

    On a CPU `run` works in Triton's interpreter only (TRITON_INTERPRET=1).
    """

    @functools.wraps(run)
    def on_its_device(x, *args):
        with torch.cuda.device_of(x):
            return run(x, *args)

    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, on_its_device, "CUDA")
    LIBRARY.impl(name, on_its_device, "CPU")
    torch.library.register_fake(f"{NAME}::{name}", fake, lib=LIBRARY)


def differentiate(name: str, backward: Callable, keep: Optional[Callable] = None) -> None:
    torch.library.register_autograd(f"{NAME}::{name}", backward, setup_context=keep, lib=LIBRARY)


def no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "the Triton operators cannot be differentiated twice: MOH_VISION_KERNELS=off and executor='masked' leave them out"
    )


# ---- attend


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Optional[Tensor],
    token: Tensor,
    offsets: Tensor,
    is_causal: bool = False,
    mask: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
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

    Raises:
        ValueError: other dtypes or shapes, or a mask that requires a gradient.
    """
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}; not one of {DTYPES}")
    if D > WIDEST or k.shape != (B, G, M, D) or v.shape != k.shape or H % G:
        raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}")
    if weights is not None and (weights.dtype != torch.float32 or weights.shape not in ((B, N, H), (B, 1, H))):
        raise ValueError(f"weights are {weights.dtype} {tuple(weights.shape)}, not float32 {(B, N, H)}")
    if offsets.shape != (H * B + 1,) or token.dtype != torch.int32 or offsets.dtype != torch.int32:
        raise ValueError(f"token {token.dtype}, offsets {offsets.dtype} {tuple(offsets.shape)}, not int32 {H * B + 1}")
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


def _keep_attend(ctx, inputs, output):
    q, k, v, weights, token, offsets, ctx.is_causal, mask = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, weights, token, offsets, mask)


def _attend(ctx, do, _):
    q, k, v, o, lse, weights, token, offsets, mask = ctx.saved_tensors
    dq, dk, dv, dgates = OPS.attend_backward(do, q, k, v, o, lse, weights, token, offsets, ctx.is_causal, mask)
    return dq, dk, dv, None if weights is None else dgates, None, None, None, None


_LISTS = "Tensor? weights, Tensor token, Tensor offsets, bool is_causal, Tensor? mask"
define(f"attend(Tensor q, Tensor k, Tensor v, {_LISTS}) -> (Tensor, Tensor)", attend_forward, _fake_attend)
define(
    f"attend_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_LISTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    attend_backward,
    _fake_attend_backward,
)
differentiate("attend", _attend, _keep_attend)
differentiate("attend_backward", no_second_derivative)


# ---- products of whole sequences with the heads that each of them chose


def project_heads(x: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor, head_dim: int) -> Tensor:
    """`kernels.project_heads` in one kernel: x [B, M, C], weight [H*D, C], heads [B, K] int32 -> [B, M, K, D].

    Raises:
        ValueError: other dtypes than float32, bfloat16 and float16, or different ones, or shapes that do not fit.
    """
    check_products(x, weight, bias, heads)
    if weight.shape[1] != x.shape[2] or weight.shape[0] % head_dim:
        raise ValueError(f"tokens {tuple(x.shape)}, weight {tuple(weight.shape)}, heads of {head_dim}")
    return OPS.project_heads(x, weight, bias, heads, head_dim)


def combine_heads(o: Tensor, gates: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor) -> Tensor:
    """`kernels.combine_heads` in one kernel: o [B, N, K, D], gates [B, K] float32, weight [C, H*D] -> [B, N, C].

    Raises:
        ValueError: as in `project_heads`, or other gates.
    """
    check_products(o, weight, bias, heads)
    if o.shape[2] != heads.shape[1] or weight.shape[1] % o.shape[3]:
        raise ValueError(f"outputs {tuple(o.shape)}, heads {tuple(heads.shape)}, weight {tuple(weight.shape)}")
    if gates.dtype != torch.float32 or gates.shape != heads.shape:
        raise ValueError(f"gates are {gates.dtype} {tuple(gates.shape)}, not float32 {tuple(heads.shape)}")
    return OPS.combine_heads(o, gates, weight, bias, heads)


def check_products(x: Tensor, weight: Tensor, bias: Optional[Tensor], heads: Tensor) -> None:
    dtypes = {x.dtype, weight.dtype} | (set() if bias is None else {bias.dtype})
    if len(dtypes) > 1 or x.dtype not in DTYPES:
        raise ValueError(f"inputs, weight and bias are {dtypes}; they must be of one dtype, one of {DTYPES}")
    if heads.dtype != torch.int32 or heads.dim() != 2 or heads.shape[0] != x.shape[0]:
        raise ValueError(f"heads are {heads.dtype} {tuple(heads.shape)}, not int32 [{x.shape[0]}, K]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)}, weight {tuple(weight.shape)}")


def _fake_project_heads(x, weight, bias, heads, head_dim):
    return x.new_empty(*x.shape[:2], heads.shape[1], head_dim)


def _fake_project_heads_backward(grad, x, weight, heads, has_bias):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0] if has_bias else 0)


def _fake_combine_heads(o, gates, weight, bias, heads):
    return o.new_empty(*o.shape[:2], weight.shape[0])


def _fake_combine_heads_backward(grad, o, gates, weight, heads):
    return o.new_empty(o.shape), gates.new_empty(gates.shape), weight.new_empty(weight.shape)


def _keep_project_heads(ctx, inputs, output):
    x, weight, bias, heads, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, heads)


def _project_heads(ctx, grad):
    dx, dweight, dbias = OPS.project_heads_backward(grad, *ctx.saved_tensors, ctx.has_bias)
    return dx, dweight, dbias if ctx.has_bias else None, None, None


def _keep_combine_heads(ctx, inputs, output):
    o, gates, weight, bias, heads = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(o, gates, weight, heads)


def _combine_heads(ctx, grad):
    gradients = OPS.combine_heads_backward(grad, *ctx.saved_tensors)
    return *gradients, grad.sum((0, 1)) if ctx.has_bias else None, None


define(
    "project_heads(Tensor x, Tensor weight, Tensor? bias, Tensor heads, int head_dim) -> Tensor",
    products.project,
    _fake_project_heads,
)
define(
    "project_heads_backward(Tensor grad, Tensor x, Tensor weight, Tensor heads, bool has_bias)"
    " -> (Tensor, Tensor, Tensor)",
    products.project_backward,
    _fake_project_heads_backward,
)
define(
    "combine_heads(Tensor o, Tensor gates, Tensor weight, Tensor? bias, Tensor heads) -> Tensor",
    products.combine,
    _fake_combine_heads,
)
define(
    "combine_heads_backward(Tensor grad, Tensor o, Tensor gates, Tensor weight, Tensor heads) -> (Tensor, Tensor, Tensor)",
    products.combine_backward,
    _fake_combine_heads_backward,
)
differentiate("project_heads", _project_heads, _keep_project_heads)
differentiate("combine_heads", _combine_heads, _keep_combine_heads)
differentiate("project_heads_backward", no_second_derivative)
differentiate("combine_heads_backward", no_second_derivative)


# ---- route


def _fake_route(x, weight, candidates, shared, routed, kind, padding):
    B, N, H = x.shape[0], x.shape[1], shared + candidates
    outputs = (B, N, H), (B, N, weight.shape[0]), (B, N, candidates), (B, H)
    weights, rows, probs, counts = (x.new_empty(shape, dtype=torch.float32) for shape in outputs)
    token, offsets = (x.new_empty(n, dtype=torch.int32) for n in (B * N * (shared + routed), H * B + 1))
    return weights, x.new_empty((B, N, H), dtype=torch.bool), rows, probs, counts, token, offsets


def _fake_route_backward(rows, x, weight, *rest):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _fake_pairs(active):
    B, N, H = active.shape
    return tuple(active.new_empty(n, dtype=torch.int32) for n in (B * N * H, H * B + 1))


def _keep_route(ctx, inputs, output):
    x, weight, *ctx.arguments, padding = inputs
    _, active, rows, _, counts, token, offsets = output
    ctx.mark_non_differentiable(active, counts, token, offsets)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, x, weight, padding)


def _route(ctx, dweights, _active, drows, dprobs, *_):
    rows, x, weight, padding = ctx.saved_tensors
    dx, dweight = OPS.route_backward(rows, x, weight, dweights, dprobs, drows, *ctx.arguments, padding)
    return dx, dweight, None, None, None, None, None


define(
    "route(Tensor x, Tensor weight, int candidates, int shared, int routed, str kind, Tensor? padding) -> "
    "(Tensor weights, Tensor active, Tensor rows, Tensor probs, Tensor counts, Tensor token, Tensor offsets)",
    route.forward,
    _fake_route,
)
define(
    "route_backward(Tensor rows, Tensor x, Tensor weight, Tensor? dweights, Tensor? dprobs, Tensor? drows, "
    "int candidates, int shared, int routed, str kind, Tensor? padding) -> (Tensor dx, Tensor dweight)",
    route.backward,
    _fake_route_backward,
)
define("pairs(Tensor active) -> (Tensor token, Tensor offsets)", route.pairs, _fake_pairs)
differentiate("route", _route, _keep_route)
differentiate("route_backward", no_second_derivative)


# ---- decode


def decode(
    q: Tensor, k: Tensor, v: Tensor, weights: Optional[Tensor], active: Tensor, mask: Optional[Tensor] = None
) -> Tensor:
    """Weighted attention of one token that reads only the keys and values of heads that run. It has no gradient.

    Query heads of one key-value head are computed together, so a key-value head is left out where all of them are off.
    Scores are divided by sqrt(D). Sums are in float32, in an order that depends on shapes alone.

    Args:
        q: queries [B, H, 1, D], float32, bfloat16 or float16, D at most 256.
        k, v: [B, G, M, D] of the same dtype, G a divisor of H. They may be views of a larger cache. What they hold for
            heads that are not read, and for keys that the mask hides from all heads, may be anything, also NaN.
        weights: gates [B, 1, H]; None: all 1.
        active: [B, 1, H], True where a head runs.
        mask: [B or 1, H or 1, 1, M], True (attend) or an additive float; None: all keys.

    Returns:
        o [B, 1, H*D]: 0 for heads that are off or see no key.

    Raises:
        ValueError: other dtypes or shapes, or a mask that requires a gradient.
    """
    (B, H, N, D), (_, G, M, _) = q.shape, k.shape
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}; not one of {DTYPES}")
    if N != 1 or D > WIDEST or k.shape != (B, G, M, D) or v.shape != k.shape or H % G:
        raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}")
    if active.dtype != torch.bool or active.shape != (B, 1, H) or (weights is not None and weights.shape != (B, 1, H)):
        raise ValueError(f"active heads and their weights are not bool and float {(B, 1, H)}")
    if mask is not None and (mask.dim() != 4 or mask.shape[2:] != (1, M)):
        raise ValueError(f"mask {tuple(mask.shape)}, not [{B} or 1, {H} or 1, 1, {M}]")
    return OPS.decode(q, k, v, weights, active, mask)


def _fake_decode(q, k, v, weights, active, mask):
    B, H, N, D = q.shape
    return q.new_empty(B, N, H * D)


define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor? weights, Tensor active, Tensor? mask) -> Tensor",
    decode_forward,
    _fake_decode,
)
