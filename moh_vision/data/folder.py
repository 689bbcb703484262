"""A folder of class folders, as torchvision's ImageFolder reads it, or of images. Links are followed.

timm's ImageFolder numbers the same folders in another order, and takes the innermost ones; see
`moh_vision.models.class_names.assumed_order`.
"""

import copy
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from moh_vision.common.errors import some_of
from moh_vision.common.io import composed
from moh_vision.common.progress import Progress
from moh_vision.data.sources import ImageSource, file_size, read_file

# The extensions that are looked for.
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
VAL_NAMES = ("val", "validation")
# Bytes in the middle of a file that, with its size, decide about its part of a division: pixels, not a header that many
# files share. To read whole files would take as long as an epoch.
MIDDLE = 16_384
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


def undivided_folder(root: str | Path) -> Path | None:
    """Return the folder of images in `root` that has no validation images beside it; None if there is none.

    That is ROOT/train; or `root` if it holds images and no folders, or if its folders are classes: none has a name of a
    split, and one or more hold images outside of further folders.
    """
    root = Path(root)
    if not root.is_dir() or any(root.glob("*.tar")):
        return None
    folders = split_folders(root)
    if folders:
        return None if "val" in folders else folders["train"]
    classes = subfolders(root)
    if SPLIT_NAMES.intersection(name.lower() for name in classes):
        return None
    folders = [root / name for name in classes] or [root]
    return root if any(map(_holds_images_directly, folders)) else None


def _is_image(entry: os.DirEntry) -> bool:
    return entry.name.lower().endswith(IMAGES) and not entry.name.startswith(".")


def _holds_images_directly(folder: Path) -> bool:
    return any(map(_is_image, os.scandir(folder)))


def _holds_images(folder: Path) -> bool:
    return any(_is_image(entry) for entry, _ in walk(folder, ""))


def content_hash(path: str, name: str) -> int:
    """Return 64 bits that follow from the size of a file and the MIDDLE bytes in its middle.

    They follow from `name` for a file that cannot be read, which the run reports when it comes to it.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            middle = os.pread(file.fileno(), MIDDLE, max(0, size - MIDDLE) // 2)
        digest = hashlib.sha256(f"{size} ".encode() + middle)
    except OSError:
        digest = hashlib.sha256(os.fsencode(name))
    return int.from_bytes(digest.digest()[:8], "big")


class ImageFolder(ImageSource):
    """Images in FOLDER/CLASS/..., at any depth; if there are no folders in FOLDER, images in FOLDER without classes.

    Classes are sorted by name, and a class's images by path, so that the same folder gives the same sample indices.
    `name` is the name of the data set.
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
        self.divided: list[str] = []  # lines on the division, of a part that `divide` has made

    @property
    def remarks(self) -> list[str]:
        left_out = left_out_line(self.folder, self.left_out)
        return [line for line in (left_out, *self.divided) if line]

    def divide(self, val_fraction: float) -> dict[str, Self]:
        """Return {"train": images, "val": images}, about `val_fraction` of them in "val".

        An image is in "val" if `content_hash` of its file is below the share, which other files do not change. So copies
        stay together, and new files move no others. A class may have no images in "val". Where all images of a class would
        be there, one of them and its copies are in "train"; that one moves when the class gets others.
        """
        numbers = Progress.over(range(len(self)), f"dividing {self.folder}", "image")
        hashes = np.array([content_hash(self.where(i), self.path(i)) for i in numbers], np.uint64)
        share = np.uint64(val_fraction * 2**64)
        highest = np.zeros(len(self.classes) or 1, np.uint64)  # hash in each class
        np.maximum.at(highest, self.labels, hashes)
        kept = np.flatnonzero(highest < share)  # classes whose images are all below the share
        in_val = (hashes < share) & ~np.isin(hashes, highest[kept])  # [N]
        if not in_val.any():
            raise ValueError(
                f"{self.folder}: none of its {len(self)} images falls into val_fraction {val_fraction:g} for validation; "
                "give a larger one, or put the images into train and val"
            )
        parts = {"train": self.subset(~in_val), "val": self.subset(in_val)}
        lines = [
            f"{in_val.sum()} of the {len(self)} images in {self.folder} are for validation alone"
        ]
        if self.classes:
            lines += self._lines_on_classes(kept, set(parts["val"].labels.tolist()))
        for part in parts.values():
            part.divided = lines
        return parts

    def _lines_on_classes(self, kept: Iterable[int], in_val: set[int]) -> list[str]:
        """Return lines on the classes of a division without images in "val", and on those that have `kept` one of all."""
        lines = []
        without = [name for c, name in enumerate(self.classes) if c not in in_val]
        if without:
            shown = some_of(without, 5)
            count = f"{len(without)} of {len(self.classes)} classes"
            lines.append(f"{count} have no image for validation: {shown}")
        names = some_of([self.classes[c] for c in kept], 5)
        if names:
            lines.append(
                f"all images of {names} would be for validation: one of a class is trained on, until it has others"
            )
        return lines

    def subset(self, keep: np.ndarray) -> Self:
        """Return a source of the images where the mask `keep` [N] is true, with the same classes."""
        source = copy.copy(self)
        source.files = self.files[keep]
        source.labels = self.labels[keep]
        source.shard_sizes = (len(source),)  # not the cached one of all images
        return source

    def read(self, index: int) -> bytes:
        return read_file(self.where(index), self.where(index))

    def path(self, index: int) -> str:
        """Return the path of a sample below the folder of the split."""
        return os.fsdecode(bytes(self.files[index]))

    def where(self, index: int) -> str:
        return os.path.join(self.folder, self.path(index))

    def sizes(self) -> np.ndarray:
        return np.array([file_size(self.where(index)) for index in range(len(self))], np.int64)

    def listing(self) -> Iterator[bytes]:
        yield self.files.tobytes()

    def identities(self) -> Iterator[bytes]:
        for index, name in enumerate(self.files):
            status = os.stat(self.where(index))
            yield bytes(name) + repr((status.st_size, status.st_mtime_ns)).encode()
