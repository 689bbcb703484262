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
    kind: str,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Project and route.

    Args:
        exact: tokens as they came [B, N, C]; the router reads them.
        x: the same in the numbers of the product.
        weight: of the product [O, C]; bias: [O] or None. Numbers as x.
        router_weight: [R, C].
        candidates, shared, routed, kind, padding: see `route.forward`.

    Returns:
        The product [B, N, O], and what `route.forward` returns.
    """
    with torch.autocast(x.device.type, enabled=False):
        product = F.linear(x, weight, bias)
    routed_heads = route.forward(exact, router_weight, candidates, shared, routed, kind, padding)
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
    kind: str,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias and the router's weight; that of a bias that is None is empty."""
    router = (candidates, shared, routed, kind, padding)
    dx, drouter = route.backward(dweights, dprobs, drows, rows, x, router_weight, *router)
    if dproduct is None:
        dbias = weight.new_zeros(0 if bias is None else bias.shape)
        return dx, torch.zeros_like(weight), dbias, drouter
    with torch.autocast(x.device.type, enabled=False):  # backward may be called under it
        grad = dproduct.flatten(0, 1)
        dx.view(-1, dx.shape[-1]).addmm_(grad, weight)
        dweight = grad.t() @ x.flatten(0, 1)
        dbias = weight.new_empty(0) if bias is None else grad.sum(0)
    return dx, dweight, dbias, drouter
