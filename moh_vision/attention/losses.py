"""Auxiliary losses and head counts computed from `RoutingStats`, and `RoutedTask`, which adds the losses up.

They are functions of what the model returns, not state in modules, so they are right under activation checkpointing,
accumulation and with several models in a process.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moh_vision.attention.routed_layer import routed_layers
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
    groups = by_shape(routed)
    chances = [stack_probs(layers).sum((1, 2)) for layers in groups]  # [L, E] each
    # The probabilities of a token sum to 1, and those at padding are 0, so the sum of all is the number of tokens.
    tokens = [chance.detach().sum(1).round() for chance in chances]  # [L] each
    selected = [
        stack_counts(layers)[..., -chance.shape[1] :].sum(1)  # [L, E]
        for layers, chance in zip(groups, chances)
    ]
    *all_selected, all_tokens = _summed([*selected, torch.cat(tokens)], all_reduce)
    losses = []
    totals = all_tokens.split([len(layers) for layers in groups])
    for chance, local, count, total in zip(chances, tokens, all_selected, totals):
        f = count / total.unsqueeze(1)
        P = chance / local.unsqueeze(1)
        losses.append(P.shape[1] * (f * P).sum(1))
    return torch.cat(losses).mean()


def moa_balance_loss(
    stats: Sequence[RoutingStats], all_reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return MoA's load-balance loss L_a (Zhang 2022, eq. 13), summed over layers (eq. 17).

    The loss of one layer is E * sum_i f_i P_i. f_i is the number of tokens that select expert i, P_i the sum over tokens of
    its probability; f and P are each normalised to sum to 1 over experts. At perfect balance the loss is 1.

    Args:
        stats: one entry per layer whose router has this loss.
        all_reduce: sums a tensor over processes and returns the sum, so that f counts the tokens of all processes.
    """
    losses = []
    groups = by_shape(stats)
    all_counts = _summed([stack_counts(layers).sum(1) for layers in groups], all_reduce)
    for layers, counts in zip(groups, all_counts):  # counts [L, E]
        P = stack_probs(layers).sum((1, 2))  # [L, E]
        f = counts / counts.sum(1, keepdim=True)
        losses.append(P.shape[1] * (f * P / P.sum(1, keepdim=True)).sum(1))
    return torch.cat(losses).sum()


def by_shape(stats: Sequence[RoutingStats]) -> list[list[RoutingStats]]:
    """Group the statistics of layers by their shapes.

    A loss stacks those of a group: it then launches a few kernels for all layers, and not a few for every layer.
    """
    groups: dict[tuple, list[RoutingStats]] = {}
    for s in stats:
        groups.setdefault((s.probs.shape, s.counts.shape), []).append(s)
    return list(groups.values())


def stack_probs(layers: Sequence[RoutingStats]) -> Tensor:
    """Return the probabilities of L layers of one shape, [L, B, N, E]."""
    return torch.stack([s.probs for s in layers])


def stack_counts(layers: Sequence[RoutingStats]) -> Tensor:
    """Return the counts of L layers of one shape, [L, B, H]."""
    return torch.stack([s.counts for s in layers])


def _summed(
    counts: list[Tensor], all_reduce: Callable[[Tensor], Tensor] | None
) -> Sequence[Tensor]:
    """Sum tensors of counts over processes, by one all-reduce for all layers."""
    if all_reduce is None:
        return counts
    summed = all_reduce(torch.cat([count.flatten() for count in counts]))
    parts = summed.split([count.numel() for count in counts])
    return [part.view(count.shape) for part, count in zip(parts, counts)]


def router_z_loss(stats: Sequence[RoutingStats]) -> Tensor:
    """Return MoA's L_z: the mean over unpadded tokens of the squared logsumexp of the logits, summed over layers.

    Zhang 2022, eq. 16 and 17.
    """
    losses = []
    for layers in by_shape(stats):
        real = stack_probs(layers).detach().sum(-1)  # [L, B, N], 1 at tokens, 0 at padding
        logits = torch.stack([s.logits for s in layers])
        squares = logits.logsumexp(-1).square() * real
        losses.append(squares.sum((1, 2)) / real.sum((1, 2)))
    return torch.cat(losses).sum()


def head_runs(stats: Sequence[RoutingStats]) -> list[Tensor]:
    """Return how many tokens ran each head and, last, the number of tokens: one tensor [H + 1] per layer. No gradient."""
    runs: dict[int, Tensor] = {}
    for layers in by_shape(stats):
        of_layers = sample_runs(layers).sum(1)  # [L, H + 1]
        runs.update((id(s), row) for s, row in zip(layers, of_layers))
    return [runs[id(s)] for s in stats]


def sample_runs(layers: Sequence[RoutingStats]) -> Tensor:
    """Return the counts of `head_runs` for L layers of one shape and every sequence: [L, B, H + 1]."""
    counts = stack_counts(layers).detach()
    # Count the tokens: if head 0 is shared, it ran for all of them; else the probabilities of each sum to 1.
    no_head_is_shared = layers[0].probs.shape[-1] >= counts.shape[-1]
    if no_head_is_shared:
        tokens = stack_probs(layers).detach().sum((2, 3)).round()
    else:
        tokens = counts[..., 0]
    return torch.cat([counts, tokens.unsqueeze(-1)], dim=-1)


def head_usage(stats: Sequence[RoutingStats]) -> list[Tensor]:
    """Return the share of tokens that ran each head, one tensor [H] per layer (1 for shared heads). No gradient."""
    return [runs[:-1] / runs[-1].clamp_min(1) for runs in head_runs(stats)]


# The losses that a router may state in `aux_loss` -> names of their weights.
AUX_LOSSES = dict(moh=("balance_weight",), moa=("moa_balance_weight", "z_weight"))


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
        layers = routed_layers(model)
        # One entry per layer, in the order of the statistics.
        self.aux_losses = [layer.router.aux_loss for layer in layers]
        for layer, aux_loss in zip(layers, self.aux_losses):
            if aux_loss and aux_loss not in AUX_LOSSES:
                raise ValueError(
                    f"aux_loss {aux_loss!r} of {type(layer.router).__name__} is not one of {', '.join(AUX_LOSSES)}, "
                    "nor '' for none"
                )

    def losses(self, task_loss: Tensor, stats: list[RoutingStats]) -> dict:
        """Return the losses of a micro-batch.

        Args:
            task_loss: a scalar.
            stats: one entry per layer.

        Returns:
            dict(loss, task_loss, balance_loss, head_runs); with MoA layers also moa_balance_loss and z_loss. Only "loss",
            their weighted sum, has a gradient. "head_runs" is what `moh_vision.attention.head_runs` returns.
        """
        by_loss: dict[str, list[RoutingStats]] = {aux_loss: [] for aux_loss in AUX_LOSSES}
        for s, aux_loss in zip(stats, self.aux_losses, strict=True):
            if aux_loss:
                by_loss[aux_loss].append(s)
        moh = by_loss["moh"]
        moa = by_loss["moa"]

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
