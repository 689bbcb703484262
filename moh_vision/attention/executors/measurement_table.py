"""`MeasurementTable`: for which calls skipping heads takes less time on this machine. The executor "auto" reads it.

A process has one table: that of the user's cache, unless `use_table` sets another.
"""

import hashlib
import json
import logging
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Self

import torch

from moh_vision.attention.kernels.build import path
from moh_vision.common.io import cache_folder, write_whole

log = logging.getLogger("moh_vision.attention")

VARIABLE = "MOH_VISION_MEASURE"
# Keys are the words of `choice.key_of`. A row is [tokens, keys, batch, active heads, faster executor, ratio]. The ratio is
# the time of skipping heads over the time of all heads, or None where skipping failed.
Rows = dict[str, list[list]]


class MeasurementTable:
    """Rows that were measured on this device.

    Args:
        rows: the rows; None: an empty table.
    """

    def __init__(self, rows: Rows | None = None):
        self.rows: Rows = rows or {}

    @classmethod
    def from_record(cls, record: dict) -> Self:
        """Return the table that `as_record` wrote; an empty one from {}.

        Raises:
            ValueError: for malformed rows, and for rows of Triton's kernels that were measured on another GPU.
        """
        rows = checked(record.get("rows", {}))
        on_gpu = any(
            " cuda " in key and row[4] == "InPlace"
            for key, of_calls in rows.items()
            for row in of_calls
        )
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

    def as_record(self) -> dict:
        """Return dict(device, rows), which the user's cache and attention.json of a run keep as JSON."""
        return dict(device=device_name(), rows=self.rows)

    def add(self, rows: Rows) -> None:
        """Add rows; a new row replaces an old one of the same sizes.

        Rows are sorted by active heads, then by batch: `auto` takes the first row that is large enough for a call.
        """
        merged = {}
        for key in [*self.rows, *rows]:
            by_sizes = {tuple(row[:4]): row for row in self.rows.get(key, ())}
            by_sizes.update({tuple(row[:4]): row for row in rows.get(key, ())})
            merged[key] = sorted(by_sizes.values(), key=lambda row: (row[3], row[2]))
        self.rows = merged

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
    if record is None:
        _current = None
    else:
        _current = MeasurementTable.from_record(record)


@torch.compiler.assume_constant_result  # a compiled model keeps the table that it was compiled with
def look_up(key: tuple[str, ...]) -> tuple[tuple, ...]:
    """Return the rows that the table of this process has for a key of `choice.key_of`."""
    return tuple(map(tuple, current_table().rows.get(" ".join(key), ())))


def measuring_is_off() -> bool:
    """Return whether measuring is off; if it is, the user's cache of earlier measurements is not read either."""
    wish = os.environ.get(VARIABLE, "") or "auto"
    if wish not in ("auto", "off"):
        raise ValueError(
            f"{VARIABLE}={wish}: only auto (measure where skipping heads pays) and off (do not)"
        )
    return wish == "off" or torch.are_deterministic_algorithms_enabled()


def checked(rows: object) -> Rows:
    """Return `rows` unchanged; raise ValueError if they are not of the form of `Rows`."""
    try:
        forms = {(len(row), *map(type, row[:5])) for of_calls in rows.values() for row in of_calls}
    except (AttributeError, TypeError, LookupError):
        forms = {("not rows",)}
    if forms - {(6, int, int, int, int, str)}:
        raise ValueError("rows of the table of auto are four numbers, a name and a ratio")
    return rows


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
