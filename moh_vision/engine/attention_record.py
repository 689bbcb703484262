"""How a run computes attention: the same from start to end, on every process."""

import json
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from accelerate.utils import gather_object

from moh_vision.attention.executors import measurement_table
from moh_vision.attention.kernels import build as operators
from moh_vision.engine.config import KEPT_KEYS
from moh_vision.engine.errors import BUILD, MISTAKES
from moh_vision.engine.io import write_whole
from moh_vision.engine.ranks import attempt, by_main, from_first, say

RECORD = "attention.json"
PATH, TABLE = KEPT_KEYS


def keep_settings(folder: Path | None, accelerator, held: ExitStack, allowed: Collection[str] = ()):
    """Return an `AttentionRecord` that holds until `held` is closed; None on a device without operators."""
    device = accelerator.device.type
    if device not in operators.PATHS:
        return None
    held.callback(measurement_table.use_table, None)
    held.callback(operators.use, None)
    return AttentionRecord(folder, allowed, device)


class AttentionRecord:
    """The path of the attention operators and the table of `auto`, kept in FOLDER/attention.json.

    Both decide the last bits of results: all processes use the main one's, and resumed work its first ones, but for
    `allowed`, keys of --allow-change. `table` is None until `measure`; `refused` names unusable ones, `line` what runs.
    """

    def __init__(self, folder: Path | None, allowed: Collection[str] = (), device: str = "cpu"):
        self.folder = folder
        self.allowed = allowed
        self.device = device
        self.settle()

    def settle(self, build: bool = False) -> list[str]:
        """Decide the settings; return what is refused. With `build`, build missing operators for a CPU first."""
        device = self.device
        here: dict = {}  # what this process has
        operators.use(None)

        def kept(key: str):
            return (
                None if key in self.allowed else here["stored"].get(key.removeprefix("attention."))
            )

        def look():
            file = self.folder and self.folder / RECORD
            here["stored"] = _read(file) if file and file.exists() else {}
            if os.environ.setdefault(BUILD, "later") == "later" and build and kept(PATH) != "torch":
                os.environ[BUILD] = "auto"
            here.update(
                path=operators.path(device),
                line=operators.about(device),
                off=measurement_table.measuring_is_off(),
            )

        problem = attempt(look, MISTAKES)
        if problem:
            raise ValueError(problem)
        ranks = gather_object([here])
        here, self.line, self.refused = ranks[0], ranks[0]["line"], []
        # Operators of another kind of device are ignored: the bits differ anyway.
        kept_path = kept(PATH) if kept(PATH) in operators.PATHS[device] else None
        self.path, self.table = kept_path or here["path"], kept(TABLE)
        if self.table is None and here["off"]:
            self.table = {}

        lacking = [rank for rank, seen in enumerate(ranks) if seen["path"] != self.path]
        plain = "attention runs in plain PyTorch"
        if self.path != "torch" and lacking:
            why = f"process {lacking[0]}: " * (lacking[0] > 0) + ranks[lacking[0]]["line"]
            if kept_path:
                self.refused.append(f"{PATH}: {self.path!r} -> 'torch' ({why})")
            self.path, self.line = "torch", f"{plain} on all processes ({why})"
        elif self.path != here["path"]:
            self.line = (
                f"{plain}, as {self.folder} began; --allow-change {PATH} takes the operators"
            )
        if not self.refused:
            operators.use(self.path)
            try:
                measurement_table.use_table(self.table or {})
            except ValueError as error:  # of another version or card
                self.refused.append(f"{TABLE}: {error}")
        return self.refused

    def measure(self, make: Callable[[], tuple[dict, str]], folder: Path, accelerator) -> None:
        """Take the main process's table, with a line for the user or "", and write it into a folder."""
        self.table, line = from_first(make)
        measurement_table.use_table(self.table)
        by_main(lambda: self.save(folder), accelerator)
        if line:
            say(line)

    def save(self, folder: Path) -> None:
        """Write the record into a folder."""
        write_whole(
            folder / RECORD, json.dumps(dict(path=self.path, table=self.table), indent=1) + "\n"
        )


def _read(file: Path) -> dict:
    try:
        record = json.loads(file.read_text("utf-8"))
        if record["path"] not in ("cpp", "triton", "torch") or not isinstance(
            record["table"], (dict, type(None))
        ):
            raise ValueError("path is cpp, triton or torch, table is a mapping or null")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"not a record of attention that can be read ({error!r})"
        raise ValueError(f"{file}: {problem}; delete it to take this machine's settings") from None
    return record
