"""The parameter-free router of MoH-LLaMA, Jin 2024 section 4.4."""

import torch
import torch.fx
from torch import Tensor
from torch.types import Device

from moh_vision.attention.budget import HeadBudget, check_groups
from moh_vision.attention.kernels.eager import active_heads, heads_last, select_top_k, top_k_stats
from moh_vision.attention.linear import in_float
from moh_vision.attention.routers.common import TopKRouter
from moh_vision.attention.routing import Routing, RoutingStats

# A leaf while tracing; fx needs to be told in every module that calls it.
torch.fx.wrap("select_top_k")


class QueryNormRouter(TopKRouter):
    """A token's heads are those with the longest queries; weights are 0 and 1 (Jin 2024, eq. 9).

    The first heads are shared. Among the others the L2 norm of the head's query, before any rotary embedding, divided
    by its standard deviation over those heads, is softmaxed to p, and the k largest run. The gradient of the 0/1
    weight goes straight through to p (eq. 10), for every head, so heads are skipped only where no gradient is recorded;
    the released file leaves that gradient out, so nothing there is trained by it.

    With `group` > 1 whole groups of neighbouring heads are chosen, as if each were one wide head: by the norm of their
    queries taken together, with one gate for all of them. Not in the paper; it is what lets grouped-query attention
    leave keys and values unread, which it can only where all query heads of a key-value head are off. Statistics stay
    per head: a group's probability is shared out evenly among its heads, so that every token's still sum to 1, the
    balance loss is still the number of routed heads at balance, and its gradient has the size it has without groups.

    Args:
        dim: C, not used.
        budget: in heads, also with groups.
        group: heads in a group, those of one key-value head; 1: heads are chosen one by one, as released.
    """

    needs_query = True

    def __init__(
        self,
        dim: int,
        budget: HeadBudget,
        group: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(budget)
        check_groups(budget, group)
        self.group = group

    def forward(
        self, x: Tensor, q: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Route x [B, N, C]; q [B, H, N, D]; padding_mask [B, N], True at padding."""
        if q is None:
            raise ValueError("router 'query_norm' needs the queries")
        norms = self.norms(q)  # [E / group, B, N]
        dtype = norms.dtype
        if self.num_candidates > self.group:
            # Equal norms have no spread; any positive divisor gives them equal scores.
            logits = norms / norms.std(0, keepdim=True).clamp_min(1e-6)
        else:
            logits = norms
        probs = logits.softmax(0)
        # The largest norms are the largest probs, but for the rounding of those.
        chosen = select_top_k(norms, self.num_routed // self.group)
        selected = chosen.to(dtype)
        gate = selected + (probs - probs.detach())  # forward 0 or 1, backward to p
        if self.group > 1:  # and back to E heads
            probs = probs.repeat_interleave(self.group, 0) / self.group
            logits = logits.repeat_interleave(self.group, 0)
            chosen = chosen.repeat_interleave(self.group, 0)
            gate = gate.repeat_interleave(self.group, 0)
        ones = torch.ones((self.num_shared, x.shape[0], x.shape[1]), dtype=dtype, device=x.device)
        stats = top_k_stats(probs, chosen, logits, self.num_shared, padding_mask)
        weights = heads_last(torch.cat([ones, gate]))
        # Eq. 10 hands the gradient of the weight on for every head, also where it is 0: to train, all heads must run.
        if self.training or torch.is_grad_enabled():
            return Routing(weights, None, stats)
        active = active_heads(self.num_shared, chosen)
        return Routing(weights, active, stats, self.budget.active)

    def choose(self, q: Tensor) -> Routing:
        """Choose as `forward` does for queries q [B, H, N, D] and nothing else, with a fraction of its operations.

        For one token at a time, where the small operations of `forward` are a part of the step that can be measured. No
        gradient, and empty statistics.
        """
        chosen = select_top_k(self.norms(q), self.num_routed // self.group)  # [E / group, B, N]
        if self.group > 1:
            chosen = chosen.repeat_interleave(self.group, 0)
        active = active_heads(self.num_shared, chosen)
        none = q.new_empty(0)
        return Routing(active, active, RoutingStats(none, none, none), self.budget.active)

    def norms(self, q: Tensor) -> Tensor:
        """Return what candidates are compared by: q [B, H, N, D] -> [E / group, B, N], in float32 or better."""
        candidates = in_float(q[:, self.num_shared :])
        norms = torch.linalg.vector_norm(candidates, dim=-1).transpose(0, 1)  # [E, B, N]
        if self.group > 1:
            # The norm of queries taken together is the norm of their norms.
            groups = norms.unflatten(0, (self.num_candidates // self.group, self.group))
            norms = torch.linalg.vector_norm(groups, dim=1)
        return norms
