"""A mixture of h - 1 (or h - t) heads, Peng 2020."""

from itertools import combinations
from typing import Optional

import torch
import torch.fx
from torch import Tensor, nn

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.routers.common import gate_logits, masked_mean, windowed_mean
from moh_vision.attention.routing import Routing, RoutingStats

MODES = ("soft", "sampled", "uniform", "argmax", "random")
HIDDEN = 256  # Peng 2020, appendix A
WINDOW = 100  # tokens, for language models

torch.fx.wrap("gate_logits")
torch.fx.wrap("masked_mean")
torch.fx.wrap("windowed_mean")


class MAERouter(nn.Module):
    """Experts are all ways to leave out t of h heads; a gate on the pooled sequence mixes them (Peng 2020, eq. 5 and 6).

    Expert S (a set of h - t heads) is h / (h - t) times the sum of its heads, so the mixture with gate g weighs head j
    by h / (h - t) * (sum of g_S over the S that contain j): plain attention for a uniform g. The gate is a mean over
    the unpadded tokens, batch norm, a 256-unit tanh layer, dropout, softmax; one choice for the whole sequence.

    `mode` says what is done with g:
        "soft"      the mixture: the G step, and testing
        "sampled"   one expert drawn from g for every sequence, no gradient into the gate: the F step
        "uniform"   g = 1 / experts; in training one uniformly drawn expert (UNI-MAE)
        "argmax"    the most probable expert
        "random"    one uniformly drawn expert, also in testing
    The paper leaves open whether batch statistics are taken in the F step; here they are, as in any training forward.

    Args:
        dim: C, width of the tokens.
        budget: all heads shared: every head may run.
        leave_out: t, 1 for MAE-7 of 8 heads, 2 for MAE-6.
        pool: "sequence"; or, for causal models, one gate per token from the tokens up to it: "running", or their last
            100, "window". In the F step every token then draws its own expert.
        dropout: of the hidden layer.

    Raises:
        ValueError: for a budget that leaves heads out, or a leave_out that leaves none.
    """

    needs_query = False
    sees_one_token = False
    all_heads = True
    aux_loss = ""

    def __init__(
        self,
        dim: int,
        budget: HeadBudget,
        leave_out: int = 1,
        pool: str = "sequence",
        dropout: float = 0.1,
        mode: str = "soft",
        device=None,
        dtype=None,
    ):
        super().__init__()
        h = budget.heads
        if budget.shared < h:
            raise ValueError(
                f"router 'mae' may run all {h} heads, the budget only {budget.active}: leave head_budget out"
            )
        if not 1 <= leave_out < h:
            raise ValueError(f"leave_out {leave_out} is out of range: 1 to {h - 1} of {h} heads")
        if pool not in ("sequence", "running", "window"):
            raise ValueError(f"pool {pool!r} is not one of sequence, running, window")
        self.pool = pool
        self.window = WINDOW
        self.scale = h / (h - leave_out)
        self.set_mode(mode)
        left_out = list(combinations(range(h), leave_out))
        members = torch.ones(len(left_out), h, device=device, dtype=torch.float32)
        if not members.is_meta:
            for expert, heads in enumerate(left_out):
                members[expert, list(heads)] = 0
        self.register_buffer("members", members, persistent=False)  # [experts, H] of 0 and 1
        self.norm = nn.BatchNorm1d(dim, device=device, dtype=dtype)
        self.hidden = nn.Linear(dim, HIDDEN, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(HIDDEN, len(left_out), device=device, dtype=dtype)

    def set_mode(self, mode: str) -> None:
        """Choose among MODES.

        Raises:
            ValueError: naming them.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        self.mode = mode

    def forward(self, x: Tensor, q: Optional[Tensor] = None, padding_mask: Optional[Tensor] = None) -> Routing:
        """x [B, N, C]; padding_mask [B, N], True at padding. Weights are [B, 1, H], or [B, N, H] for causal pools."""
        if self.pool == "sequence":
            pooled = masked_mean(x, padding_mask)  # [B, 1, C]
        else:
            pooled = windowed_mean(x, self.window if self.pool == "window" else x.shape[1], padding_mask)  # [B, N, C]
        logits = self._gate(pooled)  # [B, 1 or N, experts]
        probs = logits.softmax(-1)
        members = self.members.to(probs.dtype)

        active: Optional[Tensor] = None
        if self.mode == "soft":
            g = probs
        elif self.mode == "uniform" and not self.training:
            g = torch.full_like(probs, 1 / probs.shape[-1])
        else:
            with torch.no_grad():
                if self.mode == "argmax":
                    expert = probs.argmax(-1, keepdim=True)
                else:
                    # A loss that is not finite is the training loop's to skip; multinomial would end the process.
                    odds = torch.nan_to_num(probs, nan=1.0) if self.mode == "sampled" else torch.ones_like(probs)
                    expert = torch.multinomial(odds.flatten(0, 1), 1).view(odds.shape[0], odds.shape[1], 1)
                g = torch.zeros_like(probs).scatter(-1, expert, 1.0)
                active = (g @ members) > 0  # [B, 1 or N, H]
        weights = self.scale * (g @ members)  # [B, 1 or N, H]
        counts = (weights.detach() > 0).to(probs.dtype).sum(1)  # [B, H]
        return Routing(weights, active, RoutingStats(probs, counts, logits))

    def _gate(self, pooled: Tensor) -> Tensor:
        flat = self.norm(pooled.flatten(0, 1))  # [B, C] or [B * N, C]
        hidden = self.dropout(torch.tanh(gate_logits(flat, self.hidden.weight, self.hidden.bias)))
        logits = gate_logits(hidden, self.out.weight, self.out.bias)
        return logits.view(pooled.shape[0], pooled.shape[1], -1)
