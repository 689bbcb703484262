"""Auxiliary losses and head counts computed from `RoutingStats`, and `RoutedTask`, which adds the losses up.

They are functions of what the model returns, not state in modules, so they are right under activation checkpointing,
accumulation and with several models in a process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.attention.routing import RoutingStats


def load_balance_loss(
    stats: Sequence[RoutingStats], all_reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return MoH's load-balance loss: Jin 2024, eq. 7, times E and averaged over layers, as in the released code.

    The loss of one layer is E * sum_i f_i P_i over its E candidates (eq. 7 has no factor E). f_i is the share of tokens that
    select head i (a count, without a gradient), P_i the mean over tokens of the softmax probability of head i. At perfect
    balance the loss is k, the number of routed heads. Layers without routed heads are left out of the mean.

    Args:
        stats: one entry per layer.
        all_reduce: sums a tensor over processes and returns the sum, so that f counts the tokens of all processes.

    Returns:
        A scalar; 0 without a gradient if no layer routes.
    """
    routed = [s for s in stats if s.probs.shape[-1] > 0]
    if not routed:
        if not stats:
            return torch.zeros(())
        return stats[0].counts.new_zeros(())
    # The probabilities of a token sum to 1, and those at padding are 0, so the sum of all is the number of tokens.
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
    """Return MoA's load-balance loss L_a (Zhang 2022, eq. 13), summed over layers (eq. 17).

    The loss of one layer is E * sum_i f_i P_i. f_i is the number of tokens that select expert i, P_i the sum over tokens of
    its probability; f and P are each normalised to sum to 1 over experts. At perfect balance the loss is 1.

    Args:
        stats: one entry per layer with router "moa".
        all_reduce: sums a tensor over processes and returns the sum, so that f counts the tokens of all processes.
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
    """Sum vectors of counts over processes, by one all-reduce for all layers."""
    if all_reduce is None:
        return counts
    lengths = [len(count) for count in counts]
    return all_reduce(torch.cat(counts)).split(lengths)


def router_z_loss(stats: Sequence[RoutingStats]) -> Tensor:
    """Return MoA's L_z: the mean over unpadded tokens of the squared logsumexp of the logits, summed over layers.

    Zhang 2022, eq. 16 and 17.
    """
    losses = []
    for s in stats:
        real = s.probs.detach().sum(-1)  # [B, N], 1 at tokens, 0 at padding
        losses.append((s.logits.logsumexp(-1).square() * real).sum() / real.sum())
    return torch.stack(losses).sum()


def head_runs(stats: Sequence[RoutingStats]) -> list[Tensor]:
    """Return how many tokens ran each head and, last, the number of tokens: one tensor [H + 1] per layer. No gradient."""
    return [sample_runs(s).sum(0) for s in stats]


def sample_runs(s: RoutingStats) -> Tensor:
    """Return the counts of `head_runs` for one layer and every sequence: [B, H + 1]."""
    counts = s.counts.detach()
    # Count the tokens: if head 0 is shared, it ran for all of them; else the probabilities of each sum to 1.
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
    """Holds a model with head routing, and adds its routers' auxiliary losses to the loss of the task.

    Args:
        model: must return the statistics of its routed layers in the order of `model.modules()`.
        balance_weight: weight of MoH's load-balance loss (Jin 2024, eq. 7 times E, averaged over the layers, as released).
        moa_balance_weight, z_weight: weights of MoA's L_a and L_z, summed over layers (Zhang 2022, eq. 17). The defaults
            are the paper's, for a task loss that is a mean over tokens.
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
        # One entry per layer, in the order of the statistics.
        self.aux_losses = [layer.router.aux_loss for layer in layers]

    def losses(self, task_loss: Tensor, stats: list[RoutingStats]) -> dict:
        """Return the losses of a micro-batch.

        Args:
            task_loss: a scalar.
            stats: one entry per layer.

        Returns:
            dict(loss, task_loss, balance_loss, head_runs); with MoA layers also moa_balance_loss and z_loss. Only "loss",
            their weighted sum, has a gradient. "head_runs" is what `moh_vision.attention.head_runs` returns.
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
    """Return the sum of counts over processes, without a gradient; `counts` itself if torch.distributed is not in use."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        counts = counts.clone()
        torch.distributed.all_reduce(counts)
    return counts
