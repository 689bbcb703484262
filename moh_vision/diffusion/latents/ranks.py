"""The processes of one command, as torchrun or `accelerate launch` starts them."""

from __future__ import annotations

import contextlib
import datetime
import os
from typing import Callable, Iterator, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from moh_vision.data.shards.worker import watch_parent

T = TypeVar("T")


class MistakeElsewhere(Exception):
    """Rank 0 met a mistake, and has said which."""


def from_first(make: Callable[[], T]) -> T:
    """make() on rank 0, its result on every rank; a mistake there ends all."""
    told: list = [False, None]
    try:
        if PartialState().is_main_process:
            told = [True, make()]
    finally:
        broadcast_object_list(told)
    if not told[0]:
        raise MistakeElsewhere
    return told[1]


def first(make: Callable[[], T]) -> T:
    """make() on every rank, on rank 0 before the others; a mistake there ends all."""
    made: list = []
    from_first(lambda: made.append(make()))
    return made[0] if made else make()


@contextlib.contextmanager
def launched_ranks() -> Iterator[None]:
    """Connect the ranks that the environment speaks of, if there are several (see accelerate's PartialState)."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        # An orphan would write on beside the run that is started next.
        watch_parent(os.getppid())
        # A rank waits until the slowest has written its last shard.
        PartialState(cpu=True, backend="gloo", timeout=datetime.timedelta(days=7))
    try:
        yield
    finally:
        if several:
            PartialState().destroy_process_group()
