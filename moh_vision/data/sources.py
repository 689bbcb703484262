"""What all sources of images share, and the smallest: the digits of scikit-learn, which need no download."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from moh_vision.data.decode import UnreadableImage, decode_image

MAX_CLASSES = 1_000_000  # without names the largest label says how many there are


class ImageSource:
    """Images of one split; see `splits.open_source`."""

    name: str
    classes: list[str]  # their names; [] of images without labels
    labels: (
        np.ndarray
    )  # class numbers, int64 [N]; without classes 0, which a DiT takes for "no class"
    channels = 3  # 1: grey images
    img_size: int | None = None  # side of the images, if all are squares of one size
    numbered = False  # whether classes have no names but the numbers up to the largest label
    remarks: Sequence[str] = ()  # lines on what was left out or assumed, for the user

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """Images of each shard, see `order.epoch_order`."""
        return (len(self),)

    def read(self, index: int) -> bytes:
        """Return the image file of a sample; raise UnreadableImage."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Name a sample in errors."""
        return str(index)

    def image(self, index: int) -> Image.Image:
        """Decode a sample; raise UnreadableImage, naming it."""
        data = self.read(index)
        try:
            return decode_image(data)
        except UnreadableImage as error:  # its name may have to be read, so only now
            raise UnreadableImage(f"{self.where(index)}: {error}") from None

    def check_labels(self, named: object) -> None:
        """Raise ValueError for the first sample whose label is not that of a class, which are `named` there; -1 is none."""
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.classes)))
        if len(wrong):
            label = self.labels[wrong[0]]
            found = "no label" if label == -1 else f"label {label}"
            raise ValueError(
                f"{self.where(wrong[0])}: {found}, but {named} has {len(self.classes)} classes, from 0 on"
            )

    def listing(self) -> Iterator[bytes]:
        """Yield bytes that tell which sample has which number, beside the labels in their order."""
        yield from ()

    def identities(self) -> Iterator[bytes]:
        """Yield bytes that tell the files from changed ones, beside the labels in their order."""
        yield from self.listing()


def first_size(source: ImageSource) -> str:
    """Return in words the size of a source's first image, behind a message; "" if it cannot be read."""
    try:
        width, height = source.image(0).size
    except UnreadableImage:
        return ""
    return f"; the first has {width} x {height} pixels"


def read_file(path: str | Path, where: str) -> bytes:
    """Read a file; raise UnreadableImage that names it, `where`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnreadableImage(f"{where}: {error.strerror}") from None


class Digits(ImageSource):
    """The 1,797 digits of scikit-learn, 8 x 8 grey pixels; every fifth image of a class is in the test split."""

    channels = 1
    img_size = 8
    name = "digits"
    classes = [str(c) for c in range(10)]

    def __init__(self, split: str):
        from sklearn.datasets import load_digits

        data = load_digits()
        keep = np.full(len(data.target), split == "train")
        for c in range(10):
            keep[np.flatnonzero(data.target == c)[4::5]] ^= True
        self.pixels = np.rint(data.images[keep] * (255 / 16)).astype(np.uint8)  # [n, 8, 8]
        self.labels = data.target[keep].astype(np.int64)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])
