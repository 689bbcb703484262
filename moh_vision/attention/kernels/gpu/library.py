"""Register the Triton operators with torch: schemas, fake implementations (shapes without values) and gradients.

torch.compile treats each operator as one opaque call.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.kernels import contract, eager
from moh_vision.attention.kernels.contract import (
    DTYPES,
    WIDEST,
    attend_product_oracle,
    call,
    describe_attend,
    describe_route,
    differentiate,
    gradients_of_parts,
    parts_of_weight,
)
from moh_vision.attention.kernels.gpu import attend as attend_forward
from moh_vision.attention.kernels.gpu import (
    attend_backward,
    project_route,
    route,
    route_attend,
    sequences,
    weigh,
)
from moh_vision.attention.kernels.gpu.pairs import longest_list, pairs

NAME = "moh_vision_triton"
LIBRARY = torch.library.Library(NAME, "DEF")
OPS = torch.ops.moh_vision_triton


def define(schema: str, run: Callable, fake: Callable | None = None) -> None:
    """Register an operator.

    Args:
        schema: name, arguments and results.
        run: computes the operator. Triton launches on the current device, so that is set to the device of the first tensor.
            On a CPU `run` needs Triton's interpreter (TRITON_INTERPRET=1).
        fake: returns results without values, of the right shapes; None: it is registered elsewhere.
    """

    @functools.wraps(run)
    def on_its_device(*args):
        for first_tensor in args:
            if isinstance(first_tensor, Tensor):
                break
        if not first_tensor.is_cuda or first_tensor.get_device() == torch.cuda.current_device():
            return run(*args)
        with torch.cuda.device(first_tensor.device):
            return run(*args)

    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, on_its_device, "CUDA")
    LIBRARY.impl(name, on_its_device, "CPU")
    contract.add_operator(f"{NAME}::{name}", on_its_device)
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
    """Compute attention for the pairs that run, and multiply it by their gates; scores are divided by sqrt(D).

    Queries, keys and values may have any strides. They are copied only if their last dimension is not contiguous, so views
    of one fused product are not copied.

    Args:
        q: queries of all heads [B, H, N, D] in float32, bfloat16 or float16, D at most 256. Where a head is off, its
            query is not read.
        k, v: [B, G, M, D] of the same dtype, G a divisor of H.
        weights: gates [B, N, H] or [B, 1, H], float32; None: all 1.
        token, offsets: the list of pairs, see `moh_vision.attention.routing.Pairs`. `token` may be longer than the
            list; its elements after the last pair are not read.
        is_causal: a query at token n sees keys 0 .. n.
        mask: [B or 1, H or 1, N or 1, M], True (attend) or an additive float; it gets no gradient.

    Returns:
        o: [B, N, H*D], 0 where a head is off or a query sees no key.
        lse: [P] float32, the log-sum-exp of each pair's scores, -inf where the query sees no key. It has no gradient.
    """
    _check_attend(q, k, v, weights, token, offsets, mask)
    inputs = (q, k, v, weights, token, offsets, is_causal, mask)
    return contract.run(f"{NAME}::attend_in_place", *inputs)


def _check_attend(q, k, v, weights, token, offsets, mask) -> None:
    """Raise ValueError for arguments of `attend` that the kernels cannot take."""
    B, H, N, D = q.shape
    _, G, M, _ = k.shape
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}; not one of {DTYPES}"
        )
    if D > WIDEST or k.shape != (B, G, M, D) or v.shape != k.shape or H % G:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
        )
    _check_lists(B, H, N, weights, token, offsets)
    _check_mask(B, H, N, M, mask)


def _check_product(product, heads, kv_heads, weights, token, offsets, mask) -> None:
    """Raise ValueError for arguments of `attend_product` that the kernels cannot take."""
    B, N, width = product.shape
    columns = heads + 2 * kv_heads
    if product.dtype not in DTYPES or heads % kv_heads or width % columns:
        raise ValueError(
            f"product {product.dtype} {tuple(product.shape)} of {heads} heads and {kv_heads} key-value heads"
        )
    if width > WIDEST * columns:
        raise ValueError(f"heads of width {width // columns}, at most {WIDEST}")
    _check_lists(B, heads, N, weights, token, offsets)
    _check_mask(B, heads, N, N, mask)


def _check_lists(B: int, H: int, N: int, weights, token, offsets) -> None:
    if weights is not None:
        if weights.dtype != torch.float32 or weights.shape not in ((B, N, H), (B, 1, H)):
            raise ValueError(
                f"weights are {weights.dtype} {tuple(weights.shape)}, not float32 {(B, N, H)}"
            )
    if offsets.shape != (H * B + 1,) or token.dtype != torch.int32 or offsets.dtype != torch.int32:
        raise ValueError(
            f"token {token.dtype}, offsets {offsets.dtype} {tuple(offsets.shape)}, not int32 {H * B + 1}"
        )


def _check_mask(B: int, H: int, N: int, M: int, mask) -> None:
    if mask is None:
        return
    if mask.dim() != 4 or mask.shape[3] != M:
        raise ValueError(f"mask {tuple(mask.shape)}, not [{B} or 1, {H} or 1, {N} or 1, {M}]")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("the mask requires a gradient, and this operator has none for it")


def attend_product(
    product: Tensor,
    heads: int,
    kv_heads: int,
    weights: Tensor | None,
    token: Tensor,
    offsets: Tensor,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do as `attend` with queries, keys and values that are one tensor, whose gradient is one tensor too.

    Args:
        product: [B, N, (H + 2 * G) * D], grouped q | k | v, and by head in each group.
        heads, kv_heads: H and G.
        weights, token, offsets, is_causal, mask: see `attend`.
    """
    _check_product(product, heads, kv_heads, weights, token, offsets, mask)
    inputs = (product, heads, kv_heads, weights, token, offsets, is_causal, mask)
    return contract.run(f"{NAME}::attend_product", *inputs)


_LISTS = "Tensor? weights, Tensor token, Tensor offsets, bool is_causal, Tensor? mask"
_PRODUCT = f"int heads, int kv_heads, {_LISTS}"
define(
    f"attend_in_place(Tensor q, Tensor k, Tensor v, {_LISTS}) -> (Tensor, Tensor)",
    attend_forward.forward,
)
define(
    f"attend_in_place_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_LISTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    attend_backward.backward,
)
define(
    f"attend_product(Tensor product, {_PRODUCT}) -> (Tensor, Tensor)",
    attend_forward.forward_of_product,
)
define(
    f"attend_product_backward(Tensor grad, Tensor product, Tensor o, Tensor lse, {_PRODUCT})"
    " -> (Tensor, Tensor)",
    attend_backward.backward_of_product,
)
describe_attend(NAME)


# ---- route


def _fake_pairs(active, count):
    B, N, H = active.shape
    token = active.new_empty(longest_list(B, N, H, count), dtype=torch.int32)
    offsets = active.new_empty(H * B + 1, dtype=torch.int32)
    return token, offsets


_ROUTER = "int candidates, int shared, int routed, str gate_form, Tensor? padding"
_FURTHER = "Tensor? second, Tensor? third"  # rows of the router's weight
define(
    f"route(Tensor x, Tensor weight, {_ROUTER}, {_FURTHER}) -> "
    "(Tensor weights, Tensor active, Tensor rows, Tensor probs, Tensor counts)",
    route.forward,
)
define(
    "route_backward(Tensor? dweights, Tensor? dprobs, Tensor? drows, Tensor rows, Tensor x, Tensor weight, "
    f"{_ROUTER}, {_FURTHER}) -> (Tensor dx, Tensor dweight)",
    route.backward,
)
define("pairs(Tensor active, int? count) -> (Tensor token, Tensor offsets)", pairs, _fake_pairs)
describe_route(NAME, lists_pairs=False)


# ---- product and router


def _fake_project_and_route(exact, x, weight, bias, router_weight, *router):
    routed = OPS.route(exact, router_weight, *router)
    return x.new_empty(*x.shape[:2], weight.shape[0]), *routed


def _fake_gradients(x, weight, bias, router_weight, rows):
    """Return the gradients of these inputs of `project_and_route`, without values.

    rows: outputs of the router's linear layer.
    """
    dbias = weight.new_empty(0)
    if bias is not None:
        dbias = weight.new_empty(bias.shape)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight),
        dbias,
        router_weight.new_empty(rows.shape[2], router_weight.shape[1]),
    )


def _fake_project_and_route_backward(
    dproduct, dweights, dprobs, drows, rows, x, weight, bias, router_weight, *router
):
    return _fake_gradients(x, weight, bias, router_weight, rows)


def _project_and_route_gradients(grads, inputs, outputs):
    """See `contract.differentiate`, argument `backward`."""
    dproduct, dweights, _, drouter_outputs, dprobs = grads[:5]
    (router_outputs,) = outputs
    _exact, *remaining = inputs
    grads = (dproduct, dweights, dprobs, drouter_outputs)
    dx, dweight, dbias, drouter = call(
        f"{NAME}::project_and_route_backward", *grads, router_outputs, *remaining
    )
    return None, dx, dweight, *_of_bias_and_router(dbias, drouter, inputs)


def _of_bias_and_router(dbias, drouter, inputs):
    """Return the gradients of the bias and of all inputs after it, of an operator that begins with a projection.

    drouter: gradient of all rows of the router's weight.
    """
    _exact, _, _, bias, router_weight, *settings, second, third = inputs
    if bias is None:
        dbias = None
    first, *further = gradients_of_parts(drouter, router_weight, second, third)
    return dbias, first, *[None] * len(settings), *further


def _project_and_route_oracle(outputs, _exact, x, *weights_and_settings):
    """Project and route in PyTorch, with the router's outputs that the operator saved.

    The tokens of the router, `_exact`, were not saved, and the router's outputs for the rounded tokens x might choose
    other heads.
    """
    return _projected_and_routed(outputs, x, x, *weights_and_settings)


def _projected_and_routed(outputs, read, x, weight, bias, router_weight, *router):
    """Project tokens x and route `read` in PyTorch; outputs: those of the router, which the operator saved."""
    (saved,) = outputs
    # The values are the saved outputs, the gradient is that of the outputs for `read`.
    candidates, shared, routed, gate_form, padding, *further = router
    joint = torch.cat(parts_of_weight(router_weight, *further))
    rounded = eager.gate_logits(read, joint)
    exact = rounded + (saved - rounded).detach()
    balanced = eager.is_balanced(joint, candidates, shared)
    routing = eager.choose(exact, candidates, shared, routed, gate_form, balanced, padding)
    product = F.linear(x, weight, bias)
    return product, routing.weights, routing.active, exact, routing.stats.probs


_PROJECTION = f"Tensor x, Tensor weight, Tensor? bias, Tensor router_weight, {_ROUTER}"
define(
    f"project_and_route(Tensor exact, {_PROJECTION}, {_FURTHER}) -> (Tensor product, "
    "Tensor weights, Tensor active, Tensor rows, Tensor probs, Tensor counts)",
    project_route.forward,
    _fake_project_and_route,
)
define(
    "project_and_route_backward(Tensor? dproduct, Tensor? dweights, Tensor? dprobs, Tensor? drows, "
    f"Tensor rows, {_PROJECTION}, {_FURTHER}) -> (Tensor, Tensor, Tensor, Tensor)",
    project_route.backward,
    _fake_project_and_route_backward,
)
differentiate(
    f"{NAME}::project_and_route",
    _project_and_route_oracle,
    _project_and_route_gradients,
    kept=(3,),
    constant=(2, 5),
    dropped=(0,),
    reads_outputs=True,
)


# ---- product, router and attention


def _fake_route_and_attend(exact, x, weight, bias, router_weight, *settings):
    *router, kv_heads, _, _, second, third = settings
    product, *routed = _fake_project_and_route(
        exact, x, weight, bias, router_weight, *router, second, third
    )
    B, N, _ = x.shape
    _, active, *_ = routed
    H = active.shape[2]
    token, offsets = _fake_pairs(active.expand(B, N, H), router[1] + router[2])
    o = x.new_empty(B, N, weight.shape[0] // (H + 2 * kv_heads) * H)
    lse = x.new_empty(token.shape, dtype=torch.float32)
    return o, *routed, product, lse, token, offsets


def _fake_route_and_attend_backward(
    do, dweights, dprobs, drows, saved, x, weight, bias, router_weight, *settings
):
    _, _, rows, *_ = saved
    return _fake_gradients(x, weight, bias, router_weight, rows)


def _route_and_attend_gradients(grads, inputs, outputs):
    """See `contract.differentiate`, argument `backward`."""
    do, dweights, _, drouter_outputs, dprobs = grads[:5]
    _exact, *remaining = inputs
    grads = (do, dweights, dprobs, drouter_outputs)
    dx, dweight, dbias, drouter = call(
        f"{NAME}::route_and_attend_backward", *grads, outputs, *remaining
    )
    return None, dx, dweight, *_of_bias_and_router(dbias, drouter, inputs)


def _route_and_attend_oracle(outputs, _exact, x, *weights_and_settings):
    """Project, route and attend in PyTorch, with the router's outputs and the pairs that the operator saved."""
    return _attended(outputs, x, x, *weights_and_settings)


def _attended(outputs, read, x, *weights_and_settings):
    """Do as `_route_and_attend_oracle` where the router reads `read`."""
    _, _, rows, _, _, token, offsets = outputs
    *of_router, kv_heads, is_causal, mask, second, third = weights_and_settings
    product, weights, active, exact, probs = _projected_and_routed(
        [rows], read, x, *of_router, second, third
    )
    heads = active.shape[2]
    lists = (token, offsets, is_causal, mask)
    (o,) = attend_product_oracle(product, heads, kv_heads, weights, *lists)
    return o, weights, active, exact, probs


_ATTENDED = "int kv_heads, bool is_causal, Tensor? mask"
_ATTENDED_OUTPUTS = (
    "(Tensor o, Tensor weights, Tensor active, Tensor rows, Tensor probs, Tensor counts, "
    "Tensor product, Tensor lse, Tensor token, Tensor offsets)"
)
# What `differentiate` must know of these outputs.
_OF_ATTENDED_OUTPUTS = dict(
    kept=(0, 1, 3, 6, 7, 8, 9), constant=(2, 5, 6, 7, 8, 9), returned=6, reads_outputs=True
)
define(
    f"route_and_attend(Tensor exact, {_PROJECTION}, {_ATTENDED}, {_FURTHER}) -> {_ATTENDED_OUTPUTS}",
    route_attend.forward,
    _fake_route_and_attend,
)
define(
    "route_and_attend_backward(Tensor? do, Tensor? dweights, Tensor? dprobs, Tensor? drows, "
    f"Tensor[] saved, {_PROJECTION}, {_ATTENDED}, {_FURTHER}) -> (Tensor, Tensor, Tensor, Tensor)",
    route_attend.backward,
    _fake_route_and_attend_backward,
)
differentiate(
    f"{NAME}::route_and_attend",
    _route_and_attend_oracle,
    _route_and_attend_gradients,
    dropped=(0,),
    **_OF_ATTENDED_OUTPUTS,
)


# ---- the same for one choice of each sequence


def _fake_sequences_backward(
    do, dweights, dprobs, drows, saved, read, x, weight, bias, router_weight, *settings
):
    _, _, rows, *_ = saved
    return read.new_empty(read.shape), *_fake_gradients(x, weight, bias, router_weight, rows)


def _sequences_gradients(grads, inputs, outputs):
    """See `contract.differentiate`, argument `backward`."""
    do, dweights, _, drouter_outputs, dprobs = grads[:5]
    grads = (do, dweights, dprobs, drouter_outputs)
    dread, dx, dweight, dbias, drouter = call(
        f"{NAME}::route_sequences_and_attend_backward", *grads, outputs, *inputs
    )
    return dread, dx, dweight, *_of_bias_and_router(dbias, drouter, inputs)


define(
    f"route_sequences_and_attend(Tensor read, {_PROJECTION}, {_ATTENDED}, {_FURTHER})"
    f" -> {_ATTENDED_OUTPUTS}",
    route_attend.forward,
    _fake_route_and_attend,
)
define(
    "route_sequences_and_attend_backward(Tensor? do, Tensor? dweights, Tensor? dprobs, Tensor? drows, "
    f"Tensor[] saved, Tensor read, {_PROJECTION}, {_ATTENDED}, {_FURTHER})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    route_attend.backward_of_sequences,
    _fake_sequences_backward,
)
differentiate(
    f"{NAME}::route_sequences_and_attend",
    _attended,
    _sequences_gradients,
    **_OF_ATTENDED_OUTPUTS,
)


# ---- outputs times gates


def _fake_weigh(o, weights):
    B, H, N, D = o.shape
    return o.new_empty(B, N, H * D)


def _fake_weigh_backward(dy, o, weights):
    B, H, N, D = o.shape
    return o.new_empty(B, N, H, D).transpose(1, 2), weights.new_empty(weights.shape)


def _weigh_gradients(grads, inputs, _):
    return call(f"{NAME}::weigh_backward", grads[0], *inputs)


def _weigh_oracle(o, weights):
    y = o.transpose(1, 2) * weights.unsqueeze(-1)
    return (y.to(o.dtype).flatten(2),)


define("weigh(Tensor o, Tensor weights) -> Tensor", weigh.forward, _fake_weigh)
define(
    "weigh_backward(Tensor dy, Tensor o, Tensor weights) -> (Tensor, Tensor)",
    weigh.backward,
    _fake_weigh_backward,
)
differentiate(f"{NAME}::weigh", _weigh_oracle, _weigh_gradients)


# ---- sequences that choose their heads, without gradients


def _fake_plan(active, weights, count, head_dim):
    S = active.shape[0]
    heads = active.new_empty(S, count, dtype=torch.int32)
    index = active.new_empty(S, count * head_dim, dtype=torch.int32)
    return heads, weights.new_empty(S, count), index


def _fake_project_heads(x, weight, bias, heads, gates, index):
    S, T, _ = x.shape
    K = heads.shape[1]
    shape = (S, T, K, index.shape[1] // K)
    return tuple(x.new_empty(shape) for _ in range(3))


def _fake_project_groups(x, weight, bias, heads, index):
    S, T, _ = x.shape
    K = heads.shape[1]
    return x.new_empty(S, T, K, index.shape[1] // K)


def _fake_slice_rows(weight, bias, index, parts, x):
    rows = parts * index.shape[1]
    of_bias = 0
    if bias is not None:
        of_bias = rows
    return x.new_empty(rows, weight.shape[1]), x.new_empty(of_bias)


def _fake_slice_columns(weight, gates, index, x):
    return x.new_empty(weight.shape[0], index.shape[1])


def _fake_combine_heads(o, weight, bias, gates, index):
    return o.new_empty(*o.shape[:2], weight.shape[0])


define(
    "plan(Tensor active, Tensor weights, int count, int head_dim) -> (Tensor, Tensor, Tensor)",
    sequences.plan,
    _fake_plan,
)
define(
    "project_heads(Tensor x, Tensor weight, Tensor? bias, Tensor heads, Tensor gates, Tensor index)"
    " -> (Tensor, Tensor, Tensor)",
    sequences.project,
    _fake_project_heads,
)
define(
    "project_groups(Tensor x, Tensor weight, Tensor? bias, Tensor heads, Tensor index) -> Tensor",
    sequences.project_groups,
    _fake_project_groups,
)
define(
    "combine_heads(Tensor o, Tensor weight, Tensor? bias, Tensor? gates, Tensor index) -> Tensor",
    sequences.combine,
    _fake_combine_heads,
)
define(
    "slice_rows(Tensor weight, Tensor? bias, Tensor index, int parts, Tensor x) -> (Tensor, Tensor)",
    sequences.slice_rows,
    _fake_slice_rows,
)
define(
    "slice_columns(Tensor weight, Tensor gates, Tensor index, Tensor x) -> Tensor",
    sequences.slice_columns,
    _fake_slice_columns,
)
