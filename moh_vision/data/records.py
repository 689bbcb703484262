"""The record of written shards: SPLIT.shards.json, or SPLIT.meta.json of latents."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from moh_vision.common.errors import reason_of
from moh_vision.common.io import kept_beside, sha256_of, write_whole
from moh_vision.common.progress import Progress

FORMAT = 2
# The keys of a shard's entry, and the types of their values.
ENTRY_TYPES = dict(shard=str, samples=int, bytes=int, sha256=str, bad=list)


def record_path(folder: Path, split: str) -> Path:
    """Return where `python -m moh_vision shards` records a split."""
    return folder / f"{split}.shards.json"


def parts_path(record: Path) -> Path:
    """Return the folder that holds the entries of finished shards until all shards are finished."""
    return record.with_name(f".{record.name}.parts")


def read_record(path: Path, unfinished: bool = False) -> dict:
    """Read a record as a dict: format, made_from, and shards (name -> entry).

    A record without all of its shards is refused or, with `unfinished`, read with the shards finished so far.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, this version reads {FORMAT}")
        record["made_from"] = dict(record["made_from"])
        entries = record["shards"]
        if entries is None and not unfinished:
            raise ValueError(
                "some are not written yet; the command that writes them goes on where it stopped"
            )
        if entries is None:
            files = sorted(parts_path(path).glob("*.json"))
            entries = [json.loads(file.read_text("utf-8")) for file in files]
        record["shards"] = {entry["shard"]: _checked(entry) for entry in entries}
    except Exception as error:  # a damaged record may lack a key or hold another type
        raise ValueError(
            f"{path} is not a record of shards that can be read: {reason_of(error)}"
        ) from None
    return record


def check_sums(record: Path, files: Mapping[str, tuple[Sequence[Path], str]]) -> None:
    """Raise ValueError, naming a file, unless files have the SHA-256 that a record says.

    A file is hashed again only if its size or its time of change is new: sums that were right are kept in a file beside
    the record, or in the user's cache.

    Args:
        record: path of the record.
        files: name -> (paths, the expected SHA-256 of their concatenated bytes).
    """
    kept = _sums_file(record)
    now = {name: _identity(paths, expected) for name, (paths, expected) in files.items()}
    known = _read_sums(kept)
    new = [name for name in now if known.get(name) != now[name]]
    for name in Progress.over(new, f"checking {record.name}", "file"):
        paths, expected = files[name]
        if sha256_of(*paths) != expected:
            raise ValueError(
                f"{paths[0]}: changed since it was written, its sha256 is not that of {record}; bring it back, or write "
                "it again"
            )
    if new:
        write_whole(kept, json.dumps(known | now) + "\n", shared=True)


def _sums_file(record: Path) -> Path:
    return kept_beside(record.parent, f".{record.name}.sums.json")


def _identity(paths: Sequence[Path], expected: str) -> list:
    statuses = [path.stat() for path in paths]
    return [[[status.st_size, status.st_mtime_ns] for status in statuses], expected]


def _read_sums(kept: Path) -> dict:
    """Read the sums that `check_sums` has kept; {} if there is no such file, or it is damaged."""
    try:
        return dict(json.loads(kept.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _checked(entry: dict) -> dict:
    """Return the entry of a shard; raise ValueError for a value of another type, or a number out of range."""
    for key, expected in ENTRY_TYPES.items():
        value = entry[key]
        if type(value) is not expected:  # isinstance would take True for a number
            raise ValueError(f"{key} is {value!r}")
        if expected is int and not 0 < value < 2**48:
            raise ValueError(f"{key} is {value!r}")
    for which, reason in entry["bad"]:
        if not isinstance(which, str | int) or not isinstance(reason, str):
            raise ValueError(f"bad holds {which!r}, {reason!r}")
    return entry


def entries_for(path: Path, record: dict, shards: list[Path]) -> dict[str, dict]:
    """Return the entries of a record by the names of the shards.

    Raise ValueError, naming a shard, unless the record has exactly `shards`; `path` is the record's.
    """
    entries = record["shards"]
    odd = sorted(entries.keys() ^ {shard.name for shard in shards})
    if odd:
        problem = "is gone" if odd[0] in entries else "is not in it"
        raise ValueError(f"{path}: {odd[0]} {problem}")
    return entries


def refuse_difference(
    shard: object,
    size: int,
    samples: int,
    entry: dict,
    record: Path,
) -> None:
    """Raise ValueError, naming a shard, unless it has the bytes and samples that the record says.

    Args:
        shard: path or URL.
        size, samples: bytes and samples that were found.
        entry: what the record says of the shard.
        record: path of the record, for the message.
    """
    if (size, samples) != (entry["bytes"], entry["samples"]):
        raise ValueError(
            f"{shard}: {size} bytes, {samples} samples; {record.name} says {entry['bytes']} and {entry['samples']}"
        )
