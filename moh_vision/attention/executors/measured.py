"""What was measured on this machine: for which calls skipping heads takes less time. `auto` looks its calls up here."""

import hashlib
import json
import logging
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from moh_vision.attention.kernels.build import path
from moh_vision.engine.io import cache_folder, write_whole

log = logging.getLogger("moh_vision.attention")

VARIABLE = "MOH_VISION_MEASURE"
# By the words of `choice.key_of`: [tokens, keys, batch, active heads, executor, its time over that of all heads or None].
Rows = dict[str, list[list]]

_table: dict | None = None


def off() -> bool:
    """Return whether measuring is off; earlier measurements are not read either."""
    wish = os.environ.get(VARIABLE, "") or "auto"
    if wish not in ("auto", "off"):
        raise ValueError(
            f"{VARIABLE}={wish}: only auto (measure where skipping heads pays) and off (do not)"
        )
    return wish == "off" or torch.are_deterministic_algorithms_enabled()


def table() -> dict:
    """The table of this process, JSON: dict(device, rows). It is that of `use_table`, else what the user's cache has."""
    global _table
    if _table is None:
        _table = dict(device=device(), rows={} if off() else cached())
    return _table


def use_table(table: dict | None) -> None:
    """Set the table of this process; {}: an empty one, None: back to the user's cache."""
    global _table
    rows = checked(table.get("rows", {})) if table else {}
    on_gpu = any(row[4] == "OnGpu" for kind in rows.values() for row in kind)
    if on_gpu and table.get("device") != device():
        raise ValueError(f"measured on {table.get('device')}, this is {device()}")
    _table = None if table is None else dict(device=device(), rows=rows)


@torch.compiler.assume_constant_result  # a compiled model keeps the table that it was compiled with
def rows_of(key: tuple) -> tuple[tuple, ...]:
    """The rows of a kind of calls. The first that a call fits into is its own."""
    return tuple(map(tuple, table()["rows"].get(" ".join(key), ())))


def merged(rows: Rows, new: Rows) -> Rows:
    """Both; of two rows of the same sizes the new one. Those with fewer heads, and then the smaller batch, come first."""
    both = {
        key: {tuple(r[:4]): r for r in [*rows.get(key, ()), *new.get(key, ())]}
        for key in [*rows, *new]
    }
    return {
        key: sorted(kind.values(), key=lambda row: (row[3], row[2])) for key, kind in both.items()
    }


def checked(rows: object) -> Rows:
    """Rows as they were read, or ValueError."""
    try:
        kinds = {(len(row), *map(type, row[:5])) for kind in rows.values() for row in kind}
    except (AttributeError, TypeError, LookupError):
        kinds = {()}
    if kinds - {(6, int, int, int, int, str)}:
        raise ValueError("rows of the table of auto are four numbers, a name and a ratio")
    return rows


def cached() -> Rows:
    """The rows in the user's cache."""
    try:
        return checked(json.loads(place().read_text())["rows"]) if place().is_file() else {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.warning(f"{place()} is ignored ({error!r})")
        return {}


def keep(rows: Rows) -> None:
    """Add rows to the user's cache."""
    text = json.dumps(dict(device=device(), rows=merged(cached(), rows)), indent=1) + "\n"
    try:
        write_whole(place(), text, shared=True)
    except OSError as error:
        log.warning(f"{place()}: {error.strerror}; what was measured is not kept")


def place() -> Path:
    """CACHE/measured/DEVICE-HASH.json, the hash of all that times depend on beside the call."""
    gpu = torch.cuda.is_available()
    capability = (
        torch.cuda.get_device_capability() if gpu else torch.backends.cpu.get_cpu_capability()
    )
    conditions = [
        capability,
        torch.__version__,
        path("cuda" if gpu else "cpu"),
        torch.get_float32_matmul_precision(),
    ]
    conditions += (
        [metadata.version("triton")] if "triton" in conditions else [torch.get_num_threads()]
    )
    digest = hashlib.sha256(repr([device(), *conditions]).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.[chp]*")):
        digest.update(b"" if "__pycache__" in file.parts else file.read_bytes())
    return (
        cache_folder()
        / "measured"
        / f"{re.sub('[^0-9A-Za-z]+', '-', device())}-{digest.hexdigest()[:12]}.json"
    )


def device() -> str:
    """The name of the GPU, else of the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def processor() -> str:
    """The name of the processor's model."""
    info = Path("/proc/cpuinfo")
    names = re.findall(
        r"^model name\s*: (.*)", info.read_text() if info.is_file() else "", re.MULTILINE
    )
    return names[0] if names else platform.processor()
