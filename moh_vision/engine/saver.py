"""Saves a run in the background, and lets it live on when a save fails."""

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from moh_vision.common.cli import refuse_unwritable
from moh_vision.common.io import fsync, hidden_path, save_tensors, sha256_of
from moh_vision.engine.checkpoint import Snapshot, TrainingState
from moh_vision.engine.ranks import attempt, from_all, say
from moh_vision.engine.step_folders import export, put_in_place, rotate, seal, tidy

MAX_FAILED_SAVES = 3


class SaveError(OSError):
    """Three saves in a row failed, or the last one of a run."""


class Saver:
    """Saves a run, counts what fails, and gives up after three failures in a row.

    A thread of each process writes what `TrainingState.snapshot` copied; in the meantime training goes on, also after
    a failure: a full disk may have room at the next save, and earlier checkpoints are whole. Every process calls the
    methods.

    Args:
        accelerator: accelerate's Accelerator.
        run: the run's folder.
        state: what is saved.
        keep: how many checkpoints stay, see `rotate`.
        every: steps between saves; the checkpoint of a stop between two of them goes first.
        background: whether threads write; else `save` returns when all is written.

    Attributes:
        failed: saves that failed since the process started.
        in_a_row: saves that failed since the last that did not.
        told: whether a save has been announced; after the first one saves are silent.
    """

    def __init__(
        self,
        accelerator,
        run: Path,
        state: TrainingState,
        keep: int,
        every: int = 1,
        background: bool = True,
    ):
        self.main = accelerator.is_main_process
        self.run = run
        self.state = state
        self.keep = keep
        self.every = every
        self.background = background
        self.failed = 0
        self.in_a_row = 0
        self.told = False
        self.problem: str | None = None
        self.writing: Future | None = None
        # A group for the threads alone: what they tell each other does not meet what training sends.
        self.group = None
        if accelerator.num_processes > 1:
            self.group = dist.new_group(backend="gloo")

    def save(self, step: int, metadata: dict[str, object], last: bool = False) -> None:
        """Begin to save after `step` steps; the `last` save, or without `background` any, also ends here.

        The weights have `metadata`, by which the model is built again. Every process raises SaveError after three
        failures in a row or a failed `last` save.
        """
        if self.writing and not self.writing.done():
            say(f"step {step} waits for the checkpoint that is being written")
        self.finish()
        begun = time.monotonic()
        snapshot = self.state.snapshot()
        writer = ThreadPoolExecutor(1)
        metadata = dict(metadata, step=step)
        self.writing = writer.submit(self._work, step, snapshot, metadata, last, begun)
        writer.shutdown(wait=False)  # its thread ends with this save
        if last or not self.background:
            self.finish(last)

    def finish(self, last: bool = False) -> None:
        """Wait for what is being written; raise SaveError as `save` does."""
        self.wait()
        if self.problem and (last or self.in_a_row >= MAX_FAILED_SAVES):
            problem = self.problem
            if self.in_a_row > 1:
                problem += f", the {self.in_a_row}. failure in a row"
            hint = "earlier checkpoints are intact, and the same command resumes from them"
            raise SaveError(f"{problem}; {hint}")

    def wait(self) -> None:
        """Wait for what is being written; raise what its thread raised, if that is a fault of ours."""
        writing = self.writing
        self.writing = None
        if writing:
            writing.result()

    def _work(
        self, step: int, snapshot: Snapshot, metadata: dict[str, object], last: bool, begun: float
    ) -> None:
        """Write a snapshot, in a thread, and note whether that failed; `begun` is the time before it was taken."""
        problem = self._write(step, snapshot, metadata, last)
        if problem is None:
            self.problem = None
            self.in_a_row = 0
            self._tell(step, time.monotonic() - begun)
            return
        self.problem = f"{self.run}: step {step} could not be saved ({problem})"
        self.failed += 1
        self.in_a_row += 1
        if not last and self.in_a_row < MAX_FAILED_SAVES:
            patience = f"training goes on, {MAX_FAILED_SAVES} such failures in a row end it"
            with contextlib.suppress(OSError):  # the log may be on the same full disk
                say(f"{self.problem}; {patience}")

    def _tell(self, step: int, seconds: float) -> None:
        """Say once what a save takes, so that save_every and keep_checkpoints can be chosen."""
        if self.told or not self.main:
            return
        self.told = True
        folder = self.run / "checkpoints" / f"step_{step}"
        with contextlib.suppress(OSError):  # the log may be on a full disk
            size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
            say(f"first save: {folder}, {size:.1f} MiB in {seconds:.1f} s")

    def _write(
        self, step: int, snapshot: Snapshot, metadata: dict[str, object], last: bool
    ) -> str | None:
        """Write a checkpoint, whole or not at all; return what went wrong on any process."""
        hidden = hidden_path(self.run / "checkpoints" / f"step_{step}")
        sums: dict[str, str] = {}  # of the files that this process writes
        all_sums: dict[str, str] = {}

        def begin():
            if self.main:
                tidy(self.run)
                hidden.mkdir(parents=True)

        def write():
            sums.update(write_files(hidden, snapshot.files, metadata))

        def end():
            if self.main:
                seal(hidden, step, all_sums, snapshot.plain)
                folder = put_in_place(hidden, step)
                rotate(self.run, step, self.keep, self.every)
                export(self.run, folder, join=last)

        # One after the other, on all processes; the first that fails on any ends the save on all.
        problem = attempt(begin, group=self.group)
        if not problem:
            problem = attempt(write, group=self.group)
        if not problem:
            for process_sums in from_all(sums, self.group):
                all_sums.update(process_sums)
            problem = attempt(end, group=self.group)
        if problem and self.main:
            with contextlib.suppress(OSError):
                tidy(self.run)
        return problem


def write_files(
    folder: Path, files: dict[str, dict[str, Tensor]], metadata: dict[str, object]
) -> dict[str, str]:
    """Write tensors, and wait until they are on the disk; return the sum of each file by its name."""
    sums = {}
    flushed = []
    with ThreadPoolExecutor(8) as pool:  # hashlib and fsync let other threads run
        for name, tensors in files.items():
            path = folder / f"{name}.safetensors"
            save_tensors(path, tensors, metadata)
            flushed.append(pool.submit(fsync, path))
            sums[path.name] = pool.submit(sha256_of, path)
        for future in flushed:
            future.result()
        return {name: future.result() for name, future in sums.items()}


def check_writable(folder: Path) -> None:
    """Refuse a run's folder, which need not exist, where nothing can be written."""
    for path in (folder, folder / "checkpoints"):
        refuse_unwritable("--output", path)
