"""A folder of class folders, as torchvision's ImageFolder reads it, or of images. Links are followed.

timm's ImageFolder numbers the same folders in another order, and takes the innermost ones; see
`moh_vision.models.class_names.assumed_order`.
"""

import copy
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from moh_vision.common.io import composed
from moh_vision.data.sources import ImageSource, read_file

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
    """Yield (entry, `prefix`...) of all files below a folder; of hidden folders the entry alone.

    Raise ValueError that names a link to a folder `above`: (device, inode) of the folders that led here.
    """
    here = folder.stat()
    if (here.st_dev, here.st_ino) in above:
        raise ValueError(f"{folder}: a link to a folder above it")
    for entry in os.scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            yield from walk(
                folder / entry.name, f"{prefix}{entry.name}/", (*above, (here.st_dev, here.st_ino))
            )
        else:
            yield entry, f"{prefix}{entry.name}"


def image_files(folder: Path, prefix: str = "") -> tuple[list[str], list[tuple[str, str]]]:
    """Return the images below a folder at any depth, sorted, each as `prefix`...; and (path, why) of what is left out.

    This is the rule of every reader of image files: an image has one of the endings IMAGES, and neither it nor a folder
    on the way to it is hidden. Hidden files of other endings are not listed.
    """
    images = []
    left_out = []
    for entry, path in walk(folder, prefix):
        name = entry.name.lower()
        if name.startswith("."):
            if entry.is_dir() or name.endswith(IMAGES):
                left_out.append((path, "hidden"))
        elif name.endswith(IMAGES):
            refuse_special(entry)  # a dangling link is listed, counted and named when it is read
            images.append(path)
        else:
            left_out.append((path, os.path.splitext(name)[1] or "without an ending"))
    return sorted(images), sorted(left_out)


def left_out_line(folder: Path | str, left_out: Sequence[tuple[str, str]]) -> str:
    """Count what `image_files` left out, by ending and reason, in a line; "" for nothing."""
    by_reason: dict[str, list[str]] = {}
    for path, why in left_out:
        by_reason.setdefault(why, []).append(path)
    parts = []
    for why, paths in sorted(by_reason.items()):
        shown = one_line(paths[0])
        if len(paths) > 1:
            shown += ", ..."
        parts.append(f"{len(paths)} {why} ({shown})")
    if not parts:
        return ""
    return f"left out of {folder}: {', '.join(parts)}"


def one_line(path: str) -> str:
    """Return a file name as one line of UTF-8."""
    text = path.encode("utf-8", "backslashreplace").decode()
    return text.replace("\n", "\\n").replace("\t", "\\t")


def refuse_special(path: os.PathLike) -> None:
    """Raise ValueError for a pipe, socket or device, which would be read forever; a dangling link passes."""
    if not os.path.isfile(path) and os.path.exists(path):
        raise ValueError(f"{os.fspath(path)}: not a file but a folder, pipe, socket or device")


def split_folders(root: str | Path) -> dict[str, Path]:
    """Return the folder of each split, "train" and "val": ROOT/train, and ROOT/val or /validation.

    There are none if the folders in ROOT are classes, one of them called train: that one holds no folders, and other
    folders of ROOT hold images.
    """
    root = Path(root)
    there = [name for name in ("train", *VAL_NAMES) if (root / name).is_dir()]
    if not there:
        return {}
    remaining = [name for name in subfolders(root) if name not in there]
    has_classes = any(subfolders(root / name) for name in there)
    if not has_classes and any(_holds_images(root / name) for name in remaining):
        return {}
    if set(VAL_NAMES) <= set(there):
        raise ValueError(f"{root}: both val and validation are there; move one away")
    return {"train" if name == "train" else "val": root / name for name in there}


def _holds_images(folder: Path) -> bool:
    return any(
        entry.name.lower().endswith(IMAGES) and not entry.name.startswith(".")
        for entry, _ in walk(folder, "")
    )


class ImageFolder(ImageSource):
    """Images in FOLDER/CLASS/..., at any depth; classes are the sorted names of folders, without any: no classes.

    They come in sorted order, so that the same folder gives the same sample numbers. `name` is that of the data set.
    """

    def __init__(self, folder: str | Path, name: str = ""):
        self.folder = Path(folder)
        self.name = name
        folders = subfolders(folder)
        self.classes = [composed(name) for name in folders]
        for one, other in itertools.pairwise(folders):
            if composed(one) == composed(other):
                raise ValueError(
                    f"{folder}: two class folders are called {composed(one)}, once with composed characters and once "
                    "without; join them"
                )
        paths = []
        labels = []
        self.left_out = []
        if self.classes:
            self.left_out = sorted(
                (entry.name, "outside of the class folders")
                for entry in os.scandir(folder)
                if not entry.is_dir() and not entry.name.startswith(".")
            )
        for label, name in enumerate(folders or [""]):
            files, left_out = image_files(self.folder / name, name and f"{name}/")
            self.left_out += left_out
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

    @property
    def remarks(self) -> list[str]:
        line = left_out_line(self.folder, self.left_out)
        return [line] if line else []

    def subset(self, keep: np.ndarray) -> Self:
        """Return these images alone, with the same classes; `keep` is a mask [N]."""
        some = copy.copy(self)
        some.files = self.files[keep]
        some.labels = self.labels[keep]
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
