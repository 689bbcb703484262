"""Generated images on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from moh_vision.engine.io import whole_file, write_whole


class ImageParts:
    """Batches of uint8 images, one file each, in a hidden folder named after their `settings`.

    Batch k holds images k * batch_size to (k + 1) * batch_size - 1, whatever process makes it. With
    `counted`, a batch also needs sums over its images, as of a `HeadLoad`.
    """

    def __init__(self, parent: Path, total: int, batch_size: int, settings: dict, counted: bool = False):
        text = json.dumps(dict(settings, total=total, batch_size=batch_size), sort_keys=True)
        self.folder = parent / f".samples-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.total, self.batch_size, self.counted = total, batch_size, counted
        self.count = -(-total // batch_size)
        try:
            write_whole(self.folder / "settings.json", text + "\n", shared=True)
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def missing(self, rank: int = 0, world: int = 1) -> List[int]:
        """Return the numbers of the batches that this process still has to make."""
        kept = [self._path, self._sums] if self.counted else [self._path]
        return [k for k in range(rank, self.count, world) if not all(path(k).exists() for path in kept)]

    def numbers(self, batch: int) -> range:
        """Return the numbers of the images of a batch."""
        return range(batch * self.batch_size, min((batch + 1) * self.batch_size, self.total))

    def add(self, batch: int, images: Tensor, sums: Optional[Tensor] = None) -> None:
        """Write a batch, whole or not at all: images uint8 [B, C, h, w], and their sums if counted."""
        if self.counted:
            self._write(self._sums(batch), sums)
        self._write(self._path(batch), images)

    def _write(self, path: Path, values: Tensor) -> None:
        with whole_file(path, shared=True) as file:  # processes of a killed run may still write
            save = np.save if path.suffix == ".npy" else np.savez_compressed
            save(file, values.cpu().numpy())

    def batches(self) -> Iterator[Tuple[int, Tensor]]:
        """Yield (number of the first image, uint8 [B, C, h, w]) of each batch in order."""
        for k in range(self.count):
            yield k * self.batch_size, torch.from_numpy(np.load(self._path(k)))

    def images(self, numbers: List[int]) -> Tensor:
        """Return the images of these numbers, [len(numbers), C, h, w]."""
        loaded = {}
        for number in numbers:
            k = number // self.batch_size
            if k not in loaded:
                loaded[k] = np.load(self._path(k), mmap_mode="r")
        return torch.stack(
            [torch.from_numpy(loaded[n // self.batch_size][n % self.batch_size].copy()) for n in numbers]
        )

    def sums(self) -> Tensor:
        """Return the sums over all batches."""
        return sum(torch.from_numpy(np.load(self._sums(k))["arr_0"]) for k in range(self.count))

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def _path(self, batch: int) -> Path:
        return self.folder / f"{batch:08d}.npy"

    def _sums(self, batch: int) -> Path:
        return self.folder / f"{batch:08d}.loads.npz"  # compressed: a batch has few classes
