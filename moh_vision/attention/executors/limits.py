"""The table by which `auto` chooses: up to which share of heads `packed` takes less time than `masked`.

It is measured on the user's machine (`python -m moh_vision.attention.tune`) or comes with the package.
"""

import functools
import hashlib
import itertools
import json
import logging
import platform
import re
from pathlib import Path
from typing import Optional, Tuple

import torch

from moh_vision.attention import kernels
from moh_vision.attention.kernels.build import cache_folder, isa, key

log = logging.getLogger("moh_vision.attention")

COMMAND = "python -m moh_vision.attention.tune"
# What a table tells apart; "varlen" is the executor of this name. PyTorch's path pads queries where heads are chosen per
# token, and does better where a key-value head serves all heads or all sequences chose alike; the operators' path knows
# no such differences.
KINDS = {
    "cpp": ("token", "sample"),
    "triton": ("token", "sample", "decode"),
    "varlen": ("token",),
    "torch": ("token", "token, causal", "one key-value head", "sample", "sample, alike"),
}
ON_GPU = ("triton", "varlen")
BITS, MODES = ("float32", "16 bits"), ("forward", "training")

Row = Tuple[
    int, int, float
]  # least keys, least numbers in the queries of all heads, largest share at which packed pays

_given: Optional[dict] = None  # what `use_table` was given


def table() -> dict:
    """The table in use, read once: what `use_table` was given, else what was measured here, else the shipped one.

    What was measured on this processor without this GPU counts where nothing was measured with it.

    Its form, as JSON: {"about": where it was measured, path: {kind: {bits: {mode: rows}}}} with the names of KINDS, BITS
    and MODES, and rows as `Row`. Of the rows that a call reaches, with so many keys and numbers, the last one counts.
    """
    return _given or _found()


def use_table(table: Optional[dict]) -> None:
    """Set the table of this process; None: back to what is found.

    Raises:
        ValueError: the table is malformed; names the place in it.
    """
    global _given
    _given = None if table is None else checked(table)


def checked(table: object) -> dict:
    """The table, if it is one; else ValueError."""
    if not isinstance(table, dict) or not isinstance(table.get("about"), str):
        raise ValueError("the table of auto does not say what it is about")
    for path, kinds in KINDS.items():
        if path in ON_GPU and path not in table:
            continue  # measured on a machine without a GPU
        for names in itertools.product([path], kinds, BITS, MODES):
            rows = functools.reduce(lambda part, name: part.get(name) if isinstance(part, dict) else None, names, table)
            if not isinstance(rows, list) or not all(map(_is_row, rows)):
                raise ValueError(
                    f"the table of auto, {' / '.join(names)}: {json.dumps(rows)} is not a list of rows "
                    "[least keys, least numbers, largest share]"
                )
    return table


def _is_row(row: object) -> bool:
    numbers = isinstance(row, list) and len(row) == 3 and all(type(n) in (int, float) for n in row)
    return numbers and min(row) >= 0 and row[2] <= 1


@torch.compiler.assume_constant_result
def measured(path: str) -> bool:
    """Whether the table has rows for a path. None is shipped for a GPU."""
    return path in table()


@torch.compiler.assume_constant_result  # a compiled model keeps the table that it was compiled with
def rows(path: str, kind: str, short: bool, train: bool) -> Tuple[Row, ...]:
    """The rows for one kind of call, short: in 16 bits."""
    kinds = table().get(path)
    return () if kinds is None else tuple(map(tuple, kinds[kind][BITS[short]][MODES[train]]))


@functools.cache
def _found() -> dict:
    for place in dict.fromkeys((table_path(), table_path(gpu=None))):
        if place.is_file():
            try:
                return checked(json.loads(place.read_bytes()))
            except (OSError, ValueError) as error:
                log.warning(f"{place} is ignored ({error}); `{COMMAND}` measures again")
    return shipped()


def shipped() -> dict:
    """The table that comes with the package for processors like this one.

    PyTorch's limits are from benchmarks/attention.py on 2 Xeon cores and, in float32, on 2 EPYC cores (AVX2): where
    `packed` was 10 % faster on one and no more than noise slower on the other. Causal prompts by benchmarks/llm_speed.py:
    at 2048 tokens and half of the heads `packed` 1.07 to 1.23 of dense attention's speed, `masked` 0.95 to 1.00. One
    image of DiT-S at half of its heads by its timestep: 0.90 of dense attention's time.
    """
    # Other processors get the limits measured with AMX, because these are the more careful ones.
    without_amx = isa() == "avx512" and not torch.cpu._is_amx_tile_supported()
    name = "limits_avx512.json" if without_amx else "limits_amx.json"
    return checked(json.loads(Path(__file__).with_name(name).read_bytes()))


@functools.cache
def gpu_name() -> Optional[str]:
    """The name of the current GPU, None without one."""
    if not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.get_device_name()
    except RuntimeError:  # a process that was forked from one with a GPU may not ask
        return None


def table_path(gpu: Optional[str] = "here") -> Path:
    """Where the table is kept that was measured with this torch, processor, GPU and source code of the operators.

    gpu: its name, which the file's name has in it; None: a table without a GPU; "here": of this machine.
    """
    gpu = gpu_name() if gpu == "here" else gpu
    place, digest = cache_folder() / "tables", hashlib.sha256(processor().encode())
    if gpu is None:
        return place / f"{key()}-{digest.hexdigest()[:8]}.json"
    for source in sorted(Path(kernels.__file__).parent.glob("gpu/*.py")):
        digest.update(b"\0" + source.read_bytes())
    name = re.sub(r"[^0-9A-Za-z]+", "-", gpu)
    return place / f"{key()}-{digest.hexdigest()[:8]}-{name}.json"


def processor() -> str:
    """The name of the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
