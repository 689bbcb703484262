"""The product for queries, keys and values and the router of the same tokens, as one node of autograd.

Both read x, so backward has one gradient of x: the router's is written first, and the product's is added to it by the
matrix product itself. Forward routes tokens as they came, which rounding must not change. Backward keeps them once, in
the numbers of the product.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.kernels.gpu import route


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Project and route.

    Args:
        exact: tokens as they came [B, N, C]; the router reads them.
        x: the same in the numbers of the product.
        weight, bias: [O, C], and [O] or None, of the product, in the numbers of x.
        router_weight: [R, C].
        candidates, shared, routed, gate_form, padding: see `route.forward`.

    Returns:
        The product [B, N, O], and what `route.forward` returns.
    """
    with torch.autocast(x.device.type, enabled=False):
        product = F.linear(x, weight, bias)
    router = (candidates, shared, routed, gate_form, padding)
    routed_heads = route.forward(exact, router_weight, *router)
    return product, *routed_heads


def backward(
    dproduct: Tensor | None,
    dweights: Tensor | None,
    dprobs: Tensor | None,
    drows: Tensor | None,
    rows: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    router_weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    gate_form: str,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of x, weight, bias and the router's weight.

    The gradient of a bias that is None is empty.

    Args:
        dproduct, dweights, dprobs, drows: gradients of those outputs of `forward`, or None.
        rows: output of `forward`.
        x, weight, ..., padding: see `forward`.
    """
    router = (candidates, shared, routed, gate_form, padding)
    dx, drouter = route.backward(dweights, dprobs, drows, rows, x, router_weight, *router)
    dbias = weight.new_empty(0)
    if dproduct is None:
        if bias is not None:
            dbias = weight.new_zeros(bias.shape)
        return dx, torch.zeros_like(weight), dbias, drouter
    with torch.autocast(x.device.type, enabled=False):  # backward may be called under it
        grad = dproduct.flatten(0, 1)
        dx.view(-1, dx.shape[-1]).addmm_(grad, weight)
        dweight = grad.t() @ x.flatten(0, 1)
        if bias is not None:
            dbias = grad.sum(0)
    return dx, dweight, dbias, drouter
