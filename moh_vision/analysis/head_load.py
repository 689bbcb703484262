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
        self.counts = [
            torch.zeros(num_classes, heads, dtype=torch.float64) for heads in layers
        ]  # tokens that ran the head
        self.tokens = [torch.zeros(num_classes, dtype=torch.float64) for _ in layers]

    def add(self, stats: List[RoutingStats], labels: Tensor) -> None:
        """Statistics of a batch whose labels are [B]; padding-free, every sample with the same number of tokens."""
        labels = labels.cpu()
        for counts, tokens, layer in zip(self.counts, self.tokens, stats):
            counts.index_add_(0, labels, layer.counts.cpu().double())
            tokens.index_add_(0, labels, torch.full((len(labels),), layer.probs.shape[1], dtype=torch.float64))

    def reduce(self, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Replace own sums by those of all processes."""
        self.counts = [sum_over_processes(c) for c in self.counts]
        self.tokens = [sum_over_processes(t) for t in self.tokens]

    def share(self) -> List[Tensor]:
        """Share of a class's tokens that ran each head: one [classes, H] per layer, 0 for a class without tokens."""
        return [c / t.clamp_min(1)[:, None] for c, t in zip(self.counts, self.tokens)]

    def active(self) -> List[float]:
        """Heads that a token runs in each layer, on average over all samples."""
        return [(c.sum() / t.sum().clamp_min(1)).item() for c, t in zip(self.counts, self.tokens)]
