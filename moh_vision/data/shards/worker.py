"""Writes one shard, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Tuple

from moh_vision.data.shards.class_folders import ImageFile
from moh_vision.data.shards.encode import BadImage, encode_sample
from moh_vision.data.shards.record import BadLimit
from moh_vision.data.shards.shard_file import ShardFile

# fork where it is safe: a fresh interpreter would import torch first, for seconds, in every worker.
CONTEXT = multiprocessing.get_context("fork" if os.uname().sysname == "Linux" else "spawn")


@dataclass(frozen=True)
class Job:
    """What the shards of a split have in common; see `writer.SplitWriter`."""

    root: Path
    out: Path
    size: Optional[int]
    quality: int
    limit: BadLimit


class Shared:
    """Counters over all workers, and the word to stop."""

    def __init__(self, bad: int):
        self.done, self.bad, self.stop = CONTEXT.Value("q", 0), CONTEXT.Value("q", bad), CONTEXT.Event()


def start_worker(job: Job, shared: Shared, parent: int) -> None:
    """Initialiser of a worker process."""
    global _job, _shared
    _job, _shared = job, shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and says stop
    watch_parent(parent)


def write_shard(name: str, samples: List[Tuple[int, ImageFile]]) -> dict:
    """Write the samples (number, file) under `hidden_path`, flushed.

    Returns:
        the entry of the record: shard, samples, bytes, sha256, bad.

    Raises:
        ValueError: a bad image too many, or all bad. OSError: a file that cannot be read, or a full disk.
    """
    bad = []
    with ShardFile(_job.out, name) as shard:
        for number, image in samples:
            if _shared.stop.is_set():
                raise InterruptedError("stopped")
            data = (_job.root / image.path).read_bytes()
            try:
                extension, data = encode_sample(data, _job.size, _job.quality)
            except BadImage as error:
                bad.append([image.path, str(error)])
                with _shared.bad.get_lock():
                    _shared.bad.value += 1
                    _job.limit.check(_shared.bad.value, f"{_job.root / image.path}: {error}")
            else:
                shard.write(number, image.label, extension, data)
            with _shared.done.get_lock():
                _shared.done.value += 1
        return shard.finish(bad)


def watch_parent(parent: int) -> None:
    """A process whose parent was killed would write on, or wait for ever, and keep the lock of the folder: end it."""
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
