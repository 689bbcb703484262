"""Images to score, as batches of uint8 [B, 3, H, W]: folders, data sets, .npz, tensors, iterators."""

from __future__ import annotations

import math
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, Iterator, List, Optional, Tuple, Union

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from moh_vision.data.decode import MAX_PIXELS, center_crop, open_image, upright, upright_size
from moh_vision.data.folder import split_folder
from moh_vision.data.hub import PREFIX
from moh_vision.data.splits import is_latent_cache, open_source
from moh_vision.engine.commands import refuse_missing

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp")
FORMATS = ("PNG", "JPEG", "WEBP")  # some of Pillow's other formats start programs
Batch = Tuple[int, Tensor]  # number of the first image in the set, images


class ScoredFolder:
    """The images directly in a folder, in order of name; without any, those of its subfolders.

    Args:
        folder: PNG files of one size, all RGB or all grey. JPEG and WebP are read too; then compression is
            part of the score. EXIF rotation is applied, as in data sets.

    Attributes:
        channels: of the files, 1 or 3; what is scored has 3.

    Raises:
        ValueError, FileNotFoundError: naming the folder or file, also for transparency and for another size or mode
            than the first; while reading for a damaged file.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder or .npz file")
        found = (sorted(p for p in folder.glob(depth) if p.suffix.lower() in EXTENSIONS) for depth in ("*", "*/*"))
        self.files: List[Path] = next(filter(None, found), [])
        if not self.files:
            raise ValueError(
                f"{folder}: holds no images ({', '.join(EXTENSIONS)}), nor do the folders in it, nor shards"
            )
        self.name = str(folder)
        self.size: Optional[Tuple[int, int]] = None  # width, height
        self.mode: Optional[str] = None
        for file in self.files:
            with self._open(file) as image:
                self._check(file, image.mode, upright_size(image))
        self.channels = 1 if self.mode == "L" else 3

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield every world-th batch from `rank` on; batches are the same for any `world`."""
        with ThreadPoolExecutor(4) as pool:
            waiting = None
            for first in range(rank * batch_size, len(self.files), world * batch_size):
                files = self.files[first : first + batch_size]
                coming = first, [pool.submit(self._read, file) for file in files]
                if waiting is not None:
                    yield _collect(*waiting)
                waiting = coming
            if waiting is not None:
                yield _collect(*waiting)

    def _open(self, file: Path) -> Image.Image:
        """An image whose pixels are not read."""
        try:
            return open_image(file, FORMATS)
        except Exception as error:  # decoders raise many kinds
            raise ValueError(f"{file}: not a readable image ({error})") from None

    def _check(self, file: Path, mode: str, size: Tuple[int, int]) -> None:
        """Raise ValueError unless an image has the first one's mode and upright size."""
        self.mode, self.size = self.mode or mode, self.size or size
        if mode not in ("RGB", "L"):
            raise ValueError(f"{file}: its mode is {mode}; expected RGB, or grey L, 8 bits a channel")
        if mode != self.mode:
            raise ValueError(f"{file}: its mode is {mode}, that of {self.files[0].name} is {self.mode}")
        if size != self.size:
            raise ValueError(
                f"{file} has {size[0]} x {size[1]} pixels, {self.files[0].name} has {self.size[0]} x "
                f"{self.size[1]}; all images must have one size (those of a data set, shards or folders train and val, are "
                "cropped to one)"
            )

    def _read(self, file: Path) -> np.ndarray:
        with self._open(file) as image:
            try:
                image.load()
                turned = upright(image)
                pixels = np.asarray(turned.convert("RGB"))
            except Exception as error:
                raise ValueError(f"{file}: not a readable image ({error})") from None
            self._check(file, turned.mode, turned.size)
        return pixels


def _collect(first: int, pending: list) -> Batch:
    images = np.stack([future.result() for future in pending])
    return first, torch.from_numpy(images).permute(0, 3, 1, 2)


class SourceImages:
    """Images of a data set, center-cropped to `size` x `size` pixels; see `ScoredFolder`.

    Args:
        source: see `splits.open_source`.
        name: of the set, for messages and results.

    Attributes:
        size: of the images, or None if they differ: set it before reading.
        channels: see `ScoredFolder`.
    """

    def __init__(self, source, name: str):
        self.source, self.name = source, name
        self.size, self.channels = source.img_size, source.channels

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """As `ScoredFolder.batches`."""
        rgb = v2.RGB()
        for first in range(rank * batch_size, len(self), world * batch_size):
            numbers = range(first, min(first + batch_size, len(self)))
            crops = [np.asarray(center_crop(rgb(self.source.image(i)), self.size)) for i in numbers]
            yield first, torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)


class ImageArchive:
    """arr_0, uint8 [N, H, W, 3 or 1], of an .npz file, read by batches: it may exceed memory.

    Raises:
        ValueError, FileNotFoundError: naming the file, and what it holds instead.
    """

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)
        shape, order, dtype = array_header(path, "arr_0")
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or order:
            raise ValueError(f"{path}: arr_0 is {dtype} {list(shape)}; expected uint8 [N, height, width, 3 or 1]")
        if shape[0] < 1:
            raise ValueError(f"{path}: arr_0 holds no images")
        if not 0 < math.prod(shape[1:3]) <= MAX_PIXELS:
            raise ValueError(
                f"{path}: arr_0 has images of {shape[2]} x {shape[1]} pixels, at most {MAX_PIXELS} are read"
            )
        self.shape, self.channels = shape, shape[3]

    def __len__(self) -> int:
        return self.shape[0]

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """As `ScoredFolder.batches`."""
        image = math.prod(self.shape[1:])
        with _member(self.path, "arr_0") as file:
            _header(file)
            for number, first in enumerate(range(0, len(self), batch_size)):
                count = min(batch_size, len(self) - first)
                try:
                    data = file.read(count * image)
                except Exception as error:  # damaged compression makes many kinds
                    raise ValueError(f"{self.path}: arr_0 is damaged in image {first} or behind ({error})") from None
                if len(data) != count * image:
                    raise ValueError(f"{self.path}: ends within image {first + len(data) // image} of {len(self)}")
                if number % world == rank:
                    array = np.frombuffer(bytearray(data), np.uint8).reshape(count, *self.shape[1:])
                    yield first, torch.from_numpy(array).permute(0, 3, 1, 2).expand(-1, 3, -1, -1)


class ImageTensors:
    """A tensor of images, or an iterator of batches, uint8 [B, 3, H, W].

    Every process iterates over all batches and computes its own; an iterator can be read once.
    """

    channels = None  # those of the files that they come from are not known

    def __init__(self, images: Union[Tensor, Iterable[Tensor]], name: str):
        self.images, self.name = images, name
        self.size: Optional[Tuple[int, int]] = None

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """As `ScoredFolder.batches`; the batches of an iterator stay as they come."""
        parts = self.images.split(batch_size) if isinstance(self.images, Tensor) else self.images
        first = 0
        for number, batch in enumerate(parts):
            if not isinstance(batch, Tensor) or batch.dtype != torch.uint8 or batch.ndim != 4 or batch.shape[1] != 3:
                what = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
                raise ValueError(
                    f"{self.name}: batch {number} is {what}; expected a uint8 tensor [B, 3, height, width]"
                )
            self.size = self.size or tuple(batch.shape[2:])
            if tuple(batch.shape[2:]) != self.size:
                raise ValueError(
                    f"{self.name}: batch {number} has images of {list(batch.shape[2:])}, the first of {list(self.size)}"
                )
            if number % world == rank:
                yield first, batch
            first += len(batch)


def open_images(source, name: str):
    """Wrap a path, tensor or iterator in its class; return such an object as it is.

    Args:
        source: path of a folder or .npz file, a uint8 tensor [N, 3, H, W], an iterator of such batches, or an object
            with `name`, `batches` and length, as `ScoredFolder`.
        name: for a tensor or iterator in messages.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        return ImageArchive(path) if path.suffix == ".npz" else ScoredFolder(path)
    return source if hasattr(source, "batches") else ImageTensors(source, name)


def is_data_set(path: str) -> bool:
    """Whether a path means a data set or stored latents, as in data.root."""
    place = Path(path)
    splits = (split_folder(path, split) or is_latent_cache(path, split) for split in ("train", "val"))
    return path == "digits" or path.startswith(PREFIX) or any(splits) or any(place.glob("*.tar"))


def open_set(key: str, path: str, split: Optional[str], default_split: str):
    """The `SourceImages` of a data set; any other path as it is.

    Args:
        key: option that named the path, for messages.
        split: of a data set; None: `default_split`.

    Raises:
        ValueError, FileNotFoundError: for a missing path, a data set that cannot be opened, or a split of
            something else.
    """
    if not is_data_set(path):
        refuse_missing(key, path)
        if split is not None:
            raise ValueError(f"{key} {path} is no data set, so a split ({split}) has no effect")
        return path
    split = split or default_split
    try:
        return SourceImages(open_source(path, split), f"{path}, {split} split")
    except (ValueError, OSError) as error:
        raise ValueError(str(error).replace("data.root", key, 1)) from None


def archive_members(path: Path) -> List[str]:
    """Names of the arrays in an .npz file.

    Raises:
        ValueError, FileNotFoundError: naming the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception as error:  # damaged directories make many kinds
        raise ValueError(f"{path}: not a readable .npz file ({error})") from None


def array_header(path: Path, name: str) -> Tuple[tuple, bool, np.dtype]:
    """Read (shape, Fortran order, dtype) of an array in an .npz file.

    Raises:
        ValueError: naming the file and the array.
    """
    with _member(path, name) as file:
        try:
            return _header(file)
        except Exception as error:  # damaged headers make many kinds
            raise ValueError(f"{path}: {name} is not an array ({error})") from None


def _member(path: Path, name: str):
    members = archive_members(path)
    if name not in members:
        raise ValueError(f"{path}: holds no {name}, only {', '.join(members) or 'nothing'}")
    try:
        return zipfile.ZipFile(path).open(f"{name}.npy")
    except Exception as error:  # a wrong header, encryption, unknown compression
        raise ValueError(f"{path}: {name} is not an array ({error})") from None


def _header(file):
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)
