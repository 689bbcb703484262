"""Project, route and attend as one operator and one node of autograd.

It launches the kernels of `project_route`, `pairs` and `attend`. One call and one node take less time on the host than
three and two, and backward hands the gradients of the gates and of the product on without autograd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moh_vision.attention.kernels.gpu import attend, attend_backward, project_route, route
from moh_vision.attention.kernels.gpu.pairs import pairs
from moh_vision.attention.linear import without_autocast


def forward(
    exact: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    router_weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    gate_form: str,
    padding: Tensor | None,
    kv_heads: int,
    is_causal: bool,
    mask: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
) -> tuple[Tensor, ...]:
    """Project, route and attend.

    Args:
        exact, ..., padding, second, third: see `project_route.forward`; the product is queries, keys and values. `exact` may
            have one vector for each sequence [B, 1, C], which chooses for all its tokens.
        kv_heads, is_causal, mask: see `library.attend_product`.

    Returns:
        The weighted outputs of the heads [B, N, H*D], what `route.forward` returns, and for backward the product, lse (see
        `attend.forward`), and the list of pairs.
    """
    router = (candidates, shared, routed, gate_form, padding, second, third)
    product, *routed_heads = project_route.forward(exact, x, weight, bias, router_weight, *router)
    weights, active, *_ = routed_heads
    B, N, _ = x.shape
    if active.shape[1] != N:
        active = active.expand(B, N, -1)
    lists = pairs(active, shared + routed)
    heads = shared + candidates
    o, lse = attend.forward_of_product(product, heads, kv_heads, weights, *lists, is_causal, mask)
    return o, *routed_heads, product, lse, *lists


def backward(
    do: Tensor | None,
    dweights: Tensor | None,
    dprobs: Tensor | None,
    drows: Tensor | None,
    saved: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    router_weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    gate_form: str,
    padding: Tensor | None,
    kv_heads: int,
    is_causal: bool,
    mask: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias and all rows of the router's weight.

    If the bias is None, its gradient is an empty tensor.

    Args:
        do, dweights, dprobs, drows: gradients of the outputs of `forward` with these names, or None.
        saved: o, weights, rows, product, lse, token and offsets, outputs of `forward`.
        x, ..., third: see `forward`.
    """
    heads = shared + candidates
    dproduct, dgates, rows = _through_attention(
        do, dweights, saved, heads, kv_heads, is_causal, mask
    )
    router = (candidates, shared, routed, gate_form, padding, second, third)
    return project_route.backward(
        dproduct, dgates, dprobs, drows, rows, x, weight, bias, router_weight, *router
    )


def backward_of_sequences(
    do: Tensor | None,
    dweights: Tensor | None,
    dprobs: Tensor | None,
    drows: Tensor | None,
    saved: Sequence[Tensor],
    read: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    router_weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    gate_form: str,
    padding: Tensor | None,
    kv_heads: int,
    is_causal: bool,
    mask: Tensor | None,
    second: Tensor | None,
    third: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do as `backward` where the router read one vector for each sequence, `read` [B, 1, C], and none of x.

    Returns:
        The gradients of read, x, weight, bias and all rows of the router's weight.
    """
    heads = shared + candidates
    dproduct, dgates, rows = _through_attention(
        do, dweights, saved, heads, kv_heads, is_causal, mask
    )
    router = (candidates, shared, routed, gate_form, padding, second, third)
    dread, drouter = route.backward(dgates, dprobs, drows, rows, read, router_weight, *router)
    if dproduct is None:
        dx = torch.zeros_like(x)
    else:
        with without_autocast(x):  # backward may be called under it
            dx = dproduct @ weight
    of_projection = project_route.gradients_of_projection(dproduct, x, weight, bias)
    return dread, dx, *of_projection, drouter


def _through_attention(
    do: Tensor | None,
    dweights: Tensor | None,
    saved: Sequence[Tensor],
    heads: int,
    kv_heads: int,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of the product and of the gates, None where there is none, and `rows` of `saved`."""
    o, weights, rows, product, lse, token, offsets = saved
    if do is None:
        return None, dweights, rows
    lists = (token, offsets)
    dproduct, dgates = attend_backward.backward_of_product(
        do, product, o, lse, heads, kv_heads, weights, *lists, is_causal, mask
    )
    if dweights is not None:
        dgates = dgates + dweights
    return dproduct, dgates, rows
