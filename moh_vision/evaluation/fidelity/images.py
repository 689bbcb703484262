"""Images to score, as batches of uint8 [B, 3, H, W]: folders, data sets, .npz, tensors, iterators."""

import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from moh_vision.common.cli import refuse_missing
from moh_vision.common.errors import reason_of
from moh_vision.data.decode import (
    AS_STORED,
    MAX_PIXELS,
    Decoding,
    center_crop,
    in_8_bits,
    open_image,
    upright_size,
)
from moh_vision.data.deep_pixels import is_deep
from moh_vision.data.first_look import lost_of
from moh_vision.data.folder import IMAGES, image_files, left_out_line
from moh_vision.data.sources import ListedFiles
from moh_vision.data.splits import classes_that_open, has_splits, open_source

GREY = ("1", "L", "LA", "La")  # modes of 8 bits or less that `in_8_bits` makes "L"
Batch = tuple[int, Tensor]  # index of the batch's first image in the set, images


class ImageSet:
    """A set of images of one size. Subclasses define `read(first, stop)`, which returns uint8 [B, H, W, 3 or 1]."""

    size: tuple[int, int] | None = None  # width and height; None: not known
    remarks: Sequence[str] = ()  # lines on what was left out, for the user
    formats: dict[str, int] | None = None  # number of files by format; None: not known

    def __init__(self, name: str, count: int, channels: int):
        self.name = name  # in messages and results
        self.count = count
        self.channels = channels  # of the files, 1 or 3; `batches` always yields 3

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield every `world`-th batch from number `rank` on, uint8 [B, 3, H, W]; read the next one meanwhile.

        The batches of all ranks together are the same for any `world`.
        """

        def read(first: int) -> Batch:
            images = torch.from_numpy(self.read(first, min(first + batch_size, self.count)))
            return first, images.permute(0, 3, 1, 2).expand(-1, 3, -1, -1)

        with ThreadPoolExecutor(1) as reader:
            pending = None
            for first in range(rank * batch_size, self.count, world * batch_size):
                following = reader.submit(read, first)
                if pending:
                    yield pending.result()
                pending = following
            if pending:
                yield pending.result()


class ScoredFolder(ImageSet):
    """The images in a folder at any depth, sorted by path. They are decoded as in training, but must have one size.

    PNG is expected. JPEG and WebP are read too; then compression is part of the score.
    """

    def __init__(self, folder: Path, decoding: Decoding = AS_STORED):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder or .npz file")
        self.decoding = decoding
        names, left_out = image_files(folder)
        self.files = [folder / name for name in names]
        if not self.files:
            raise ValueError(
                f"{folder}: holds no images ({', '.join(IMAGES)}), nor do the folders in it, nor shards"
            )
        listed = ListedFiles([str(file) for file in self.files])
        listed.decoding = decoding
        lost = (f"{folder}: {line}" for line in lost_of(listed))
        self.remarks = [line for line in (left_out_line(folder, left_out), *lost) if line]
        self.pool = ThreadPoolExecutor(4)
        channels = 1
        formats: Counter = Counter()
        for file in self.files:
            with _opened(file) as image:
                if image.mode not in GREY and not is_deep(image.mode):
                    channels = 3
                formats[image.format] += 1
                self._check(file, upright_size(image))
        self.formats = dict(sorted(formats.items()))
        super().__init__(str(folder), len(self.files), channels)

    def read(self, first: int, stop: int) -> np.ndarray:
        return np.stack(list(self.pool.map(self._pixels, self.files[first:stop])))

    def _check(self, file: Path, size: tuple[int, int]) -> None:
        """Raise ValueError unless an image has the first one's upright size."""
        self.size = self.size or size
        if size != self.size:
            width, height = size
            first_width, first_height = self.size
            raise ValueError(
                f"{file} has {width} x {height} pixels, {self.files[0].name} has {first_width} x {first_height}; "
                "all images must have one size (those of a data set, shards or folders train and val, are cropped to one)"
            )

    def _pixels(self, file: Path) -> np.ndarray:
        with _opened(file) as image:
            pixels = np.asarray(in_8_bits(image, self.decoding).convert("RGB"))
        self._check(file, pixels.shape[1::-1])
        return pixels


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    try:
        with open_image(file) as image:
            yield image
    except Exception as error:  # decoders raise exceptions of many classes
        raise ValueError(f"{file}: not a readable image ({reason_of(error)})") from None


class SourceImages(ImageSet):
    """Images of a data set, center-cropped to `size` x `size` pixels; set `size` before reading if it is None."""

    def __init__(self, source, name: str, decoding: Decoding = AS_STORED):
        super().__init__(name, len(source), source.channels)
        self.source = source
        self.size = source.img_size
        source.decoding = decoding
        self.remarks = [*source.remarks, *(f"{name}: {line}" for line in lost_of(source))]

    def read(self, first: int, stop: int) -> np.ndarray:
        rgb = v2.RGB()
        return np.stack(
            [center_crop(rgb(self.source.image(i)), self.size) for i in range(first, stop)]
        )


class ImageArchive(ImageSet):
    """The images of an .npz file, arr_0, uint8 [N, H, W, 3 or 1], read batch by batch, as they may exceed memory."""

    def __init__(self, path: Path):
        self.file, (shape, fortran_order, dtype) = open_array(path, "arr_0")
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or fortran_order:
            raise ValueError(
                f"{path}: arr_0 is {dtype} {list(shape)}; expected uint8 [N, height, width, 3 or 1]"
            )
        if shape[0] < 1:
            raise ValueError(f"{path}: arr_0 holds no images")
        if not 0 < math.prod(shape[1:3]) <= MAX_PIXELS:
            size = f"{shape[2]} x {shape[1]} pixels"
            raise ValueError(f"{path}: arr_0 has images of {size}, at most {MAX_PIXELS} are read")
        super().__init__(str(path), shape[0], shape[3])
        self.shape = shape[1:]
        self.size = (shape[2], shape[1])
        self.next = 0  # index of the image that the open file reads next

    def read(self, first: int, stop: int) -> np.ndarray:
        image_bytes = math.prod(self.shape)
        count = stop - first
        if first < self.next:  # reopen rather than seek: after a seek zipfile checks no CRC
            self.file, _ = open_array(Path(self.name), "arr_0")
            self.next = 0
        try:
            self.file.read((first - self.next) * image_bytes)
            data = self.file.read(count * image_bytes)
        except Exception as error:  # damaged compression raises exceptions of many classes
            raise ValueError(
                f"{self.name}: arr_0 is damaged in image {first} or behind ({reason_of(error)})"
            ) from None
        if len(data) != count * image_bytes:
            cut = first + len(data) // image_bytes
            raise ValueError(f"{self.name}: ends within image {cut} of {self.count}")
        self.next = stop
        return np.frombuffer(bytearray(data), np.uint8).reshape(count, *self.shape)


class ImageTensors:
    """Images in a uint8 tensor [N, 3, H, W], or in an iterator of such tensors, read once; used as an `ImageSet` is."""

    channels = count = formats = None  # not known
    remarks: Sequence[str] = ()

    def __init__(self, images: Tensor | Iterable[Tensor], name: str):
        self.images = images
        self.name = name

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield batches as `ImageSet.batches` does, but an iterator's keep their size, and every rank reads them all."""
        batches = self.images
        if isinstance(batches, Tensor):
            batches = batches.split(batch_size)
        first = 0
        size = None
        for number, batch in enumerate(batches):
            shape = self._shape_of(batch, number)
            size = size or shape[2:]
            if shape[2:] != size:
                raise ValueError(
                    f"{self.name}: batch {number} has images of {shape[2:]}, the first of {size}"
                )
            if number % world == rank:
                yield first, batch
            first += len(batch)

    def _shape_of(self, batch: Tensor, number: int) -> list[int]:
        """Return the shape of a batch; raise ValueError unless it is uint8 [B, 3, height, width]."""
        given = type(batch).__name__
        if isinstance(batch, Tensor):
            shape = list(batch.shape)
            if batch.dtype == torch.uint8 and len(shape) == 4 and shape[1] == 3:
                return shape
            given = f"{batch.dtype} {shape}"
        raise ValueError(
            f"{self.name}: batch {number} is {given}; expected a uint8 tensor [B, 3, height, width]"
        )


def open_images(source, name: str, decoding: Decoding = AS_STORED):
    """Wrap a path, or a tensor or iterator, which messages call `name`. An object with `batches` is not wrapped.

    `decoding` says how image files become pixels.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.suffix == ".npz":
            return ImageArchive(path)
        return ScoredFolder(path, decoding)
    if hasattr(source, "batches"):
        return source
    return ImageTensors(source, name)


def open_set(
    key: str,
    path: str,
    split: str | None,
    default_split: str,
    decoding: Decoding = AS_STORED,
):
    """Open a data set, given as in data.root, as `SourceImages`; return any other path unchanged.

    Raise an error for a path that does not exist, and for the `split` of a path that is no data set.

    Args:
        key: the option that named the path, for messages.
        path: of a data set, a folder of images or an .npz file.
        split: of a data set, "train" or "val"; None: `default_split`.
        decoding: how the image files of a data set become pixels.
    """
    if split is None and not has_splits(path):  # a folder of images alone is scored as it is
        refuse_missing(key, path)
        return path
    if not classes_that_open(path):
        refuse_missing(key, path)
        raise ValueError(f"{key} {path} is no data set, so a split ({split}) has no effect")
    split = split or default_split
    return SourceImages(open_source(path, split, key), f"{path}, {split} split", decoding)


def archive_members(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception as error:  # damaged directories raise exceptions of many classes
        raise ValueError(f"{path}: not a readable .npz file ({reason_of(error)})") from None


def open_array(path: Path, name: str) -> tuple[zipfile.ZipExtFile, tuple[tuple, bool, np.dtype]]:
    """Open an array of an .npz file and read its header.

    Returns:
        file: positioned at the first byte of the array.
        header: shape, whether the array is in Fortran order, and dtype.
    """
    members = archive_members(path)
    if name not in members:
        raise ValueError(f"{path}: holds no {name}, only {', '.join(members) or 'nothing'}")
    try:
        file = zipfile.ZipFile(path).open(f"{name}.npy")
        if np.lib.format.read_magic(file) == (1, 0):
            return file, np.lib.format.read_array_header_1_0(file)
        return file, np.lib.format.read_array_header_2_0(file)
    except Exception as error:  # encryption, unknown compression, a wrong header
        raise ValueError(f"{path}: {name} is not an array ({reason_of(error)})") from None
