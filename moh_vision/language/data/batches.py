"""Batches of text: which sentences are together, how rows are padded, and how batches are loaded.

Sentences of similar lengths share a batch, whose tokens are limited. The sentences of a batch are a pure function of
(lengths, seed, position).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.order import PositionSampler
from moh_vision.data.workers import leave_signals_to_the_parent

IGNORE = -100  # label of a token without loss


def length_key(lengths: np.ndarray) -> np.ndarray:
    """Return keys [n] that sort lengths [n, sides] by the longer side, then source, then target."""
    lengths = lengths.astype(np.int64)
    key = lengths.max(1)
    for side in lengths.T:
        key = key << 20 | side  # 20 bits for each length
    return key


def batch_ends(sizes: np.ndarray, max_tokens: int) -> list[int]:
    """Return the end of every batch of sentences whose sizes are sorted.

    A batch has at most `max_tokens` tokens, sentences x longest. A sentence of more tokens is a batch alone.
    """
    ends = [0]
    while ends[-1] < len(sizes):
        first = ends[-1]
        candidates = range(first + 1, min(len(sizes), first + max_tokens // int(sizes[first])) + 1)
        fitting = bisect_right(
            candidates, max_tokens, key=lambda end: (end - first) * int(sizes[end - 1])
        )
        ends.append(first + max(1, fitting))
    return ends[1:]


class TokenSampler(PositionSampler):
    """Sampler of one rank's micro-batches, which are lists of sample indices.

    A micro-batch has at most `max_tokens` padded tokens (sentences x longest of either side with eos, as in fairseq).
    The cuts between batches depend on lengths alone, so every epoch has the same number of batches.

    A position of the run is a micro-batch of a rank. An epoch has every sample once, in an order drawn from (seed, epoch);
    a step may span two epochs.
    """

    def __init__(
        self, lengths: np.ndarray, *, max_tokens: int, accumulation: int, world: int, **arguments
    ):
        longest = int(lengths.max(initial=0))
        if longest > max_tokens:
            raise ValueError(
                f"data.max_tokens {max_tokens} is less than the {longest} tokens of the longest sentence; "
                "raise it, or set data.max_length"
            )
        self.key = length_key(lengths)
        self.bounds = [0, *batch_ends(np.sort(lengths.max(1)), max_tokens)]
        super().__init__(
            [len(self.bounds) - 1],
            group=1,
            batch_size=accumulation * world,
            accumulation=accumulation,
            world=world,
            **arguments,
        )
        self._drawn = lru_cache(1)(self._draw)

    def __iter__(self) -> Iterator[list[int]]:
        for (position,) in self.positions():
            yield self.sample(position)

    def sample(self, position: int) -> list[int]:
        """Return the sample indices of the micro-batch at a position."""
        epoch, index = divmod(position, self.total)
        order, batch_order = self._drawn(epoch)
        batch = batch_order[index]
        return order[self.bounds[batch] : self.bounds[batch + 1]].tolist()

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the order of the samples and the order of the batches."""
        rng = np.random.Generator(np.random.PCG64(derive_seed(self.seed, epoch, Stream.LENGTHS)))
        shuffled = rng.permutation(len(self.key))
        by_length = np.argsort(self.key[shuffled], kind="stable")  # equal lengths stay shuffled
        return shuffled[by_length], rng.permutation(self.total)


def length_slices(lengths: np.ndarray, max_tokens: int, rank: int, world: int) -> list[list[int]]:
    """Return evaluation batches of similar lengths; all ranks together have every sample once."""
    order = np.argsort(length_key(lengths), kind="stable")
    ends = batch_ends(lengths.max(1)[order], max_tokens)
    batches = [order[first:end].tolist() for first, end in zip([0, *ends], ends)]
    return batches[rank::world]


def padded(rows, filler: int) -> Tensor:
    """Stack rows of unequal length, padded with `filler` on the right: [B, longest]."""
    batch = np.full((len(rows), max(map(len, rows))), filler, np.int64)
    for i, row in enumerate(rows):
        batch[i, : len(row)] = row
    return torch.from_numpy(batch)


def load_batches(
    dataset: Dataset, batches: Iterable[list], workers: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Load batches of a text data set in order; each of `batches` is a list of its indices.

    Encoded text rarely needs `workers`.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=dataset.collate,
        worker_init_fn=leave_signals_to_the_parent,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
    )
    return iter(loader)
