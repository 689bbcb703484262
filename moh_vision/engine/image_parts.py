"""Generated images on disk while they are being generated, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Iterator, List, Tuple

import numpy as np
import torch
from torch import Tensor


class ImageParts:
    """Batches of uint8 images, one file a batch, in a hidden folder named after what determines them.

    Batch k holds images k * batch_size to (k + 1) * batch_size - 1, whoever makes it, so the images do not depend on the
    number of processes or on where a run was interrupted.

    Args:
        parent: where the hidden folder goes.
        total: images in all.
        batch_size: images at a time.
        settings: everything that the images depend on; JSON. Other settings have another folder.

    Raises:
        ValueError: if the folder cannot be made.
    """

    def __init__(self, parent: Path, total: int, batch_size: int, settings: dict):
        text = json.dumps(dict(settings, total=total, batch_size=batch_size), sort_keys=True)
        self.folder = parent / f".samples-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.total, self.batch_size = total, batch_size
        self.count = -(-total // batch_size)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "settings.json").write_text(text + "\n")
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def missing(self, rank: int = 0, world: int = 1) -> List[int]:
        """Numbers of the batches that this process makes and that are not there."""
        return [k for k in range(rank, self.count, world) if not self._path(k).exists()]

    def numbers(self, batch: int) -> range:
        """Of the images of a batch."""
        return range(batch * self.batch_size, min((batch + 1) * self.batch_size, self.total))

    def add(self, batch: int, images: Tensor) -> None:
        """images uint8 [B, C, h, w]; there whole or not at all."""
        hidden = self.folder / f".{batch}.{os.getpid()}.tmp"
        with open(hidden, "wb") as file:
            np.save(file, images.cpu().numpy())
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(self._path(batch))

    def batches(self) -> Iterator[Tuple[int, Tensor]]:
        """(number of the first image, uint8 [B, C, h, w]) of every batch, in order."""
        for k in range(self.count):
            yield k * self.batch_size, torch.from_numpy(np.load(self._path(k)))

    def images(self, numbers: List[int]) -> Tensor:
        """Those images, [len(numbers), C, h, w]."""
        loaded = {}
        for number in numbers:
            k = number // self.batch_size
            if k not in loaded:
                loaded[k] = np.load(self._path(k), mmap_mode="r")
        return torch.stack(
            [torch.from_numpy(loaded[n // self.batch_size][n % self.batch_size].copy()) for n in numbers]
        )

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def _path(self, batch: int) -> Path:
        return self.folder / f"{batch:08d}.npy"
