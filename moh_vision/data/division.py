"""Keep a part of the images for validation where a data set has none: `data.val_fraction`."""

import hashlib
import os
from collections.abc import Iterable, Iterator

import numpy as np

from moh_vision.common.errors import some_of
from moh_vision.common.progress import Progress
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.sources import ImageSource


def content_hash(source: ImageSource, index: int) -> int:
    """Return 64 bits that follow from the size of a sample and the bytes in its middle.

    They follow from its path for a sample that cannot be read, which the run reports when it comes to it.
    """
    try:
        size, middle = source.size_and_middle(index)
        digest = hashlib.sha256(f"{size} ".encode() + middle)
    except UnreadableImage:
        digest = hashlib.sha256(os.fsencode(source.path(index)))
    return int.from_bytes(digest.digest()[:8], "big")


def divide(source: ImageSource, val_fraction: float, named: str) -> dict[str, ImageSource]:
    """Return {"train": images, "val": images}, about `val_fraction` of them in "val"; messages call them `named`.

    An image is in "val" if its `content_hash` is below the share, which no other images change. So copies stay together,
    new images move no others, and an image has the same part in a folder, in shards and in a table. A class may have no
    images in "val". Where all images of a class would be there, one of them and its copies are in "train"; that one moves
    when the class gets others.
    """
    numbers = Progress.over(range(len(source)), f"dividing {named}", "image")
    hashes = np.array([content_hash(source, index) for index in numbers], np.uint64)
    share = np.uint64(val_fraction * 2**64)
    highest = np.zeros(len(source.classes) or 1, np.uint64)  # hash in each class
    np.maximum.at(highest, source.labels, hashes)
    kept = np.flatnonzero(highest < share)  # classes whose images are all below the share
    in_val = (hashes < share) & ~np.isin(hashes, highest[kept])  # [N]
    if not in_val.any():
        raise ValueError(
            f"{named}: none of its {len(source)} images falls into val_fraction {val_fraction:g} for validation; give a "
            "larger one, or put the images into train and val"
        )
    lines = [f"{in_val.sum()} of the {len(source)} images in {named} are for validation alone"]
    if source.classes:
        in_val_of_class = np.bincount(source.labels[in_val], minlength=len(source.classes))
        lines += _lines_on_classes(source.classes, kept, np.flatnonzero(in_val_of_class == 0))
    return {"train": source.subset(~in_val, lines), "val": source.subset(in_val, lines)}


def _lines_on_classes(
    classes: list[str], kept: Iterable[int], without: Iterable[int]
) -> Iterator[str]:
    """Yield a line on the classes `without` images in "val", and one on those that have `kept` one of all."""
    names = [classes[c] for c in without]
    if names:
        count = f"{len(names)} of {len(classes)} classes"
        yield f"{count} have no image for validation: {some_of(names, 5)}"
    names = [classes[c] for c in kept]
    if names:
        yield (
            f"all images of {some_of(names, 5)} would be for validation: one of a class is trained on, until it has others"
        )
