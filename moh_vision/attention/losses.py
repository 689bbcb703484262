"""Losses and summaries computed from `RoutingStats`, always as values, and the task module that adds them up.

They are computed from what the model returns, so they are right under activation checkpointing, accumulation and several
models in a process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.attention.routing import RoutingStats


def load_balance_loss(
    stats: Sequence[RoutingStats], all_reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
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
        if not stats:
            return torch.zeros(())
        return stats[0].counts.new_zeros(())
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


def moa_balance_loss(
    stats: Sequence[RoutingStats], all_reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """MoA's load-balance loss L_a (Zhang 2022, eq. 13), summed over modules (eq. 17).

    One module: E * sum_i f_i P_i with the counts f and the summed probabilities P each divided by their sum over the
    experts; 1 at balance.

    Args:
        stats: one entry per module with router "moa".
        all_reduce: sums a tensor over processes and returns it, so that f counts the tokens of all of them.
    """
    losses = []
    all_counts = _summed([s.counts.sum(0) for s in stats], all_reduce)
    for s, counts in zip(stats, all_counts):  # counts [E]
        P = s.probs.sum((0, 1))  # [E]
        losses.append(P.shape[0] * (counts / counts.sum() * P / P.sum()).sum())
    return torch.stack(losses).sum()


def _summed(
    counts: list[Tensor], all_reduce: Callable[[Tensor], Tensor] | None
) -> Sequence[Tensor]:
    """Sum vectors of counts over processes, all layers in one message."""
    if all_reduce is None:
        return counts
    lengths = [len(count) for count in counts]
    return all_reduce(torch.cat(counts)).split(lengths)


def router_z_loss(stats: Sequence[RoutingStats]) -> Tensor:
    """Mean squared logsumexp of the router's logits over unpadded tokens (Zhang 2022, eq. 16), summed over modules."""
    losses = []
    for s in stats:
        real = s.probs.detach().sum(-1)  # [B, N] 1, and 0 at padding
        losses.append((s.logits.logsumexp(-1).square() * real).sum() / real.sum())
    return torch.stack(losses).sum()


def head_runs(stats: Sequence[RoutingStats]) -> list[Tensor]:
    """Return how many tokens ran each head, then how many there are: one tensor [H + 1] per layer. No gradient."""
    return [sample_runs(s).sum(0) for s in stats]


def sample_runs(s: RoutingStats) -> Tensor:
    """Return `head_runs` of one layer for every sequence: [B, H + 1]."""
    counts = s.counts.detach()
    # Head 0 is shared and ran for every token; where no head is shared, tokens are counted by their probabilities.
    no_head_is_shared = s.probs.shape[-1] >= counts.shape[-1]
    if no_head_is_shared:
        tokens = s.probs.detach().sum((1, 2)).round()
    else:
        tokens = counts[:, 0]
    return torch.cat([counts, tokens.unsqueeze(1)], dim=1)


def head_usage(stats: Sequence[RoutingStats]) -> list[Tensor]:
    """Return the share of tokens that ran each head, one tensor [H] per layer (1 for shared heads). No gradient."""
    return [runs[:-1] / runs[-1].clamp_min(1) for runs in head_runs(stats)]


class RoutedTask(nn.Module):
    """Holds a model with head routing and adds its routers' auxiliary losses to that of the task.

    Args:
        model: its routed layers hand on their statistics in the order of `model.modules()`.
        balance_weight: weight of MoH's load-balance loss (Jin 2024, eq. 7 times E, averaged over the layers, as released).
        moa_balance_weight, z_weight: weights of MoA's L_a and L_z, summed over its modules (Zhang 2022, eq. 17). The
            defaults are the paper's, for a task loss that is a mean over tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        balance_weight: float,
        moa_balance_weight: float = 0.01,
        z_weight: float = 0.001,
    ):
        super().__init__()
        self.model = model
        self.balance_weight = balance_weight
        self.moa_balance_weight = moa_balance_weight
        self.z_weight = z_weight
        layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
        # In the order of the statistics.
        self.aux_losses = [layer.router.aux_loss for layer in layers]

    def losses(self, task_loss: Tensor, stats: list[RoutingStats]) -> dict:
        """task_loss, a scalar, and the statistics of all layers -> the losses of a micro-batch.

        Returns:
            dict(loss, task_loss, balance_loss, head_runs); with MoA layers also moa_balance_loss and z_loss. Only the
            loss has a gradient. head_runs is what `moh_vision.attention.head_runs` returns.
        """
        moh = []
        moa = []
        for s, aux_loss in zip(stats, self.aux_losses, strict=True):
            if aux_loss == "moh":
                moh.append(s)
            elif aux_loss == "moa":
                moa.append(s)

        terms = {}
        if moh:
            terms["balance_loss"] = load_balance_loss(moh, sum_over_processes)
        else:
            terms["balance_loss"] = task_loss.new_zeros(())
        auxiliary = self.balance_weight * terms["balance_loss"]
        if moa:
            terms["moa_balance_loss"] = moa_balance_loss(moa, sum_over_processes)
            terms["z_loss"] = router_z_loss(moa)
            auxiliary = auxiliary + self.moa_balance_weight * terms["moa_balance_loss"]
            auxiliary = auxiliary + self.z_weight * terms["z_loss"]
        return dict(
            loss=task_loss + auxiliary,
            task_loss=task_loss.detach(),
            **{name: value.detach() for name, value in terms.items()},
            head_runs=head_runs(stats),
        )


def sum_over_processes(counts: Tensor) -> Tensor:
    """All-reduce counts without a gradient; the tensor itself where there is one process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
    return counts
