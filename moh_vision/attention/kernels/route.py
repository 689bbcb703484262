"""Route tokens: find the gates and the heads that run, for routers of one linear layer.

On a GPU this is one Triton operator (see `gpu.route`), on a CPU one C++ operator if it is built (see `build`), elsewhere
plain PyTorch. The three may differ in the last bit of logits, because they sum in different orders. Among equal logits
all three prefer the lower index.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.fx
from torch import Tensor

from moh_vision.attention.kernels.build import path, works
from moh_vision.attention.kernels.contract import DTYPES, run
from moh_vision.attention.kernels.eager import choose, gate_logits
from moh_vision.attention.linear import cast_bias, is_traced, product_dtype
from moh_vision.attention.routing import Pairs, Routing, RoutingStats

MOST_ROWS = 256  # most rows of a router's weight whose logits fit in the registers of a GPU

# fx records a call of this function and does not trace into it, because it reads a dtype and a device, which proxies lack.
torch.fx.wrap("gate_logits")


class LinearRouter(NamedTuple):
    """A router of one linear layer: all that `route` needs beside tokens.

    Fields:
        weight: weight of the router [R, C]. Its rows are for the E candidates, then for the shared heads if there are at
            least two, then, if `balanced`, two rows whose softmax weighs the groups of shared and of routed heads.
        candidates: E.
        shared: number of shared heads. They come first in the order of heads; the candidates follow.
        routed: number of candidates that run for a token.
        gate_form: "released" or "paper": the gates of Jin 2024, whose equations MoHRouter has. "renormalised": those of
            Zhang 2022, a probability over the detached sum of the chosen probabilities; only without shared heads.
        balanced: whether the weight has the two rows that balance shared and routed heads.
    """

    weight: Tensor
    candidates: int
    shared: int
    routed: int
    gate_form: str
    balanced: bool = False


def route(x: Tensor, router: LinearRouter, padding_mask: Tensor | None = None) -> Routing:
    """Choose and weigh the heads of every token.

    Args:
        x: tokens [B, N, C].
        router: see `LinearRouter`.
        padding_mask: [B, N], True at padding, which is left out of the statistics.

    Returns:
        The Routing, in float32 or wider. The operators write gates below 1e-30 as 0, because products with denormal
        numbers are slow. The C++ operator also lists the pairs. On a GPU the executor that reads the list makes it.
    """
    operator = _operator(x, router.weight)
    if operator is None:
        logits = gate_logits(x, router.weight)
        return choose(logits, *router[1:], padding_mask)
    return _routing(router, run(operator, x, *router[:5], padding_mask))


def project_and_route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    router: LinearRouter,
    padding_mask: Tensor | None = None,
) -> tuple[Routing, Tensor] | None:
    """Route tokens and multiply them by a weight, as one node of autograd.

    Args:
        x: tokens [B, N, C].
        weight, bias: weight [O, C] and bias [O] (or None) of the product.
        router, padding_mask: see `route`.

    Returns:
        The Routing, and x W^T + b [B, N, O] in the dtype of products; or None if no operator does both.
    """
    dtype = product_dtype(x)
    if dtype not in DTYPES or weight.dtype not in DTYPES or _path(x, router.weight) != "triton":
        return None
    if not works("project_and_route", x.device, x.dtype, dtype, router.weight.dtype):
        return None
    bias = cast_bias(bias, dtype)
    inputs = (x, x.to(dtype), weight.to(dtype), bias, *router[:5], padding_mask)
    product, *outputs = run("moh_vision_triton::project_and_route", *inputs)
    return _routing(router, outputs), product


def _routing(router: LinearRouter, outputs: Sequence[Tensor]) -> Routing:
    """Make a Routing of the outputs of an operator."""
    weights, active, rows, probs, counts, *listed = outputs
    stats = RoutingStats(probs, counts, rows[..., : router.candidates])
    count = router.shared + router.routed
    pairs = None
    if listed:
        pairs = Pairs(*listed)
    return Routing(weights, active, stats, count, pairs)


def _operator(x: Tensor, weight: Tensor) -> str | None:
    """Return the name of the operator that routes x, or None if there is none."""
    route_path = _path(x, weight)
    if route_path == "cpp":
        return "moh_vision::route"
    if route_path == "triton" and works("route", x.device, x.dtype, weight.dtype):
        return "moh_vision_triton::route"
    return None


def _path(x: Tensor, weight: Tensor) -> str:
    """Return the path whose operator routes x: "cpp", "triton", or "torch" if there is no operator."""
    if is_traced(x) or x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return "torch"
    route_path = path(x.device.type)
    if route_path == "triton" and weight.shape[0] > MOST_ROWS:
        return "torch"
    return route_path
