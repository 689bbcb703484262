"""A folder of class folders, as torchvision's and timm's ImageFolder read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, List

import numpy as np
from PIL import Image

from moh_vision.data.decode import UnreadableImage, decode_image
from moh_vision.data.walk import IMAGES, refuse_special, subfolders, walk

VAL_NAMES = ("val", "validation")


def split_folder(root: str, split: str) -> Path | None:
    """`root`/train, or `root`/val or /validation, where it exists."""
    names = VAL_NAMES if split == "val" else (split,)
    return next((Path(root, name) for name in names if Path(root, name).is_dir()), None)


class ImageFolder:
    """Images in ROOT/train/CLASS/... and ROOT/val/CLASS/... (or validation); the classes are the folders' names, sorted.

    Files are found at any depth below a class, in sorted order, so that the same folder gives the same sample numbers.
    Links are followed.

    Args:
        root: the folder that holds the splits.
        split: "train" or "val"; "": the classes are in `root` itself.
        allow_empty: also list classes without images, for `data.check`.

    Attributes:
        left_out: files in the folder of the split and below that are no images by their names.

    Raises:
        ValueError, FileNotFoundError: naming the folder.
    """

    channels = 3
    img_size = None  # as large as each image is; the transform decides

    def __init__(self, root: str, split: str, allow_empty: bool = False):
        folder = split_folder(root, split)
        if folder is None:
            raise FileNotFoundError(f"data.root {root}: no folder {split} in it")
        self.folder, self.name = folder, Path(root).name
        self.classes = subfolders(folder)
        if not self.classes:
            raise ValueError(f"data.root {root}: {folder} holds no class folders")
        names, labels = [], []
        self.left_out = sorted(e.name for e in os.scandir(folder) if not e.is_dir() and not e.name.startswith("."))
        for label, name in enumerate(self.classes):
            found = self._images(name)
            if not found and not allow_empty:
                raise ValueError(f"{folder / name}: a class folder without images ({', '.join(IMAGES)})")
            names += found
            labels += [label] * len(found)
        # One array of bytes: a list of a million strings would be copied into every loader process.
        self.files = np.array([os.fsencode(n) for n in names])
        self.labels = np.array(labels, dtype=np.int64)
        self.shard_sizes = (len(self.labels),)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        return decode_image(self.read(index), self.where(index))

    def read(self, index: int) -> bytes:
        """The file of a sample; raises UnreadableImage."""
        try:
            with open(self.where(index), "rb") as file:
                return file.read()
        except OSError as error:
            raise UnreadableImage(f"{self.where(index)}: {error.strerror}") from None

    def where(self, index: int) -> str:
        """Names a sample in errors."""
        return os.path.join(self.folder, os.fsdecode(bytes(self.files[index])))

    def listing(self) -> Iterator[bytes]:
        """Bytes that tell which file is which sample: the paths below the folder of the split."""
        yield self.files.tobytes()

    def identities(self) -> Iterator[bytes]:
        """For each sample what tells it from a changed one: its file's path, size and time."""
        for name in self.files:
            found = os.stat(self.folder / os.fsdecode(bytes(name)))
            yield bytes(name) + repr((found.st_size, found.st_mtime_ns)).encode()

    def _images(self, name: str) -> List[str]:
        """Image files of a class, sorted, each as `name`/..."""
        found = []
        for entry, path in walk(self.folder / name, name, hidden=True):
            if entry.name[0] == ".":
                continue
            if entry.name.lower().endswith(IMAGES):
                refuse_special(entry)  # a dangling link is found, counted and named when it is read
                found.append(path)
            else:
                self.left_out.append(path)
        return sorted(found)
