"""The record of written shards: SPLIT.shards.json, or SPLIT.meta.json of latents."""

import json
from pathlib import Path

from moh_vision.engine.commands import reason_of

FORMAT = 2
KINDS = dict(shard=str, samples=int, bytes=int, sha256=str, bad=list)  # of a shard's entry


def record_path(folder: Path, split: str) -> Path:
    """Return where `python -m moh_vision shards` records a split."""
    return folder / f"{split}.shards.json"


def parts_path(record: Path) -> Path:
    """Return the folder that holds the entries of finished shards while others are missing."""
    return record.with_name(f".{record.name}.parts")


def read_record(path: Path, unfinished: bool = False) -> dict:
    """Read a record: format, made_from, and `shards`: the entries of all, or of an `unfinished` one those so far."""
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, this version reads {FORMAT}")
        record["made_from"] = dict(record["made_from"])
        if record["shards"] is None and unfinished:
            parts = sorted(parts_path(path).glob("*.json"))
            record["shards"] = [json.loads(file.read_text("utf-8")) for file in parts]
        _check_entries(record["shards"] or [])
    except Exception as error:  # what is missing or of another kind fails anywhere
        raise ValueError(f"{path} is not a record of shards that can be read: {reason_of(error)}") from None
    if record["shards"] is None:
        raise ValueError(
            f"{path}: the shards are not all there yet; the command that writes them goes on where it stopped"
        )
    return record


def _check_entries(entries: list[dict]) -> None:
    """Raise an error unless these are entries of shards, with [which, reason] of each bad image."""
    for entry in entries:
        for key, kind in KINDS.items():
            if type(entry[key]) is not kind or kind is int and not 0 < entry[key] < 2**48:
                raise ValueError(f"{key} is {entry[key]!r}")
        for which, reason in entry["bad"]:
            if not isinstance(which, str | int) or not isinstance(reason, str):
                raise ValueError(f"bad holds {which!r}, {reason!r}")


def entries_for(path: Path, record: dict, shards: list[Path]) -> dict[str, dict]:
    """Return the entries of a record by the names of the shards; raise ValueError that names one too few or too many."""
    entries, names = {entry["shard"]: entry for entry in record["shards"]}, {shard.name: shard for shard in shards}
    if gone := entries.keys() - names.keys():
        raise ValueError(f"{min(gone)} of {path} is gone")
    if more := names.keys() - entries.keys():
        raise ValueError(f"{names[min(more)]} is not in {path.name}")
    return entries


def refuse_difference(
    shard: object,
    size: int,
    samples: int,
    entry: dict,
    record: Path,
) -> None:
    """Raise ValueError, naming a shard, unless it has the bytes and samples that the record says."""
    if (size, samples) != (entry["bytes"], entry["samples"]):
        raise ValueError(
            f"{shard}: {size} bytes, {samples} samples; {record.name} says {entry['bytes']} and {entry['samples']}"
        )
