"""Generated images on disk: a killed command finds them again and draws only the rest."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moh_vision.common.io import whole_file, write_whole

IMAGES = ".npy"
SUMS = ".loads.npz"  # compressed: most sums are 0, because a batch has few classes


class ImageParts:
    """Batches of uint8 images in a hidden folder.

    Args:
        parent: where the hidden folder is made.
        total: number of images in all batches.
        batch_size: images in a batch; the last batch may have fewer.
        settings: what the images depend on, as JSON values; a hash of them is in the name of the folder.
        counted: also keep the sums of a `HeadLoad` for each batch.
    """

    def __init__(
        self, parent: Path, total: int, batch_size: int, settings: dict, counted: bool = False
    ):
        text = json.dumps(dict(settings, total=total, batch_size=batch_size), sort_keys=True)
        self.folder = parent / f".samples-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.total = total
        self.batch_size = batch_size
        self.endings = [IMAGES]  # of the files of a batch
        if counted:
            self.endings.append(SUMS)
        self.count = -(-total // batch_size)  # number of batches
        try:
            write_whole(self.folder / "settings.json", text + "\n", shared=True)
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def missing(self, accelerator) -> list[int]:
        """Return the indices of the batches that this rank still has to draw."""
        batches = range(accelerator.process_index, self.count, accelerator.num_processes)
        return [
            batch
            for batch in batches
            if not all(self._path(batch, ending).exists() for ending in self.endings)
        ]

    def numbers(self, batch: int) -> range:
        """Return the numbers of the images in a batch."""
        return range(batch * self.batch_size, min((batch + 1) * self.batch_size, self.total))

    def add(self, batch: int, images: Tensor, sums: Tensor | None = None) -> None:
        """Write a batch: images uint8 [B, C, h, w] and, if `counted`, the sums of their head load."""
        # shared=True: processes of a killed command may still be writing the same files.
        if SUMS in self.endings:
            with whole_file(self._path(batch, SUMS), shared=True) as file:
                np.savez_compressed(file, sums.cpu().numpy())
        with whole_file(self._path(batch, IMAGES), shared=True) as file:
            np.save(file, images.cpu().numpy())

    def batches(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first image, uint8 [B, C, h, w]) of each batch in order."""
        for k in range(self.count):
            yield k * self.batch_size, torch.from_numpy(np.load(self._path(k, IMAGES)))

    def images(self, numbers: list[int]) -> Tensor:
        """Return the images with these numbers, uint8 [len(numbers), C, h, w]."""
        images = []
        for number in numbers:
            batch, index = divmod(number, self.batch_size)
            images.append(np.load(self._path(batch, IMAGES), mmap_mode="r")[index])
        return torch.from_numpy(np.stack(images))

    def sums(self) -> Tensor:
        """Return the sums of the head load, added over all batches."""
        return sum(
            torch.from_numpy(np.load(self._path(k, SUMS))["arr_0"]) for k in range(self.count)
        )

    def _path(self, batch: int, ending: str) -> Path:
        return self.folder / f"{batch:08d}{ending}"
