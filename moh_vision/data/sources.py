"""What all sources of images share, and the smallest: the digits of scikit-learn, which need no download."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from moh_vision.data.decode import UnreadableImage, decode_image

MAX_CLASSES = 1_000_000  # without names the largest label says how many there are


class Sample(NamedTuple):
    """A labelled image as its source holds it, not decoded yet.

    Attributes:
        name: its number in the source; in a stream URL and key. See `Source.where`.
        content: the bytes of an image file, pixels as uint8 [h, w] or [h, w, 3], or stored latents.
        label: class number, 0 without classes; class numbers [L] where several are right.
    """

    name: int | str
    content: bytes | np.ndarray | Tensor
    label: int | np.ndarray


class BadSample(NamedTuple):
    """Stands in place of a `Sample` that cannot be read: its name, and a message that names it."""

    name: int | str
    problem: str


class Source:
    """Images of one split: an `ImageSource`, whose samples have numbers, or a `ShardStream`."""

    name: str
    classes: list[str]  # their names; [] of images without labels
    channels = 3  # 1: grey images
    img_size: int | None = None  # side of the images, if all are squares of one size
    remarks: Sequence[str] = ()  # lines on what was left out or assumed, for the user

    def __len__(self) -> int:
        """Return the number of images in an epoch."""
        raise NotImplementedError

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """Images of each shard, see `order.epoch_order`."""
        return (len(self),)

    def where(self, name: int | str) -> str:
        """Say where a sample is, for errors."""
        return str(name)

    def decode(self, sample: Sample) -> Image.Image:
        """Return the image of a sample; raise UnreadableImage, naming it."""
        if isinstance(sample.content, np.ndarray):
            return Image.fromarray(sample.content)
        try:
            return decode_image(sample.content)
        except UnreadableImage as error:  # its name may have to be read, so only now
            raise UnreadableImage(f"{self.where(sample.name)}: {error}") from None

    def listing(self) -> Iterator[bytes]:
        """Yield bytes that tell which sample has which number, beside the labels in their order."""
        yield from ()


class ImageSource(Source):
    """Images of one split, numbered from 0; see `splits.open_source`. A subclass has labels, classes and `read`."""

    # Class numbers, int64 [N]; without classes 0, which a DiT takes for "no class".
    labels: np.ndarray
    numbered = False  # whether classes have no names but the numbers up to the largest label

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes | np.ndarray | Tensor:
        """Return the content of a sample; raise UnreadableImage, naming it."""
        raise NotImplementedError

    def sample(self, index: int) -> Sample:
        """Read a sample; raise UnreadableImage, naming it."""
        return Sample(index, self.read(index), self.labels[index])

    def image(self, index: int) -> Image.Image:
        """Read and decode a sample; raise UnreadableImage, naming it."""
        return self.decode(self.sample(index))

    def check_labels(self, named: object) -> None:
        """Raise ValueError for the first sample whose label is not that of a class, which are `named` there; -1 is none."""
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.classes)))
        if len(wrong):
            label = self.labels[wrong[0]]
            found = "no label" if label == -1 else f"label {label}"
            raise ValueError(
                f"{self.where(wrong[0])}: {found}, but {named} has {len(self.classes)} classes, from 0 on"
            )

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

    def read(self, index: int) -> np.ndarray:
        return self.pixels[index]
