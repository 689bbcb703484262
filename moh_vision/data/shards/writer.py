"""The shards of one split: which sample goes where, and writing those that are not there yet."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Callable, Dict, List, Optional

from moh_vision.data.shards.class_folders import ClassFolders
from moh_vision.data.shards.record import BadLimit, ShardRecord, one_line, plan_shards
from moh_vision.data.shards.worker import (
    CONTEXT,
    Job,
    Shared,
    start_worker,
    write_shard,
)
from moh_vision.data.sources import Shards
from moh_vision.engine.commands import Progress
from moh_vision.engine.io import hidden_path, write_whole


class SplitWriter:
    """Writes the shards of one split.

    Args:
        folders: the listing.
        split: name of the split; shards are called {split}-000000.tar ...
        out: an existing folder.
        limit: how many images of all splits may be bad.
        size, quality: see `encode.encode_sample`.
        samples_per_shard: at most; the samples are spread evenly.
        seed: of the shuffle.

    Raises:
        ValueError: if `out` holds shards that are not of this conversion.
    """

    def __init__(
        self,
        folders: ClassFolders,
        split: str,
        out: Path,
        limit: BadLimit,
        *,
        size: Optional[int],
        quality: int,
        samples_per_shard: int,
        seed: int,
    ):
        self.split, self.out, self.classes, files = split, out, folders.classes, folders.files
        self.job = Job(folders.root, out, size, quality, limit)
        arguments = dict(size=size, quality=size and quality, samples_per_shard=samples_per_shard, seed=seed)
        self.record = ShardRecord(out, split, arguments, folders.fingerprint())
        plan, number = plan_shards(split, files, lambda file: file.path, samples_per_shard, seed), itertools.count()
        self.plan = {name: [(next(number), file) for file in files] for name, files in plan.items()}

    def write(self, workers: int, say: Callable[[str], None], earlier: int = 0) -> int:
        """Write what is missing, then the list of files and the index.

        Args:
            workers: processes; each writes a shard at a time.
            say: takes lines about what is done.
            earlier: bad images of the splits before this one.

        Returns:
            number of its bad images.

        Raises:
            ValueError, OSError: a bad image too many, an unreadable file, a full disk; finished shards stay.
        """
        done = self.record.finished(self.plan, workers, say)
        bad = [b for entry in done.values() for b in entry["bad"]]
        if bad:
            self.job.limit.check(earlier + len(bad), f"{self.job.root / bad[0][0]}: {bad[0][1]}")
        todo = [name for name in self.plan if name not in done]
        self.record.start(todo)
        rate = None
        if todo:
            rate = self._write_missing(todo, done, min(workers, len(todo)), earlier + len(bad))
        entries = [done[name] for name in self.plan]
        self._finish(entries)

        images, size = sum(e["samples"] for e in entries), sum(e["bytes"] for e in entries)
        what = f"{images} images of {len(self.classes)} classes in {len(entries)} shards, {size / 1e6:.1f} MB"
        how = f"written at {rate:.0f} img/s" if todo else "all there already"
        left = sum(len(e["bad"]) for e in entries)
        say(f"{self.split}: {what}, {how}{f'; {left} bad images left out, {self.split}.bad.txt' if left else ''}")
        return left

    def _write_missing(self, todo: List[str], done: Dict[str, dict], workers: int, bad: int) -> float:
        """Write the shards `todo` and enter them in `done`; returns images per second."""
        shared, before = Shared(bad), sum(len(self.plan[name]) for name in done)
        images = sum(map(len, self.plan.values()))
        initial = (self.job, shared, os.getpid())
        with ProcessPoolExecutor(workers, CONTEXT, initializer=start_worker, initargs=initial) as pool:
            pending = {pool.submit(write_shard, name, self.plan[name]) for name in todo}
            try:
                with Progress(self.split, images, "image", before) as progress:
                    while pending:
                        finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                        for entry in [future.result() for future in finished]:
                            self.record.lines.add(entry)
                            done[entry["shard"]] = entry
                        progress.add(before + shared.done.value - progress.done)
            except BaseException as error:
                shared.stop.set()
                pool.shutdown(cancel_futures=True)
                for name in todo:
                    hidden_path(self.out / name).unlink(missing_ok=True)
                if isinstance(error, BrokenProcessPool):
                    raise ValueError(
                        f"a worker of {workers} died, of too little memory perhaps; finished shards are kept, the same "
                        "command goes on (--workers may change)"
                    ) from None
                raise
        return progress.rate

    def _finish(self, entries: List[dict]) -> None:
        bad = {path for entry in entries for path, _ in entry["bad"]}
        files = [image.path for samples in self.plan.values() for _, image in samples if image.path not in bad]
        write_whole(self.out / f"{self.split}.files.txt", "".join(f"{one_line(p)}\n" for p in files))
        self.record.close(entries)
        source = Shards(str(self.out), self.split)  # builds the index, and so reads every header
        assert source.shard_sizes == tuple(e["samples"] for e in entries) and source.classes == self.classes
