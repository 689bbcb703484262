"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO, Iterator

from moh_vision.engine.io import fsync


@contextlib.contextmanager
def whole_file(place: Path) -> Iterator[BinaryIO]:
    """A file to write; at the end it is flushed and takes the name `place`, after an error there is nothing.

    Processes that write the same at once do not disturb each other: the last rename stands.

    Raises:
        ValueError: naming the file, if it cannot be written.
    """
    hidden = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(hidden, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(place)
        fsync(place.parent)
    except OSError as error:
        raise ValueError(f"{place} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            hidden.unlink()
