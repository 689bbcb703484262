"""The folder of a training run: its lock, its records, and what may be there when a run starts."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from moh_vision.engine.command_line import dump, load_tree
from moh_vision.engine.io import CONFIG, LOCK, hidden_path, only_one, write_whole
from moh_vision.engine.logging import logged
from moh_vision.engine.ranks import by_main, say
from moh_vision.engine.saver import check_writable
from moh_vision.engine.step_folders import resume_point

IN_NO_RUN = {LOCK, hidden_path(Path(CONFIG)).name}  # left by a killed start


class RunFolder:
    """A run's folder, written by the main process.

    Args:
        output: the folder.
        fresh: move a run that is there aside.
        held: releases the lock.
        dry: look for mistakes alone: neither lock nor write.
    """

    def __init__(
        self, output: str, fresh: bool, accelerator, held: contextlib.ExitStack, dry: bool = False
    ):
        self.output, self.fresh, self.dry = output, fresh, dry
        self.accelerator, self.held = accelerator, held
        self.path = Path(output).resolve()
        self.saved = self.path / CONFIG

    @property
    def goes_on(self) -> bool:
        """Whether the folder holds a run that is not moved aside."""
        return self.saved.exists() and not self.fresh

    def take_up(self, max_steps: int) -> tuple[int, Path] | None:
        """Lock an existing run; return the checkpoint to resume from, as `resume_point`."""

        def lock_it():
            if self.saved.exists() and not self.dry:
                check_writable(self.path)
                self.held.enter_context(only_one(self.path, "--output"))

        by_main(lock_it, self.accelerator)
        return resume_point(Path(self.output), max_steps, self.fresh, say)

    def open(
        self, config: dict, changed: Callable, records: Sequence = (), attention=None, resumes=False
    ) -> None:
        """Make the folder, or open the locked one; refuse what is `changed` since its config.yaml.

        What `attention`, an `AttentionRecord`, refuses counts as changed. A run that `resumes` calls `write_records`
        itself, with its checkpoint loaded: an allowed change may not fit.
        """
        self.config = config
        self.records = [*records, attention] if attention else [*records]
        folder, there = self.path, self.goes_on
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output {self.output} is a file")
        if there:
            differences = changed(load_tree(self.saved))
            list(logged(folder / "metrics.jsonl"))  # refuses what is no log, before training
            differences += self._settle(attention, build=not differences)
            if differences and only_records(folder):
                say(
                    f"{self.output}: no step was done there; it starts over with {'; '.join(differences)}"
                )
            elif differences:
                raise ValueError(
                    f"--output {self.output} holds a run with another configuration: {'; '.join(differences)}. "
                    "Take another folder, --allow-change KEY, or --fresh to move that run aside"
                )
            else:
                for record in records:
                    record.check(folder, say)
        elif folder.exists() and not self.fresh and {p.name for p in folder.iterdir()} - IN_NO_RUN:
            raise ValueError(
                f"--output {self.output} is not empty and holds no run; nothing there is overwritten, take another folder"
            )
        else:
            self._settle(attention, build=True)
        if self.dry:
            return by_main(lambda: check_writable(folder), self.accelerator)
        self.accelerator.wait_for_everyone()  # all have looked before one writes
        by_main(lambda: self._write(there, resumes), self.accelerator)

    def _settle(self, attention, build: bool) -> list[str]:
        """Settle an `AttentionRecord`, if there is one; return what it refuses."""
        return attention.settle(build=build and not self.dry) if attention else []

    def _write(self, there: bool, resumes: bool) -> None:
        folder = self.path
        check_writable(folder)
        if self.fresh and folder.exists():
            number = 1
            while folder.with_name(f"{folder.name}.{number}").exists():
                number += 1
            aside = folder.rename(folder.with_name(f"{folder.name}.{number}"))
            (aside / LOCK).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not there:
            self.held.enter_context(only_one(folder, "--output"))
            if self.saved.exists():
                raise ValueError(
                    f"--output {self.output}: another process has begun a run there meanwhile; start again"
                )
        if not resumes:
            self.write_records()

    def write_records(self) -> None:
        """Write config.yaml and what else a run is compared with when it goes on."""
        write_whole(self.saved, dump(self.config))
        for record in self.records:
            record.save(self.path)


def only_records(folder: Path) -> bool:
    """Return whether a run left only records of its start: neither weights nor losses."""
    records = {CONFIG, LOCK, "attention.json", "data.json", "frozen.json", "environment.jsonl"}
    empty = {
        "metrics.jsonl": lambda p: p.stat().st_size == 0,
        "checkpoints": lambda p: not any(p.iterdir()),
    }
    return all(p.name in records or p.name in empty and empty[p.name](p) for p in folder.iterdir())
