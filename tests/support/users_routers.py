"""Routers as users write them in files of their own, of kinds that the package does not have."""

import torch
from torch import nn
from torch.nn import functional as F

from moh_vision.attention import Router, Routing, RoutingStats
from moh_vision.attention.kernels.eager import choose
from moh_vision.attention.routers.common import GateLinear, TopKRouter, real_tokens


class CosineRouter(TopKRouter):
    """The k heads whose learned directions are nearest to the token; none is shared. It can start as plain attention."""

    shared_share = 0.0

    def __init__(self, dim, budget, first_scale=10.0, device=None, dtype=None):
        super().__init__(budget)
        self.directions = nn.Parameter(torch.randn(budget.heads, dim, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.full((1,), first_scale, device=device, dtype=dtype))

    def forward(self, x, q=None, padding_mask=None):
        cosines = F.normalize(x, dim=-1) @ F.normalize(self.directions, dim=-1).T  # [B, N, H]
        logits = self.scale.float() * cosines.float()
        return choose(
            logits, self.num_candidates, 0, self.num_routed, "released", padding_mask=padding_mask
        )

    def become_dense(self):
        nn.init.zeros_(self.scale)


class ExpertChoiceRouter(Router):
    """Each head takes its best tokens, as many as a share of k / H is (Zhou 2022): a token's heads depend on all tokens."""

    reads = "sequence"
    scopes = ("token",)
    shared_share = 0.0

    def __init__(self, dim, budget, device=None, dtype=None):
        super().__init__(budget)
        self.gate = GateLinear(dim, budget.heads, bias=False, device=device, dtype=dtype)

    def forward(self, x, q=None, padding_mask=None):
        logits = self.gate(x)  # [B, N, H]
        probs = logits.softmax(-1) * real_tokens(logits, padding_mask)
        taken = max(1, x.shape[1] * self.budget.routed // self.budget.heads)
        best = probs.topk(taken, dim=1).indices  # [B, taken, H], of tokens
        active = torch.zeros_like(probs, dtype=torch.bool).scatter(1, best, True) & (probs > 0)
        counts = active.sum(1).to(probs.dtype)
        return Routing(probs * active, active, RoutingStats(probs, counts, logits))
