"""Base classes of the sources of images, and the smallest source: scikit-learn's digits, which need no download."""

import os
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from PIL import Image
from torch import Tensor

from moh_vision.data.decode import AS_STORED, Decoding, UnreadableImage, decode_image

# A bound on labels. Where classes have no names, the largest label says how many classes there are.
MAX_CLASSES = 1_000_000
# Bytes in the middle of a sample that, with its size, decide about its part of a division: pixels, not a header that many
# files share. To read whole files would take as long as an epoch.
MIDDLE = 16_384


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
    # Class numbers, int64 [N]; of a stream none, because they come with its samples.
    labels: np.ndarray = np.empty(0, np.int64)
    # True: any sample can be read, see `ImageSource.sample`, so that they come in the seed's order.
    exact_order = False
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

    def sizes(self) -> np.ndarray | None:
        """Return the number of bytes of each sample, int64 [N], 0 if it cannot be read; None if that is not known."""
        return None

    def listing(self) -> Iterator[bytes]:
        """Yield bytes that, together with the labels, identify the sample at each index."""
        yield from ()


class ImageSource(Source):
    """A source with random access by indices from 0.

    Subclasses set `labels` and `classes` and define `read`. The class of a source that data.root may name stands in
    `splits.SOURCES`, and says with `takes`, `opens` and `splits` what it takes.
    """

    takes = ""  # what data.root may be, for the message that lists what is taken
    holds = "images"  # "latents": what a VAE made of images, which diffusion alone reads
    has_splits = True  # False: images in no split; all are "train", and scores read each of them
    exact_order = True
    numbered = False  # True: the classes have no names, only numbers up to the largest label
    folder: Path | None = None  # that has the files of this split; None: they are in no folder

    @classmethod
    def opens(cls, root: str) -> bool:
        """Return whether `root` is a data set of this class, without reading all of it."""
        return False

    @classmethod
    def splits(cls, root: str) -> Collection[str]:
        """Return which of "train" and "val" there are in `root`, which this class `opens`."""
        return ("train", "val")

    @classmethod
    def open(cls, root: str, split: str, key: str) -> Self:
        """Open a split of `root`; raise NoSplit if it lacks the split. `key` is the option that named `root`."""
        cls.refuse_missing(root, split, key)
        return cls(root, split)

    @classmethod
    def refuse_missing(cls, root: str, split: str, key: str) -> None:
        """Raise NoSplit if `root` lacks a split. Arguments are those of `open`."""
        splits = cls.splits(root)
        if split not in splits:
            raise NoSplit(f"{key} {root}: no split {split}; it has {', '.join(splits)}")

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

    def path(self, index: int) -> str:
        """Return the name of a sample within its split, wherever the data set lies; its number if it has no name."""
        return str(index)

    def file_names(self) -> list[str] | None:
        """Return the file that each sample is or was made from; None if that is not known."""
        return None

    def size_and_middle(self, index: int) -> tuple[int, bytes]:
        """Return the size of a sample in bytes, and the MIDDLE bytes in its middle; raise UnreadableImage.

        An image is the same as a file, in a shard or in a table; see `division.divide`.
        """
        content = self.read(index)
        if not isinstance(content, bytes):
            content = np.asarray(content).tobytes()
        start = middle_of(len(content))
        return len(content), content[start : start + MIDDLE]

    def subset(self, keep: np.ndarray, remarks: Sequence[str]) -> "ImageSource":
        """Return a source of the samples where the mask `keep` [N] is true, with the same classes and more `remarks`."""
        return Subset(self, np.flatnonzero(keep), remarks)

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
                f"{self.where(int(wrong[0]))}: {found}, but {named} has {len(self.classes)} classes, from 0 on"
            )

    def identities(self) -> Iterator[bytes]:
        """Yield bytes that, together with the labels, are different if a file has changed."""
        yield from self.listing()


class Subset(ImageSource):
    """Some samples of a source.

    Args:
        source: the source.
        indices: of the samples in `source`, rising.
        remarks: lines for the user, after those of `source`.
    """

    def __init__(self, source: ImageSource, indices: Sequence[int], remarks: Sequence[str] = ()):
        self.source = source
        self.indices = np.asarray(indices, np.int64)
        self.labels = source.labels[self.indices]
        self.remarks = [*source.remarks, *remarks]
        self.name = source.name
        self.classes = source.classes
        self.numbered = source.numbered
        self.channels = source.channels
        self.img_size = source.img_size
        self.folder = source.folder
        # Each shard stays one, so that no more of them than before are read at a time.
        ends = np.searchsorted(self.indices, np.cumsum(source.shard_sizes))  # of each shard
        self.shard_sizes = tuple(np.diff(ends, prepend=0).tolist())

    @property
    def decoding(self) -> Decoding:
        return self.source.decoding

    @decoding.setter
    def decoding(self, decoding: Decoding) -> None:
        self.source.decoding = decoding

    def read(self, index: int) -> bytes | np.ndarray | Tensor:
        return self.source.read(int(self.indices[index]))

    def decode(self, sample: Sample) -> Image.Image:
        return self.source.decode(sample._replace(name=int(self.indices[sample.name])))

    def path(self, index: int) -> str:
        return self.source.path(int(self.indices[index]))

    def where(self, index: int) -> str:
        return self.source.where(int(self.indices[index]))

    def file_names(self) -> list[str] | None:
        names = self.source.file_names()
        if names is None:
            return None
        return [names[index] for index in self.indices]

    def sizes(self) -> np.ndarray | None:
        sizes = self.source.sizes()
        if sizes is None:
            return None
        return sizes[self.indices]

    def listing(self) -> Iterator[bytes]:
        yield from self.source.listing()
        yield self.indices.tobytes()

    def identities(self) -> Iterator[bytes]:
        yield from self.source.identities()
        yield self.indices.tobytes()


class Joined(ImageSource):
    """The samples of several sources, one after another; the label of a sample is its index."""

    classes = []

    def __init__(self, sources: Sequence[ImageSource]):
        self.sources = sources
        self._ends = np.cumsum([len(source) for source in sources])
        self.labels = range(int(self._ends[-1]))

    def _within(self, index: int) -> tuple[ImageSource, int]:
        """Return the source of a sample, and the sample's index there."""
        number = int(np.searchsorted(self._ends, index, "right"))
        source = self.sources[number]
        return source, index - int(self._ends[number]) + len(source)

    def read(self, index: int) -> bytes | np.ndarray | Tensor:
        source, number = self._within(index)
        return source.read(number)

    def decode(self, sample: Sample) -> Image.Image:
        source, number = self._within(sample.name)
        return source.decode(sample._replace(name=number))

    def where(self, index: int) -> str:
        source, number = self._within(index)
        return source.where(number)


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


def middle_of(size: int) -> int:
    """Return the offset of the MIDDLE bytes in the middle of so many bytes."""
    return max(0, size - MIDDLE) // 2


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

    takes = "digits"
    channels = 1
    img_size = 8
    name = "digits"
    classes = [str(c) for c in range(10)]

    @classmethod
    def opens(cls, root: str) -> bool:
        return root == cls.name

    @classmethod
    def open(cls, root: str, split: str, key: str) -> Self:
        return cls(split)

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
