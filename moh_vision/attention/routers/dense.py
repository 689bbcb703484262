"""`DenseRouter`: all heads run, without routing."""

import torch
from torch import Tensor
from torch.types import Device

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routers.common import all_heads_stats, refuse_fewer_heads
from moh_vision.attention.routing import Routing


class DenseRouter(Router):
    """Runs every head for every token with weight 1: plain multi-head attention. The budget must share all heads."""

    all_heads = True
    plain_attention = True

    def __init__(
        self, dim: int, budget: HeadBudget, device: Device = None, dtype: torch.dtype | None = None
    ):
        super().__init__(budget)
        refuse_fewer_heads("dense", budget)

    def forward(
        self, x: Tensor, q: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Route x [B, N, C]; padding_mask [B, N] is True at padding, which is left out of the statistics."""
        return Routing(None, None, all_heads_stats(x, padding_mask, self.budget.heads))

    def become_dense(self) -> None:
        """Change nothing: it is plain attention."""
