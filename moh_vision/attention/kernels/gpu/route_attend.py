"""Project, route and attend as one operator and one node of autograd.

It launches the kernels of `project_route`, `pairs` and `attend`. One call and one node take less time on the host than
three and two, and backward hands the gradients of the gates and of the product on without autograd.
"""

from collections.abc import Sequence

from torch import Tensor

from moh_vision.attention.kernels.gpu import attend, attend_backward, project_route
from moh_vision.attention.kernels.gpu.pairs import pairs


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
        exact, ..., padding, second, third: see `project_route.forward`; the product is queries, keys and values.
        kv_heads, is_causal, mask: see `library.attend_product`.

    Returns:
        The weighted outputs of the heads [B, N, H*D], what `route.forward` returns, and for backward the product, lse (see
        `attend.forward`), and the list of pairs.
    """
    router = (candidates, shared, routed, gate_form, padding, second, third)
    product, *routed_heads = project_route.forward(exact, x, weight, bias, router_weight, *router)
    weights, active, *_ = routed_heads
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
    o, weights, rows, product, lse, token, offsets = saved
    dproduct = None
    dgates = dweights
    if do is not None:
        heads = shared + candidates
        lists = (token, offsets)
        dproduct, dgates = attend_backward.backward_of_product(
            do, product, o, lse, heads, kv_heads, weights, *lists, is_causal, mask
        )
        if dweights is not None:
            dgates = dgates + dweights
    router = (candidates, shared, routed, gate_form, padding, second, third)
    return project_route.backward(
        dproduct, dgates, dprobs, drows, rows, x, weight, bias, router_weight, *router
    )
