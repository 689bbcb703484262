"""The record of written shards: SPLIT.shards.json, or SPLIT.meta.json of latents."""

from __future__ import annotations

import json
from pathlib import Path

from moh_vision.engine.commands import reason_of

FORMAT = 2
KINDS = dict(shard=str, samples=int, bytes=int, sha256=str, bad=list)  # of a shard's entry


def record_path(folder: Path, split: str) -> Path:
    """Return where `python -m moh_vision shards` records a split."""
    return folder / f"{split}.shards.json"


def read_record(path: Path) -> dict:
    """Read a record: format, made_from, and the entries of all shards; `shards` is None while some are missing."""
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, this version reads {FORMAT}")
        check_entries([] if record["shards"] is None else record["shards"])
    except Exception as error:  # what is missing or of another kind fails anywhere
        raise ValueError(f"{path} is not a record of shards that can be read: {reason_of(error)}") from None
    return record


def check_entries(entries: list[dict]) -> None:
    """Raise an error unless these are entries of shards, with [which, reason] of each bad image."""
    for entry in entries:
        for key, kind in KINDS.items():
            if type(entry[key]) is not kind or kind is int and not 0 < entry[key] < 2**48:
                raise ValueError(f"{key} is {entry[key]!r}")
        for which, reason in entry["bad"]:
            if not isinstance(which, str | int) or not isinstance(reason, str):
                raise ValueError(f"bad holds {which!r}, {reason!r}")


def finished(path: Path) -> dict[str, dict]:
    """Return the entries of a record by the names of the shards."""
    entries = read_record(path)["shards"]
    if entries is None:
        raise ValueError(
            f"{path}: the shards are not all there yet; the command that writes them goes on where it stopped"
        )
    return {entry["shard"]: entry for entry in entries}


def refuse_other_shards(record: Path, entries: dict[str, dict], paths: list[Path]) -> None:
    """Raise ValueError that names a recorded shard which is gone, or one that the record lacks."""
    names = {path.name: path for path in paths}
    if gone := entries.keys() - names.keys():
        raise ValueError(f"{min(gone)} of {record} is gone")
    if more := names.keys() - entries.keys():
        raise ValueError(f"{names[min(more)]} is not in {record.name}")


def refuse_difference(shard: object, size: int, samples: int, entry: dict, record: Path) -> None:
    """Raise ValueError, naming a shard, unless it has the bytes and samples that the record says."""
    if (size, samples) != (entry["bytes"], entry["samples"]):
        raise ValueError(
            f"{shard}: {size} bytes, {samples} samples; {record.name} says {entry['bytes']} and {entry['samples']}"
        )
