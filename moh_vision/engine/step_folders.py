"""The folders of a run's checkpoints: once one was whole, one always is.

step_200          a checkpoint
.step_200.tmp     of a save that did not end
.step_200.old     an earlier step 200: a checkpoint until the new one has its name
.step_200.gone    being deleted
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Callable, List, Tuple

from moh_vision.engine.io import give_name, hidden_path
from moh_vision.engine.manifest import damage


def hidden_folder(parent: Path, step: int) -> Path:
    """Where a checkpoint is written."""
    return hidden_path(parent / f"step_{step}")


def by_age(parent: Path) -> List[Tuple[int, Path]]:
    """(step, folder) of what may be a checkpoint, the newest first."""
    found = []
    for folder in parent.glob("*step_*"):
        number = re.fullmatch(r"step_([0-9]+)|\.step_([0-9]+)\.old", folder.name)
        if number and folder.is_dir():
            found.append((int(number[1] or number[2]), not folder.name.startswith("."), folder))
    return [(step, folder) for step, _, folder in sorted(found, reverse=True)]


def tidy(parent: Path) -> None:
    """Delete leftovers of interrupted saves, and restore a checkpoint that one had renamed."""
    for ending in ("tmp", "gone"):
        for folder in parent.glob(f".step_*.{ending}"):
            shutil.rmtree(folder, ignore_errors=True)
    for aside in parent.glob(".step_*.old"):
        if not _named(aside).exists():
            aside.rename(_named(aside))


def put_in_place(hidden: Path, step: int, at: Callable[[str], None]) -> None:
    """Give a sealed folder its name; its predecessor stays a checkpoint until then."""
    final = _named(hidden)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        if damage(final, step):
            _discard(final)  # what this run passed over when it resumed
        else:
            if aside.exists():
                _discard(aside)
            final.rename(aside)
        at(f"moved {final.name} aside")
    give_name(hidden, final)
    at(f"renamed {hidden.name}")


def rotate(parent: Path, step: int, keep: int, every: int, at: Callable[[str], None]) -> None:
    """Delete what the checkpoint of `step` makes superfluous.

    Only steps up to this one count: newer folders are damaged ones that this run passed over. A checkpoint
    of a stop between two saves (`every` steps apart) is the first to go, so that in the end the run has
    the same checkpoints as without a stop.
    """
    named = [(number, path) for number, path in by_age(parent) if number <= step and not path.name.startswith(".")]
    folders = [path for number, path in sorted(named, key=lambda f: f[0] != step and f[0] % every > 0)]
    for old in [*folders[keep:], *parent.glob(".step_*.old")]:
        _discard(old)
        at(f"deleted {old.name}")


def _named(hidden: Path) -> Path:
    return hidden.with_name(hidden.stem.removeprefix("."))


def _discard(folder: Path) -> None:
    # Renamed first: an interrupted deletion leaves rubbish, not a damaged checkpoint.
    gone = folder.with_name(f".{folder.name.removeprefix('.').removesuffix('.old')}.gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
