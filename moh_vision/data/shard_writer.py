"""Write shards so that the same command resumes after a kill: all are planned first, and each is whole or not there."""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from moh_vision.common.io import check_pread, sha256_of, write_whole
from moh_vision.common.progress import say
from moh_vision.data.folder import one_line
from moh_vision.data.records import FORMAT, parts_path, read_record
from moh_vision.data.splits import outline

INPUT = "sha256 of the input"  # a key of a record's made_from


def plan_shards(
    split: str,
    ending: str,
    names: Iterable[str],
    most: int,
    seed: int,
) -> dict[str, list[int]]:
    """Spread shuffled samples evenly over shards; return file name of each shard -> sample indices.

    Args:
        split, ending: parts of the file names, {split}-{number}.{ending}.
        names: of the samples; the order depends on them.
        most: samples of a shard, at most.
        seed: of the shuffle.
    """
    # Shuffle by sorting hashes of the names: unlike a generator, no new version of a library changes this order.
    hashes = [hashlib.sha256(os.fsencode(f"{seed}/{name}")).digest() for name in names]
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    count = -(-len(order) // most)
    starts = [i * len(order) // count for i in range(count + 1)]
    return {f"{split}-{i:06d}.{ending}": order[starts[i] : starts[i + 1]] for i in range(count)}


class ShardWriter:
    """Writes the record of the shards of one split; a subclass or caller writes the shards.

    As soon as a shard is whole, its entry (shard, samples, bytes, sha256, and bad: a list of [which, reason]) is kept in a
    hidden folder. At the end all entries go into the record. Shards in the folder that were made with other options, or
    from images with other classes or files, are refused.

    Args:
        record: path of the record; the shards are in the same folder.
        plan: file name of each shard -> sample indices.
        images: the source.
        options: name -> value; shards made with other options are refused.
        more: further keys of the record, with their values.
    """

    def __init__(
        self, record: Path, plan: dict[str, list], images, options: dict[str, object], **more
    ):
        self.out = record.parent
        check_pread(self.out)  # by which shards are read back
        self.record = record
        self.plan = plan
        self.split = record.name.partition(".")[0]
        listed = outline(images, images.identities())
        counts = {
            f"images of class {name}": count
            for name, count in zip(listed["classes"], listed["samples"])
        }
        made_from = {**options, **counts, INPUT: listed["sha256"]}
        self.header = dict(format=FORMAT, made_from=made_from, **more)
        self.parts = parts_path(record)
        self.entries = self._earlier()
        # Refuse files that this command did not write: without its record any of the split's, else shards alone.
        patterns = [f"{self.split}[-.]*", f".{self.split}-*"]
        if record.exists():
            patterns = [f"{self.split}-*{Path(next(iter(plan))).suffix}"]
        found = {path.name for pattern in patterns for path in self.out.glob(pattern)}
        strangers = found - self.entries.keys()
        if strangers:
            raise ValueError(
                f"--out {self.out} holds {min(strangers)}, which this command did not write; take another folder"
            )

    def _earlier(self) -> dict[str, dict]:
        """Return the entries of an earlier run of the same command; raise ValueError if another wrote the shards."""
        if not self.record.exists():
            return {}
        record = read_record(self.record, unfinished=True)
        before = record["made_from"]
        now = self.header["made_from"]
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        # Until the first shard is finished, nothing depends on options and input.
        if changed and record["shards"]:
            changes = [f"{key} was {before.get(key)}, now {now.get(key)}" for key in changed]
            if changed == [INPUT]:
                changes.append(
                    "its files have other names, sizes or times (cp -a copies files with their times)"
                )
            raise ValueError(
                f"--out {self.out} holds shards of other arguments or another input: {'; '.join(changes)}. Take another folder"
            )
        return record["shards"]

    def begin(self, threads: int) -> list[str]:
        """Check the sums of existing shards; return the names of the shards to write, missing or damaged ones."""
        existing = {
            name: entry
            for name, entry in self.entries.items()
            if name in self.plan and (self.out / name).exists()
        }
        if existing:
            say(
                f"{self.split}: {len(existing)} of {len(self.plan)} shards are there, checking them"
            )
        with ThreadPoolExecutor(threads) as pool:
            sums = dict(zip(existing, pool.map(lambda name: sha256_of(self.out / name), existing)))
        for name, sha256 in sums.items():
            if sha256 != existing[name]["sha256"]:
                say(f"{self.split}: {name} does not have its recorded sha256; it is written again")
                del existing[name]
        self.entries = existing
        todo = [name for name in self.plan if name not in existing]
        if todo:
            # The record is unfinished until `end`: the entries so far are in the hidden folder.
            for entry in existing.values():
                self._keep(entry)
            self._write(None)
        return todo

    def finish(self, name: str, file: BinaryIO, samples: int, bad: list[list]) -> dict:
        """Record a shard that is written but not yet renamed by `whole_file`; return its entry."""
        if not samples:
            raise ValueError(
                f"every image of shard {name} is bad; the first: {bad[0][0]}: {bad[0][1]}"
            )
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        # Record before renaming: after a kill in between, a shard without entry would count as another command's.
        return self._keep(dict(shard=name, samples=samples, bytes=size, sha256=sha256, bad=bad))

    @property
    def bad(self) -> list[list]:
        """List [which, reason] of each bad image of the shards in `entries`."""
        return [bad for entry in self.entries.values() for bad in entry["bad"]]

    def end(self) -> None:
        """Write the record with the `entries` of all shards, and the list of bad images."""
        self.entries = {name: self.entries[name] for name in self.plan}
        if self.bad:
            lines = (f"{one_line(str(which))}\t{one_line(reason)}\n" for which, reason in self.bad)
            write_whole(self.out / f"{self.split}.bad.txt", "".join(lines))
        self._write(list(self.entries.values()))
        shutil.rmtree(self.parts, ignore_errors=True)

    def report(self, images: str, origin: str) -> None:
        """Print a line on the split: `images` in words, shards, bytes and `origin`, whether written now or before."""
        size = sum(entry["bytes"] for entry in self.entries.values()) / 1e6
        line = f"{self.split}: {images} in {len(self.entries)} shards, {size:.1f} MB, {origin}"
        if self.bad:
            line += f"; {len(self.bad)} bad images left out, {self.split}.bad.txt"
        say(line)

    def _keep(self, entry: dict) -> dict:
        write_whole(self.parts / f"{entry['shard']}.json", json.dumps(entry))
        return entry

    def _write(self, shards: list[dict] | None) -> None:
        text = json.dumps(dict(self.header, shards=shards), indent=1, ensure_ascii=False)
        write_whole(self.record, text + "\n")


def end_with(parent: int) -> None:
    """Exit this process when its parent is gone; it would go on or wait forever, and keep the folder's lock."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
