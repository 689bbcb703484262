"""The folder that shards are written to."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import List

from moh_vision.engine.commands import refuse_unwritable
from moh_vision.engine.io import write_whole


def check_out(out: str) -> None:
    """Raise ValueError if `out` is a file, or a folder that cannot be written."""
    if Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"--out {out} is a file, expected a folder")
    refuse_unwritable("--out", out)


def write_classes(folder: Path, classes: List[str], source: str) -> None:
    """Write classes.txt, or raise ValueError if there is one with other classes."""
    names = folder / "classes.txt"
    text = "".join(f"{name}\n" for name in classes)
    if names.exists() and names.read_bytes() != text.encode():
        raise ValueError(f"{names} is there and lists other classes than {source}; take another --out")
    write_whole(names, text)


@contextlib.contextmanager
def full_disk_in_one_line(out: str):
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ValueError(
            f"--out {out}: {error.strerror}; finished shards are kept, the same command goes on from them"
        ) from None
