"""Shards that are read at random: the last few are open, and one that has changed is refused."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import List, Sequence, Type

MAX_OPEN_SHARDS = 16


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
