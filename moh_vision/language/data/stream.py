"""Batches of any of the text data sets, through a loader."""

from __future__ import annotations

from typing import Dict, Iterable, Iterator, List, Tuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moh_vision.data.order import StepBatches, rank_slice
from moh_vision.data.workers import leave_signals_to_the_parent


class BlockBatches(StepBatches):
    """The micro-batches of one rank for blocks of equal length, as lists of (position, block number).

    Args:
        blocks: how many there are.
        batch_size: blocks per step, over all ranks and micro-batches.
        seed, accumulation, rank, world, start, stop: see `StepBatches`.
    """

    def __init__(self, blocks: int, **arguments):
        super().__init__([blocks], group=1, **arguments)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of a step's first block; the same on every rank."""
        return step * self.batch_size // self.shard_sizes[0]


def block_slices(blocks: int, batch_size: int, rank: int, world: int) -> List[List[Tuple[int, int]]]:
    """Batches for evaluation: (n, n) for every block exactly once over all ranks."""
    return [[(n, n) for n in numbers] for numbers in rank_slice(blocks, rank, world, batch_size)]


def load_batches(dataset: Dataset, batches: Iterable[list], workers: int = 0) -> Iterator[Dict[str, Tensor]]:
    """The batches of a text data set, in order; the same for any number of workers.

    Args:
        dataset: `ParallelTokens`, `MaskedBlocks` or `CausalWindows`.
        batches: lists of items: `TokenBatches` or `length_slices` for the first, else `BlockBatches` or `block_slices`.
        workers: loader processes; encoded text needs none but on the fastest machines.
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
