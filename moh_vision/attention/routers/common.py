"""Parts that several routers use: a base class, their linear layer, and means over tokens."""

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from moh_vision.attention.budget import HeadBudget
from moh_vision.attention.kernels.eager import gate_logits
from moh_vision.attention.linear import in_float
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routing import Routing, RoutingStats

# A leaf while fx traces; `wrap` is needed in every module that calls the function.
torch.fx.wrap("gate_logits")


class TopKRouter(Router):
    """Base of routers whose tokens choose their best heads, just as many as the budget says."""

    counted = True
    aux_loss = "moh"

    @property
    def num_shared(self) -> int:
        """Return the number of heads that run for every token."""
        return self.budget.shared

    @property
    def num_candidates(self) -> int:
        """Return the number of heads that tokens choose among."""
        return self.budget.candidates

    @property
    def num_routed(self) -> int:
        """Return the number of candidates that run for one token."""
        return self.budget.routed


class GateLinear(NonDynamicallyQuantizableLinear):
    """A router's linear layer, with outputs in float32 or better.

    It is not quantised, because rounding must not decide which head wins: PyTorch's dynamic quantisation replaces only
    modules whose class is exactly nn.Linear, and torchao leaves out those of the base class.
    """

    def forward(self, x: Tensor) -> Tensor:
        return gate_logits(x, self.weight, self.bias)


def no_logits(x: Tensor) -> Tensor:
    """Return empty logits [B, N, 0], for a layer without candidates."""
    return in_float(x.new_zeros(x.shape[0], x.shape[1], 0))


def refuse_fewer_heads(router: str, budget: HeadBudget) -> None:
    """Raise ValueError if the budget of a router that runs all heads leaves some out."""
    if budget.shared < budget.heads:
        raise ValueError(
            f"router {router!r} runs all {budget.heads} heads, the budget only {budget.active}: leave head_budget out"
        )


def all_heads_stats(x: Tensor, padding_mask: Tensor | None, heads: int) -> RoutingStats:
    """Return the statistics of tokens x [B, N, C] that all run every head: no candidates, and as many counts as tokens.

    padding_mask [B, N] is True at padding, which is not counted.
    """
    none = no_logits(x)
    counts = real_tokens(none.float(), padding_mask).sum(1).expand(-1, heads)
    return RoutingStats(none, counts, none)


def real_tokens(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return 1 for tokens and 0 for padding, in the dtype of x: x [B, N, C], padding_mask [B, N] -> [B, N, 1]."""
    if padding_mask is None:
        return torch.ones((x.shape[0], x.shape[1], 1), dtype=x.dtype, device=x.device)
    return (~padding_mask).unsqueeze(-1).to(x.dtype)


def masked_mean(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Average the unpadded tokens: x [B, .., N, C], padding_mask [B, N] (True at padding) -> [B, .., 1, C]."""
    if padding_mask is None:
        return x.mean(-2, keepdim=True)
    real = real_tokens(x, padding_mask)  # [B, N, 1]
    if x.dim() == 4:
        real = real.unsqueeze(1)  # [B, 1, N, 1], for all heads
    return (x * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)


def route_sequences(
    router: nn.Module,
    x: Tensor,
    condition: Tensor | None = None,
    padding_mask: Tensor | None = None,
    q: Tensor | None = None,
) -> Routing:
    """Call a router once for each sequence of x [B, N, C], or once for all.

    Args:
        router: any router.
        x: the tokens, of which the router reads the mean if there is no condition.
        condition: [B, C], read instead of the mean token; or [C]: one choice for all sequences.
        padding_mask: [B, N], True at padding, which is left out of the mean.
        q: mean queries [B, H, 1, D], for a router that reads queries.
    """
    if condition is not None and condition.dim() == 1:
        routing = router(condition.view(1, 1, -1), q)
        return routing._replace(stats=expand_stats(routing.stats, x.shape[0]), choice="all")
    return router(read_of_sequences(x, condition, padding_mask), q)._replace(choice="sequence")


def read_of_sequences(x: Tensor, condition: Tensor | None, padding_mask: Tensor | None) -> Tensor:
    """Return the vector [B, 1, C] that a router reads for each sequence of x [B, N, C].

    Args:
        condition: [B, C], or None: the mean token is read.
        padding_mask: see `route_sequences`.
    """
    if condition is None:
        return masked_mean(x, padding_mask)
    if condition.shape[0] != x.shape[0]:
        raise ValueError(
            f"condition of shape {tuple(condition.shape)} for {x.shape[0]} sequences: give one vector for each "
            f"sequence, or a single vector of shape ({condition.shape[1]},) for one choice that serves all of them"
        )
    return condition.unsqueeze(1)


def expand_stats(stats: RoutingStats, batch: int) -> RoutingStats:
    """Repeat the statistics of one choice [1, ..] for `batch` sequences that share it, without a copy."""
    return RoutingStats(*(value.expand(batch, *value.shape[1:]) for value in stats))


def causal_mean(
    x: Tensor, window: int, padding_mask: Tensor | None, state: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return for every token the mean of it and the tokens before it, without padding, in float32 or better.

    Args:
        x: [B, N, C].
        window: number of positions in the mean, the token's own included; 0: all positions so far.
        padding_mask: [B, N], True at padding.
        state: the state that an earlier call returned, for the tokens before x; None: there are none. It has vectors
            [B, T, C] and, for each vector, the number of tokens in it [B, T, 1]. Without a window T is 1 and the vector is
            the sum of all tokens so far; with a window the vectors are the last window - 1 tokens, 0 at padding.

    Returns:
        The means [B, N, C], and the state after x.
    """
    x = in_float(x)
    real = real_tokens(x, padding_mask)
    if padding_mask is not None:
        x = x * real
    past = 0
    if state is not None:
        past_vectors, past_counts = state
        past = past_vectors.shape[1]
        x = torch.cat([past_vectors, x], dim=1)
        real = torch.cat([past_counts, real], dim=1)
    total = x.cumsum(1)
    count = real.cumsum(1)
    if window == 0:
        state = (total[:, -1:], count[:, -1:])
    else:
        keep = max(x.shape[1] - (window - 1), 0)
        state = (x[:, keep:], real[:, keep:])
        if x.shape[1] > window:
            total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], dim=1)
            count = torch.cat([count[:, :window], count[:, window:] - count[:, :-window]], dim=1)
    return (total / count.clamp_min(1))[:, past:], state
