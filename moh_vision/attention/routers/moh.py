"""Mixture-of-Head attention, Jin 2024."""

from typing import List, Optional

import torch
import torch.fx
from torch import Tensor, nn

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.routers.common import active_heads, gate_logits, no_logits, select_top_k, top_k_stats
from moh_vision.attention.routing import Routing

torch.fx.wrap("gate_logits")  # a leaf while tracing; fx needs to be told in every module that calls it

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

    needs_query = False
    all_heads = False
    balanced = True

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
        if gate_scale not in GATE_SCALES:
            raise ValueError(f"gate_scale {gate_scale!r} is not one of {', '.join(GATE_SCALES)}")
        self.released = gate_scale == "released"
        self.num_shared = budget.shared
        self.num_candidates = budget.candidates
        self.num_routed = budget.routed
        self.two_groups = budget.shared > 0 and budget.candidates > 0

        def linear(rows: int) -> nn.Linear:
            layer = nn.Linear(dim, rows, bias=False, device=device, dtype=dtype)
            nn.init.trunc_normal_(layer.weight, std=0.02)
            return layer

        self.shared = linear(budget.shared) if budget.shared > 1 else None  # W_s
        self.routed = linear(budget.candidates) if budget.candidates > 0 else None  # W_r
        self.balance = linear(2) if self.two_groups and two_stage else None  # W_h

    def forward(self, x: Tensor, q: Optional[Tensor] = None, padding_mask: Optional[Tensor] = None) -> Routing:
        """x [B, N, C]; padding_mask [B, N] is True at padding, which is left out of the statistics."""
        B, N, _ = x.shape
        logits = no_logits(x) if self.routed is None else gate_logits(x, self.routed.weight)  # [B, N, E]
        probs = logits.softmax(-1)  # [B, N, E]
        chosen, selected = select_top_k(probs, self.num_routed)  # [B, N, k], [B, N, E]

        parts: List[Tensor] = []
        if self.num_shared > 0:
            if self.shared is None:
                gate = torch.ones((B, N, 1), dtype=logits.dtype, device=x.device)
            else:
                gate = gate_logits(x, self.shared.weight).softmax(-1)  # [B, N, h_s]
            parts.append(gate * self.num_shared if self.released else gate)
        if self.num_candidates > 0:
            gate = probs * selected
            if self.released:
                # The released code also clamps the sum; it is at least 1/E, because the largest p is in it.
                gate = gate * (self.num_routed / gate.sum(-1, keepdim=True))
            parts.append(gate)  # [B, N, E]
        if self.two_groups:
            if self.balance is not None:
                alpha = gate_logits(x, self.balance.weight).softmax(-1)  # [B, N, 2], eq. 6
                if self.released:
                    alpha = 2 * alpha
                parts = [parts[0] * alpha[..., :1], parts[1] * alpha[..., 1:]]
            elif not self.released:
                parts = [parts[0] * 0.5, parts[1] * 0.5]

        stats = top_k_stats(probs, selected, logits, self.num_shared, padding_mask)
        return Routing(torch.cat(parts, dim=-1), active_heads(self.num_shared, chosen), stats)
