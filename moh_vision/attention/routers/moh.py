"""`MoHRouter`: Mixture-of-Head attention, Jin 2024."""

import torch
import torch.fx
from torch import Tensor, nn
from torch.types import Device

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.kernels.eager import choose
from moh_vision.attention.kernels.route import LinearRouter, route
from moh_vision.attention.linear import weight_of
from moh_vision.attention.routers.common import GateLinear, TopKRouter
from moh_vision.attention.routing import Routing

GATE_SCALES = ("released", "paper")
LINEARS = ("routed", "shared", "balance")  # in the order of the rows of a `LinearRouter`


class MoHRouter(TopKRouter):
    """Weighs shared heads and the chosen routed heads by two-stage gates (Jin 2024, eq. 5 and 6).

    The weight of shared head i and of routed head j of token x, with k heads routed among E candidates, is

        released:  2 a_1 * h_s * softmax(W_s x)_i        2 a_2 * k * p_j / sum of the selected p
        paper:       a_1 *       softmax(W_s x)_i          a_2 * p_j
        p = softmax(W_r x) over all E candidates;  [a_1, a_2] = softmax(W_h x)

    Here h_s is the number of shared heads. "released" is the formula of the published code, which official checkpoints
    need. With zero weights and all heads active it makes every gate 1, and the layer plain multi-head attention. If all
    heads are shared or none is, there is no W_h, and 2a (released) or a (paper) is 1. One shared head needs no W_s, because
    its softmax is 1.

    Args:
        dim: C, width of the tokens.
        budget: heads of the layer.
        gate_scale: "released" or "paper".
        two_stage: False leaves out W_h and fixes a_1 = a_2 = 1/2 (the paper's ablation, Table 6).
    """

    def __init__(
        self,
        dim: int,
        budget: HeadBudget,
        gate_scale: str = "released",
        two_stage: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(budget)
        if gate_scale not in GATE_SCALES:
            raise ValueError(f"gate_scale {gate_scale!r} is not one of {', '.join(GATE_SCALES)}")
        self.released = gate_scale == "released"
        self.two_groups = budget.shared > 0 and budget.candidates > 0

        def linear(rows: int) -> nn.Linear:
            layer = GateLinear(dim, rows, bias=False, device=device, dtype=dtype)
            nn.init.trunc_normal_(layer.weight, std=0.02)
            return layer

        self.shared = None  # W_s
        self.routed = None  # W_r
        self.balance = None  # W_h
        if budget.shared > 1:
            self.shared = linear(budget.shared)
        if budget.candidates > 0:
            self.routed = linear(budget.candidates)
        if self.two_groups and two_stage:
            self.balance = linear(2)

    def forward(
        self, x: Tensor, q: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Route x [B, N, C]; padding_mask [B, N] is True at padding, which is left out of the statistics."""
        router = self.as_linear(x)
        if router is not None:
            return route(x, router, padding_mask)
        logits = torch.cat([linear(x) for linear in self.linears], -1)
        return choose(logits, *self.settings, padding_mask)

    @property
    def linears(self) -> list[nn.Module]:
        """Return W_r, W_s and W_h, without those that do not exist."""
        # Every call of a layer reads them, and nn.Module's own lookup of attributes takes ten times as long.
        modules = self._modules
        return [modules[name] for name in LINEARS if modules.get(name) is not None]

    @property
    def settings(self) -> tuple[int, int, int, str, bool]:
        """Return the fields of a `LinearRouter` after its weight, which are also arguments of `choose`."""
        budget = self.budget
        gate_form = "released" if self.released else "paper"
        balanced = self._modules.get("balance") is not None
        return budget.candidates, budget.shared, budget.routed, gate_form, balanced

    def as_linear(self, x: Tensor) -> LinearRouter | None:
        is_proxy = isinstance(x, torch.fx.Proxy)
        weights = []
        for linear in self.linears:
            weight = weight_of(linear, GateLinear)
            if weight is None:
                return None
            if is_proxy:
                # A proxy too: the graph then reads the module's weight when it runs.
                weight = linear.weight
            weights.append(weight)
        if not weights:
            weights.append(x.new_zeros((0, x.shape[-1])))
        # All of them read the same tokens: together they are one weight [E + h_s + 2, C], of one product.
        first, *more = weights
        return LinearRouter(first, *self.settings, *more)

    def init_text_weights(self) -> None:
        """Draw the weights as the released language models do."""
        for linear in self.children():
            nn.init.normal_(linear.weight, std=0.02)

    def become_dense(self) -> None:
        """Set the weights to zero: all gates of the form "released" are 1 while all heads run."""
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def shared_in(self, state_dict: dict[str, Tensor]) -> int:
        heads = self.budget.heads
        routed = state_dict.get("routed.weight")  # [candidates, C]
        if routed is None and "shared.weight" in state_dict:  # no candidates
            return heads
        # Too many candidates are left for `load_state_dict` to report.
        if routed is None or len(routed) > heads:
            return self.budget.shared
        return heads - len(routed)

    def why_not_keep(self) -> str:
        if self.released:
            return ""
        return "its gates, gate_scale='paper', depend on heads that would leave"

    def kept_weights(self, candidates: Tensor) -> dict[str, Tensor]:
        state = self.state_dict()
        state["routed.weight"] = state["routed.weight"][candidates]
        return state

    def only_balance_trains(self) -> bool:
        """Return whether one head is routed: its gate, renormalised, is constant. In the paper's form no gate is."""
        return self.released and self.budget.routed == 1
