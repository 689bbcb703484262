"""Latents on disk: the manifest, and reading any sample."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from moh_vision.data.decode import UnreadableImage
from moh_vision.data.splits import manifest_path
from moh_vision.data.tar_samples import TarSamples
from moh_vision.diffusion.latents.vae import LatentSpace
from moh_vision.engine.io import write_whole

FORMAT = 1
DTYPES = ("float16", "float32")


def write_manifest(
    folder: Path, split: str, space: LatentSpace, size: int, dtype: str, source: str, classes: List[str],
    shards: Optional[List[dict]],
) -> None:  # fmt: skip
    """Write the manifest. `shards`: entries of the record, or None while unfinished, which training refuses."""
    manifest = dict(format=FORMAT, complete=shards is not None, split=split, source=source, size=size, dtype=dtype)
    manifest.update(vae=dataclasses.asdict(space), shape=_shape(space, size), classes=classes)
    if shards is not None:
        manifest.update(
            samples=sum(e["samples"] for e in shards),
            bad=sum(len(e["bad"]) for e in shards),
            shards=[{k: e[k] for k in ("shard", "samples", "bytes", "sha256")} for e in shards],
        )
    write_whole(manifest_path(folder, split), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def _shape(space: LatentSpace, size: int) -> List[int]:
    side = space.side(size)
    return [2, space.moment_channels, side, side]


class LatentCache(TarSamples):
    """Posterior moments of images and of their mirror images, written by `python -m moh_vision latents`.

    `space` is a `LatentSpace`, `size` the images' side in pixels; `img_size` and `channels` are the latents'.
    """

    what = "latents"
    extensions = ("npy",)

    def __init__(self, root: str, split: str, index_dir: Optional[str] = None):
        path = manifest_path(Path(root), split)
        self.manifest = m = _read_manifest(path, root, split)
        super().__init__(root, split, index_dir)
        self.space = LatentSpace(**m["vae"])
        self.size, self.img_size = m["size"], m["shape"][-1]
        self.channels = self.space.latent_channels
        self.classes = m["classes"]
        if self.labels.max() >= len(self.classes):
            worst = int(self.labels.argmax())
            raise ValueError(
                f"{self.where(worst)}: label {self.labels[worst]}, but {path.name} names {len(self.classes)} classes"
            )
        self.shape, self.dtype = tuple(m["shape"]), np.dtype(m["dtype"])
        # All members are arrays of one shape and type, so they begin alike.
        self.header = _npy_header(self.shape, self.dtype)
        odd = np.flatnonzero(self.bytes != len(self.header) + self.dtype.itemsize * math.prod(self.shape))
        if len(odd):
            raise ValueError(
                f"{self.where(odd[0])}: {self.bytes[odd[0]]} bytes, not {self.dtype} of shape {self.shape}"
            )

    def _record(self, folder: Path, split: str) -> Tuple[Path, Dict[str, dict]]:
        return manifest_path(folder, split), {entry["shard"]: entry for entry in self.manifest["shards"]}

    def moments(self, index: int) -> Tensor:
        """Return moments of an image and of its mirror image: [2, 2C or C, h, w], float32."""
        data = self.read(index)
        if len(data) != self.bytes[index] or not data.startswith(self.header):
            raise UnreadableImage(f"{self.where(index)}: not {self.dtype} of shape {self.shape}; the shard is damaged")
        numbers = np.frombuffer(data, self.dtype, offset=len(self.header)).reshape(self.shape)
        return torch.from_numpy(numbers.astype(np.float32))

    def listing(self) -> Iterator[bytes]:
        """Yield the listing with each shard's SHA-256: other VAEs give the same offsets and sizes."""
        yield from super().listing()
        yield json.dumps(self.manifest["shards"]).encode()


def npy_bytes(array: np.ndarray) -> bytes:
    """Return a C-contiguous array as the bytes of a .npy file."""
    return _npy_header(array.shape, array.dtype) + array.tobytes()


@lru_cache(maxsize=4)
def _npy_header(shape: tuple, dtype: np.dtype) -> bytes:
    """Return the 128 bytes that numpy writes before the numbers."""
    file = io.BytesIO()
    about = dict(descr=np.lib.format.dtype_to_descr(dtype.newbyteorder("<")), fortran_order=False, shape=shape)
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def _read_manifest(path: Path, root: str, split: str) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"data.root {root}: no {path.name} in it, which latents have")
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if not manifest["complete"]:
            raise ValueError("the latents are not all there yet; the command that writes them goes on where it stopped")
        if manifest["dtype"] not in DTYPES or manifest["shape"] != _shape(
            LatentSpace(**manifest["vae"]), manifest["size"]
        ):
            raise ValueError(f"dtype {manifest['dtype']}, shape {manifest['shape']} are not those of its VAE and size")
        _refuse_other_kinds(manifest)
        return manifest
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:  # what is not there, or of another kind, fails anywhere
        raise ValueError(f"{path}: not a manifest of latents ({type(error).__name__}: {error})") from None


def _refuse_other_kinds(manifest: dict) -> None:
    vae, shards, classes = manifest["vae"], manifest["shards"], manifest["classes"]
    if not isinstance(vae["name"], str) or not isinstance(vae["sha256"], str):
        raise ValueError("name and sha256 of its VAE are not texts")
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise ValueError("classes are not a list of names")
    kinds = dict(shard=str, samples=int, bytes=int, sha256=str)
    if not all(isinstance(entry[key], kind) for entry in shards for key, kind in kinds.items()):
        raise ValueError("shards are not a list of shard, samples, bytes, sha256")
