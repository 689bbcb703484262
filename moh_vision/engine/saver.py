"""Saves that fail, and runs that live on."""

from __future__ import annotations

from pathlib import Path
from typing import Dict

from moh_vision.engine.checkpoint import save_training
from moh_vision.engine.commands import refuse_unwritable
from moh_vision.engine.ranks import say

MAX_FAILED_SAVES = 3


class SaveError(OSError):
    """Three saves in a row failed, or the last one of a run."""


class Saver:
    """Saves a run, counts what fails, and gives up after three failures in a row.

    Training goes on after a failure: a full disk may have room at the next save, and earlier checkpoints are
    whole.

    Attributes:
        failed: saves that failed since the process started.
        in_a_row: of these the ones since the last that did not.
    """

    def __init__(self, accelerator, run: Path, keep: int, every: int = 1):
        self.accelerator, self.run, self.keep, self.every = accelerator, run, keep, every
        self.failed = self.in_a_row = 0

    def save(self, step: int, model, ema, metadata: Dict[str, object], last: bool = False) -> bool:
        """Return whether everything was saved, the same on every process. See `save_training`.

        Raises:
            SaveError: on every process, after three failures in a row or a failed `last` save.
        """
        problem = save_training(
            self.accelerator, self.run, step, model, ema, metadata, keep=self.keep, every=self.every
        )
        if problem is None:
            self.in_a_row = 0
            return True
        self.failed += 1
        self.in_a_row += 1
        told = f"{self.run}: step {step} could not be saved ({problem})"
        if last or self.in_a_row >= MAX_FAILED_SAVES:
            count = f", the {self.in_a_row}. failure in a row" if self.in_a_row > 1 else ""
            raise SaveError(f"{told}{count}; earlier checkpoints are intact, and the same command resumes from them")
        say(f"{told}; training goes on, {MAX_FAILED_SAVES} such failures in a row end it")
        return False


def check_writable(folder: Path) -> None:
    """Refuse a run's folder, which need not exist, where nothing can be written."""
    for place in (folder, folder / "checkpoints"):
        refuse_unwritable("--output", place)
