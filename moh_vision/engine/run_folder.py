"""The folder of a training run: its lock, its records, and what may be there when a run starts."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moh_vision.common.io import CONFIG, LOCK, hidden_path, only_one, write_whole
from moh_vision.engine.command_line import dump, load_tree
from moh_vision.engine.logging import logged
from moh_vision.engine.ranks import by_main, say
from moh_vision.engine.saver import check_writable
from moh_vision.engine.step_folders import resume_point

IN_NO_RUN = {LOCK, hidden_path(Path(CONFIG)).name}  # left by a killed start


@dataclass(frozen=True)
class OpenFolder:
    """A run's folder that is open: it is locked, and what it holds fits the run.

    Args:
        path: the folder, as --output says it.
        config: the run's configuration.
        records: with `save(folder)`, of data, frozen models and attention.
        earlier: the configuration that a run that goes on had before; None for a new run.
    """

    path: Path
    config: dict
    records: Sequence
    earlier: dict | None

    def write_records(self) -> None:
        """Write config.yaml and what else a run is compared with when it goes on."""
        write_whole(self.path / CONFIG, dump(self.config))
        for record in self.records:
            record.save(self.path)


class RunFolder:
    """A run's folder before it is open, written by the main process.

    Args:
        output: the folder.
        fresh: move a run that is there aside.
        held: releases the lock.
        dry: look for mistakes alone: neither lock nor write.
    """

    def __init__(
        self, output: str, fresh: bool, accelerator, held: contextlib.ExitStack, dry: bool = False
    ):
        self.output = output
        self.fresh = fresh
        self.dry = dry
        self.accelerator = accelerator
        self.held = held
        self.path = Path(output).resolve()
        self.saved = self.path / CONFIG

    @property
    def goes_on(self) -> bool:
        """Whether the folder holds a run that is not moved aside."""
        return self.saved.exists() and not self.fresh

    def find_checkpoint(self, max_steps: int) -> tuple[int, Path] | None:
        """Lock an existing run; return the checkpoint to resume from, as `resume_point`."""

        def lock_it():
            if self.saved.exists() and not self.dry:
                check_writable(self.path)
                self.held.enter_context(only_one(self.path, "--output"))

        by_main(lock_it, self.accelerator)
        return resume_point(Path(self.output), max_steps, self.fresh, say)

    def open(
        self, config: dict, changed: Callable, records: Sequence = (), attention=None, resumes=False
    ) -> OpenFolder:
        """Make the folder, or open the locked one; refuse what has changed since its config.yaml.

        Args:
            config: the run's configuration, for config.yaml.
            changed: returns the differences to the earlier configuration, which it is given.
            records: a `DataRecord`, a `FrozenRecord`; a run that goes on is compared with them.
            attention: an `AttentionRecord`, if any; what it refuses counts as changed.
            resumes: whether a checkpoint will be loaded. Then the caller writes the records, after that: a change
                that is allowed may not fit the checkpoint.
        """
        folder = self.path
        goes_on = self.goes_on  # before anything is moved or written
        earlier = None
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output {self.output} is a file")
        if goes_on:
            earlier = load_tree(self.saved)
            self._compare(changed(earlier), records, attention)
        elif folder.exists() and not self.fresh and {p.name for p in folder.iterdir()} - IN_NO_RUN:
            raise ValueError(
                f"--output {self.output} is not empty and holds no run; nothing there is overwritten, take another folder"
            )
        else:
            self._settle(attention, build=True)
        saved_records = list(records)
        if attention:
            saved_records.append(attention)
        opened = OpenFolder(Path(self.output), config, saved_records, earlier)
        if self.dry:
            by_main(lambda: check_writable(folder), self.accelerator)
            return opened
        self.accelerator.wait_for_everyone()  # all have looked before one writes
        by_main(lambda: self._make(locked=goes_on), self.accelerator)
        if not resumes:
            by_main(opened.write_records, self.accelerator)
        return opened

    def _compare(self, differences: list[str], records: Sequence, attention) -> None:
        """Refuse to go on with a run whose configuration, records or log do not fit; see `open`."""
        folder = self.path
        list(logged(folder / "metrics.jsonl"))  # refuses what is no log, before training
        differences = differences + self._settle(attention, build=not differences)
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

    def _settle(self, attention, build: bool) -> list[str]:
        """Settle an `AttentionRecord`, if there is one; return what it refuses."""
        if attention is None:
            return []
        return attention.settle(build=build and not self.dry)

    def _make(self, locked: bool) -> None:
        """Make the folder and lock it, unless it is `locked` already; with `fresh` move an earlier one aside."""
        folder = self.path
        check_writable(folder)
        if self.fresh and folder.exists():
            number = 1
            while folder.with_name(f"{folder.name}.{number}").exists():
                number += 1
            aside = folder.rename(folder.with_name(f"{folder.name}.{number}"))
            (aside / LOCK).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not locked:
            self.held.enter_context(only_one(folder, "--output"))
            if self.saved.exists():
                raise ValueError(
                    f"--output {self.output}: another process has begun a run there meanwhile; start again"
                )


def only_records(folder: Path) -> bool:
    """Return whether a run left only records of its start: neither weights nor losses."""
    records = {CONFIG, LOCK, "attention.json", "data.json", "frozen.json", "environment.jsonl"}

    def is_of_a_start(path: Path) -> bool:
        if path.name == "metrics.jsonl":
            return path.stat().st_size == 0
        if path.name == "checkpoints":
            return not any(path.iterdir())
        return path.name in records

    return all(is_of_a_start(path) for path in folder.iterdir())
