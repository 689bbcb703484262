"""Generated images on disk, so that a killed run goes on where it was."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moh_vision.engine.io import whole_file, write_whole

IMAGES, SUMS = ".npy", ".loads.npz"  # compressed: a batch has few classes


class ImageParts:
    """Batches of uint8 images in a hidden folder named after `settings`; if `counted`, with sums as of a `HeadLoad`."""

    def __init__(
        self, parent: Path, total: int, batch_size: int, settings: dict, counted: bool = False
    ):
        text = json.dumps(dict(settings, total=total, batch_size=batch_size), sort_keys=True)
        self.folder = parent / f".samples-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.total, self.batch_size, self.kinds = (
            total,
            batch_size,
            (IMAGES, SUMS) if counted else (IMAGES,),
        )
        self.count = -(-total // batch_size)
        try:
            write_whole(self.folder / "settings.json", text + "\n", shared=True)
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def missing(self, accelerator) -> list[int]:
        """Return the numbers of the batches that this process still has to make."""
        own = range(accelerator.process_index, self.count, accelerator.num_processes)
        return [k for k in own if not all(self._path(k, kind).exists() for kind in self.kinds)]

    def numbers(self, batch: int) -> range:
        """Return the numbers of the images of a batch."""
        return range(batch * self.batch_size, min((batch + 1) * self.batch_size, self.total))

    def add(self, batch: int, images: Tensor, sums: Tensor | None = None) -> None:
        """Write a batch, whole or not at all: images uint8 [B, C, h, w], and their sums if counted."""
        if SUMS in self.kinds:
            with whole_file(self._path(batch, SUMS), shared=True) as file:
                np.savez_compressed(file, sums.cpu().numpy())
        with whole_file(
            self._path(batch, IMAGES), shared=True
        ) as file:  # processes of a killed run may still write
            np.save(file, images.cpu().numpy())

    def batches(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first image, uint8 [B, C, h, w]) of each batch in order."""
        for k in range(self.count):
            yield k * self.batch_size, torch.from_numpy(np.load(self._path(k, IMAGES)))

    def images(self, numbers: list[int]) -> Tensor:
        """Return the images of these numbers, [len(numbers), C, h, w]."""
        places = [divmod(number, self.batch_size) for number in numbers]
        images = [np.load(self._path(k, IMAGES), mmap_mode="r")[i] for k, i in places]
        return torch.from_numpy(np.stack(images))

    def sums(self) -> Tensor:
        """Return the sums over all batches."""
        return sum(
            torch.from_numpy(np.load(self._path(k, SUMS))["arr_0"]) for k in range(self.count)
        )

    def _path(self, batch: int, kind: str) -> Path:
        return self.folder / f"{batch:08d}{kind}"
