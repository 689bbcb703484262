"""From images to shards of posterior moments."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from moh_vision.data.batches import LabelledImages, evaluation_batches, image_transform
from moh_vision.data.shards.out_folder import write_classes
from moh_vision.data.shards.record import BadLimit, RecordPart, ShardRecord, part_path, plan_shards
from moh_vision.data.shards.shard_file import ShardFile
from moh_vision.diffusion.latents.cache import LatentCache, npy_bytes, write_manifest
from moh_vision.diffusion.latents.vae import LatentSpace, encode_moments
from moh_vision.engine.commands import Progress


class LatentWriter:
    """Assigns the images of a split to shards, and writes missing shards; see `write_latents`.

    Rank 0 calls `begin` and `end`, every rank `write` in between.
    """

    def __init__(
        self,
        source,
        split: str,
        out: Path,
        space: LatentSpace,
        *,
        size: int,
        dtype: str,
        samples_per_shard: int,
        seed: int,
        max_bad_fraction: float,
    ):
        self.source, self.split, self.out = source, split, out
        self.space, self.size, self.dtype = space, size, dtype
        self.limit = BadLimit(max_bad_fraction, len(source))
        self.arguments = dict(
            vae=dict(name=space.name, sha256=space.sha256),
            size=size, dtype=dtype, samples_per_shard=samples_per_shard, seed=seed,
        )  # fmt: skip
        self.plan = plan_shards(split, range(len(source)), str, samples_per_shard, seed)

    def begin(self, threads: int, say: Callable[[str], None]) -> List[str]:
        """Check the folder, start the record, and return the names of the shards to write."""
        self.record = ShardRecord(self.out, self.split, self.arguments, _fingerprint(self.source))
        write_classes(self.out, self.source.classes, self.source.name)
        self.done = self.record.finished(self.plan, threads, say)
        self._refuse_too_many_bad([b for entry in self.done.values() for b in entry["bad"]])
        todo = [name for name in self.plan if name not in self.done]
        self.record.start(todo)  # first: a manifest without a record is a stranger's
        if todo:
            self._write_manifest(None)
        return todo

    def write(self, todo: List[str], model, batch_size: int, workers: int) -> List[dict]:
        """Write this rank's shards of `todo`; return their record entries. Finished shards survive failures."""
        self.since = time.monotonic()
        state = PartialState()
        own = todo[state.process_index :: state.num_processes]
        batches = {name: _chunks(self.plan[name], batch_size) for name in own}
        part = part_path(self.out, self.split, state.process_index)
        record = self.record.lines if state.is_main_process else RecordPart(part)
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", state.local_process_index % gpus) if gpus else torch.device("cpu")
        model = model.to(device)
        channels, half = model.config.in_channels, [0.5] * model.config.in_channels
        transform = image_transform("none", self.size, channels, half, half, fit="crop")
        images = LabelledImages(self.source, transform, seed=0, replace=False)
        stream = iter(evaluation_batches(images, sum(batches.values(), []), workers).loader)
        title = f"{self.split}, rank 0 of {state.num_processes}" if state.use_distributed else self.split
        entries, bad = [], []
        total = sum(len(self.plan[name]) for name in own)
        with Progress(title, total, "image", enabled=state.is_main_process) as progress:
            for name in own:
                shard_bad = []
                with ShardFile(self.out, name) as shard:
                    for numbers in batches[name]:
                        batch = _next(stream, workers)
                        shard_bad += batch["bad"]
                        bad += batch["bad"]
                        self._refuse_too_many_bad(bad)
                        good = [n for n in numbers if n not in dict(batch["bad"])]
                        if good:
                            self._encode(good, batch["images"].to(device), model, shard)
                        progress.add(len(numbers))
                    entries.append(shard.finish(shard_bad))
                record.add(entries[-1])
        return entries

    def end(self, written: List[dict], say: Callable[[str], None]) -> None:
        """Write the final record, the index and the manifest; `written`: entries of all new shards."""
        self.done.update({entry["shard"]: entry for entry in written})
        entries = [self.done[name] for name in self.plan]
        bad = [b for entry in entries for b in entry["bad"]]
        self._refuse_too_many_bad(bad)
        self.record.close(entries)
        self._write_manifest(entries)
        cache = LatentCache(str(self.out), self.split)  # builds the index: reads every header
        size, seconds = sum(e["bytes"] for e in entries), time.monotonic() - self.since
        images = sum(e["samples"] for e in written)
        say(
            f"{self.split}: latents {list(cache.shape)} {self.dtype} of {len(cache)} images in {len(entries)} shards, "
            f"{size / 1e6:.1f} MB, {f'{images} written at {images / seconds:.1f} img/s' if written else 'all there already'}"
            f"{f'; {len(bad)} bad images left out, {self.split}.bad.txt' if bad else ''}"
        )

    def _encode(self, numbers: List[int], images: Tensor, model, shard: ShardFile) -> None:
        """Write images [B, C, H, W] in -1 .. 1 and their mirror images, encoded, to the shard."""
        # One after the other, so that a batch is no larger than it was asked to be.
        try:
            moments = torch.stack([encode_moments(model, images), encode_moments(model, images.flip(-1))], 1)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"--batch-size: {len(images)} images do not fit into the memory of {images.device}"
            ) from None
        with np.errstate(over="ignore"):  # is refused below
            stored = moments.cpu().numpy().astype(self.dtype)  # [B, 2, 2C, h, w]
        for number, array in zip(numbers, stored):
            if not np.isfinite(array).all():
                raise ValueError(
                    f"the latents of image {number} of {self.source.name} are not finite in {self.dtype}"
                    f"{'; take --dtype float32' if self.dtype == 'float16' else ''}"
                )
            shard.write(number, int(self.source.labels[number]), "npy", npy_bytes(array))

    def _write_manifest(self, shards: Optional[List[dict]]) -> None:
        made_from = dict(source=self.source.name, classes=self.source.classes, shards=shards)
        write_manifest(self.out, self.split, space=self.space, size=self.size, dtype=self.dtype, **made_from)

    def _refuse_too_many_bad(self, bad: List[list]) -> None:
        if bad:
            self.limit.check(len(bad), bad[-1][1])


def _fingerprint(source) -> Dict[str, list]:
    """Return class name -> [number of images, digest of their identities]."""
    digests = [hashlib.sha256() for _ in source.classes]
    for label, identity in zip(source.labels.tolist(), source.identities()):
        digests[label].update(identity)
    counts = np.bincount(source.labels, minlength=len(digests)).tolist()
    return {name: [counts[i], digests[i].hexdigest()[:16]] for i, name in enumerate(source.classes)}


def _next(stream: Iterator[dict], workers: int) -> dict:
    try:
        return next(stream)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ValueError(f"a reading process of {workers} died, of too little memory perhaps") from None


def _chunks(numbers: List[int], size: int) -> List[List[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]
