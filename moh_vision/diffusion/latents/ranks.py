"""The processes of one command, as torchrun or `accelerate launch` starts them."""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Callable, Iterator, List, Optional, TypeVar

import torch.distributed as dist

from moh_vision.data.shards.worker import watch_parent

T = TypeVar("T")


class MistakeElsewhere(Exception):
    """Rank 0 met a mistake, and has said which."""


class Ranks:
    """Which process this is, and what the others say.

    Args:
        rank, world: this process, and how many there are.
        local: number of this process on its machine.
    """

    def __init__(self, rank: int = 0, world: int = 1, local: int = 0):
        self.rank, self.world, self.local = rank, world, local

    def first(self, make: Callable[[], T]) -> T:
        """make() on every rank, on rank 0 before the others; a mistake there ends all."""
        made = self._tell(make)
        return made if self.rank == 0 else make()

    def from_first(self, make: Callable[[], T]) -> T:
        """make() on rank 0, its result on every rank; a mistake there ends all."""
        return self._tell(make, result=True)

    def gather(self, value: T) -> Optional[List[T]]:
        """The values of all ranks on rank 0, None on others; waits for all."""
        if self.world == 1:
            return [value]
        values: Optional[list] = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, values)
        return values

    def _tell(self, make: Callable[[], T], result: bool = False) -> Optional[T]:
        if self.world == 1:
            return make()
        told: list = [False, None]
        try:
            if self.rank == 0:
                made = make()
                told = [True, made if result else None]
        finally:
            dist.broadcast_object_list(told)
        if not told[0]:
            raise MistakeElsewhere
        return made if self.rank == 0 else told[1]


@contextlib.contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """The ranks that the environment speaks of (RANK, WORLD_SIZE, LOCAL_RANK); one without it."""
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if world == 1:
        yield Ranks()
        return
    # An orphan would write on beside the run that is started next.
    watch_parent(os.getppid())
    # A rank waits until the slowest has written its last shard.
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(days=7))
    try:
        yield Ranks(rank, world, local)
    finally:
        dist.destroy_process_group()
