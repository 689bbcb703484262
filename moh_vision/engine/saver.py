"""Save a run in the background; training goes on if a save fails."""

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
    """Three saves in a row failed, or the last save of a run failed."""


class Saver:
    """Saves a run, counts failed saves, and gives up after three failures in a row.

    On each process a thread writes the copy that `TrainingState.snapshot` made, while training goes on. Training also
    goes on after a failure: a full disk may have room at the next save, and earlier checkpoints are whole. Every
    process calls every public method.

    Args:
        accelerator: accelerate's Accelerator.
        run: the run's folder.
        state: the state to save.
        keep: how many checkpoints stay, see `rotate`.
        every: steps between saves, for `rotate`.
        background: whether `save` returns while the thread still writes; else it waits for the thread.

    Attributes:
        failed: number of failed saves since the process started.
        in_a_row: number of failed saves since the last successful one.
        told: whether a successful save has been announced; only the first one is.
        problem: why the latest save failed, or None.
        writing: the save that a thread is writing, or None.
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
        # The threads have their own process group, so that their collectives do not mix with those of training.
        self.group = None
        if accelerator.num_processes > 1:
            self.group = dist.new_group(backend="gloo")

    def save(
        self,
        step: int,
        metadata: dict[str, object],
        last: bool = False,
        plain: dict[str, object] | None = None,
    ) -> None:
        """Copy the state after `step` steps, and write it in a thread.

        The `last` save, and without `background` every save, waits for the thread. Every process raises SaveError after
        three failures in a row, or if the `last` save failed.

        Args:
            step: number of steps done.
            metadata: what the weights store, from which the model can be rebuilt.
            last: whether the run ends here.
            plain: further entries of step.json.
        """
        if self.writing and not self.writing.done():
            say(f"step {step} waits for the checkpoint that is being written")
        self.finish()
        begun = time.monotonic()
        snapshot = self.state.snapshot()
        snapshot.plain.update(plain or {})
        writer = ThreadPoolExecutor(1)
        metadata = dict(metadata, step=step)
        self.writing = writer.submit(self._work, step, snapshot, metadata, last, begun)
        writer.shutdown(wait=False)  # its thread ends with this save
        if last or not self.background:
            self.finish(last)

    def finish(self, last: bool = False) -> None:
        """Wait for the save that is being written; raise SaveError as `save` does."""
        self.wait()
        if self.problem and (last or self.in_a_row >= MAX_FAILED_SAVES):
            problem = self.problem
            if self.in_a_row > 1:
                problem += f", the {self.in_a_row}. failure in a row"
            hint = "earlier checkpoints are intact, and the same command resumes from them"
            raise SaveError(f"{problem}; {hint}")

    def wait(self) -> None:
        """Wait for the save that is being written; raise any exception of its thread.

        A failure to write, such as a full disk, raises nothing here: it is noted in `problem`.
        """
        writing = self.writing
        self.writing = None
        if writing:
            writing.result()

    def _work(
        self, step: int, snapshot: Snapshot, metadata: dict[str, object], last: bool, begun: float
    ) -> None:
        """Write a snapshot, in a thread, and note whether that failed; `begun` is when `save` began to take it."""
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
        """Print once how much disk and time a save takes, so that users can choose save_every and keep_checkpoints."""
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
        """Write a checkpoint, whole or not at all; return what went wrong on the first process that failed, or None."""
        hidden = hidden_path(self.run / "checkpoints" / f"step_{step}")
        sums: dict[str, str] = {}  # SHA-256 by file, of the files that this process writes
        all_sums: dict[str, str] = {}  # the same of all processes

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

        # All processes do one stage after the other. If a stage fails on any process, all end the save.
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
    """Write tensors, and wait until they are on the disk; return the SHA-256 of each file by its name."""
    sums = {}
    flushed = []
    with ThreadPoolExecutor(8) as pool:  # threads are enough: hashlib and fsync release the GIL
        for name, tensors in files.items():
            path = folder / f"{name}.safetensors"
            save_tensors(path, tensors, metadata)
            flushed.append(pool.submit(fsync, path))
            sums[path.name] = pool.submit(sha256_of, path)
        for future in flushed:
            future.result()
        return {name: future.result() for name, future in sums.items()}


def check_writable(folder: Path) -> None:
    """Raise ValueError if a run could not write into `folder`, which need not exist yet."""
    for path in (folder, folder / "checkpoints"):
        refuse_unwritable("--output", path)
