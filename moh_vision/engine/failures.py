"""What went wrong while writing, in words, and known to every process."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Optional

from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException


def attempt(part: Callable[[], None], kinds=(OSError, SafetensorError)) -> Optional[str]:
    """Do one process's part of a write and wait for the others; every process calls it.

    Args:
        part: the work of this process.
        kinds: exceptions that are told to all processes; others are raised here.

    Returns:
        None if all did theirs, else what the first of those that did not says, the same on every process.
    """
    problem = None
    try:
        part()
    except kinds as error:
        problem = str(error) or repr(error)
    return next((p for p in gather_object([problem]) if p), None)


def why_not_written(error: BaseException, folder: Path) -> str:
    """The system's reason why torch.save or FSDP could not write into `folder`, as far as it can be told."""
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    # torch.save names a line of its own code. Going on where it stopped tells why it did.
    torn = max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_mtime_ns, default=None)
    if torn:
        try:
            with open(torn, "ab") as file:
                file.write(bytes(2**20))
        except OSError as cause:
            return f"{cause}: {torn}"
    return str(error)
