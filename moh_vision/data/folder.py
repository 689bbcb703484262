"""A folder of class folders, as torchvision's ImageFolder reads it, or of images. Links are followed.

timm's ImageFolder numbers the same folders in another order, and takes the innermost ones; see
`moh_vision.models.class_names.assumed_order`.
"""

import copy
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from moh_vision.common.io import composed
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.sources import MIDDLE, ImageSource, file_size, middle_of, read_file

# The extensions that are looked for.
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
VAL_NAMES = ("val", "validation")
# Folders of these names are not taken for classes where no folder says what is trained on.
SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


def subfolders(folder: str | Path) -> list[str]:
    """Return the names of the folders in `folder`, without hidden ones, sorted by their `composed` names."""
    return sorted(
        (
            entry.name
            for entry in os.scandir(folder)
            if entry.is_dir() and not entry.name.startswith(".")
        ),
        key=composed,
    )


def walk(folder: Path, prefix: str, above: tuple = ()) -> Iterator[tuple[os.DirEntry, str]]:
    """Yield (entry, `prefix` + path) of all files below a folder, and of hidden folders without what is in them.

    Raise ValueError for a link to a folder above it, because the walk would never end. `above` holds (device, inode) of
    the folders on the way to this one.
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
    """Return the images below a folder at any depth, sorted, as `prefix` + path; and (path, reason) of other files.

    Every reader of image files has this rule: an image has one of the endings IMAGES, and neither the image nor a
    folder on the way to it is hidden. Hidden files with other endings are in neither list.
    """
    images = []
    left_out = []
    for entry, path in walk(folder, prefix):
        name = entry.name.lower()
        if name.startswith("."):
            if entry.is_dir() or name.endswith(IMAGES):
                left_out.append((path, "hidden"))
        elif name.endswith(IMAGES):
            # A dangling link passes: it is reported as unreadable when it is read.
            refuse_special(entry)
            images.append(path)
        else:
            left_out.append((path, os.path.splitext(name)[1] or "without an ending"))
    return sorted(images), sorted(left_out)


def left_out_line(folder: Path | str, left_out: Sequence[tuple[str, str]]) -> str:
    """Return a line that counts what `image_files` left out, by reason; "" if that is nothing."""
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
    """Return the folder of each split, "train" and "val": ROOT/train, and ROOT/val or ROOT/validation.

    Return {} if the folders in ROOT are classes, one of which is called train, for example. That is so if the folders
    with a split's name hold no folders, and other folders in ROOT hold images.
    """
    root = Path(root)
    present = [name for name in ("train", *VAL_NAMES) if (root / name).is_dir()]
    if not present:
        return {}
    remaining = [name for name in subfolders(root) if name not in present]
    has_classes = any(subfolders(root / name) for name in present)
    if not has_classes and any(_holds_images(root / name) for name in remaining):
        return {}
    if set(VAL_NAMES) <= set(present):
        raise ValueError(f"{root}: both val and validation are there; move one away")
    return {"train" if name == "train" else "val": root / name for name in present}


def _is_image(entry: os.DirEntry) -> bool:
    return entry.name.lower().endswith(IMAGES) and not entry.name.startswith(".")


def _holds_images_directly(folder: Path) -> bool:
    return any(map(_is_image, os.scandir(folder)))


def _holds_images(folder: Path) -> bool:
    return any(_is_image(entry) for entry, _ in walk(folder, ""))


class ImageFolder(ImageSource):
    """Images in FOLDER/CLASS/..., at any depth; if there are no folders in FOLDER, images in FOLDER without classes.

    Classes are sorted by name, and a class's images by path, so that the same folder gives the same sample indices.
    `name` is the name of the data set.

    As data.root this is a folder of splits; `UndividedFolder` takes the others.
    """

    takes = "a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or without CLASS for train_dit.py"

    @classmethod
    def opens(cls, root: str) -> bool:
        return Path(root).is_dir() and bool(split_folders(root))

    @classmethod
    def splits(cls, root: str) -> Collection[str]:
        return split_folders(root)

    @classmethod
    def open(cls, root: str, split: str, key: str) -> Self:
        cls.refuse_missing(root, split, key)
        return cls(split_folders(root)[split], Path(root).name)

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
        all_left_out = []
        if self.classes:
            all_left_out = sorted(
                (entry.name, "outside of the class folders")
                for entry in os.scandir(folder)
                if not entry.is_dir() and not entry.name.startswith(".")
            )
        for label, name in enumerate(folders or [""]):
            files, left_out = image_files(self.folder / name, name and f"{name}/")
            all_left_out += left_out
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
        left_out_here = left_out_line(folder, all_left_out)
        if left_out_here:
            self.remarks = [left_out_here]

    def subset(self, keep: np.ndarray, remarks: Sequence[str]) -> Self:
        source = copy.copy(self)
        source.files = self.files[keep]
        source.labels = self.labels[keep]
        source.shard_sizes = (len(source),)  # not the cached one of all images
        source.remarks = [*self.remarks, *remarks]
        return source

    def read(self, index: int) -> bytes:
        return read_file(self.where(index), self.where(index))

    def path(self, index: int) -> str:
        return os.fsdecode(bytes(self.files[index]))

    def where(self, index: int) -> str:
        return os.path.join(self.folder, self.path(index))

    def file_names(self) -> list[str]:
        return [self.where(index) for index in range(len(self))]

    def size_and_middle(self, index: int) -> tuple[int, bytes]:
        path = self.where(index)
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                return size, os.pread(file.fileno(), MIDDLE, middle_of(size))
        except OSError as error:
            raise UnreadableImage(f"{path}: {error.strerror}") from None

    def sizes(self) -> np.ndarray:
        return np.array([file_size(self.where(index)) for index in range(len(self))], np.int64)

    def listing(self) -> Iterator[bytes]:
        yield self.files.tobytes()

    def identities(self) -> Iterator[bytes]:
        for index, name in enumerate(self.files):
            status = os.stat(self.where(index))
            yield bytes(name) + repr((status.st_size, status.st_mtime_ns)).encode()


class UndividedFolder(ImageFolder):
    """ROOT/CLASS/... or ROOT/*.jpg: a folder of images, or of classes, none of which has the name of a split.

    One class or more has images outside of further folders. All images are "train".
    """

    takes = "a folder with CLASS/*.jpg, or with *.jpg for train_dit.py, without further splits"
    has_splits = False

    @classmethod
    def opens(cls, root: str) -> bool:
        if not Path(root).is_dir() or split_folders(root):
            return False
        classes = subfolders(root)
        if SPLIT_NAMES.intersection(name.lower() for name in classes):
            return False
        folders = [Path(root, name) for name in classes] or [Path(root)]
        return any(map(_holds_images_directly, folders))

    @classmethod
    def splits(cls, root: str) -> Collection[str]:
        return ("train",)

    @classmethod
    def open(cls, root: str, split: str, key: str) -> Self:
        cls.refuse_missing(root, split, key)
        return cls(root, Path(root).name)
