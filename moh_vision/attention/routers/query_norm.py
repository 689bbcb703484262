"""`QueryNormRouter`: the parameter-free router of MoH-LLaMA, Jin 2024, section 4.4."""

import torch
import torch.fx
from torch import Tensor
from torch.types import Device

from moh_vision.attention.budget import HeadBudget, check_groups
from moh_vision.attention.kernels.eager import active_heads, heads_last, select_top_k, top_k_stats
from moh_vision.attention.linear import in_float
from moh_vision.attention.routers.common import TopKRouter
from moh_vision.attention.routing import Routing, RoutingStats

# A leaf while fx traces; `wrap` is needed in every module that calls the function.
torch.fx.wrap("select_top_k")


class QueryNormRouter(TopKRouter):
    """Runs for each token the heads with the longest queries, with weights 0 and 1 (Jin 2024, eq. 9).

    The first heads are shared. For each of the other heads, the L2 norm of its query before any rotary embedding is divided
    by the standard deviation of these norms over the heads; p is the softmax of that, and the k heads with the largest p
    run. The 0/1 weight passes its gradient straight through to p, for every head (eq. 10), so heads are skipped only where
    no gradient is recorded. The released code leaves this gradient out.

    With `group` > 1 (not in the paper) whole groups of neighbouring heads are chosen, each as if it were one wide head: by
    the norm of its queries taken together, and with one gate for all its heads. This is for grouped-query attention, where
    keys and values can stay unread only if all query heads of their key-value head are off. Statistics are per head: the
    heads of a group share its probability evenly, so that the probabilities of a token sum to 1 as without groups, and the
    balance loss and its gradient have the same scale.

    Args:
        dim: C, not used.
        budget: counts heads, also with groups.
        group: number of heads in a group, those of one key-value head; 1: heads are chosen one by one, as in the paper.
    """

    needs_query = True
    layer_options = ("group",)

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
        """Route x [B, N, C] by queries q [B, H, N, D]; padding_mask [B, N] is True at padding."""
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
        # By norms: the heads are the same as by probs, in which rounding could make ties.
        chosen = select_top_k(norms, self.num_routed // self.group)
        selected = chosen.to(dtype)
        gate = selected + (probs - probs.detach())  # forward 0 or 1, backward to p
        if self.group > 1:  # from E / group groups to E heads
            probs = probs.repeat_interleave(self.group, 0) / self.group
            logits = logits.repeat_interleave(self.group, 0)
            chosen = chosen.repeat_interleave(self.group, 0)
            gate = gate.repeat_interleave(self.group, 0)
        ones = torch.ones((self.num_shared, x.shape[0], x.shape[1]), dtype=dtype, device=x.device)
        stats = top_k_stats(probs, chosen, logits, self.num_shared, padding_mask)
        weights = heads_last(torch.cat([ones, gate]))
        # By eq. 10 also a head of weight 0 has a gradient, which depends on its output: to train, all heads must run.
        if self.training or torch.is_grad_enabled():
            return Routing(weights, None, stats)
        active = active_heads(self.num_shared, chosen)
        return Routing(weights, active, stats, self.budget.active)

    def choose(self, x: Tensor, q: Tensor | None, padding_mask: Tensor | None) -> Routing:
        """Choose the heads that `forward` would choose for queries q [B, H, N, D]; no gradient, and empty statistics.

        Token by token the many small operations of `forward` take a measurable part of a step.
        """
        chosen = select_top_k(self.norms(q), self.num_routed // self.group)  # [E / group, B, N]
        if self.group > 1:
            chosen = chosen.repeat_interleave(self.group, 0)
        active = active_heads(self.num_shared, chosen)
        none = q.new_empty(0)
        return Routing(active, active, RoutingStats(none, none, none), self.budget.active)

    def norms(self, q: Tensor) -> Tensor:
        """Return the norms by which candidates are compared: q [B, H, N, D] -> [E / group, B, N], in float32 or better."""
        candidates = in_float(q[:, self.num_shared :])
        norms = torch.linalg.vector_norm(candidates, dim=-1).transpose(0, 1)  # [E, B, N]
        if self.group > 1:
            # The norm of the concatenated queries of a group is the norm of their norms.
            groups = norms.unflatten(0, (self.num_candidates // self.group, self.group))
            norms = torch.linalg.vector_norm(groups, dim=1)
        return norms

    def become_dense(self) -> None:
        """Change nothing: it has no weights, and all gates are 1 while all heads run."""

    def gates_are_one(self) -> bool:
        return self.budget.active == self.budget.heads

    def why_not_keep(self) -> str:
        return ""

    def kept_weights(self, candidates: Tensor) -> dict[str, Tensor]:
        return {}

    @classmethod
    def shared_of_text(cls, active: int, heads: int) -> int:
        """Return half of the active heads, at most half of all: the released MoH-LLaMA3-8B shares 16 of 24 of 32."""
        return min(heads // 2, active // 2)
