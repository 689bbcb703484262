"""Routers as users write them in files of their own, of kinds that the package does not have."""

import torch
from torch import nn
from torch.nn import functional as F

from moh_vision.attention import Router, Routing, RoutingStats
from moh_vision.attention.kernels.eager import choose
from moh_vision.attention.linear import in_float
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
        logits = self.scale * in_float(cosines)
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
        real = real_tokens(logits, padding_mask)  # [B, N, 1]
        probs = logits.softmax(-1) * real
        taken = (real.sum(1, keepdim=True) * self.budget.routed / self.budget.heads).floor()
        ranks = probs.argsort(1, descending=True).argsort(1)  # 0: the best token of a head
        active = (ranks < taken.clamp_min(1)) & (probs > 0)
        counts = active.sum(1).to(probs.dtype)
        return Routing(probs * active, active, RoutingStats(probs, counts, logits))
