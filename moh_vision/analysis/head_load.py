"""Head load: how often each head of each layer runs, by class."""

from __future__ import annotations

from typing import Callable, List, Sequence

import torch
from torch import Tensor

from moh_vision.attention import RoutingStats


class HeadLoad:
    """Adds up routing statistics.

    Args:
        layers: heads of each layer.
        num_classes: classes of the labels.
    """

    def __init__(self, layers: Sequence[int], num_classes: int):
        self.layers = list(layers)
        # One row a class: the tokens that ran each head, layer by layer, then the tokens of each layer.
        self.sums = torch.zeros(num_classes, sum(layers) + len(self.layers), dtype=torch.float64)

    def add(self, stats: List[RoutingStats], labels: Tensor) -> None:
        """Add the statistics of a batch with labels [B]; no padding, every sample has the same number of tokens."""
        counts = torch.cat([layer.counts for layer in stats], dim=1)
        tokens = counts.new_tensor([layer.probs.shape[1] for layer in stats]).expand(len(counts), -1)
        self.sums.index_add_(0, labels.cpu(), torch.cat([counts, tokens], dim=1).cpu().double())

    def reduce(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Replace own sums by those of all processes."""
        self.sums = sum_over_processes(self.sums)

    def share(self) -> List[Tensor]:
        """Share of a class's tokens that ran each head: one [classes, H] per layer, 0 for a class without tokens."""
        *counts, tokens = self.sums.split([*self.layers, len(self.layers)], dim=1)
        return [c / t.clamp_min(1)[:, None] for c, t in zip(counts, tokens.unbind(1))]

    def active(self) -> List[float]:
        """Heads that a token runs in each layer, on average over all samples."""
        *counts, tokens = self.sums.sum(0).split([*self.layers, len(self.layers)])
        return [(c.sum() / t.clamp_min(1)).item() for c, t in zip(counts, tokens)]
