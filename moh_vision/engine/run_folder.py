"""The folder of a training run: lock it, write its records, and refuse a folder that does not fit the run."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moh_vision.common.io import LOCK, RUN_CONFIG, hidden_path, only_one, write_whole
from moh_vision.engine.command_line import dump, load_tree
from moh_vision.engine.logging import WANDB_ID, logged
from moh_vision.engine.ranks import by_main, from_first, say
from moh_vision.engine.saver import check_writable
from moh_vision.engine.step_folders import refuse_other_views, resume_point

IN_NO_RUN = {
    LOCK,
    hidden_path(Path(RUN_CONFIG)).name,
}  # files of a run that was killed as it started


@dataclass(frozen=True)
class OpenFolder:
    """A run's folder that is locked, and whose content fits the run.

    Args:
        path: the folder, as given by --output.
        config: the run's configuration.
        records: records of data, frozen models and attention; each has a method `save(folder)`.
        earlier: for a resumed run, the configuration that its config.yaml held; None for a new run.
    """

    path: Path
    config: dict
    records: Sequence
    earlier: dict | None

    def write_records(self) -> None:
        """Write config.yaml and the records, with which the run is compared when it is resumed."""
        write_whole(self.path / RUN_CONFIG, dump(self.config))
        for record in self.records:
            record.save(self.path)


class RunFolder:
    """A run's folder before it is open. The main process alone locks it, decides what it holds, and writes into it.

    Every process makes one and calls every method: they follow the main process, because a network disk may show them
    an older state of the folder.

    Args:
        output: the folder.
        fresh: move an earlier run in the folder aside.
        accelerator: accelerate's Accelerator.
        held: releases the lock when it is closed.
        dry: neither lock nor write.
        builds: build missing attention operators for a CPU, which takes minutes.

    Attributes:
        goes_on: whether the folder holds a run that is not moved aside.
    """

    def __init__(
        self,
        output: str,
        fresh: bool,
        accelerator,
        held: contextlib.ExitStack,
        dry: bool = False,
        builds: bool = True,
    ):
        self.output = output
        self.fresh = fresh
        self.dry = dry
        self.builds = builds
        self.accelerator = accelerator
        self.held = held
        self.path = Path(output).resolve()
        self.saved = self.path / RUN_CONFIG
        self.goes_on = from_first(lambda: self.saved.exists() and not self.fresh)

    def lock_and_find_checkpoint(self, max_steps: int) -> tuple[int, Path] | None:
        """Lock the folder if it holds a run; return (step, folder) of the checkpoint to resume from, or None."""

        def lock_it() -> None:
            if self.saved.exists() and not self.dry:
                check_writable(self.path)
                self.held.enter_context(only_one(self.path, "--output"))

        by_main(lock_it, self.accelerator)
        found = from_first(lambda: resume_point(Path(self.output), max_steps, self.fresh, say))
        if found is not None:
            _, checkpoint = found
            refuse_other_views([checkpoint])
        return found

    def open(
        self, config: dict, changed: Callable, records: Sequence = (), attention=None, resumes=False
    ) -> OpenFolder:
        """Make and lock a new folder, or open that of an earlier run if nothing of the run has changed.

        Args:
            config: the run's configuration, for config.yaml.
            changed: takes the earlier configuration; returns how `config` differs from it, one text per key.
            records: such as a `DataRecord` or a `FrozenRecord`; each is compared with what an earlier run saved.
            attention: an `AttentionRecord` or None; settings that it refuses count as changed.
            resumes: whether a checkpoint will be loaded. Then the caller writes the records, after loading the
                checkpoint: it may not fit a change that --allow-change lets pass.
        """
        folder = self.path
        earlier = from_first(self._read)
        differences = []
        if earlier is not None:
            differences = changed(earlier)
        if attention:
            differences += attention.settle(build=self.builds and not differences)
        if earlier is not None:
            by_main(lambda: self._compare(differences, records), self.accelerator)
        saved_records = list(records)
        if attention:
            saved_records.append(attention)
        opened = OpenFolder(Path(self.output), config, saved_records, earlier)
        if self.dry:
            by_main(lambda: check_writable(folder), self.accelerator)
            return opened
        self.accelerator.wait_for_everyone()  # no process is still reading a folder that is moved aside
        by_main(lambda: self._make(locked=self.goes_on), self.accelerator)
        if not resumes:
            by_main(opened.write_records, self.accelerator)
        return opened

    def _read(self) -> dict | None:
        """Return the configuration of the earlier run that goes on, None for a new run; refuse a folder of neither."""
        folder = self.path
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output {self.output} is a file")
        if self.goes_on:
            list(logged(folder / "metrics.jsonl"))  # raises ValueError if the file is not a log
            return load_tree(self.saved)
        if folder.exists() and not self.fresh and {p.name for p in folder.iterdir()} - IN_NO_RUN:
            raise ValueError(
                f"--output {self.output} is not empty and holds no run; nothing there is overwritten, take another folder"
            )
        return None

    def _compare(self, differences: list[str], records: Sequence) -> None:
        """Refuse to resume a run whose configuration or records do not fit; see `open`.

        If the run has done no step yet, it starts over with what has changed.
        """
        folder = self.path
        if not differences:
            for record in records:
                record.check(folder, say)
            return
        listed = "; ".join(differences)
        if only_records(folder):
            say(f"{self.output}: no step was done there; it starts over with {listed}")
            return
        raise ValueError(
            f"--output {self.output} holds a run with another configuration: {listed}. "
            "Take another folder, --allow-change KEY, or --fresh to move that run aside"
        )

    def _make(self, locked: bool) -> None:
        """Make the folder, and lock it unless it is `locked` already; with `fresh`, first move an earlier run aside."""
        folder = self.path
        check_writable(folder)
        if self.fresh and folder.exists():
            number = 1
            while folder.with_name(f"{folder.name}.{number}").exists():
                number += 1
            moved = folder.rename(folder.with_name(f"{folder.name}.{number}"))
            (moved / LOCK).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not locked:
            self.held.enter_context(only_one(folder, "--output"))
            if self.saved.exists():
                raise ValueError(
                    f"--output {self.output}: another process has begun a run there meanwhile; start again"
                )


def only_records(folder: Path) -> bool:
    """Return whether a folder holds only what a run writes before step 1: neither weights nor losses."""
    records = {
        RUN_CONFIG,
        LOCK,
        WANDB_ID,
        "attention.json",
        "cuda_graph.json",
        "data.json",
        "frozen.json",
        "environment.jsonl",
    }

    def is_from_before_step_1(path: Path) -> bool:
        if path.name == "metrics.jsonl":
            return path.stat().st_size == 0
        if path.name == "checkpoints":
            return not any(path.iterdir())
        return path.name in records

    return all(is_from_before_step_1(path) for path in folder.iterdir())
