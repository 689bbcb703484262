"""`MAERouter`: a mixture of experts, each of which is h - 1 (or h - t) of the h heads. Peng 2020."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.types import Device

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routers.common import (
    GateLinear,
    causal_mean,
    masked_mean,
    no_logits,
    real_tokens,
)
from moh_vision.attention.routers.gate_norm import GateNorm
from moh_vision.attention.routing import Routing, RoutingStats

MODES = ("soft", "sampled", "uniform", "argmax", "random")
UNGATED = ("uniform", "random")
HIDDEN = 256  # Peng 2020, appendix A
WINDOW = 100  # tokens, for language models

torch.fx.wrap("masked_mean")
torch.fx.wrap("causal_mean")


class MAERouter(Router):
    """Mixes experts, one for each choice of t of the h heads to leave out, by a gate on the pooled sequence.

    Peng 2020, eq. 5 and 6. Expert S (a set of h - t heads) is h / (h - t) times the sum of its heads. The mixture with gate
    g therefore weighs head j by h / (h - t) * (sum of g_S over the experts S that contain j); a uniform g gives plain
    attention. The gate is: mean over the unpadded tokens, batch norm, a tanh layer of 256 units, dropout, a linear layer,
    softmax. There is one gate, and so one choice of heads, for the whole sequence.

    Causal models must not pool later tokens. With pool "running" or "window" each token has its own gate, computed from
    the mean of the tokens up to it, and weights are [B, N, H]. The batch norm then always normalises with its running
    statistics (see `GateNorm`), because batch statistics would carry information about later tokens.

    `mode` is how g is used:
        "soft"      the mixture: in the G step, and in testing
        "sampled"   one expert drawn from g, without a gradient into the gate: in the F step
        "uniform"   g = 1 / experts; in training one uniformly drawn expert
        "argmax"    the most probable expert
        "random"    one uniformly drawn expert, also in testing
    Modes "uniform" and "random" do not compute the gate. A router made with mode "uniform" (UNI-MAE) has no gate at all.
    One expert is drawn for each gate: one for a sequence, as in the paper ("different experts can be sampled for different
    instances", footnote 6); with a causal pool, where each token has a gate, one for each token. The paper does not say
    whether the batch norm uses batch statistics in the F step; here it does, as in any training forward.

    Args:
        dim: C, width of the tokens.
        budget: must share all heads, because every head may run.
        leave_out: t, 1 for MAE-7 of 8 heads, 2 for MAE-6.
        pool: tokens whose mean the gate reads: "sequence": all; "running": those so far; "window": the last 100 so far
            (the latter two for language models, appendix A).
        dropout: dropout of the hidden layer.
        mode: see above.
    """

    reads = "sequence"
    choice = "sequence"
    all_heads = True
    # With torch 2.15's inductor, unlike other backends, the compiled loss has no gradient.
    trains_compiled = False
    layer_options = ("pool",)

    def __init__(
        self,
        dim: int,
        budget: HeadBudget,
        leave_out: int = 1,
        pool: str = "sequence",
        dropout: float = 0.1,
        mode: str = "soft",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(budget)
        h = budget.heads
        if budget.shared < h:
            raise ValueError(
                f"router 'mae' may run all {h} heads, the budget only {budget.active}: leave head_budget out"
            )
        if not 1 <= leave_out < h:
            raise ValueError(f"leave_out {leave_out} is out of range: 1 to {h - 1} of {h} heads")
        if pool not in ("sequence", "running", "window"):
            raise ValueError(f"pool {pool!r} is not one of sequence, running, window")
        causal = pool != "sequence"
        self.pool = pool
        if causal:
            self.reads = "earlier"
            self.choice = "token"
        self.window = 0
        if pool == "window":
            self.window = WINDOW
        self.scale = h / (h - leave_out)
        self.leave_out = leave_out
        experts = math.comb(h, leave_out)
        members = torch.empty(experts, h, device=device, dtype=torch.float32)
        self.register_buffer("members", members, persistent=False)  # [experts, H] of 0 and 1
        self.init_non_persistent_buffers()
        self.norm = self.hidden = self.out = None
        if mode != "uniform":
            self.norm = GateNorm(dim, causal, device=device, dtype=dtype)
            self.hidden = GateLinear(dim, HIDDEN, device=device, dtype=dtype)
            self.out = GateLinear(HIDDEN, experts, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.set_mode(mode)

    def init_non_persistent_buffers(self) -> None:
        """Compute `members`, which checkpoints do not have."""
        left_out = list(combinations(range(self.members.shape[1]), self.leave_out))
        self.members.fill_(1).scatter_(1, torch.tensor(left_out, device=self.members.device), 0)

    def init_weights(self) -> None:
        """Set the batch norm to that of a new router; linear layers stay as the model has initialised them."""
        if self.norm is not None:
            self.norm.init_weights()

    def become_dense(self) -> None:
        """Make the gate uniform, by zeros in its last linear layer: the mixture weighs every head by 1."""
        if self.out is not None:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that `set_mode` takes: without a gate those alone that compute none."""
        if self.out is None:
            return UNGATED
        return MODES

    def set_mode(self, mode: str) -> None:
        """Set the mode, one of MODES; a router without a gate takes only those in UNGATED."""
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        if self.out is None and mode not in UNGATED:
            raise ValueError(
                f"mode {mode!r} needs a gate; a router made with mode 'uniform' has none"
            )
        self.mode = mode

    @classmethod
    def options_reading(cls, tokens: str) -> dict[str, str]:
        return dict(pool=tokens)

    @classmethod
    def learns_in_turns_with(cls, options: dict[str, Any]) -> bool:
        return options.get("mode", "soft") == "soft"

    @property
    def learns_in_turns(self) -> bool:
        """Whether the gate learns, in phase G with the mixture; in phase F the heads learn with drawn experts."""
        return self.mode == "soft"

    def take_turn(self, of_heads: bool) -> None:
        self.set_mode("sampled" if of_heads else "soft")

    def freeze_unused(self) -> None:
        """Freeze the gate in the modes that do not use it, or without a gradient."""
        if self.mode != "soft":
            self.requires_grad_(False)

    def run_alone(self) -> None:
        if self.norm is not None:
            self.norm.over_processes = False

    def note(self) -> str:
        """Describe the experts, which a budget does not show, because it counts every head as shared."""
        experts, heads = self.members.shape
        if self.out is None:
            mixture = "an even mixture takes"
        else:
            mixture = "the soft gate mixes"
        each = f"{heads - self.leave_out} heads each"
        return f"MAE: {experts} experts of {each}; {mixture} all of them, so every head runs"

    def gate_size(self) -> tuple[int, int] | None:
        """Return the number of experts, of which the likeliest counts; None where there is no gate, or it is not mixed."""
        if self.mode != "soft":
            return None
        return len(self.members), 1

    def gate_columns(self, unit: str, budgets: Sequence[HeadBudget]) -> str:
        left_out = []
        for members in self.members[:2]:
            heads = (members == 0).nonzero().flatten().tolist()
            numbers = " and ".join(str(head + 1) for head in heads)
            word = "heads" if len(heads) > 1 else "head"
            left_out.append(f"{word} {numbers}")
        experts = f"expert 1 leaves out {left_out[0]}, expert 2 {left_out[1]}, and so on"
        return f"EN is the share of {unit}s whose most probable expert is N; {experts}."

    def forward(
        self, x: Tensor, q: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Routing:
        """Route x [B, N, C]; padding_mask [B, N] is True at padding. Weights are [B, 1, H], for causal pools [B, N, H]."""
        if self.pool == "sequence":
            routing = self._choose(masked_mean(x, padding_mask), None)  # [B, 1, C]
            return routing._replace(choice="sequence")
        means, _ = causal_mean(x, self.window, padding_mask, None)  # [B, N, C]
        return self._choose(means, padding_mask)

    def resume(
        self, x: Tensor, padding_mask: Tensor | None, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Routing, tuple[Tensor, Tensor]]:
        """Route tokens x [B, N, C] after those in `state`; also return the state after x. Causal pools only."""
        pooled, state = causal_mean(x, self.window, padding_mask, state)
        # Clones, because the state's tensors are views of larger ones, which would stay in memory.
        return self._choose(pooled, padding_mask), (state[0].clone(), state[1].clone())

    def _choose(self, pooled: Tensor, padding_mask: Tensor | None) -> Routing:
        """Return weights and active heads for pooled vectors [B, P, C], P = 1 or N; padding_mask [B, P] or None."""
        logits = self._gate(pooled, padding_mask)  # [B, P, experts]
        probs = logits.softmax(-1)
        members = self.members.to(probs.dtype)

        active: Tensor | None = None
        count: int | None = None
        if self.mode == "soft" or (self.mode == "uniform" and not self.training):
            g = probs
        else:
            g = self._one_expert(probs)
            active = (g @ members) > 0  # [B, P, H]
            count = self.budget.heads - self.leave_out
            logits = logits.detach()
            probs = probs.detach()
        weights = self.scale * (g @ members)  # [B, P, H]
        runs = (weights.detach() > 0).to(probs.dtype)  # [B, P, H]
        if padding_mask is not None:
            real = real_tokens(probs, padding_mask)
            probs = probs * real
            runs = runs * real
        counts = runs.sum(1)  # [B, H]
        return Routing(weights, active, RoutingStats(probs, counts, logits), count)

    @torch.no_grad()
    def _one_expert(self, probs: Tensor) -> Tensor:
        """Return gates that are 1 for one expert, the most probable or a drawn one, and 0 for others: [B, P, experts]."""
        if self.mode == "argmax":
            expert = probs.argmax(-1, keepdim=True)
        else:
            # NaN gives a NaN loss, which the training loop skips. Without nan_to_num, multinomial would end the process.
            odds = torch.nan_to_num(probs, nan=1.0)
            expert = torch.multinomial(odds.flatten(0, 1), 1).view(odds.shape[0], odds.shape[1], 1)
        return torch.zeros_like(probs).scatter(-1, expert, 1.0)

    def _gate(self, pooled: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Return the logits of the experts for pooled vectors [B, P, C]: [B, P, experts], all 0 in modes without a gate."""
        if self.mode in UNGATED:
            shape = (pooled.shape[0], pooled.shape[1], self.members.shape[0])
            return no_logits(pooled).new_zeros(shape)
        normed = self.norm(pooled, padding_mask)
        return self.out(self.dropout(torch.tanh(self.hidden(normed))))
