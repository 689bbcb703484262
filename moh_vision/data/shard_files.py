"""Shards that are read at random: the last few are open, and one that has changed is refused. And their record."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Type

from moh_vision.engine.commands import reason_of

MAX_OPEN_SHARDS = 16
RECORD_FORMAT = 1


class ShardFiles:
    """Open files of some shards, among the last few: there may be more shards than a process may open.

    Args:
        paths: of the shards.
        problem: what is raised, naming the shard, for one that is not what it was when this was made.

    Attributes:
        stats: (name, bytes, time of change in ns) of each shard, which its index records.
    """

    def __init__(self, paths: Sequence[Path], problem: Type[Exception]):
        self.paths, self.problem = list(paths), problem
        self.stats: List[tuple] = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in self.paths]
        self.opened: OrderedDict = OrderedDict()

    def __getstate__(self) -> dict:
        return dict(self.__dict__, opened=OrderedDict())  # descriptors are of this process

    def read(self, shard: int, size: int, offset: int) -> bytes:
        """`size` bytes from `offset` of a shard, or fewer where it ends.

        Raises:
            OSError: if it cannot be read; and `problem`.
        """
        return os.pread(self._descriptor(shard), size, offset)

    def agree(self, record: Path, entries: Optional[Dict[str, dict]], samples: Sequence[int]) -> None:
        """Raise ValueError, naming a shard, unless the record's entries are of these shards, with so many samples."""
        if entries is None:
            return
        gone = set(entries).difference(name for name, *_ in self.stats)
        if gone:
            raise ValueError(f"{min(gone)} of {record} is gone")
        for path, (name, size, _), count in zip(self.paths, self.stats, samples):
            if name not in entries:
                raise ValueError(f"{path} is not in {record.name}")
            refuse_other(path, size, count, entries[name], record)

    def _descriptor(self, shard: int) -> int:
        if shard in self.opened:
            self.opened.move_to_end(shard)
        else:
            if len(self.opened) >= MAX_OPEN_SHARDS:
                os.close(self.opened.popitem(last=False)[1])
            descriptor = os.open(self.paths[shard], os.O_RDONLY)
            found = os.fstat(descriptor)
            if (found.st_size, found.st_mtime_ns) != self.stats[shard][1:]:
                os.close(descriptor)
                raise self.problem(f"{self.paths[shard]}: the shard has changed since its index was made")
            self.opened[shard] = descriptor
        return self.opened[shard]


def record_path(folder: Path, split: str) -> Path:
    """Where the writer of shards records them, see `moh_vision.data.shards.record.ShardRecord`."""
    return folder / f"{split}.shards.jsonl"


def read_record(path: Path, *parts: Path) -> Tuple[dict, List[dict]]:
    """The header of a record, and an entry for each shard: shard, samples, bytes, sha256, bad.

    Args:
        parts: files with more entries.

    Raises:
        whatever a damaged record raises: it is not checked that it is one.
    """
    *lines, _torn = path.read_text("utf-8").split("\n")
    for part in parts:
        lines += part.read_text("utf-8").split("\n")[:-1]
    header, *entries = map(json.loads, lines)
    if header["format"] != RECORD_FORMAT:
        raise ValueError(f"format {header['format']}, this version reads {RECORD_FORMAT}")
    kinds = dict(shard=str, samples=int, bytes=int, sha256=str, bad=list)
    for entry in entries:
        for key, kind in kinds.items():
            if not isinstance(entry[key], kind):
                raise ValueError(f"{key} is {entry[key]!r}")
        for which, reason in entry["bad"]:
            if not isinstance(which, (str, int)) or not isinstance(reason, str):
                raise ValueError(f"bad holds {which!r}, {reason!r}")
    return header, entries


def recorded(path: Path) -> Optional[Dict[str, dict]]:
    """The entries of a record by the names of the shards; None where there is no such file.

    Raises:
        ValueError: naming it, if it cannot be read, or lacks shards that are still to be written.
    """
    if not path.exists():
        return None
    try:
        header, entries = read_record(path)
        images = sum(count for count, _ in header["classes"].values())
        found = sum(entry["samples"] + len(entry["bad"]) for entry in entries)
    except Exception as error:  # what is not there, or of another kind, fails anywhere
        raise ValueError(f"{path} is not a record of shards that can be read: {reason_of(error)}") from None
    if found != images:
        raise ValueError(
            f"{path}: {found} of {images} images are there yet; the command that writes them goes on where it stopped"
        )
    return {entry["shard"]: entry for entry in entries}


def refuse_other(shard: object, size: int, samples: int, entry: dict, record: Path) -> None:
    """Raise ValueError, naming a shard, unless it has the bytes and samples of its entry in a record."""
    if (size, samples) != (entry["bytes"], entry["samples"]):
        raise ValueError(
            f"{shard}: {size} bytes, {samples} samples; {record.name} says {entry['bytes']} and {entry['samples']}"
        )
