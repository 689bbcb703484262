"""Latents on disk: one array for each shard, the labels, and a record that says which VAE made the latents."""

import json
import math
import os
import reprlib
from collections.abc import Iterator
from functools import lru_cache
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from moh_vision.common.errors import reason_of
from moh_vision.common.io import check_pread
from moh_vision.data.decode import AS_STORED, Decoding, UnreadableImage
from moh_vision.data.latents import latents_path
from moh_vision.data.records import check_sums, entries_for, read_record, refuse_difference
from moh_vision.data.sources import ImageSource, Sample
from moh_vision.diffusion.latents.vae import LatentSpace

# The numpy type for each --dtype. numpy has no bfloat16: its bits are stored as unsigned integers.
DTYPES = {"float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}
MAX_OPEN_SHARDS = 16


def labels_path(folder: Path, split: str) -> Path:
    """Return the path of the file with the class number of each latent, int64 [N]."""
    return folder / f"{split}.labels.npy"


def stored_shape(space: LatentSpace, size: int) -> tuple[int, int, int, int]:
    """Return the stored shape for one image, [2, 2C or C, h, w]: moments of the image and of its mirror image.

    `size` is the side of the image in pixels.
    """
    side = space.side(size)
    return (2, space.moment_channels, side, side)


class LatentCache(ImageSource):
    """Posterior moments of images and of their mirror images, written by `python -m moh_vision latents`.

    Args:
        root: the folder.
        split: "train" or "val".

    Attributes:
        space: the `LatentSpace` of the VAE that made the latents.
        size: side of the images in pixels.
        img_size: side of the latents.
        channels: channels of the latents.
    """

    def __init__(self, root: str, split: str):
        folder = Path(root)
        file = latents_path(folder, split)
        if not file.is_file():
            raise FileNotFoundError(f"data.root {root}: no {file.name} in it, which latents have")
        check_pread(folder)
        record = read_record(file)
        self.file = file
        self.record = record
        try:
            self.space = LatentSpace(**record["vae"])
            self.size = record["size"]
            self.classes = record["classes"]
            self.dtype = record["dtype"]
            self.decoding = Decoding.of(SimpleNamespace(**record["decoding"]))
            self.shape = stored_shape(self.space, self.size)
            _refuse_other_types(record, self.shape)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        except Exception as error:  # a missing or wrongly typed entry may raise any error
            raise ValueError(
                f"{file}: not a record of latents ({type(error).__name__}: {error})"
            ) from None
        self.img_size = self.shape[-1]
        self.channels = self.space.latent_channels
        self.name = folder.name
        self.paths = sorted(folder.glob(f"{split}-*.npy"))
        entries = entries_for(file, record, self.paths)
        self.shard_sizes = tuple(entries[path.name]["samples"] for path in self.paths)
        self._ends = np.cumsum(self.shard_sizes)
        self._stats = [path.stat() for path in self.paths]
        for path, status, samples in zip(self.paths, self._stats, self.shard_sizes):
            refuse_difference(path, status.st_size, samples, entries[path.name], file)
        self.labels = _read_labels(labels_path(folder, split), len(self), len(self.classes))

    def check_sums(self) -> None:
        """Raise ValueError if a shard does not have its recorded SHA-256; see `moh_vision.data.records.check_sums`."""
        shards = self.record["shards"]
        sums = {path.name: ([path], shards[path.name]["sha256"]) for path in self.paths}
        check_sums(self.file, sums)

    def refuse_other_decoding(self, decoding: Decoding, named: str) -> None:
        """Raise ValueError unless the images were decoded as asked; what is left out asks nothing.

        `named` is the option that names the latents, with its value.
        """
        for name, asked in decoding.record.items():
            made_with = self.decoding.record[name]
            if asked not in (AS_STORED.record[name], made_with):
                raise ValueError(
                    f"{decoding.option(name)} {asked}: the latents of {named} were written with {name} {made_with}"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def where(self, index: int) -> str:
        """Return where a sample is stored, for error messages."""
        shard, row = self._shard_and_row(index)
        return f"{self.paths[shard]}, latents {row}"

    def _shard_and_row(self, index: int) -> tuple[int, int]:
        """Return the index of a sample's shard, and the sample's row in that shard."""
        shard = int(np.searchsorted(self._ends, index, "right"))
        return shard, index - int(self._ends[shard]) + self.shard_sizes[shard]

    def looked_at(self, count: int) -> Iterator[Sample]:
        """Yield nothing: these are no image files."""
        yield from ()

    def decode(self, sample: Sample) -> Tensor:
        """Return the moments, which `read` has already decoded."""
        return sample.content

    def read(self, index: int) -> Tensor:
        """Return moments of an image and of its mirror image: [2, 2C or C, h, w], float32."""
        shard, row = self._shard_and_row(index)
        path = self.paths[shard]
        dtype = DTYPES[self.dtype]
        size = dtype.itemsize * math.prod(self.shape)
        shape = (self.shard_sizes[shard], *self.shape)
        try:
            file, start = _opened(path, self._stats[shard], shape, dtype)
            # Read, do not map, the file: on a truncated file or a bad disk a mapping would kill the process.
            data = os.pread(file.fileno(), size, start + row * size)
            if len(data) != size:
                raise ValueError(f"latents {row}: {len(data)} bytes of {size} are there")
        except Exception as error:  # a damaged header may raise any error
            raise UnreadableImage(f"{path}: {reason_of(error)}") from None
        moments = torch.from_numpy(np.frombuffer(data, dtype).reshape(self.shape).copy())
        if self.dtype == "bfloat16":
            moments = moments.view(torch.bfloat16)
        return moments.float()

    def listing(self) -> Iterator[bytes]:
        """Yield bytes that identify these latents: the records of all shards, with their SHA-256."""
        yield json.dumps(list(self.record["shards"].values())).encode()


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _opened(
    path: Path, status: os.stat_result, shape: tuple, dtype: np.dtype
) -> tuple[FileIO, int]:
    """Open a shard; return the file and the offset of its data.

    Raises:
        ValueError: if the file has changed since `status`, or its array has another shape or type.
    """
    file = open(path, "rb", buffering=0)
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise ValueError("the shard has changed since the run began")
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        found_shape, _, found_dtype = np.lib.format.read_array_header_1_0(file)
    else:
        found_shape, _, found_dtype = np.lib.format.read_array_header_2_0(file)
    if (found_shape, found_dtype) != (shape, dtype):
        raise ValueError(f"{found_dtype} of shape {found_shape}, expected {dtype} of {shape}")
    return file, file.tell()


def _read_labels(path: Path, samples: int, classes: int) -> np.ndarray:
    """Return the labels, int64 [samples], of `classes` classes; ValueError for others."""
    try:
        with open(path, "rb") as file:
            labels = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # a damaged header may raise any error
        raise ValueError(f"{path}: labels that cannot be read ({reason_of(error)})") from None
    if labels.dtype != np.int64 or labels.shape != (samples,):
        raise ValueError(
            f"{path}: {labels.dtype} of shape {labels.shape}, expected int64 of {(samples,)}"
        )
    most = max(classes - 1, 0)  # without classes, all labels are 0
    if labels.min() < 0 or labels.max() > most:
        worst = labels.argmax() if labels.max() > most else labels.argmin()
        raise ValueError(
            f"{path}: label {labels[worst]} of latents {worst}, but the record names {classes} classes"
        )
    return labels


def _refuse_other_types(record: dict, shape: tuple) -> None:
    """Raise ValueError if values of a record have the wrong type or do not fit each other."""
    vae = record["vae"]
    classes = record["classes"]
    if record["dtype"] not in DTYPES or record["shape"] != list(shape):
        raise ValueError(
            f"dtype {record['dtype']}, shape {record['shape']}; expected {' or '.join(DTYPES)}, and {list(shape)} of "
            "its VAE and size"
        )
    if not isinstance(vae["name"], str) or not isinstance(vae["sha256"], str):
        raise ValueError("name and sha256 of its VAE are not texts")
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"classes {reprlib.repr(classes)} are not a list of names")
    if not record["shards"]:
        raise ValueError("shards are an empty list")
