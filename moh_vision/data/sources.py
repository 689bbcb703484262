"""Base classes of the sources of images, and the smallest source: scikit-learn's digits, which need no download."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from moh_vision.data.decode import AS_STORED, Decoding, UnreadableImage, decode_image

# A bound on labels. Where classes have no names, the largest label says how many classes there are.
MAX_CLASSES = 1_000_000


class NoSplit(ValueError):
    """A data set has no such split; the message names both."""


class Sample(NamedTuple):
    """A labelled image as its source holds it, not decoded yet.

    Attributes:
        name: its index in the source; in a stream, its URL and key. See `Source.where`.
        content: the bytes of an image file, pixels as uint8 [h, w] or [h, w, 3], or stored latents.
        label: class number (0 if the source has no classes), or class numbers [L] if several are right.
    """

    name: int | str
    content: bytes | np.ndarray | Tensor
    label: int | np.ndarray


class BadSample(NamedTuple):
    """Takes the place of a `Sample` that cannot be read. `problem` is a message that names the sample."""

    name: int | str
    problem: str


class Source:
    """Images of one split. Subclasses: `ImageSource`, with random access by index, and `ShardStream`."""

    name: str
    classes: list[str]  # class names; [] if the images have no labels
    channels = 3  # 3: RGB images; 1: grey ones
    img_size: int | None = None  # side of the images, if all are squares of one size
    remarks: Sequence[str] = ()  # lines for the user on what was left out or assumed
    decoding: Decoding = AS_STORED  # how files become pixels; who opens a source sets it

    def __len__(self) -> int:
        """Return the number of images in an epoch."""
        raise NotImplementedError

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """Return the number of images in each shard, see `order.epoch_order`; by default all are one shard."""
        return (len(self),)

    def where(self, name: int | str) -> str:
        """Return where a sample is, such as its path, for error messages."""
        return str(name)

    def decode(self, sample: Sample) -> Image.Image:
        """Decode the image of a sample; raise UnreadableImage, naming the sample."""
        if isinstance(sample.content, np.ndarray):
            return Image.fromarray(sample.content)
        try:
            return decode_image(sample.content, decoding=self.decoding)
        except UnreadableImage as error:
            # `where` only now: it may read the name from the source.
            raise UnreadableImage(f"{self.where(sample.name)}: {error}") from None

    def looked_at(self, count: int) -> Iterator[Sample]:
        """Yield up to `count` samples that can be read, to look at before work begins; see `first_look`."""
        yield from ()

    def listing(self) -> Iterator[bytes]:
        """Yield bytes that, together with the labels, identify the sample at each index."""
        yield from ()


class ImageSource(Source):
    """A source with random access by indices from 0; `splits.open_source` opens one.

    Subclasses set `labels` and `classes` and define `read`.
    """

    # Class numbers, int64 [N]. Without classes all are 0, which a DiT reads as "no class".
    labels: np.ndarray
    numbered = False  # True: the classes have no names, only numbers up to the largest label

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes | np.ndarray | Tensor:
        """Return the content of a sample; raise UnreadableImage, naming the sample."""
        raise NotImplementedError

    def sample(self, index: int) -> Sample:
        """Read a sample; raise UnreadableImage, naming the sample."""
        return Sample(index, self.read(index), self.labels[index])

    def image(self, index: int) -> Image.Image:
        """Read and decode a sample; raise UnreadableImage, naming the sample."""
        return self.decode(self.sample(index))

    def looked_at(self, count: int) -> Iterator[Sample]:
        evenly_spread = np.linspace(0, len(self) - 1, min(count, len(self))).astype(int)
        for index in evenly_spread.tolist():
            try:
                yield self.sample(index)
            except UnreadableImage:
                continue  # it is reported when it is read

    def check_labels(self, named: object) -> None:
        """Raise ValueError for the first sample whose label is not a class number; -1 stands for no label.

        `named` is what the message calls the list of classes, such as its file.
        """
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.classes)))
        if len(wrong):
            label = self.labels[wrong[0]]
            found = "no label" if label == -1 else f"label {label}"
            raise ValueError(
                f"{self.where(wrong[0])}: {found}, but {named} has {len(self.classes)} classes, from 0 on"
            )

    def sizes(self) -> np.ndarray | None:
        """Return the number of bytes of each sample, int64 [N], 0 if it cannot be read; None if that is not known."""
        return None

    def identities(self) -> Iterator[bytes]:
        """Yield bytes that, together with the labels, are different if a file has changed."""
        yield from self.listing()


def first_size(source: ImageSource) -> str:
    """Return the end of a message: the size of a source's first image, or "" if it cannot be read."""
    try:
        width, height = source.image(0).size
    except UnreadableImage:
        return ""
    return f"; the first has {width} x {height} pixels"


def read_file(path: str | Path, where: str) -> bytes:
    """Read a file; raise UnreadableImage, whose message begins with `where`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnreadableImage(f"{where}: {error.strerror}") from None


def file_size(path: str | Path) -> int:
    """Return the size of a file in bytes; 0 if it cannot be read."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class ListedFiles(ImageSource):
    """Image files from anywhere; the label of a sample is its index in `files`."""

    def __init__(self, files: Sequence[str]):
        self.files = files
        self.labels = range(len(files))

    def read(self, index: int) -> bytes:
        return read_file(self.files[index], self.where(index))

    def where(self, index: int) -> str:
        return self.files[index]


class Digits(ImageSource):
    """The 1,797 digits of scikit-learn, 8 x 8 grey pixels; every fifth image of a class is in "val"."""

    channels = 1
    img_size = 8
    name = "digits"
    classes = [str(c) for c in range(10)]

    def __init__(self, split: str):
        from sklearn.datasets import load_digits

        data = load_digits()
        keep = np.full(len(data.target), split == "train")
        for c in range(10):  # every fifth image of a class goes from "train" to "val"
            keep[np.flatnonzero(data.target == c)[4::5]] ^= True
        self.pixels = np.rint(data.images[keep] * (255 / 16)).astype(np.uint8)  # [n, 8, 8]
        self.labels = data.target[keep].astype(np.int64)

    def read(self, index: int) -> np.ndarray:
        return self.pixels[index]
