"""Batches of similar sentence lengths, limited by tokens: pure functions of (lengths, seed, position)."""

from __future__ import annotations

from bisect import bisect_right
from typing import Iterator

import numpy as np

from moh_vision.engine.seeds import Stream, derive_seed


def length_key(lengths: np.ndarray) -> np.ndarray:
    """Return sort keys: longer side, then source, then target. [n, sides] -> [n]."""
    lengths = lengths.astype(np.int64)
    key = lengths.max(1)
    for side in lengths.T:
        key = key << 20 | side
    return key


def batch_ends(sizes: np.ndarray, max_tokens: int) -> list[int]:
    """Cut sentences sorted by size into batches of at most max_tokens, longest size x sentences.
    A longer sentence is alone."""
    ends = [0]
    while ends[-1] < len(sizes):
        first = ends[-1]
        candidates = range(first + 1, min(len(sizes), first + max_tokens // int(sizes[first])) + 1)
        fitting = bisect_right(candidates, max_tokens, key=lambda end: (end - first) * int(sizes[end - 1]))
        ends.append(first + max(1, fitting))
    return ends[1:]


class TokenBatches:
    """The micro-batches of one rank as lists of sample numbers, at most `max_tokens` padded tokens each (sentences x
    longest of either side with eos, as in fairseq). Samples are cut by length alone: epochs have equally many batches.

    Micro-batch `micro` of a rank is number step * (world * accumulation) + micro * world + rank of the run. An epoch
    has every sample once, in an order drawn from (seed, epoch); a step may span two.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        max_tokens: int,
        seed: int,
        accumulation: int,
        rank: int,
        world: int,
        start: int,
        stop: int,
    ):
        if not len(lengths):
            raise ValueError("there are no training samples")
        longest = int(lengths.max())
        if longest > max_tokens:
            raise ValueError(
                f"data.max_tokens {max_tokens} is less than the {longest} tokens of the longest sentence; "
                "raise it, or set data.max_length"
            )
        self.key = length_key(lengths)
        self.bounds = [0, *batch_ends(np.sort(lengths.max(1)), max_tokens)]
        self.seed, self.accumulation, self.rank, self.world = seed, accumulation, rank, world
        self.start, self.stop = start, stop
        self._drawn: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches, over all ranks."""
        return len(self.bounds) - 1

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of a step's first micro-batch; the same on every rank."""
        return step * self.world * self.accumulation // self.batches_per_epoch

    def __len__(self) -> int:
        return max(0, self.stop - self.start) * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.stop):
            for micro in range(self.accumulation):
                yield self.samples((step * self.accumulation + micro) * self.world + self.rank)

    def samples(self, number: int) -> list[int]:
        """Sample numbers of a batch of the run."""
        epoch, place = divmod(number, self.batches_per_epoch)
        if self._drawn[0] != epoch:
            bits = np.random.PCG64(derive_seed(self.seed, epoch, Stream.LENGTHS))
            rng = np.random.Generator(bits)
            shuffled = rng.permutation(len(self.key))
            order = shuffled[np.argsort(self.key[shuffled], kind="stable")]  # equal lengths stay shuffled
            self._drawn = epoch, order, rng.permutation(self.batches_per_epoch)
        _, order, places = self._drawn
        batch = places[place]
        return order[self.bounds[batch] : self.bounds[batch + 1]].tolist()


def length_slices(lengths: np.ndarray, max_tokens: int, rank: int, world: int) -> list[list[int]]:
    """Return evaluation batches of similar lengths; all ranks together have every sample once.
    A sample longer than `max_tokens` is alone.
    """
    order = np.argsort(length_key(lengths), kind="stable")
    ends = batch_ends(lengths.max(1)[order], max_tokens)
    batches = [order[first:end].tolist() for first, end in zip([0, *ends], ends)]
    return batches[rank::world]
