"""References for generated images, and the pass of an extractor over a set."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.types import Device

from moh_vision.engine.io import sha256_of
from moh_vision.engine.progress import Progress
from moh_vision.evaluation.fidelity.extractors import Extractor
from moh_vision.evaluation.fidelity.images import archive_members, open_images
from moh_vision.evaluation.fidelity.statistics import SetStatistics, Statistics, load_statistics


def is_adm(path: str) -> bool:
    """Whether a path is ADM's statistics, such as VIRTUAL_imagenet256_labeled.npz; a damaged .npz is refused."""
    file = Path(path)
    members = archive_members(file) if file.suffix == ".npz" and file.is_file() else []
    return {"mu", "sigma"} <= set(members) and "record" not in members


class Reference:
    """A reference (as of `score`), opened and checked at once; its images are read once, when needed."""

    def __init__(self, source: Any):
        self.source, self.statistics, self.images = source, None, None
        self.path = Path(source) if isinstance(source, (str, Path)) else None
        members = archive_members(self.path) if self.path and self.path.suffix == ".npz" else []
        if isinstance(source, Statistics):
            self.statistics = source
        elif {"mu", "sigma"} & set(members):
            self.statistics = load_statistics(self.path)
        if self.statistics is None or "arr_0" in members:
            self.images = open_images(source, "reference")
        self.name = self.statistics.source if self.images is None else self.images.name

    @cached_property
    def sha256(self) -> str | None:
        """SHA-256 of the source file; None for a folder, a data set or a tensor."""
        return sha256_of(self.path) if self.path and self.path.is_file() else None

    def check(
        self,
        network: Extractor,
        dims: int | None,
        made: int | None,
        allow_biased: bool,
        channels: int | None = None,
    ) -> None:
        """Refuse `made` images, of 1 or 3 `channels`, that cannot be compared by `dims` features; None: not known."""
        known, count = self.statistics, self.images and self.images.count
        own = (known if self.images is None else self.images).channels
        if None not in (channels, own) and channels != own:
            kinds = {1: "grey", 3: "in colour"}
            both = f"the generated images are {kinds[channels]}, those of {self.name} {kinds[own]}"
            raise ValueError(f"{both}; convert one of the sets")
        if known is not None:
            weights, where = known.weights_sha256, known.source
            if weights is None and not network.published:
                raise ValueError(
                    f"{where} does not say which weights made it: it is compared with Inception's published ones only, "
                    f"not with {network.name}"
                )
            if weights not in (None, network.weights_sha256):
                own = f"{network.name} (sha256 {(network.weights_sha256 or 'unknown')[:12]})"
                raise ValueError(
                    f"{where} was made by {known.extractor} (sha256 {weights[:12]}), not by {own}"
                )
            count = known.count or count
            if dims not in (None, len(known.pooled[0])):
                raise ValueError(
                    f"{self.name} has {len(known.pooled[0])} features, {network.name} gives {dims}"
                )
        if dims is None or made is None or allow_biased:
            return
        fewest = min(made, count or made)
        if fewest <= dims:
            which = f"{fewest} generated" if fewest == made else f"{self.name}: {fewest} reference"
            raise ValueError(
                f"{which} images for {dims} features of {network.name}: the distance would be far too large and "
                "depend on their number; use more images, or allow_biased (--allow-biased) to get it labelled with the number"
            )

    def read(self, network: Extractor, batch_size: int, device: Device) -> Statistics:
        """Return its statistics for a fixed extractor, which was checked; every process calls it."""
        if self.images is not None:
            own = statistics_of(self.images, network, batch_size, device, "reference")
            if self.statistics is not None:  # ADM's file: moments of all images, arr_0 of some
                own = replace(
                    self.statistics, features=own.features, count=own.count, size=own.size
                )
            self.statistics, self.images = own, None
        return self.statistics


@torch.no_grad()
def statistics_of(
    images: Any,
    network: Extractor,
    batch_size: int,
    device: Device,
    title: str,
    keep_features: bool = True,
) -> Statistics:
    """Return the `Statistics` of images (as `generated` of `score`); every process calls it.

    `title` is the progress bar's, and stands for a set without a name.
    """
    images, network = open_images(images, title), network.eval()

    def own_share() -> SetStatistics:
        own, (rank, world) = SetStatistics(keep_features), place()
        network.to(device)  # in here: one GPU may have no room for it
        with Progress(title, images.count, "image", enabled=rank == 0) as progress:
            for first, batch in images.batches(batch_size, rank, world):
                own.add(first, network(batch.to(device)))
                own.size = tuple(batch.shape[2:])
                progress.add(len(batch) * world)
        return own

    kept, *others = on_all(own_share)
    for other in others:
        kept.merge(other)
    moments = {
        name: kept.parts[name].result() for name in ("pooled", "spatial") if name in kept.parts
    }
    count = kept.parts["pooled"].count if moments else 0
    if count == 0:
        raise ValueError(f"{title}: no images in {images.name}")
    return Statistics(
        moments["pooled"], moments.get("spatial"), images.name, count, kept.all_features(), network.name,
        weights_sha256=network.weights_sha256, channels=images.channels, size=kept.size,
        formats=getattr(images, "formats", None), classes=kept.parts.get("logits"),
    )  # fmt: skip


def place() -> tuple[int, int]:
    """Return (number of this process, how many there are)."""
    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_available() and dist.is_initialized()
        else (0, 1)
    )


def on_all(work: Callable[[], Any]) -> list:
    """Return what `work` returns on every process. An error of one is raised on all, or the others would wait."""
    world = place()[1]
    if world == 1:
        return [work()]
    try:
        own = work()
    except Exception as error:
        own = (
            error
            if isinstance(error, (ValueError, OSError))
            else RuntimeError(f"{type(error).__name__}: {error}")
        )
    results = [None] * world
    dist.all_gather_object(results, own)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
