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
from moh_vision.attention.kernels.contract import DTYPES, parts_of_weight, run
from moh_vision.attention.kernels.eager import choose, gate_logits
from moh_vision.attention.linear import cast, cast_bias, is_traced
from moh_vision.attention.routing import Pairs, Routing, RoutingForm, RoutingStats

# Operators that begin a call of a layer, see `project_and_route`.
PROJECT_AND_ROUTE = "moh_vision_triton::project_and_route"
ROUTE_AND_ATTEND = "moh_vision_triton::route_and_attend"
ROUTE_SEQUENCES_AND_ATTEND = "moh_vision_triton::route_sequences_and_attend"
MOST_ROWS = 256  # most rows of a router's weight whose logits fit in the registers of a GPU

# fx records a call of this function and does not trace into it, because it reads a dtype and a device, which proxies lack.
torch.fx.wrap("gate_logits")


class LinearRouter(NamedTuple):
    """A router of one linear layer: all that `route` needs beside tokens.

    Fields:
        weight: weight of the router [R, C]. Its rows are for the E candidates, then for the shared heads if there are at
            least two, then, if `balanced`, two rows whose softmax weighs the groups of shared and of routed heads. `second`
            and `third` may have the last rows.
        candidates: E.
        shared: number of shared heads. They come first in the order of heads; the candidates follow.
        routed: number of candidates that run for a token.
        gate_form: "released" or "paper": the gates of Jin 2024, whose equations MoHRouter has. "renormalised": those of
            Zhang 2022, a probability over the detached sum of the chosen probabilities; only without shared heads.
        balanced: whether the weight has the two rows that balance shared and routed heads.
        second, third: further rows of the weight, which Triton's kernels read where they lie; or None.
    """

    weight: Tensor
    candidates: int
    shared: int
    routed: int
    gate_form: str
    balanced: bool = False
    second: Tensor | None = None
    third: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """Return the tensors that have the rows of the weight, in order."""
        return parts_of_weight(self.weight, self.second, self.third)

    def joint_weight(self) -> Tensor:
        """Return the weight with all of its rows [R, C]."""
        parts = self.parts()
        if len(parts) == 1:
            return self.weight
        return torch.cat(parts)

    def dtype_in_triton(self) -> torch.dtype | None:
        """Return the dtype of the weight; None: Triton's kernels cannot read it, for it has too many rows or two dtypes."""
        dtype = self.weight.dtype
        rows = self.weight.shape[0]
        for further in (self.second, self.third):
            if further is not None:
                if further.dtype != dtype:
                    return None
                rows += further.shape[0]
        if rows > MOST_ROWS or dtype not in DTYPES:
            return None
        return dtype

    def form(self) -> RoutingForm:
        """Return the form of the Routing that Triton's operators make: they do not list the pairs."""
        linear = self.dtype_in_triton()
        return RoutingForm("token", self.shared + self.routed, False, False, linear)


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
    route_path = "torch"
    if not is_traced(x) and x.dtype in DTYPES:
        route_path = path(x.device.type)
    if route_path == "triton":
        dtype = router.dtype_in_triton()
        if dtype is not None and works("route", x.device, x.dtype, dtype):
            inputs = (x, *router[:5], padding_mask, router.second, router.third)
            return _routing(router, run("moh_vision_triton::route", *inputs))
    weight = router.joint_weight()
    if route_path == "cpp" and weight.dtype in DTYPES:
        return _routing(router, run("moh_vision::route", x, weight, *router[1:5], padding_mask))
    return choose(gate_logits(x, weight), *router[1:6], padding_mask)


class ProductAttention(NamedTuple):
    """How `project_and_route` attends, with a product that is queries, keys and values: see `kernels.attend_product`."""

    kv_heads: int
    is_causal: bool
    mask: Tensor | None


def project_and_route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    router: LinearRouter,
    padding_mask: Tensor | None = None,
    attention: ProductAttention | None = None,
    read: Tensor | None = None,
) -> tuple[Routing, Tensor]:
    """Route tokens and multiply them by a weight, as one node of autograd, by Triton's kernels; see `plan.operator_of`.

    Args:
        x: tokens [B, N, C].
        weight, bias: weight [O, C] and bias [O] (or None) of the product.
        dtype: of the product.
        router, padding_mask: see `route`.
        attention: not None: the node also attends for the pairs that run.
        read: with `attention`: one vector for each sequence [B, 1, C], which the router reads in place of the tokens; None:
            every token chooses.

    Returns:
        The Routing; and x W^T + b [B, N, O] in the dtype of products, or with `attention` the weighted outputs
        [B, N, H*D], 0 where a head is off.
    """
    name = PROJECT_AND_ROUTE
    exact = x
    if attention is not None:
        name = ROUTE_AND_ATTEND
    if read is not None:
        name = ROUTE_SEQUENCES_AND_ATTEND
        exact = read
    inputs = (
        exact,
        cast(x, dtype),
        cast(weight, dtype),
        cast_bias(bias, dtype),
        *router[:5],
        padding_mask,
    )
    if attention is not None:
        inputs = (*inputs, *attention)
    inputs = (*inputs, router.second, router.third)
    result, *outputs = run(name, *inputs)
    routing = _routing(router, outputs[:5])
    if read is not None:
        routing = routing._replace(choice="sequence")
    return routing, result


def _routing(router: LinearRouter, outputs: Sequence[Tensor]) -> Routing:
    """Make a Routing of the outputs of an operator."""
    weights, active, rows, probs, counts, *listed = outputs
    logits = rows.narrow(-1, 0, router.candidates)
    stats = RoutingStats(probs, counts, logits)
    count = router.shared + router.routed
    pairs = None
    if listed:
        pairs = Pairs(*listed)
    return Routing(weights, active, stats, count, pairs)
