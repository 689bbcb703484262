"""Compute the product for queries, keys and values, and route the same tokens, as one node of autograd.

Both read the tokens x. As one node they need one gradient of x: backward writes the router's part first, and the matrix
product adds its own part to that in place. In forward the router reads the tokens in their original dtype, because
rounding must not change which heads are chosen. For backward only the tokens in the dtype of the product are saved.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moh_vision.attention.kernels.gpu import route
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
    second: Tensor | None,
    third: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Project and route.

    Args:
        exact: tokens in their original dtype [B, N, C], for the router.
        x: the same tokens in the dtype of the product.
        weight, bias: weight [O, C] and bias [O] (or None) of the product, in the dtype of x.
        router_weight: weight of the router [R, C], or its first rows.
        candidates, shared, routed, gate_form, padding, second, third: see `route.forward`.

    Returns:
        The product [B, N, O], and what `route.forward` returns.
    """
    with without_autocast(x):
        product = F.linear(x, weight, bias)
    router = (candidates, shared, routed, gate_form, padding, second, third)
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
    second: Tensor | None,
    third: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias and all rows of the router's weight.

    If the bias is None, its gradient is an empty tensor.

    Args:
        dproduct, dweights, dprobs, drows: gradients of the outputs of `forward` with these names, or None.
        rows: output of `forward`.
        x, weight, ..., third: see `forward`.
    """
    router = (candidates, shared, routed, gate_form, padding, second, third)
    dx, drouter = route.backward(dweights, dprobs, drows, rows, x, router_weight, *router)
    if dproduct is not None:
        with without_autocast(x):  # backward may be called under it
            dx.view(-1, dx.shape[-1]).addmm_(dproduct.flatten(0, 1), weight)
    return dx, *gradients_of_projection(dproduct, x, weight, bias), drouter


def gradients_of_projection(
    dproduct: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weight and of the bias of a product, an empty tensor if there is no bias.

    Args:
        dproduct: gradient of the product, or None: it has none.
        x, weight, bias: see `forward`.
    """
    dbias = weight.new_empty(0)
    if dproduct is None:
        if bias is not None:
            dbias = weight.new_zeros(bias.shape)
        return torch.zeros_like(weight), dbias
    grad = dproduct.flatten(0, 1)
    with without_autocast(x):
        dweight = grad.t() @ x.flatten(0, 1)
        if bias is not None:
            dbias = grad.sum(0)
    return dweight, dbias
