"""Losses and summaries computed from `RoutingStats`, always as values."""

from typing import Callable, List, Optional, Sequence

import torch
from torch import Tensor

from moh_vision.attention.routing import RoutingStats


def load_balance_loss(stats: Sequence[RoutingStats], all_reduce: Optional[Callable[[Tensor], Tensor]] = None) -> Tensor:
    """MoH's load-balance loss: Jin 2024, eq. 7, times E and averaged over layers, as in the released code.

    Eq. 7 is sum_i f_i P_i for one layer. Here one layer is E * sum_i f_i P_i over its E candidates, where f_i is the
    share of tokens that select head i (a hard count, no gradient) and P_i the mean softmax probability. The loss is k,
    the number of routed heads, at perfect balance. Layers that route nothing are left out of the mean.

    Args:
        stats: one entry per layer.
        all_reduce: sums a tensor over processes in place and returns it, so that f counts the tokens of all of them.

    Returns:
        a scalar; 0 without a graph if no layer routes.
    """
    routed = [s for s in stats if s.probs.shape[-1] > 0]
    if not routed:
        return stats[0].counts.new_zeros(()) if len(stats) else torch.zeros(())
    # Padding has probability 0 and every real token sums to 1, so the sum of all probabilities counts the tokens.
    tokens = [s.probs.detach().sum().round() for s in routed]
    selected = [s.counts[:, -s.probs.shape[-1] :].sum(0) for s in routed]  # [E] each
    *selected, all_tokens = _summed([*selected, torch.stack(tokens)], all_reduce)
    losses = []
    for s, count, local, total in zip(routed, selected, tokens, all_tokens):
        f = count / total  # [E]
        P = s.probs.sum((0, 1)) / local  # [E]
        losses.append(P.shape[0] * (f * P).sum())
    return torch.stack(losses).mean()


def moa_balance_loss(stats: Sequence[RoutingStats], all_reduce: Optional[Callable[[Tensor], Tensor]] = None) -> Tensor:
    """MoA's load-balance loss L_a (Zhang 2022, eq. 13), summed over modules (eq. 17).

    One module: E * sum_i f_i P_i with the counts f and the summed probabilities P each divided by their sum over the
    experts; 1 at balance.

    Args:
        stats: one entry per module with router "moa".
        all_reduce: sums a tensor over processes and returns it, so that f counts the tokens of all of them.
    """
    losses = []
    for s, counts in zip(stats, _summed([s.counts.sum(0) for s in stats], all_reduce)):  # [E]
        P = s.probs.sum((0, 1))  # [E]
        losses.append(P.shape[0] * (counts / counts.sum() * P / P.sum()).sum())
    return torch.stack(losses).sum()


def _summed(counts: List[Tensor], all_reduce: Optional[Callable[[Tensor], Tensor]]) -> Sequence[Tensor]:
    """Vectors of counts summed over processes, all layers in one message."""
    if all_reduce is None:
        return counts
    return all_reduce(torch.cat(counts)).split([len(c) for c in counts])


def router_z_loss(stats: Sequence[RoutingStats]) -> Tensor:
    """Mean squared logsumexp of the router's logits over unpadded tokens (Zhang 2022, eq. 16), summed over modules."""
    losses = []
    for s in stats:
        real = s.probs.detach().sum(-1)  # [B, N] 1, and 0 at padding
        losses.append((s.logits.logsumexp(-1).square() * real).sum() / real.sum())
    return torch.stack(losses).sum()


def head_runs(stats: Sequence[RoutingStats]) -> List[Tensor]:
    """Number of tokens that ran each head, then the number of all tokens: one tensor [H + 1] per layer. No gradient."""
    runs = []
    for s in stats:
        counts = s.counts.detach().sum(0)
        # Head 0 is shared and ran for every token; where no head is shared, tokens are counted by their probabilities.
        tokens = s.probs.detach().sum().round() if s.probs.shape[-1] >= s.counts.shape[-1] else counts[0]
        runs.append(torch.cat([counts, tokens[None]]))
    return runs


def head_usage(stats: Sequence[RoutingStats]) -> List[Tensor]:
    """Share of tokens that ran each head, one tensor [H] per layer (1 for shared heads). No gradient."""
    return [runs[:-1] / runs[-1].clamp_min(1) for runs in head_runs(stats)]
