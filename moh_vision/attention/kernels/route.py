"""`route`: from tokens to the heads that run, for routers of one linear layer.

It is one operator on a GPU, in Triton (see `gpu.route`), one C++ operator on a CPU where the operators are built (see
`build`), and plain PyTorch elsewhere. Logits may differ in the last bit between them, because they are summed in another
order; equal logits rank the same.
"""

import torch
import torch.fx
from torch import Tensor

from moh_vision.attention.kernels.build import path
from moh_vision.attention.kernels.contract import DTYPES
from moh_vision.attention.kernels.eager import choose, gate_logits
from moh_vision.attention.linear import is_traced
from moh_vision.attention.routing import Pairs, Routing, RoutingStats

MOST_ROWS = 256  # of a weight whose logits fit in the registers of a GPU

torch.fx.wrap("gate_logits")  # a leaf while tracing


def route(
    x: Tensor,
    weight: Tensor,
    candidates: int,
    shared: int,
    routed: int,
    kind: str,
    balanced: bool = False,
    padding_mask: Tensor | None = None,
) -> Routing:
    """Choose and weigh the heads of every token.

    Args:
        x: tokens [B, N, C].
        weight: of the router [R, C]. Its rows are the E candidates, then the shared heads if there are several, then 2
            that balance both groups if they are balanced.
        candidates: E.
        shared: heads that always run; the heads are these and then the candidates.
        routed: how many candidates run.
        kind: "released" or "paper": Jin 2024, see MoHRouter, which has the equations. "renormalised": Zhang 2022, the
            probability over the detached sum of the chosen ones; only without shared heads.
        balanced: there are shared heads and candidates, and weights for the balance of both groups.
        padding_mask: [B, N], True at padding, which is left out of the statistics.

    Returns:
        The Routing, in float32 or better. The operators also list the pairs, and write gates below 1e-30 as 0:
        products with denormal numbers are slow.
    """
    operator, router = _operator(x, weight), (candidates, shared, routed, kind)
    if operator is None:
        return choose(gate_logits(x, weight), *router, balanced, padding_mask)
    weights, active, rows, probs, counts, *pairs = operator(x, weight, *router, padding_mask)
    stats = RoutingStats(probs, counts, rows[..., :candidates])
    return Routing(weights, active, stats, shared + routed, Pairs(*pairs))


def _operator(x: Tensor, weight: Tensor):
    """The operator that routes x, None where there is none."""
    if is_traced(x) or x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return None
    where = path(x.device.type)
    if where == "cpp":
        return torch.ops.moh_vision.route
    if where == "triton" and weight.shape[0] <= MOST_ROWS:
        return torch.ops.moh_vision_triton.route
    return None
