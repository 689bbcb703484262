"""References for generated images: images, ADM's statistics, or saved statistics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from moh_vision.engine.io import write_tensors
from moh_vision.evaluation.fidelity.images import archive_members, array_header, open_images

FORMAT = 1
ADM = ("mu", "sigma", "mu_s", "sigma_s")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_FEATURES = 16_384  # whose covariance takes 2 GiB


@dataclass
class Statistics:
    """Of one set of images under one extractor.

    Args:
        count: images; None: the file does not say.
        pooled, spatial: (mean [F], covariance [F, F]) in float64, or None.
        features: [N, F], for precision, recall and KID, or None.
        why_no_features: where features is None.
        extractor, weights_sha256: that made them; None: the file does not say.
        source: what was read.
        channels: of the image files, 1 or 3; None: not known.
        size: height and width of the images; None: not known.
    """

    count: Optional[int]
    pooled: Tuple[Tensor, Tensor]
    spatial: Optional[Tuple[Tensor, Tensor]]
    features: Optional[Tensor]
    why_no_features: str
    extractor: Optional[str]
    weights_sha256: Optional[str]
    source: str
    channels: Optional[int] = None
    size: Optional[Tuple[int, int]] = None

    def save(self, path: Path) -> None:
        """Write moments, features if any, and their origin to a .safetensors file."""
        tensors: Dict[str, Tensor] = {}
        for name, moments in (("pooled", self.pooled), ("spatial", self.spatial)):
            if moments is not None:
                tensors[f"{name}.mean"], tensors[f"{name}.covariance"] = (m.contiguous() for m in moments)
        if self.features is not None:
            tensors["features"] = self.features.contiguous()
        about = dict(
            format=FORMAT, count=self.count, extractor=self.extractor, weights_sha256=self.weights_sha256,
            source=self.source, channels=self.channels, size=self.size,
        )  # fmt: skip
        write_tensors(path, tensors, dict(statistics=about))


def load_statistics(path: Path) -> Statistics:
    """What `Statistics.save` wrote.

    Raises:
        ValueError, FileNotFoundError: naming the file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as opened:
            about = json.loads((opened.metadata() or {})["statistics"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except Exception as error:  # damaged headers make many kinds
        raise ValueError(f"{path}: not a file of statistics ({type(error).__name__}: {error})") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        form = about.get("format") if isinstance(about, dict) else None
        raise ValueError(f"{path}: statistics of format {form}, this version reads {FORMAT}")
    _refuse_other_statistics(path, about, tensors)

    def moments(name: str) -> Optional[Tuple[Tensor, Tensor]]:
        return (tensors[f"{name}.mean"], tensors[f"{name}.covariance"]) if f"{name}.mean" in tensors else None

    return Statistics(
        about["count"], moments("pooled"), moments("spatial"), tensors.get("features"),
        f"{path} was saved without features", about["extractor"], about["weights_sha256"], f"{path} ({about['source']})",
        about.get("channels"), about.get("size"),
    )  # fmt: skip


def _refuse_other_statistics(path: Path, about: dict, tensors: Dict[str, Tensor]) -> None:
    kinds = dict(count=(int, type(None)), extractor=(str, type(None)), weights_sha256=(str, type(None)), source=str)
    for key, kind in kinds.items():
        if key not in about or not isinstance(about[key], kind) or about[key] is True:
            raise ValueError(f"{path}: not a file of statistics ({key} is {about.get(key)!r})")
    channels, size = about.get("channels"), about.get("size")  # None: not known
    if channels not in (None, 1, 3) or not (
        size is None or isinstance(size, list) and list(map(type, size)) == [int] * 2
    ):
        raise ValueError(f"{path}: not a file of statistics (channels is {channels!r}, size is {size!r})")
    if about["count"] is not None and about["count"] < 1:
        raise ValueError(f"{path}: not a file of statistics (count is {about['count']})")
    dims = {name: len(t) for name in ("pooled", "spatial") if (t := tensors.get(f"{name}.mean")) is not None and t.ndim}
    shapes = {
        f"{name}.{what}": shape for name, d in dims.items() for what, shape in (("mean", (d,)), ("covariance", (d, d)))
    }
    if "features" in tensors:
        shapes["features"] = (about["count"], dims.get("pooled"))
    if "pooled" not in dims or set(tensors) != set(shapes):
        raise ValueError(
            f"{path}: not a file of statistics (it holds {', '.join(name[:100] for name in sorted(tensors)[:5]) or 'nothing'})"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name] or tensor.dtype not in FLOATS:
            raise ValueError(
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}; expected floats {list(shapes[name])}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds numbers that are not finite")


def is_adm(path: str) -> bool:
    """Whether a path is ADM's statistics, such as VIRTUAL_imagenet256_labeled.npz.

    Raises:
        ValueError: for a damaged .npz file.
    """
    file = Path(path)
    return file.suffix == ".npz" and file.is_file() and {"mu", "sigma"} <= set(archive_members(file))


def adm_statistics(path: Path) -> Optional[Statistics]:
    """Read mu, sigma, mu_s, sigma_s of ADM's .npz; None without statistics.

    Raises:
        ValueError: naming the file and the array.
    """
    members = archive_members(path)
    if not {"mu", "sigma"} & set(members):
        return None
    missing = [name for name in ADM[:2] if name not in members]
    if missing:
        raise ValueError(f"{path}: holds {', '.join(members)}, but no {missing[0]}")
    arrays = {}
    for name in (n for n in ADM if n in members):
        shape, _, dtype = array_header(path, name)  # first: it can unpack to any size
        if not np.issubdtype(dtype, np.floating) or len(shape) != (2 if "sigma" in name else 1):
            raise ValueError(
                f"{path}: {name} is {dtype} {list(shape)}; expected a {'matrix' if 'sigma' in name else 'vector'} of floats"
            )
        if not shape[0] or max(shape) > MAX_FEATURES or len(set(shape)) > 1:
            raise ValueError(f"{path}: {name} has shape {list(shape)}; allowed are 1 to {MAX_FEATURES} features")
        array = _array(path, name)
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {name} holds numbers that are not finite")
        arrays[name] = torch.from_numpy(array.astype(np.float64))
    for name in ("mu", "mu_s"):
        matrix = name.replace("mu", "sigma")
        if name in arrays and matrix in arrays and len(arrays[name]) != len(arrays[matrix]):
            raise ValueError(f"{path}: {name} has {len(arrays[name])} features, {matrix} {len(arrays[matrix])}")
    spatial = (arrays["mu_s"], arrays["sigma_s"]) if {"mu_s", "sigma_s"} <= set(arrays) else None
    why = f"{path} holds statistics only, no images (arr_0)"
    return Statistics(None, (arrays["mu"], arrays["sigma"]), spatial, None, why, None, None, str(path))


def _array(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return archive[name]
    except Exception as error:  # damaged compression makes many kinds
        raise ValueError(f"{path}: {name} is damaged ({error})") from None


def open_reference(source: Any) -> Tuple[Optional[Statistics], Any]:
    """(Statistics or None, images or None) that a reference holds; see `score`."""
    if isinstance(source, Statistics):
        return source, None
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.suffix == ".safetensors":
            return load_statistics(path), None
        if path.suffix == ".npz":
            statistics = adm_statistics(path)
            if statistics is not None:
                return statistics, open_images(path, "reference") if "arr_0" in archive_members(path) else None
    return None, open_images(source, "reference")
