"""Batches of any of the text data sets, through a loader."""

from __future__ import annotations

from typing import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moh_vision.data.workers import leave_signals_to_the_parent


def load_batches(dataset: Dataset, batches: Iterable[list], workers: int = 0) -> Iterator[dict[str, Tensor]]:
    """Load batches of a text data set in order, the same for any number of workers. Each of `batches` lists
    items. Encoded text rarely needs `workers`.
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
