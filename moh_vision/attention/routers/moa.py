"""Mixture of Attention Heads, Zhang 2022."""

from typing import Optional

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.routers.common import (
    GateLinear,
    active_heads,
    heads_first,
    heads_last,
    select_top_k,
    top_k_stats,
)
from moh_vision.attention.routing import Routing

torch.fx.wrap("select_top_k")  # a leaf while tracing; fx needs to be told in every module that calls it


class MoARouter(nn.Module):
    """The k most probable of E experts (Zhang 2022, eq. 7 to 9); the layer gives them one shared key-value head.

    p = softmax(x W_g), w_i = p_i / Detach(sum of the selected p). W_g starts at zero.

    Args:
        dim: C, width of the tokens.
        budget: heads = E, head_dim = D, shared = 0, routed = k.
        renormalise: False: w_i = p_i, as in the published code.
        noisy: in training, add noise of a learned scale to the logits before choosing (eq. 3; off in the paper's runs).

    Raises:
        ValueError: for a budget with shared heads.
    """

    __constants__ = ["num_routed"]  # read when the router is scripted
    needs_query = False
    reads = "token"
    all_heads = False
    aux_loss = "moa"

    def __init__(
        self, dim: int, budget: HeadBudget, renormalise: bool = True, noisy: bool = False, device=None, dtype=None
    ):
        super().__init__()
        self.budget = budget
        if budget.shared:
            raise ValueError(f"router 'moa' has no shared heads, the budget has {budget.shared}")
        self.renormalise = renormalise
        self.gate = GateLinear(dim, budget.heads, bias=False, device=device, dtype=dtype)  # W_g
        self.noise = GateLinear(dim, budget.heads, bias=False, device=device, dtype=dtype) if noisy else None
        self.init_weights()

    def init_weights(self) -> None:
        """Zeros: all experts alike. Models call this after their own initialisation of linear layers."""
        nn.init.zeros_(self.gate.weight)
        if self.noise is not None:
            nn.init.zeros_(self.noise.weight)

    @torch.jit.unused
    @property
    def num_routed(self) -> int:
        """Heads that run for a token beside the shared ones; `set_budgets` changes the budget."""
        return self.budget.routed

    def forward(self, x: Tensor, q: Optional[Tensor] = None, padding_mask: Optional[Tensor] = None) -> Routing:
        """x [B, N, C]; padding_mask [B, N], True at padding."""
        logits = heads_first(self.gate(x))  # [E, B, N]
        if self.noise is not None and self.training:
            scale = F.softplus(heads_first(self.noise(x))) + 1e-2
            logits = logits + torch.randn_like(logits) * scale
        probs = logits.softmax(0)
        chosen = select_top_k(probs, self.num_routed)  # [E, B, N]
        selected = chosen.to(probs.dtype)
        weights = probs * selected
        if self.renormalise:
            weights = weights / weights.sum(0, keepdim=True).detach()
        stats = top_k_stats(probs, selected, logits, 0, padding_mask)
        return Routing(heads_last(weights), active_heads(0, chosen), stats)
