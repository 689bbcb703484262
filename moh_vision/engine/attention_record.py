"""How a run computes attention: the same from its start to its end, and on every process."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Collection, List, Optional

from accelerate.utils import gather_object

from moh_vision.engine.commands import MISTAKES
from moh_vision.engine.config import KEPT_KEYS
from moh_vision.engine.io import write_whole
from moh_vision.engine.ranks import attempt

RECORD = "attention.json"
PATH, TABLE = KEPT_KEYS


def keep_settings(
    attention, folder: Optional[Path], accelerator, held: ExitStack, allowed: Collection[str] = ()
) -> Optional[AttentionRecord]:
    """The settings of attention for this process, until `held` is closed; None on a device without operators.

    Args:
        attention, folder, allowed: see `AttentionRecord`.

    Raises:
        ValueError: see `AttentionRecord`.
    """
    device = accelerator.device.type
    if device not in attention.PATHS:
        return None
    held.callback(attention.use_table, None)
    held.callback(attention.use, None)
    return AttentionRecord(attention, folder, allowed, device)


class AttentionRecord:
    """The path of the attention operators and the table of `auto`, kept in FOLDER/attention.json.

    Both decide the last bits of results. So work that goes on uses what it began with, whatever was built or measured
    meanwhile, and all processes use what the main process has. Where one of them lacks the operators, all take plain
    PyTorch. Every process makes the record; unless it refuses something, its settings hold in this process from then on.

    Args:
        attention: `moh_vision.attention.settings`.
        folder: of the work that goes on, or None for work that begins. Without a record, as earlier versions left it,
            the settings of this machine are taken.
        allowed: keys of --allow-change: a setting among them is taken from this machine, whatever is stored.
        device: the kind of device. Stored operators of another kind of device count for nothing: the bits differ anyway.
            Plain PyTorch stays plain PyTorch.

    Attributes:
        path, table: the settings; JSON.
        refused: stored settings that cannot be used here, in the form of `changed_keys`.
        line: which path runs and why, for the user.

    Raises:
        ValueError: on every process, if the record or the environment variable MOH_VISION_KERNELS has no meaning.
    """

    def __init__(self, attention, folder: Optional[Path], allowed: Collection[str] = (), device: str = "cpu"):
        here: dict = {}

        def look():
            here.update(path=attention.path(device), about=attention.about(device), table=attention.table())
            here["stored"] = _read(folder / RECORD) if folder and (folder / RECORD).exists() else None

        problem = attempt(look, MISTAKES)
        if problem:
            raise ValueError(problem)
        ranks = gather_object([here])
        self.line, stored = ranks[0]["about"], ranks[0]["stored"] or {}
        kept_path = stored.get("path")
        if PATH in allowed or kept_path not in attention.PATHS[device]:
            kept_path = None
        kept_table = None if TABLE in allowed else stored.get("table")
        self.refused: List[str] = []
        self.path, self.table = kept_path or ranks[0]["path"], kept_table or ranks[0]["table"]

        lacking = [
            f"process {rank}: {seen['about']}" if rank else seen["about"]
            for rank, seen in enumerate(ranks)
            if seen["path"] != self.path
        ]
        if self.path != "torch" and lacking:
            if kept_path:
                self.refused.append(f"{PATH}: {self.path!r} -> 'torch' ({lacking[0]})")
            self.path, self.line = "torch", f"attention runs in plain PyTorch on all processes ({lacking[0]})"
        elif self.path != ranks[0]["path"]:
            self.line = f"attention runs in plain PyTorch, as {folder} began; --allow-change {PATH} takes the operators"
        if not self.refused:
            attention.use(self.path)
            try:
                attention.use_table(self.table)
            except ValueError as error:  # the table is of another version
                self.refused.append(f"{TABLE}: {error}")

    def save(self, folder: Path) -> None:
        """Write the record into a folder."""
        write_whole(folder / RECORD, json.dumps(dict(path=self.path, table=self.table), indent=1) + "\n")


def _read(file: Path) -> dict:
    try:
        record = json.loads(file.read_text("utf-8"))
        if record["path"] not in ("cpp", "triton", "torch") or not isinstance(record["table"], dict):
            raise ValueError("path is cpp, triton or torch, table is a mapping")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file}: not a record of attention that can be read ({error!r}); delete it to take this machine's settings"
        ) from None
    return record
