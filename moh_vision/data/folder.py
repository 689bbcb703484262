"""A folder of class folders, as torchvision's and timm's ImageFolder read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator

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

    Raises:
        ValueError, FileNotFoundError: naming the folder.
    """

    channels = 3
    img_size = None  # as large as each image is; the transform decides

    def __init__(self, root: str, split: str):
        folder = split_folder(root, split)
        if folder is None:
            raise FileNotFoundError(f"data.root {root}: no folder {split} in it")
        self.folder, self.name = folder, Path(root).name
        self.classes = subfolders(folder)
        if not self.classes:
            raise ValueError(f"data.root {root}: {folder} holds no class folders")
        names, labels = [], []
        for label, name in enumerate(self.classes):
            found = sorted(_images(folder, name))
            if not found:
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
        path = self.folder / os.fsdecode(bytes(self.files[index]))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UnreadableImage(f"{path}: {error.strerror}") from None
        return decode_image(data, str(path))

    def listing(self) -> Iterator[bytes]:
        """Bytes that tell which file is which sample: the paths below the folder of the split."""
        yield self.files.tobytes()

    def identities(self) -> Iterator[bytes]:
        """For each sample what tells it from a changed one: its file's path, size and time."""
        for name in self.files:
            found = os.stat(self.folder / os.fsdecode(bytes(name)))
            yield bytes(name) + repr((found.st_size, found.st_mtime_ns)).encode()


def _images(folder: Path, name: str) -> Iterator[str]:
    """Image files in folder/name and below, each as `name`/..."""
    for entry, path in walk(folder / name, name, hidden=True):
        if entry.name.lower().endswith(IMAGES) and entry.name[0] != ".":
            refuse_special(entry)  # a dangling link is found, counted and named when it is read
            yield path
