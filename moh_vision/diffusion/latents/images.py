"""Images on their way to the VAE."""

from __future__ import annotations

import os
from functools import partial
from typing import List, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moh_vision.data.crop import center_crop
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.shards.worker import watch_parent


class CroppedImages(Dataset):
    """Item n -> (n, image n center-cropped as uint8 [C, size, size]), or (n, what went wrong)."""

    def __init__(self, source, size: int, channels: int):
        self.source, self.size, self.mode = source, size, "L" if channels == 1 else "RGB"

    def __getitem__(self, number: int):
        try:
            image = center_crop(self.source.image(number).convert(self.mode), self.size)
        except (UnreadableImage, OSError) as error:  # returned, because the loader would bury it in a traceback
            return number, error
        return number, torch.from_numpy(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1).copy())


def _collate(items: list) -> Tuple[List[int], Tensor, List[list]]:
    """Items -> (numbers, images [B, C, size, size], [number, reason] of unreadable ones)."""
    for _, value in items:
        if isinstance(value, OSError):
            return [], value, []
    bad = [[number, str(value)] for number, value in items if isinstance(value, UnreadableImage)]
    good = [(number, value) for number, value in items if isinstance(value, Tensor)]
    return [number for number, _ in good], torch.stack([image for _, image in good]) if good else torch.empty(0), bad


class ImageBatches:
    """Batches of images, read by `workers` processes.

    Yields:
        (numbers, images uint8 [B, C, size, size], [number, reason] of those that cannot be decoded)

    Raises:
        OSError: a file that cannot be read. ValueError: a process that died.
    """

    def __init__(self, source, size: int, channels: int, batches: List[List[int]], workers: int):
        self.workers = workers
        self.loader = DataLoader(
            CroppedImages(source, size, channels),
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=_collate,
            worker_init_fn=partial(_start, os.getpid()),
            pin_memory=torch.cuda.is_available(),
        )

    def __iter__(self):
        try:
            for numbers, images, bad in self.loader:
                if isinstance(images, OSError):
                    raise images
                yield numbers, images, bad
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise ValueError(f"a reading process of {self.workers} died, of too little memory perhaps") from None


def _start(parent: int, _: int) -> None:
    # Or readers would outlive a run that is killed, and keep the lock of its folder.
    watch_parent(parent)
