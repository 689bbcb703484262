"""Find the validation images that are in the training split too, byte for byte."""

import hashlib
from collections.abc import Callable

import numpy as np

from moh_vision.data.decode import UnreadableImage
from moh_vision.data.sources import ImageSource, Source

# Only files of the same size can be copies, so few images are read: of photographs about as many bytes for each image of
# the validation as the training split has images.
LOOKED_AT = 1000  # images of the validation, evenly spread
MOST_READ = 20_000  # training images of the sizes that these have, evenly spread


def warn_of_copies(named: str, train: Source, val: ImageSource, say: Callable) -> None:
    """Warn if images of the validation are also in the training split, with two names."""
    pairs, looked_at = copies(train, val)
    if pairs:
        of_val, of_train = pairs[0]
        say(
            f"{named}: {len(pairs)} of {looked_at} images for validation that were looked at are trained on too: "
            f"{val.where(of_val)} is {train.where(of_train)}; the scores are too good by them"
        )


def copies(train: Source, val: ImageSource) -> tuple[list[tuple[int, int]], int]:
    """Return (index in val, index in train) of images with the same bytes, and how many of val were looked at.

    Args:
        train, val: the splits. A stream has no images to look at before training.
    """
    sizes = train.sizes()
    val_sizes = val.sizes()
    if sizes is None or val_sizes is None:
        return [], 0
    looked_at = _spread(np.arange(len(val)), LOOKED_AT)
    candidates = np.flatnonzero((sizes > 0) & np.isin(sizes, val_sizes[looked_at]))
    in_train: dict[bytes, int] = {}
    for index in _spread(candidates, MOST_READ):
        in_train.setdefault(_digest(train, index), index)
    in_train.pop(b"", None)
    digests = [_digest(val, index) for index in looked_at]
    pairs = [(i, in_train[digest]) for i, digest in zip(looked_at, digests) if digest in in_train]
    return pairs, len(looked_at)


def _spread(indices: np.ndarray, most: int) -> list[int]:
    """Return `most` of the indices, evenly spread, or all if they are fewer."""
    chosen = np.linspace(0, len(indices) - 1, min(most, len(indices))).astype(int)
    return indices[chosen].tolist()


def _digest(source: ImageSource, index: int) -> bytes:
    """Return a hash of a sample's bytes; b"" if it cannot be read, which the run reports when it comes to it."""
    try:
        return hashlib.sha256(source.read(index)).digest()
    except UnreadableImage:
        return b""
