"""Keep how a run computes attention the same on every process, and after a resume."""

import json
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from moh_vision.attention.executors import measurement_table
from moh_vision.attention.kernels import build as operators
from moh_vision.common.errors import BUILD
from moh_vision.common.io import write_whole
from moh_vision.engine.config import KEPT_KEYS
from moh_vision.engine.ranks import by_all, by_main, from_all, from_first, say

RECORD = "attention.json"
PATH, TABLE = KEPT_KEYS


def keep_settings(folder: Path | None, accelerator, held: ExitStack, allowed: Collection[str] = ()):
    """Return an `AttentionRecord` whose settings apply until `held` is closed; None on a device without operators."""
    device = accelerator.device.type
    if device not in operators.PATHS:
        return None
    held.callback(measurement_table.use_table, None)
    held.callback(operators.use, None)
    record = AttentionRecord(folder, allowed, device)
    held.callback(record.say_unmeasured)
    return record


class AttentionRecord:
    """The path of the attention operators and the measurement table of `auto`, stored in FOLDER/attention.json.

    Both change the last bits of results. Therefore all processes use the settings of the main process, and resumed work
    uses those in its attention.json.

    Args:
        folder: the folder of the work to resume; None for new work.
        allowed: keys of --allow-change, whose stored settings are not used.
        device: type of the torch device.

    Attributes:
        path: "cpp", "triton" or "torch".
        table: the measurement table; None until `measure` makes it.
        line: tells the user how attention is computed.
        refused: stored settings that cannot be used here, one text each.
    """

    def __init__(self, folder: Path | None, allowed: Collection[str] = (), device: str = "cpu"):
        self.folder = folder
        self.allowed = allowed
        self.device = device
        self.settle()

    def settle(self, build: bool = False) -> list[str]:
        """Decide the settings; return `refused`. With `build`, first build missing operators for a CPU."""
        device = self.device
        operators.use(None)
        stored = from_first(self._stored)

        def kept(key: str):
            if key in self.allowed:
                return None
            return stored.get(key.removeprefix("attention."))

        def look() -> dict:
            # Build operators only when `build` says so, unless the user has set MOH_VISION_BUILD.
            os.environ.setdefault(BUILD, "later")
            if build and os.environ[BUILD] == "later" and kept(PATH) != "torch":
                os.environ[BUILD] = "auto"
            return dict(
                path=operators.path(device),
                line=operators.about(device),
                off=measurement_table.measuring_is_off(),
            )

        ranks = from_all(by_all(look))
        here = ranks[0]
        self.line = here["line"]
        self.refused = []
        kept_path = kept(PATH)
        if kept_path not in operators.PATHS[device]:
            kept_path = None  # stored on another type of device: the last bits differ anyway
        self.path = kept_path or here["path"]
        self.table = kept(TABLE)
        if self.table is None and here["off"]:
            self.table = {}

        lacking = [rank for rank, seen in enumerate(ranks) if seen["path"] != self.path]
        plain = "attention runs in plain PyTorch"
        if self.path != "torch" and lacking:
            first = lacking[0]
            why = ranks[first]["line"]
            if first > 0:
                why = f"process {first}: {why}"
            if kept_path:
                self.refused.append(f"{PATH}: {self.path!r} -> 'torch' ({why})")
            self.path = "torch"
            self.line = f"{plain} on all processes ({why})"
        elif self.path != here["path"]:  # the stored path is "torch", but operators are here
            take = f"--allow-change {PATH} takes the operators"
            self.line = f"{plain}, as {self.folder} began; {take}"
        if not self.refused:
            operators.use(self.path)
            try:
                measurement_table.use_table(self.table or {})
            except ValueError as error:  # the table was measured with another version or card
                self.refused.append(f"{TABLE}: {error}")
        return self.refused

    def _stored(self) -> dict:
        """Return the settings in the folder's attention.json, {} if there is none."""
        if self.folder and (self.folder / RECORD).exists():
            return _read(self.folder / RECORD)
        return {}

    def measure(
        self, make: Callable[[], tuple[dict, str]], folder: Path | None, accelerator
    ) -> None:
        """Make the measurement table on the main process, use it on all, and write the record.

        Args:
            make: returns the table, and a line for the user or "".
            folder: where to write the record; None: it is not written.
            accelerator: accelerate's Accelerator.
        """
        self.table, line = from_first(make)
        measurement_table.use_table(self.table)
        if folder is not None:
            by_main(lambda: self.save(folder), accelerator)
        if line:
            say(line)

    def say_unmeasured(self) -> None:
        """Print which calls `auto` decided by its rule, if the others were measured."""
        calls = measurement_table.unmeasured()
        if calls and self.table:
            say(
                f"attention: {len(calls)} kinds of calls were not measured, so that a rule decided: {'; '.join(calls[:3])}"
            )

    def save(self, folder: Path) -> None:
        """Write the record into a folder."""
        text = json.dumps(dict(path=self.path, table=self.table), indent=1)
        write_whole(folder / RECORD, text + "\n")


def _read(file: Path) -> dict:
    """Read attention.json; raise ValueError if it is not a record of attention."""
    try:
        record = json.loads(file.read_text("utf-8"))
        known_path = record["path"] in ("cpp", "triton", "torch")
        if not known_path or not isinstance(record["table"], (dict, type(None))):
            raise ValueError("path is cpp, triton or torch, table is a mapping or null")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"not a record of attention that can be read ({error!r})"
        raise ValueError(f"{file}: {problem}; delete it to take this machine's settings") from None
    return record
