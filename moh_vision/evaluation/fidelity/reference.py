"""What generated images are compared with: images, ADM's statistics, or statistics that were saved before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Optional, Tuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moh_vision.evaluation.fidelity.images import archive_members, open_images

FORMAT = 1
ADM = ("mu", "sigma", "mu_s", "sigma_s")


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
    """

    count: Optional[int]
    pooled: Tuple[Tensor, Tensor]
    spatial: Optional[Tuple[Tensor, Tensor]]
    features: Optional[Tensor]
    why_no_features: str
    extractor: Optional[str]
    weights_sha256: Optional[str]
    source: str

    def save(self, path: Path) -> None:
        """Write a .safetensors file: moments, and features if there are any, with where they come from."""
        tensors: Dict[str, Tensor] = {}
        for name, moments in (("pooled", self.pooled), ("spatial", self.spatial)):
            if moments is not None:
                tensors[f"{name}.mean"], tensors[f"{name}.covariance"] = (m.contiguous() for m in moments)
        if self.features is not None:
            tensors["features"] = self.features.contiguous()
        about = dict(
            format=FORMAT, count=self.count, extractor=self.extractor, weights_sha256=self.weights_sha256,
            source=self.source,
        )  # fmt: skip
        hidden = path.with_name(f".{path.name}.tmp")
        save_file(tensors, hidden, metadata={"format": "pt", "statistics": json.dumps(about)})
        hidden.chmod(0o644)
        hidden.rename(path)


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
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: not a file of statistics ({type(error).__name__}: {error})") from None
    if about.get("format") != FORMAT:
        raise ValueError(f"{path}: statistics of format {about.get('format')}, this version reads {FORMAT}")

    def moments(name: str):
        return (tensors[f"{name}.mean"], tensors[f"{name}.covariance"]) if f"{name}.mean" in tensors else None

    return Statistics(
        about["count"], moments("pooled"), moments("spatial"), tensors.get("features"),
        f"{path} was saved without features", about["extractor"], about["weights_sha256"], f"{path} ({about['source']})",
    )  # fmt: skip


def adm_statistics(path: Path) -> Optional[Statistics]:
    """mu, sigma, mu_s, sigma_s of an .npz of ADM's evaluator; None if it holds no statistics.

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
    with np.load(path, allow_pickle=False) as archive:
        for name in (n for n in ADM if n in members):
            array = archive[name]
            if not np.issubdtype(array.dtype, np.floating) or array.ndim != (2 if "sigma" in name else 1):
                raise ValueError(
                    f"{path}: {name} is {array.dtype} {list(array.shape)}; expected a {'matrix' if 'sigma' in name else 'vector'} of floats"
                )
            if not np.isfinite(array).all():
                raise ValueError(f"{path}: {name} holds numbers that are not finite")
            arrays[name] = torch.from_numpy(array).double()
    spatial = (arrays["mu_s"], arrays["sigma_s"]) if {"mu_s", "sigma_s"} <= set(arrays) else None
    why = f"{path} holds statistics only, no images (arr_0)"
    return Statistics(None, (arrays["mu"], arrays["sigma"]), spatial, None, why, None, None, str(path))


def open_reference(source):
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
