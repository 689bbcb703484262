"""References for generated images, and the pass of an extractor over a set."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.types import Device

from moh_vision.common.io import sha256_of
from moh_vision.common.progress import Progress
from moh_vision.data.decode import AS_STORED, Decoding
from moh_vision.evaluation.fidelity.extractors import Extractor
from moh_vision.evaluation.fidelity.images import archive_members, open_images
from moh_vision.evaluation.fidelity.statistics import SetStatistics, Statistics, load_statistics


def is_adm(path: str) -> bool:
    """Return whether a path is ADM's statistics, such as VIRTUAL_imagenet256_labeled.npz; refuse a damaged .npz."""
    file = Path(path)
    if file.suffix != ".npz" or not file.is_file():
        return False
    members = archive_members(file)
    return {"mu", "sigma"} <= set(members) and "record" not in members


class Reference:
    """A reference, given as in `score`. It is opened at once; its images are read once, when they are needed."""

    def __init__(self, source: Any, decoding: Decoding = AS_STORED):
        self.source = source
        self.path: Path | None = None
        self.statistics: Statistics | None = None
        self.images = None
        members: list[str] = []  # arrays of an .npz file
        if isinstance(source, (str, Path)):
            self.path = Path(source)
            if self.path.suffix == ".npz":
                members = archive_members(self.path)
        if isinstance(source, Statistics):
            self.statistics = source
        elif {"mu", "sigma"} & set(members):
            self.statistics = load_statistics(self.path)
        if self.statistics is None or "arr_0" in members:
            self.images = open_images(source, "reference", decoding)
            self.name = self.images.name
        else:
            self.name = self.statistics.source

    @cached_property
    def sha256(self) -> str | None:
        """Return the SHA-256 of the source file; None for a folder, a data set or a tensor."""
        if self.path is None or not self.path.is_file():
            return None
        return sha256_of(self.path)

    def check(
        self,
        network: Extractor,
        dims: int | None,
        num_generated: int | None,
        allow_biased: bool,
        channels: int | None = None,
    ) -> None:
        """Refuse generated images that cannot be compared with this reference.

        Args:
            network: the extractor that the images are compared by.
            dims: number of its features; None: not known.
            num_generated: number of generated images; None: not known.
            allow_biased: accept no more images than features.
            channels: of the generated images, 1 or 3; None: not known.
        """
        self._check_channels(channels)
        count = None
        if self.images is not None:
            count = self.images.count
        if self.statistics is not None:
            self._check_statistics(network, dims)
            count = self.statistics.count or count
        if dims is None or num_generated is None or allow_biased:
            return
        fewest = min(num_generated, count or num_generated)
        if fewest <= dims:
            if fewest == num_generated:
                which = f"{fewest} generated"
            else:
                which = f"{self.name}: {fewest} reference"
            raise ValueError(
                f"{which} images for {dims} features of {network.name}: the distance would be far too large and "
                "depend on their number; use more images, or allow_biased (--allow-biased) to get it labelled with the number"
            )

    def _check_channels(self, channels: int | None) -> None:
        """Refuse to compare grey images with images in colour."""
        if self.images is not None:
            expected = self.images.channels
        else:
            expected = self.statistics.channels
        if None not in (channels, expected) and channels != expected:
            words = {1: "grey", 3: "in colour"}
            raise ValueError(
                f"the generated images are {words[channels]}, those of {self.name} {words[expected]}; "
                "convert one of the sets"
            )

    def _check_statistics(self, network: Extractor, dims: int | None) -> None:
        """Refuse an extractor with other weights, or another number of features, than the statistics were made by."""
        known = self.statistics
        weights = known.weights_sha256
        if weights is None and not network.published:
            raise ValueError(
                f"{known.source} does not say which weights made it: it is compared with Inception's published ones "
                f"only, not with {network.name}"
            )
        if weights not in (None, network.weights_sha256):
            sha256 = network.weights_sha256 or "unknown"
            raise ValueError(
                f"{known.source} was made by {known.extractor} (sha256 {weights[:12]}), "
                f"not by {network.name} (sha256 {sha256[:12]})"
            )
        known_dims = len(known.pooled[0])
        if dims not in (None, known_dims):
            raise ValueError(f"{self.name} has {known_dims} features, {network.name} gives {dims}")

    def read(self, network: Extractor, batch_size: int, device: Device) -> Statistics:
        """Return the statistics of the reference; a collective.

        They are computed once: call it with one extractor only, which `check` has accepted.
        """
        if self.images is not None:
            found = statistics_of(self.images, network, batch_size, device, "reference")
            if self.statistics is not None:  # ADM's file: moments of all images, arr_0 of some
                found = replace(
                    self.statistics, features=found.features, count=found.count, size=found.size
                )
            self.statistics = found
            self.images = None
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
    """Compute the `Statistics` of images over all processes; a collective.

    Args:
        images: as `generated` of `score`.
        network: the extractor.
        batch_size: images at a time on each process.
        device: where the extractor runs.
        title: of the progress bar; also the name of images that have none.
        keep_features: also keep all features, for precision, recall and KID.
    """
    images = open_images(images, title)
    network = network.eval()

    def read_share() -> SetStatistics:
        """Collect the statistics of this process's share of the images."""
        collected = SetStatistics(keep_features)
        rank, world = rank_and_world()
        network.to(device)  # inside `on_all`, because it may fail on one GPU alone
        with Progress(title, images.count, "image", enabled=rank == 0) as progress:
            for first, batch in images.batches(batch_size, rank, world):
                collected.add(first, network(batch.to(device)))
                collected.size = tuple(batch.shape[2:])
                progress.add(len(batch) * world)
        return collected

    collected, *remaining = on_all(read_share)
    for share in remaining:
        collected.merge(share)
    parts = collected.parts
    moments = {name: parts[name].result() for name in ("pooled", "spatial") if name in parts}
    # A count is complete after `result`, which adds the features that are waiting.
    if "pooled" not in moments or parts["pooled"].count == 0:
        raise ValueError(f"{title}: 0 images in {images.name}; expected 1 or more")
    return Statistics(
        pooled=moments["pooled"],
        spatial=moments.get("spatial"),
        source=images.name,
        count=parts["pooled"].count,
        features=collected.all_features(),
        extractor=network.name,
        weights_sha256=network.weights_sha256,
        channels=images.channels,
        size=collected.size,
        formats=getattr(images, "formats", None),
        classes=parts.get("logits"),
    )


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process, and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def on_all(work: Callable[[], Any]) -> list:
    """Call `work` on every process; return the results of all, by rank. A collective.

    An exception of one process is raised on all, because the others would wait for it forever.
    """
    _, world = rank_and_world()
    if world == 1:
        return [work()]
    try:
        answer = work()
    except (ValueError, OSError) as error:
        answer = error
    except Exception as error:  # its class may not be picklable
        answer = RuntimeError(f"{type(error).__name__}: {error}")
    results = [None] * world
    dist.all_gather_object(results, answer)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
