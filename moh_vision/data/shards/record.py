"""The record of the shards that a command has written."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, TypeVar

from moh_vision.data.decode import allowed_bad, fraction_for
from moh_vision.data.shard_files import RECORD_FORMAT, read_record, record_path
from moh_vision.engine.io import give_name, hidden_path, sha256_of, write_whole

T = TypeVar("T")


class BadLimit(NamedTuple):
    """How many images may be bad: a share of those there are."""

    share: float
    images: int

    def check(self, bad: int, latest: str) -> None:
        """Raise ValueError if `bad` images are more than may be; `latest` says what is wrong with one of them."""
        if bad > allowed_bad(self.share, self.images):
            raise ValueError(
                f"{latest}; {bad} bad of {self.images} images, more than --max-bad-fraction {self.share:g} allows; "
                f"{fraction_for(bad, self.images)} allows those found so far, and finished shards are kept"
            )


def plan_shards(split: str, samples: Iterable[T], name: Callable[[T], str], most: int, seed: int) -> Dict[str, List[T]]:
    """File name of every shard -> its samples: shuffled, and spread evenly over the shards.

    Args:
        name: of a sample.
        most: samples in a shard.
        seed: of the shuffle.
    """
    # Sorted by a hash of the name: a shuffle that no library's next version changes.
    order = sorted(samples, key=lambda sample: hashlib.sha256(os.fsencode(f"{seed}/{name(sample)}")).digest())
    count = -(-len(order) // most)
    starts = [i * len(order) // count for i in range(count + 1)]
    return {f"{split}-{i:06d}.tar": order[starts[i] : starts[i + 1]] for i in range(count)}


class ShardRecord:
    """`{split}.shards.jsonl`: a line with format, arguments and input, then a line a finished shard.

    While shards are written lines are added as they finish (`lines`), so that a kill loses at most the last; `close`
    puts them in order. Where several processes write shards, each adds its lines to a `RecordPart` of its own, and
    they are taken over here. Entries are dicts with shard (file name), samples, bytes, sha256 and bad ([path, reason]
    each).

    Args:
        out: folder of the shards.
        split: name of the split.
        arguments: what determines the shards; a record with others is refused. Of a dict with a sha256 only that counts.
        classes: class -> [number of images, digest], of the input listing.

    Raises:
        ValueError: if the record is of another conversion, or the folder has shards of this split without a record.
    """

    def __init__(self, out: Path, split: str, arguments: Dict[str, object], classes: Dict[str, list]):
        self.out, self.split, self.path = out, split, record_path(out, split)
        self.header = dict(format=RECORD_FORMAT, **arguments, classes=classes)
        self.entries: Dict[str, dict] = {}
        recorded = self.path.exists()
        if recorded:
            self._read()
        strangers = sorted(p.name for p in out.glob(f"{split}-*.tar") if p.name not in self.entries)
        if not recorded:
            others = (f"{split}.files.txt", f"{split}.bad.txt", f"{split}.latents.json", f".{split}.index.safetensors")
            strangers += [name for name in others if (out / name).exists()]
        if strangers:
            raise ValueError(f"--out {out} holds {strangers[0]}, which this command did not write; take another folder")

    def _read(self) -> None:
        try:
            header, entries = read_record(self.path, *self._parts())
            self.entries = {entry["shard"]: entry for entry in entries}
            found = _differences(header, self.header)
        except Exception as error:  # what is not there, or of another kind, fails anywhere
            raise ValueError(f"{self.path} is not a record of shards that can be read: {error}") from None
        if found and entries:  # before the first shard is finished nothing depends on them
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            raise ValueError(
                f"--out {self.path.parent} holds shards of other arguments or another input: "
                f"{'; '.join(found[:5])}{more}. Take another folder"
            )

    def finished(self, names: Collection[str], threads: int, say: Callable[[str], None]) -> Dict[str, dict]:
        """Entries of the shards among `names` that are there with their recorded sum; damaged ones are moved aside."""
        there = {n: e for n, e in self.entries.items() if n in names and (self.out / n).exists()}
        if there:
            say(f"{self.split}: {len(there)} of {len(names)} shards are there, checking them")
        with ThreadPoolExecutor(threads) as pool:
            sums = dict(zip(there, pool.map(lambda name: sha256_of(self.out / name), there)))
        for name in [n for n, entry in there.items() if sums[n] != entry["sha256"]]:
            aside = _free_name(self.out / f"{name}.damaged")
            say(f"{self.split}: {name} does not have its recorded sha256; moved to {aside.name}, written again")
            (self.out / name).rename(aside)
            del there[name]
        return there

    def start(self, todo: Collection[str]) -> None:
        """Write the record if there is none, without a line that a kill tore, and take over the parts of others.

        Args:
            todo: shards that are going to be written.
        """
        self._write(list(self.entries.values()))
        self.lines = RecordPart(self.path)
        if todo:
            (self.out / f".{self.split}.index.safetensors").unlink(missing_ok=True)  # it would no longer fit

    def close(self, entries: List[dict]) -> None:
        """Write the record anew with these entries, the final ones, and the list of bad images."""
        bad = [f"{one_line(str(which))}\t{one_line(reason)}\n" for entry in entries for which, reason in entry["bad"]]
        if bad:
            write_whole(self.out / f"{self.split}.bad.txt", "".join(bad))
        self.lines.close()
        self._write(entries)

    def _write(self, entries: List[dict]) -> None:
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in (self.header, *entries)))
        for part in self._parts():
            part.unlink()

    def _parts(self) -> List[Path]:
        return sorted(self.out.glob(part_path(self.out, self.split, "*").name))


def part_path(out: Path, split: str, rank) -> Path:
    """Where process number `rank` records the shards that it has finished, beside the main record."""
    return out / f".{split}.shards.{rank}.jsonl"


class RecordPart:
    """Lines that are added to a record as shards finish."""

    def __init__(self, path: Path):
        self.out, self.file = path.parent, open(path, "a", encoding="utf-8")

    def add(self, entry: dict) -> None:
        """A shard is finished: record it, then give it its name; on return the disk knows both."""
        # Recorded before it is renamed: a shard without a record would be a stranger's.
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        shard = self.out / entry["shard"]
        give_name(hidden_path(shard), shard)

    def close(self) -> None:
        self.file.close()


def _differences(saved: dict, asked: dict) -> List[str]:
    found = []
    for key in {**asked, **saved}:
        old, new = saved.get(key), asked.get(key)
        if key != "classes" and _essence(old) != _essence(new):
            found.append(f"--{key.replace('_', '-')} was {_shown(old)}, now {_shown(new)}")
    old, new = saved["classes"], asked["classes"]
    found += [f"class {name} is new" for name in new if name not in old]
    found += [f"class {name} is gone" for name in old if name not in new]
    for name in (n for n in new if n in old and new[n] != old[n]):
        counts = f"{old[name][0]} images, now {new[name][0]}"
        found.append(f"class {name} has other files ({counts})")
    return found


def _essence(value):
    return value["sha256"] if isinstance(value, dict) else value


def _shown(value) -> str:
    return f"{value['name']} (sha256 {value['sha256'][:12]})" if isinstance(value, dict) else str(value)


def _free_name(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number, free = number + 1, path.with_name(f"{path.name}.{number}")
    return free


def one_line(path: str) -> str:
    """A file name on one line of UTF-8."""
    return path.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n").replace("\t", "\\t")
