"""A folder of class folders, as torchvision's ImageFolder reads it, or of images. Links are followed.

timm's ImageFolder numbers the same folders in another order, and takes the innermost ones; see
`moh_vision.models.class_names.assumed_order`.
"""

import copy
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np

from moh_vision.data.sources import ImageSource, read_file
from moh_vision.engine.io import composed

# The extensions that are looked for.
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
VAL_NAMES = ("val", "validation")


def subfolders(folder: str | Path) -> list[str]:
    """Return the names of the folders in `folder` but hidden ones, in the order of their `composed` names."""
    return sorted(
        (
            entry.name
            for entry in os.scandir(folder)
            if entry.is_dir() and not entry.name.startswith(".")
        ),
        key=composed,
    )


def walk(folder: Path, prefix: str, above: tuple = ()) -> Iterator[tuple[os.DirEntry, str]]:
    """Yield (entry, `prefix`...) of all files below a folder but hidden ones.

    Raise ValueError that names a link to a folder `above`: (device, inode) of the folders that led here.
    """
    here = folder.stat()
    if (here.st_dev, here.st_ino) in above:
        raise ValueError(f"{folder}: a link to a folder above it")
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from walk(
                folder / entry.name, f"{prefix}{entry.name}/", (*above, (here.st_dev, here.st_ino))
            )
        else:
            yield entry, f"{prefix}{entry.name}"


def refuse_special(path: os.PathLike) -> None:
    """Raise ValueError for a pipe, socket or device, which would be read forever; a dangling link passes."""
    if not os.path.isfile(path) and os.path.exists(path):
        raise ValueError(f"{os.fspath(path)}: not a file but a folder, pipe, socket or device")


def split_folder(root: str, split: str) -> Path | None:
    """Return ROOT/train, or ROOT/val or /validation, if it exists."""
    folders = [Path(root, name) for name in (VAL_NAMES if split == "val" else (split,))]
    return next((folder for folder in folders if folder.is_dir()), None)


class ImageFolder(ImageSource):
    """Images in FOLDER/CLASS/..., at any depth; classes are the sorted names of folders, without any: no classes.

    They come in sorted order, so that the same folder gives the same sample numbers. Of the data set `name`.
    `left_out` are the files that are no images by their names.
    """

    def __init__(self, folder: str | Path, name: str = ""):
        self.folder, self.name = Path(folder), name
        folders = subfolders(folder)
        self.classes = [composed(name) for name in folders]
        for one, other in itertools.pairwise(folders):
            if composed(one) == composed(other):
                raise ValueError(
                    f"{folder}: two class folders are called {composed(one)}, once with composed characters and once "
                    "without; join them"
                )
        paths, labels, self.left_out = [], [], []
        if self.classes:
            self.left_out = sorted(
                e.name for e in os.scandir(folder) if not e.is_dir() and not e.name.startswith(".")
            )
        for label, name in enumerate(folders or [""]):
            files = self._images(name)
            if not files:
                expected = f"expected {folder}/CLASS/*.jpg, or without classes {folder}/*.jpg"
                raise ValueError(
                    f"{self.folder / name} holds no images ({', '.join(IMAGES)}); {expected}"
                )
            paths += files
            labels += [label] * len(files)
        # One array of bytes: a list of a million strings would be copied into every loader process.
        self.files = np.array([os.fsencode(path) for path in paths])
        self.labels = np.array(labels, dtype=np.int64)

    def subset(self, keep: np.ndarray) -> Self:
        """Return these images alone, with the same classes; `keep` is a mask [N]."""
        some = copy.copy(self)
        some.files, some.labels = self.files[keep], self.labels[keep]
        some.shard_sizes = (len(some),)
        return some

    def read(self, index: int) -> bytes:
        return read_file(self.where(index), self.where(index))

    def path(self, index: int) -> str:
        """Return the path of a sample below the folder of the split."""
        return os.fsdecode(bytes(self.files[index]))

    def where(self, index: int) -> str:
        return os.path.join(self.folder, self.path(index))

    def listing(self) -> Iterator[bytes]:
        yield self.files.tobytes()

    def identities(self) -> Iterator[bytes]:
        for index, name in enumerate(self.files):
            status = os.stat(self.where(index))
            yield bytes(name) + repr((status.st_size, status.st_mtime_ns)).encode()

    def _images(self, name: str) -> list[str]:
        """Return the image files of a class, sorted, each as `name`/...; "": those in the folder itself."""
        images = []
        for entry, path in walk(self.folder / name, name and f"{name}/"):
            if entry.name.lower().endswith(IMAGES):
                refuse_special(
                    entry
                )  # a dangling link is listed, counted and named when it is read
                images.append(path)
            else:
                self.left_out.append(path)
        return sorted(images)
