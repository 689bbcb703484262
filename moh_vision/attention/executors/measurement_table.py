"""`MeasurementTable`: for which calls skipping heads takes less time on this machine. The executor "auto" reads it.

A process has one table: that of the user's cache, unless `use_table` sets another.
"""

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Self

import torch

from moh_vision.attention.executors.signature import Signature
from moh_vision.attention.kernels.build import path
from moh_vision.common.io import cache_folder, write_whole

log = logging.getLogger("moh_vision.attention")

VARIABLE = "MOH_VISION_MEASURE"


class Row(NamedTuple):
    """One measurement: which executor is faster in calls of one kind and size. Also an entry of the record, as a list."""

    call: str  # the words of `signature.words`
    tokens: int
    keys: int
    batch: int
    active: int  # heads that run
    taken: str  # name of the faster executor
    ratio: float | None  # time of skipping heads over the time of all heads; None: skipping failed

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, N, M and K."""
        return self.batch, self.tokens, self.keys, self.active

    def holds_for(self, signature: Signature) -> bool:
        """Return whether the row decides a call of its kind: the same tokens and keys, no more sequences and heads."""
        s = signature
        same_length = self.tokens == s.tokens and self.keys == s.keys
        return same_length and s.batch <= self.batch and s.active <= self.active


class MeasurementTable:
    """Rows that were measured on this device.

    Args:
        rows: the rows.
    """

    def __init__(self, rows: Iterable[Row] = ()):
        self.by_call: dict[str, list[Row]] = {}
        self.add(rows)

    @classmethod
    def from_record(cls, record: dict) -> Self:
        """Return the table that `as_record` wrote; an empty one from {}.

        Raises:
            ValueError: for malformed rows, and for rows of a GPU that were measured on another one.
        """
        rows = checked(record.get("rows", []))
        on_gpu = any(" cuda " in row.call for row in rows)
        if on_gpu and record.get("device") != device_name():
            raise ValueError(f"measured on {record.get('device')}, this is {device_name()}")
        return cls(rows)

    @classmethod
    def from_cache(cls) -> Self:
        """Return the table in the user's cache. If it cannot be read, warn and return an empty table."""
        file = cache_file()
        try:
            if not file.is_file():
                return cls()
            return cls(checked(json.loads(file.read_text())["rows"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning(f"{file} is ignored ({error!r})")
            return cls()

    @property
    def rows(self) -> list[Row]:
        """All rows."""
        return [row for rows in self.by_call.values() for row in rows]

    def as_record(self) -> dict:
        """Return dict(device, rows), which the user's cache and attention.json of a run keep as JSON."""
        return dict(device=device_name(), rows=[list(row) for row in self.rows])

    def find(self, call: str, sizes: tuple[int, int, int, int]) -> Row | None:
        """Return the row that was measured for calls of a kind with sizes B, N, M, K; None if there is none."""
        for row in self.by_call.get(call, ()):
            if row.sizes == sizes:
                return row
        return None

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows; a new row replaces an old one of the same sizes.

        Rows of a call are sorted by active heads, then by batch: `auto` takes the first row that is large enough for a call.
        """
        for row in rows:
            of_call = [kept for kept in self.by_call.get(row.call, ()) if kept.sizes != row.sizes]
            of_call.append(row)
            self.by_call[row.call] = sorted(of_call, key=lambda row: (row.active, row.batch))
        _new_generation()

    def save(self) -> None:
        """Add the rows to the user's cache; warn if it cannot be written."""
        cached = MeasurementTable.from_cache()
        cached.add(self.rows)
        text = json.dumps(cached.as_record(), indent=1) + "\n"
        file = cache_file()
        try:
            write_whole(file, text, shared=True)
        except OSError as error:
            log.warning(f"{file}: {error.strerror}; what was measured is not kept")


_current: MeasurementTable | None = None  # the table of this process; None: not yet read
_generation = 0
_unmeasured: set[str] = set()  # since the table was set


def generation() -> int:
    """Return a number that changes whenever a table does, so that plans made with another one are dropped."""
    return _generation


def _new_generation() -> None:
    global _generation
    _generation += 1


def current_table() -> MeasurementTable:
    """Return the table of this process: the one set by `use_table`, else the user's cache; empty if measuring is off."""
    global _current
    if _current is None:
        if measuring_is_off():
            _current = MeasurementTable()
        else:
            _current = MeasurementTable.from_cache()
    return _current


def use_table(record: dict | None) -> None:
    """Set the table of this process from a record, see `MeasurementTable.from_record`. None: use the user's cache again."""
    global _current
    _unmeasured.clear()
    if record is None:
        _current = None
        _new_generation()
    else:
        _current = MeasurementTable.from_record(record)


@torch.compiler.assume_constant_result  # a compiled model keeps the table that it was compiled with
def look_up(call: str) -> tuple[Row, ...]:
    """Return the rows that the table of this process has for calls of a kind, see `signature.words`."""
    return tuple(current_table().by_call.get(call, ()))


@torch.compiler.assume_constant_result
def note_unmeasured(call: str) -> None:
    """Keep the words of a call that could skip heads and has no row in the table of this process."""
    _unmeasured.add(call)


def unmeasured() -> list[str]:
    """Return the words of all calls that could have skipped heads, but had no row, since the table was set."""
    return sorted(_unmeasured)


def measuring_is_off() -> bool:
    """Return whether measuring is off; if it is, the user's cache of earlier measurements is not read either."""
    wish = os.environ.get(VARIABLE, "") or "auto"
    if wish not in ("auto", "off"):
        raise ValueError(
            f"{VARIABLE}={wish}: only auto (measure where skipping heads pays) and off (do not)"
        )
    return wish == "off" or torch.are_deterministic_algorithms_enabled()


def checked(rows: object) -> list[Row]:
    """Return rows as read from JSON as a list of `Row`; raise ValueError if they are not of that form."""
    form = (str, int, int, int, int, str)
    try:
        found = [Row(*row) for row in rows]
    except TypeError:
        found = [None]
    if any(row is None or tuple(map(type, row[:6])) != form for row in found):
        raise ValueError("rows of the table of auto are a call, four numbers, a name and a ratio")
    return found


def cache_file() -> Path:
    """Return CACHE/measured/DEVICE-HASH.json. The hash covers what times depend on besides the call, such as our sources."""
    if torch.cuda.is_available():
        device_type = "cuda"
        capability = torch.cuda.get_device_capability()
    else:
        device_type = "cpu"
        capability = torch.backends.cpu.get_cpu_capability()
    conditions = [
        capability,
        torch.__version__,
        path(device_type),
        torch.get_float32_matmul_precision(),
    ]
    if "triton" in conditions:
        conditions.append(metadata.version("triton"))
    else:
        conditions.append(torch.get_num_threads())
    digest = hashlib.sha256(repr([device_name(), *conditions]).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.[chp]*")):
        if "__pycache__" not in file.parts:
            digest.update(file.read_bytes())
    device = re.sub("[^0-9A-Za-z]+", "-", device_name())
    return cache_folder() / "measured" / f"{device}-{digest.hexdigest()[:12]}.json"


def device_name(device: torch.device | None = None) -> str:
    """Return the name of a device, a GPU or the processor; None: the current GPU if there is one, else the processor."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor()


def processor() -> str:
    """Return the name of the processor's model."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        name = re.search(r"^model name\s*: (.*)", info.read_text(), re.MULTILINE)
        if name:
            return name[1]
    return platform.processor()
