"""One shard while it is written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import List

import webdataset

from moh_vision.engine.io import hidden_path


class ShardFile:
    """A shard under `hidden_path`, in a `with` block; removed when the block is left by an exception.

    Args:
        out: the folder.
        name: of the shard.
    """

    def __init__(self, out: Path, name: str):
        self.name, self.path, self.samples = name, hidden_path(out / name), 0

    def __enter__(self) -> ShardFile:
        self.file = open(self.path, "wb")
        self.sink = _HashingFile(self.file)
        # Headers without time and owner, or every run would have other sums.
        self.tar = webdataset.TarWriter(self.sink, user="", group="", mtime=0, encoder=False, compress=False)
        return self

    def __exit__(self, kind, *_) -> None:
        self.sink.closed = True  # or tarfile would write its end when it is collected
        try:
            self.file.close()
        finally:
            if kind is not None:
                self.path.unlink(missing_ok=True)

    def write(self, number: int, label: int, extension: str, data: bytes) -> None:
        """Add a sample; its key is `number`."""
        self.tar.write({"__key__": f"{number:08d}", extension: data, "cls": str(label).encode()})
        self.samples += 1

    def finish(self, bad: List[list]) -> dict:
        """End the shard and flush it to the disk.

        Args:
            bad: [which, reason] of the images that were left out.

        Returns:
            the entry of the record: shard, samples, bytes, sha256, bad.

        Raises:
            ValueError: if it has no samples.
        """
        if not self.samples:
            raise ValueError(f"every image of shard {self.name} is bad; the first: {bad[0][0]}: {bad[0][1]}")
        self.tar.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        sums = dict(bytes=self.sink.bytes, sha256=self.sink.sha256.hexdigest())
        return dict(shard=self.name, samples=self.samples, **sums, bad=bad)


class _HashingFile:
    """What `tarfile` writes, passed on, counted and hashed."""

    def __init__(self, file):
        self.file, self.sha256, self.bytes, self.closed = file, hashlib.sha256(), 0, False

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.file.write(data)
            self.sha256.update(data)
            self.bytes += len(data)
