"""Several weighted sources of text: which block of which source is at which position of a run.

Pure functions of (seed, position), so runs resume by arithmetic, with any number of processes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate
from math import lcm

import numpy as np
from torch.utils.data import ConcatDataset

from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.order import PositionSampler, epoch_order
from moh_vision.language.data.blocks import CausalWindows

LONGEST_ROUND = 1 << 17


class Mixture:
    """The order of the blocks of several sources, which have shares proportional to weights above 0.

    Positions form rounds. In a round, which is shuffled, every source has exactly its share of the positions; with
    percentages of two decimals a round has at most 10,000 positions. If exact rounds were longer than LONGEST_ROUND,
    shares are rounded, and a source stays within one block of its share. A source goes through all its blocks, in a new
    order every epoch, before one repeats.
    """

    def __init__(self, weights: Sequence[float], blocks: Sequence[int], seed: int):
        assert len(weights) == len(blocks) > 0 and min(weights) > 0 and min(blocks) > 0
        exact = [Fraction(str(weight)) for weight in weights]
        self.shares = [weight / sum(exact) for weight in exact]
        self.bounds = list(accumulate(self.shares))  # the last is 1
        self.length = lcm(*(share.denominator for share in self.shares))
        if self.length > LONGEST_ROUND:
            self.length = LONGEST_ROUND
            for source, share in enumerate(self.shares):
                if share * self.length < 2:
                    raise ValueError(
                        f"data.mixture {source}: weight {weights[source]} is {float(share):.2g} of all; "
                        f"allowed is at least {2 / LONGEST_ROUND:.2g}"
                    )
        self.blocks = list(blocks)
        self.seed = seed
        self._round = lru_cache(4)(self._make_round)
        # Cache the present order of every source: sources alternate, and `epoch_order` caches only two orders.
        self._orders = [
            lru_cache(1)(partial(self._make_order, source)) for source in range(len(blocks))
        ]

    def __getitem__(self, position: int) -> tuple[int, int]:
        """Return (source, its block) at a position of the run."""
        round_index, index = divmod(position, self.length)
        sources, earlier, before = self._round(round_index)
        source = int(sources[index])
        drawn = before[source] + int(earlier[index])
        epoch, block = divmod(drawn, self.blocks[source])
        return source, int(self._orders[source](epoch)[block])

    def drawn(self, position: int) -> list[int]:
        """Count the blocks of each source before a position."""
        round_index, index = divmod(position, self.length)
        sources, _, before = self._round(round_index)
        inside = np.bincount(sources[:index], minlength=len(before))  # earlier blocks of this round
        return [count + int(more) for count, more in zip(before, inside)]

    def _before(self, round_index: int) -> list[int]:
        """Count the blocks of each source before a round, as differences of rounded cumulative shares."""
        ends = [int(bound * self.length * round_index) for bound in self.bounds]
        return [end - start for start, end in zip([0, *ends], ends)]

    def _make_round(self, round_index: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return the sources, earlier and before of a round.

        sources [length]: the source of each position. earlier [length]: how many earlier positions of the round have
        the same source. before: see `_before`.
        """
        before = self._before(round_index)
        counts = np.subtract(self._before(round_index + 1), before)
        seed = derive_seed(self.seed, round_index, Stream.ROUNDS)
        rng = np.random.Generator(np.random.PCG64(seed))
        sources = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        earlier = np.empty(self.length, np.int64)
        for source, count in enumerate(counts):
            earlier[sources == source] = np.arange(count)
        return sources, earlier, before

    def _make_order(self, source: int, epoch: int) -> np.ndarray:
        """Return the order of a source's blocks in an epoch."""
        seed = derive_seed(self.seed, source, Stream.BLOCKS)
        return epoch_order(seed, epoch, (self.blocks[source],), group=1)


class MixtureSampler(PositionSampler):
    """Sampler of one rank's micro-batches: lists of (position, index of a block among those of all sources)."""

    def __init__(self, mixture: Mixture, **arguments):
        super().__init__(mixture.blocks, group=1, seed=mixture.seed, **arguments)
        self.mixture = mixture
        self.starts = np.cumsum([0, *mixture.blocks])

    def sample(self, position: int) -> int:
        source, block = self.mixture[position]
        return int(self.starts[source]) + block

    def epoch(self, step: int) -> int:
        """Return the epoch, from 0, of the most repeated source; the same on every rank."""
        drawn = self.mixture.drawn(step * self.batch_size)
        return max(count // blocks for count, blocks in zip(drawn, self.mixture.blocks))

    def epochs(self) -> list[float]:
        """Return how often a run to `stop` goes through each source."""
        drawn = self.mixture.drawn(self.stop * self.batch_size)
        return [count / blocks for count, blocks in zip(drawn, self.mixture.blocks)]


class MixedWindows(ConcatDataset):
    """Concatenation of the windows of several texts, all of one width. `names` are for messages."""

    collate = staticmethod(CausalWindows.collate)

    def __init__(
        self, texts: Sequence[CausalWindows], names: Sequence[str], weights: Sequence[float]
    ):
        super().__init__(texts)
        self.names = list(names)
        self.weights = list(weights)
        self.stores = [text.tokens for text in texts]

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        position, index = item
        source = bisect_right(self.cumulative_sizes, index)
        windows = self.datasets[source]
        first = self.cumulative_sizes[source] - len(windows)
        return windows[position, index - first]
