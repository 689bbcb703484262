"""Which sample comes at which position of a run: a pure function of (seed, position).

The order depends on neither ranks nor workers, so resuming is arithmetic and any number of processes sees the same
data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np

from moh_vision.common.seeds import derive_seed


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, shard_sizes: tuple[int, ...], group: int) -> np.ndarray:
    """Return the sample indices of an epoch in order, a permutation of 0 .. sum(shard_sizes) - 1.

    Shards are permuted and taken in groups of `group`; the samples of a group are shuffled together. A small `group`
    bounds how many shards are read at a time.
    """
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, epoch)))
    starts = np.concatenate([[0], np.cumsum(shard_sizes)])
    shards = rng.permutation(len(shard_sizes))
    parts = []
    for first in range(0, len(shards), group):
        members = np.concatenate(
            [np.arange(starts[s], starts[s + 1]) for s in shards[first : first + group]]
        )
        parts.append(rng.permutation(members))
    return np.concatenate(parts)


@dataclass
class PositionSampler:
    """Yields the micro-batches of one rank, step after step, as lists of (position, sample index).

    Position p = step * batch_size + slot, where `batch_size` is over all ranks and micro-batches. The slots of a step
    are cut into accumulation * world equal slices; slice m * world + r is micro-batch m of rank r. So a step holds the
    same samples whatever the number of ranks.

    Repeated augmentation (Hoffer et al. 2020; DeiT, timm's RepeatAugSampler): with `repeats` 3, an epoch has as many
    positions as before, but covers only the first third of its order. Each sample comes three times, a third of a step
    apart; a copy at the end of a step may fall into the next. With three or more micro-batches the copies are in
    different ones, as DeiT puts them on different GPUs.
    """

    shard_sizes: Sequence[int]
    _: KW_ONLY
    group: int  # see `epoch_order`
    seed: int
    batch_size: int
    accumulation: int
    rank: int
    world: int
    start: int  # the first step
    stop: int  # the step after the last one
    repeats: int = 1

    def __post_init__(self):
        self.shard_sizes = tuple(self.shard_sizes)
        self.total = sum(self.shard_sizes)
        if self.total < 1:
            shards = f"{len(self.shard_sizes)} shards"
            raise ValueError(f"shard_sizes: 0 samples in {shards}; training needs 1 or more")
        if self.batch_size % (self.accumulation * self.world):
            divisor = f"accumulation {self.accumulation} x processes {self.world}"
            raise ValueError(f"optim.batch_size {self.batch_size} is not a multiple of {divisor}")
        # Slot of a step -> offset in the step's part of the order: copy 0 of all its samples, then copy 1, ...
        self.order_in_step = np.concatenate(
            [np.arange(copy, self.batch_size, self.repeats) for copy in range(self.repeats)]
        )

    def __len__(self) -> int:
        return max(0, self.stop - self.start) * self.accumulation

    def __iter__(self):
        for positions in self.positions():
            yield [(p, self.sample(p)) for p in positions]

    def positions(self) -> Iterator[range]:
        """Yield the positions of each micro-batch."""
        micro = self.batch_size // (self.accumulation * self.world)
        for step in range(self.start, self.stop):
            for m in range(self.accumulation):
                first = step * self.batch_size + (m * self.world + self.rank) * micro
                yield range(first, first + micro)

    def epoch(self, step: int) -> int:
        """Return the epoch, from 0, of a step's first sample."""
        return step * self.batch_size // self.total

    def sample(self, position: int) -> int:
        """Return the sample index at a position."""
        step, slot = divmod(position, self.batch_size)
        epoch, index = divmod(step * self.batch_size + int(self.order_in_step[slot]), self.total)
        order = epoch_order(self.seed, epoch, self.shard_sizes, self.group)
        return int(order[index // self.repeats])


def rank_slice(count: int, rank: int, world: int, batch_size: int) -> list[list[int]]:
    """Return one rank's batches of sample indices for evaluation.

    Over all ranks, every index below `count` occurs exactly once: nothing is padded.
    """
    indices = list(range(rank, count, world))
    return [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
