"""Mixture-of-Head attention, Jin 2024."""

from typing import List, Optional

import torch
import torch.fx
from torch import Tensor, nn

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.linear import plain
from moh_vision.attention.routers.common import (
    GateLinear,
    active_heads,
    gate_logits,
    heads_first,
    heads_last,
    select_top_k,
    top_k_stats,
)
from moh_vision.attention.routing import Routing

torch.fx.wrap("gate_logits")  # leaves while tracing; fx needs to be told in every module that calls them
torch.fx.wrap("select_top_k")

GATE_SCALES = ("released", "paper")


class MoHRouter(nn.Module):
    """Shared and routed heads with two-stage gates (Jin 2024, eq. 5 and 6).

    The weight of shared head i and of routed head j of token x, with k heads routed among E candidates, is

        released:  2 a_1 * h_s * softmax(W_s x)_i        2 a_2 * k * p_j / sum of the selected p
        paper:       a_1 *       softmax(W_s x)_i          a_2 * p_j
        p = softmax(W_r x) over all E candidates;  [a_1, a_2] = softmax(W_h x)

    "released" is the published code, which official checkpoints need: with zero weights and all heads active every
    gate is 1, and the layer is plain multi-head attention. Where only shared or only routed heads exist there is
    nothing to balance and 2a (released) or a (paper) is 1. One shared head needs no softmax, hence no W_s.

    Args:
        dim: C, width of the tokens.
        budget: heads of the layer.
        gate_scale: "released" or "paper".
        two_stage: False leaves out W_h and fixes a_1 = a_2 = 1/2 (the paper's ablation, Table 6).
    """

    __constants__ = ["num_routed"]  # read when the router is scripted
    needs_query = False
    reads = "token"
    all_heads = False
    aux_loss = "moh"

    def __init__(
        self,
        dim: int,
        budget: HeadBudget,
        gate_scale: str = "released",
        two_stage: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.budget = budget
        if gate_scale not in GATE_SCALES:
            raise ValueError(f"gate_scale {gate_scale!r} is not one of {', '.join(GATE_SCALES)}")
        self.released = gate_scale == "released"
        self.num_shared = budget.shared
        self.num_candidates = budget.candidates
        self.two_groups = budget.shared > 0 and budget.candidates > 0

        def linear(rows: int) -> nn.Linear:
            layer = GateLinear(dim, rows, bias=False, device=device, dtype=dtype)
            nn.init.trunc_normal_(layer.weight, std=0.02)
            return layer

        self.shared = linear(budget.shared) if budget.shared > 1 else None  # W_s
        self.routed = linear(budget.candidates) if budget.candidates > 0 else None  # W_r
        self.balance = linear(2) if self.two_groups and two_stage else None  # W_h

    @torch.jit.unused
    @property
    def num_routed(self) -> int:
        """Heads that run for a token beside the shared ones; `set_budgets` changes the budget."""
        return self.budget.routed

    def forward(self, x: Tensor, q: Optional[Tensor] = None, padding_mask: Optional[Tensor] = None) -> Routing:
        """x [B, N, C]; padding_mask [B, N] is True at padding, which is left out of the statistics."""
        rows = heads_first(self.gates(x))  # [E + h_s + 2, B, N]
        logits = rows[: self.num_candidates]  # [E, B, N]
        probs = logits.softmax(0)
        chosen = select_top_k(probs, self.num_routed)  # [E, B, N]
        selected = chosen.to(probs.dtype)

        # The factors of both groups first: on [B, N] they cost less than on all heads.
        if self.balance is not None:
            alpha = rows[-2:].softmax(0)  # [2, B, N], eq. 6
        else:
            alpha = torch.full((2, 1, 1), 0.5 if self.two_groups else 1.0, dtype=probs.dtype, device=x.device)
        if self.two_groups and self.released:
            alpha = 2 * alpha
        parts: List[Tensor] = []
        if self.num_shared > 0:
            factor = self.num_shared * alpha[:1] if self.released else alpha[:1]
            if self.shared is None:
                gate = torch.ones((1, x.shape[0], x.shape[1]), dtype=probs.dtype, device=x.device)
            else:
                gate = rows[self.num_candidates :][: self.num_shared].softmax(0)  # [h_s, B, N]
            parts.append(gate * factor)
        if self.num_candidates > 0:
            gate = probs * selected  # [E, B, N]
            factor = alpha[1:]
            if self.released:
                factor = self.num_routed * factor
                if self.num_routed < self.num_candidates:  # else the sum is 1, and rounding would spoil the identity
                    # The released code also clamps the sum; it is at least 1/E, because the largest p is in it.
                    factor = factor / gate.sum(0, keepdim=True)
            parts.append(gate * factor)

        stats = top_k_stats(probs, selected, logits, self.num_shared, padding_mask)
        return Routing(heads_last(torch.cat(parts)), active_heads(self.num_shared, chosen), stats)

    def gates(self, x: Tensor) -> Tensor:
        """Outputs of W_r, W_s and W_h, as far as they exist: x [B, N, C] -> [B, N, E + h_s + 2]."""
        if not torch.jit.is_scripting():
            linears = list(filter(None, (self.routed, self.shared, self.balance)))
            if not all([plain(linear, GateLinear) for linear in linears]):
                return torch.cat([linear(x) for linear in linears], -1)
        # One matrix product: they read the same tokens.
        weights: List[Tensor] = []
        if self.routed is not None:
            weights.append(self.routed.weight)
        if self.shared is not None:
            weights.append(self.shared.weight)
        if self.balance is not None:
            weights.append(self.balance.weight)
        if len(weights) == 0:
            weights.append(x.new_zeros((0, x.shape[-1])))
        return gate_logits(x, torch.cat(weights))
