"""`GatedRouter`: all heads run, each weighed by a sigmoid gate. Qiu et al. 2025."""

import torch
from torch import Tensor, nn
from torch.types import Device

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routers.common import GateLinear, all_heads_stats, refuse_fewer_heads
from moh_vision.attention.routing import Routing


class GatedRouter(Router):
    """Weighs every head by a gate between 0 and 2 (gated attention, Qiu et al. 2025). The budget must share all heads.

        w(x) = 2 sigmoid(W x)

    Qiu et al. have sigmoid(W x) on the output of each head. Here the factor 2 makes every gate 1 where W is zero, and the
    layer plain multi-head attention. W is initialised to zero.

    Args:
        dim: C, width of the tokens.
        budget: heads of the layer.
    """

    all_heads = True

    def __init__(
        self, dim: int, budget: HeadBudget, device: Device = None, dtype: torch.dtype | None = None
    ):
        super().__init__(budget)
        refuse_fewer_heads("gated", budget)
        self.gate = GateLinear(dim, budget.heads, bias=False, device=device, dtype=dtype)  # W
        self.init_weights()

    def init_weights(self) -> None:
        """Set W to zero."""
        nn.init.zeros_(self.gate.weight)

    def become_dense(self) -> None:
        """Set W to zero: every gate is 1."""
        self.init_weights()

    def note(self) -> str:
        return "gated: a gate from 0 to 2 weighs each head, and every head runs"

    def forward(
        self, x: Tensor, q: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Route x [B, N, C]; padding_mask [B, N] is True at padding, which is left out of the statistics."""
        weights = 2 * self.gate(x).sigmoid()  # [B, N, H]
        return Routing(weights, None, all_heads_stats(x, padding_mask, self.budget.heads))
