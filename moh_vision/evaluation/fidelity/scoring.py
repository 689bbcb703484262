"""`score`: all numbers of generated images in one pass of the extractor."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Iterable, Optional, Tuple, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.types import Device

from moh_vision.engine.commands import Progress
from moh_vision.engine.io import sha256_of
from moh_vision.evaluation.fidelity.extractors import Extractor, make_extractor
from moh_vision.evaluation.fidelity.images import open_images
from moh_vision.evaluation.fidelity.metrics import frechet_distance, kernel_distance, precision_recall
from moh_vision.evaluation.fidelity.reference import Statistics, open_reference
from moh_vision.evaluation.fidelity.statistics import SetStatistics

ImageSet = Union[str, Path, Tensor, Iterable[Tensor]]
# Names of the numbers without Inception's published weights.
OTHER_NAMES = dict(
    fid="fd", sfid="spatial_fd", inception_score="class_score", inception_score_std="class_score_std", kid="kernel_distance"
)  # fmt: skip


def score(
    generated: ImageSet,
    reference: Union[ImageSet, Statistics, Reference],
    *,
    extractor: Union[str, nn.Module] = "inception",
    inception_weights: Optional[Union[str, Path]] = None,
    batch_size: int = 64,
    device: Device = None,
    allow_biased: bool = False,
) -> dict:
    """FID, sFID, inception score, KID, precision and recall of generated images against a reference.

    With torch.distributed, the processes share the batches, and all get the same result as one, up to rounding.

    Args:
        generated: folder of images, .npz with arr_0 (uint8 NHWC), uint8 tensor [N, 3, H, W] or iterator of those.
        reference: the same; or ADM's .npz of mu, sigma, mu_s, sigma_s (with arr_0, also precision and recall); a file
            of `Statistics.save`, `Statistics`, or a `Reference`, which is read once.
        extractor: "inception", "timm:NAME", or a module from uint8 images [B, 3, H, W] to features [B, F]; see
            `make_extractor`.
        inception_weights: path of torch-fidelity's file; None: fetched once.
        batch_size: images at a time on each process.
        device: where the extractor runs; None: a GPU if there is one.
        allow_biased: also with no more images than features, where a Frechet distance is far too large; the
            label is then FID@N.

    Returns:
        dict(fid, sfid, inception_score, inception_score_std, kid, precision, recall, num_generated, num_reference,
        extractor, weights_sha256, label, missing, notes, reference_sha256: of its file). Unavailable numbers are None,
        and `missing` says why; `notes` are lines on the numbers' limits. Without Inception's published weights the
        numbers have other keys (`OTHER_NAMES`), because they are not FID; `label` is "FID", "FID@N", "FD-NAME"
        or "FD-NAME@N".

    Raises:
        ValueError, FileNotFoundError: one line that names the file, array or image and what is wrong.
    """
    network = make_extractor(extractor, inception_weights)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network = network.eval()
    if not isinstance(reference, Reference):
        reference = Reference(reference)
    images = open_images(generated, "generated")
    if hasattr(images, "__len__"):  # an iterator can be read once
        with torch.no_grad():
            dims = network.to(device)(next(images.batches(2))[1].to(device)).pooled.shape[1]
        reference.check(network, dims, len(images), allow_biased, getattr(images, "channels", None))
    statistics = reference.read(network, batch_size, device)
    compared = statistics.features is not None  # else no score needs features themselves
    made = extract(images, network, batch_size, device, "generated", compared)
    told, (rank, world) = [None], _place()
    if rank == 0:
        try:
            reference.check(network, made.pooled.dim, made.count, allow_biased)
            result = _numbers(made, statistics, network, device)
            told = [dict(result, reference_sha256=reference.sha256)]
        except Exception as error:  # for all processes, or the others would wait
            told = [_portable(error)]
    if world > 1:
        dist.broadcast_object_list(told)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


class Reference:
    """A reference, opened and checked at once; its images are read once, when needed.

    Args:
        source: as `reference` of `score`, or an object like a `ScoredFolder`.

    Raises:
        ValueError, FileNotFoundError: for a source that does not exist or is malformed.
    """

    def __init__(self, source: Any):
        self.source = source
        self.statistics, self.images = open_reference(source)
        self.name = self.statistics.source if self.images is None else self.images.name

    @cached_property
    def sha256(self) -> Optional[str]:
        """SHA-256 of the source file; None for a folder, a data set or a tensor."""
        is_path = isinstance(self.source, (str, Path))
        return sha256_of(Path(self.source)) if is_path and Path(self.source).is_file() else None

    @property
    def channels(self) -> Optional[int]:
        """Of the image files, 1 or 3; None: not known."""
        return getattr(self.statistics if self.images is None else self.images, "channels", None)

    def check(
        self, network: Extractor, dims: int, generated: int, allow_biased: bool, channels: Optional[int] = None
    ) -> None:
        """Raise ValueError if what is known of the images forbids a comparison.

        Args:
            network: the extractor.
            dims: its features.
            generated: number of images.
            allow_biased: see `score`.
            channels: of the generated images, 1 or 3; None: not known.
        """
        if None not in (channels, self.channels) and channels != self.channels:
            kinds = {1: "grey", 3: "in colour"}
            raise ValueError(
                f"the generated images are {kinds[channels]}, those of {self.name} {kinds[self.channels]}; convert one of the sets"
            )
        statistics = self.statistics
        _check_same_extractor(statistics, network)
        if statistics is not None and len(statistics.pooled[0]) != dims:
            raise ValueError(f"{self.name} has {len(statistics.pooled[0])} features, {network.name} gives {dims}")
        count = statistics.count if statistics is not None else None
        if count is None and hasattr(self.images, "__len__"):
            count = len(self.images)
        fewest = min(generated, count or generated)
        if fewest <= dims and not allow_biased:
            which = f"{fewest} generated" if fewest == generated else f"{self.name}: {fewest} reference"
            raise ValueError(
                f"{which} images for {dims} features of {network.name}: the distance would be far too large and "
                "depend on their number; use more images, or allow_biased (--allow-biased) to get it labelled with the number"
            )

    def read(self, network: Extractor, batch_size: int, device: Device) -> Statistics:
        """Return its statistics for a fixed extractor; every process calls it."""
        _check_same_extractor(self.statistics, network)
        if self.images is not None:
            own = extract(self.images, network, batch_size, device, "reference")
            own = of_set(own, network, self.name, self.channels)
            if self.statistics is not None:  # ADM's file: moments of all images, arr_0 of some
                count = self.statistics.count or own.count
                own = replace(self.statistics, features=own.features, count=count, size=own.size)
            self.statistics, self.images = own, None
        return self.statistics


def statistics_of(images: ImageSet, network: Extractor, batch_size: int, device: Device, title: str) -> Statistics:
    """The `Statistics` of a set, for a reference that is used more than once.

    Args:
        images: as `generated` of `score`.
        network: the extractor.
        batch_size, device: see `score`.
        title: of the progress bar, and of the set where it has no name.
    """
    images, network = open_images(images, title), network.eval()
    kept = extract(images, network, batch_size, device, title)
    return of_set(kept, network, images.name, getattr(images, "channels", None))


@torch.no_grad()
def extract(
    images: Any, network: Extractor, batch_size: int, device: Device, title: str, keep_features: bool = True
) -> SetStatistics:
    """The statistics of a set of images, on every process.

    Args:
        images: of `open_images`.
        network: the extractor.
        batch_size: images at a time.
        device: where it runs.
        title: of the progress bar.
        keep_features: see `SetStatistics`.

    Raises:
        ValueError: for an image that cannot be used; and where there are none.
    """
    kept, problem = SetStatistics(keep_features), None
    total = len(images) if hasattr(images, "__len__") else None
    rank, world = _place()
    try:
        network.to(device)  # in here: one GPU may have no room for it
        with Progress(title, total, "image", enabled=rank == 0) as progress:
            for first, batch in images.batches(batch_size, rank, world):
                out = network(batch.to(device))
                kept.add(first, out.pooled, out.spatial, out.logits)
                kept.size = tuple(batch.shape[2:])
                progress.add(len(batch) * world)
    except Exception as error:
        if world == 1:
            raise
        problem = _portable(error)
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, problem or kept)
        for other in everyone:
            if isinstance(other, Exception):  # on all processes, or the others would wait
                raise other
        kept = everyone[0]
        for other in everyone[1:]:
            kept.merge(other)
    if kept.count == 0:
        raise ValueError(f"{title}: no images in {images.name}")
    return kept


def of_set(kept: SetStatistics, network: Extractor, source: str, channels: Optional[int] = None) -> Statistics:
    """The `Statistics` of a set that was read."""
    return Statistics(
        kept.count, kept.pooled.result(), kept.spatial and kept.spatial.result(), kept.all_features(),
        "features were not kept", network.name, network.weights_sha256, source, channels, kept.size,
    )  # fmt: skip


def _check_same_extractor(statistics: Optional[Statistics], network: Extractor) -> None:
    if statistics is None:
        return
    if statistics.weights_sha256 is None and not network.published:
        raise ValueError(
            f"{statistics.source} does not say which weights made it: it is compared with Inception's published ones "
            f"only, not with {network.name}"
        )
    if statistics.weights_sha256 not in (None, network.weights_sha256):
        raise ValueError(
            f"{statistics.source} was made by {statistics.extractor} (sha256 {statistics.weights_sha256[:12]}), not by "
            f"{network.name} (sha256 {(network.weights_sha256 or 'unknown')[:12]})"
        )


def _portable(error: Exception) -> Exception:
    """An exception that can be sent to other processes."""
    return error if isinstance(error, (ValueError, OSError)) else RuntimeError(f"{type(error).__name__}: {error}")


def _numbers(made: SetStatistics, reference: Statistics, network: Extractor, device: Device) -> dict:
    generated = of_set(made, network, "generated")
    missing, notes = {}, []
    values = dict.fromkeys(("fid", "sfid", "inception_score", "inception_score_std", "kid", "precision", "recall"))
    values["fid"] = frechet_distance(*generated.pooled, *reference.pooled)
    if generated.spatial is None:
        missing["sfid"] = f"{network.name} has no spatial features"
    elif reference.spatial is None:
        missing["sfid"] = f"{reference.source} has none"
    else:
        values["sfid"] = frechet_distance(*generated.spatial, *reference.spatial)
    if made.classes is None:
        missing["inception_score"] = f"{network.name} gives no class probabilities"
    else:
        values["inception_score"], values["inception_score_std"] = made.classes.result()
        if made.classes.short:
            notes.append(f"{'inception' if network.published else 'class'} score: {made.classes.short}")
    if reference.features is None:
        missing.update(dict.fromkeys(("kid", "precision", "recall"), reference.why_no_features))
    else:
        values["kid"] = kernel_distance(generated.features, reference.features)
        values["precision"], values["recall"] = precision_recall(generated.features, reference.features, device)
    if reference.size and tuple(reference.size) != generated.size:
        one, two = ("{1} x {0}".format(*size) for size in (generated.size, reference.size))
        notes.append(f"the generated images have {one} pixels, those of {reference.source} {two}")
    label = "FID" if network.published else f"FD-{network.name}"
    fewest = min(generated.count, reference.count or generated.count)
    if not network.published:
        values = {OTHER_NAMES.get(name, name): value for name, value in values.items()}
        missing = {OTHER_NAMES.get(name, name): reason for name, reason in missing.items()}
    return dict(
        values,
        num_generated=generated.count,
        num_reference=reference.count,
        extractor=network.name,
        weights_sha256=network.weights_sha256,
        label=label if fewest > made.pooled.dim else f"{label}@{fewest}",
        missing=missing,
        notes=notes,
    )


def _place() -> Tuple[int, int]:
    """(number of this process, how many there are)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
