"""`MoARouter`: Mixture of Attention Heads, Zhang 2022."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.types import Device

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.kernels.eager import choose
from moh_vision.attention.kernels.route import LinearRouter, route
from moh_vision.attention.linear import plain
from moh_vision.attention.routers.common import GateLinear, TopKRouter
from moh_vision.attention.routing import Routing


class MoARouter(TopKRouter):
    """Chooses the k most probable of E experts (Zhang 2022, eq. 7 to 9). In the paper all experts share one key-value head.

    p = softmax(x W_g), w_i = p_i / Detach(sum of the selected p). W_g is initialised to zero.

    Args:
        dim: C, width of the tokens.
        budget: heads = E, head_dim = D, shared = 0, routed = k.
        renormalise: True: the weights above; False: w_i = p_i, as in the published code.
        noisy: in training, add noise of a learned scale to the logits before experts are chosen (eq. 3; the paper's runs do
            not).
    """

    aux_loss = "moa"
    shared_share = 0.0

    def __init__(
        self,
        dim: int,
        budget: HeadBudget,
        renormalise: bool = True,
        noisy: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(budget)
        if budget.shared:
            raise ValueError(f"router 'moa' has no shared heads, the budget has {budget.shared}")
        self.renormalise = renormalise
        self.gate = GateLinear(dim, budget.heads, bias=False, device=device, dtype=dtype)  # W_g
        self.noise = None
        if noisy:
            self.noise = GateLinear(dim, budget.heads, bias=False, device=device, dtype=dtype)
        self.init_weights()

    def init_weights(self) -> None:
        """Set the weights to zero: all experts are equally probable."""
        nn.init.zeros_(self.gate.weight)
        if self.noise is not None:
            nn.init.zeros_(self.noise.weight)

    def forward(
        self, x: Tensor, q: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Route x [B, N, C]; padding_mask [B, N] is True at padding, which is left out of the statistics."""
        router = self.as_linear(x)
        if router is not None:
            return route(x, router, padding_mask)
        logits = self.gate(x)  # [B, N, E]
        if self.is_noisy:
            noise = torch.randn_like(logits) * (F.softplus(self.noise(x)) + 1e-2)
            logits = logits + noise
        return choose(logits, *self.settings, padding_mask=padding_mask)

    @property
    def is_noisy(self) -> bool:
        """Return whether a call now adds noise to the logits."""
        return self.noise is not None and self.training

    @property
    def settings(self) -> tuple[int, int, int, str]:
        """Return the fields of a `LinearRouter` after its weight, which are also arguments of `choose`."""
        gate_form = "renormalised" if self.renormalise else "paper"
        return self.num_candidates, 0, self.num_routed, gate_form

    def as_linear(self, x: Tensor) -> LinearRouter | None:
        if self.is_noisy or not plain(self.gate, GateLinear):
            return None
        return LinearRouter(self.gate.weight, *self.settings)

    def macs(self) -> int:
        """Count W_g alone: noise is for training."""
        return self.gate.weight.numel()

    def why_not_keep(self) -> str:
        if self.renormalise:
            return ""
        return "its gates, renormalise=False, depend on heads that would leave"

    def kept_weights(self, candidates: Tensor) -> dict[str, Tensor]:
        return {name: weight[candidates] for name, weight in self.state_dict().items()}
