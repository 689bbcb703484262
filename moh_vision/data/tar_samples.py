"""Members of webdataset shards, read at random through an index."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

INDEX_FORMAT = "1"
MAX_OPEN_SHARDS = 16


class TarSamples:
    """A folder of webdataset shards `{split}-*.tar` whose samples are one member and a .cls file with the label.

    webdataset itself only streams; an index of member offsets, built once, makes any sample readable by one pread, so
    that the order of a run can be a pure function. The index records each shard's size and time; a shard that changed
    since is refused. Class names come from classes.txt (one a line) or are the numbers 0 .. largest label.

    Args:
        root: the folder.
        split: "train" or "val".
        index_dir: where the index goes if the folder is read-only.

    Raises:
        ValueError, FileNotFoundError: naming the folder, shard or member.
    """

    what: str  # a sample's member, in errors
    extensions: Sequence[str]  # those it may have

    def __init__(self, root: str, split: str, index_dir: Optional[str] = None):
        folder = Path(root)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data.root {root}: no such folder (give a folder of {split}-*.tar shards, or 'digits')"
            )
        self.name = folder.name
        self.paths = sorted(folder.glob(f"{split}-*.tar"))
        if not self.paths:
            raise FileNotFoundError(f"data.root {root}: no {split}-*.tar shards in it")
        meta, arrays = self._index(folder, split, Path(index_dir) if index_dir else None)
        self.shard_sizes = tuple(meta["samples"])
        self.shard, self.offset, self.bytes, self.labels = (arrays[k] for k in ("shard", "offset", "size", "label"))
        names = folder / "classes.txt"
        if names.exists():
            self.classes = [line.strip() for line in names.read_text(encoding="utf-8").splitlines() if line.strip()]
            if self.labels.max() >= len(self.classes):
                worst = int(self.labels.argmax())
                raise ValueError(
                    f"{self.paths[self.shard[worst]]}: label {self.labels[worst]}, but {names} names {len(self.classes)} classes"
                )
        else:
            self.classes = [str(c) for c in range(int(self.labels.max()) + 1)]
        self._files: OrderedDict = OrderedDict()

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """The member of a sample."""
        shard = int(self.shard[index])
        return os.pread(self._file(shard), int(self.bytes[index]), int(self.offset[index]))

    def where(self, index: int) -> str:
        """Names a sample in errors."""
        return f"{self.paths[self.shard[index]]}, {self.what} at byte {self.offset[index]}"

    def identities(self) -> Iterator[bytes]:
        """For each sample what tells it from a changed one: its place, and its shard's size and time."""
        shards = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths]
        for shard, offset, size in zip(self.shard.tolist(), self.offset.tolist(), self.bytes.tolist()):
            yield repr((shards[shard], offset, size)).encode()

    def _file(self, shard: int) -> int:
        """An open descriptor, among the last few: there may be more shards than a process may open."""
        if shard in self._files:
            self._files.move_to_end(shard)
        else:
            if len(self._files) >= MAX_OPEN_SHARDS:
                os.close(self._files.popitem(last=False)[1])
            self._files[shard] = os.open(self.paths[shard], os.O_RDONLY)
        return self._files[shard]

    def _index(self, folder: Path, split: str, index_dir: Optional[Path]):
        stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in self.paths]
        places = [folder / f".{split}.index.safetensors"]
        if index_dir is not None:
            which = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]  # other folders have the same name
            places.append(index_dir / f"{folder.name}-{which}.{split}.index.safetensors")
        for place in places:
            if place.exists():
                return _read_index(place, stats)
        arrays, samples = _scan(self.paths, self.extensions, self.what)
        meta = dict(shards=stats, samples=samples)
        # The mode is asked too, because root may write into folders that are meant to be read-only.
        writable = folder.stat().st_mode & stat.S_IWUSR and os.access(folder, os.W_OK)
        place = places[0] if writable else places[-1]
        if writable or index_dir is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            hidden = place.with_name(f"{place.name}.{os.getpid()}.tmp")
            save_file(arrays, hidden, metadata={"format": INDEX_FORMAT, "meta": json.dumps(meta)})
            hidden.chmod(0o644)  # safetensors writes 0600, and others may share the folder
            hidden.rename(place)
        return meta, arrays


def _read_index(place: Path, stats: List[Tuple[str, int, int]]):
    with safe_open(place, "numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != INDEX_FORMAT:
            raise ValueError(f"{place}: not an index of this version; delete it to build it again")
        meta = json.loads(metadata["meta"])
        arrays = {k: file.get_tensor(k) for k in file.keys()}
    recorded = {name: (size, mtime) for name, size, mtime in meta["shards"]}
    for name, size, mtime in stats:
        if recorded.pop(name, None) != (size, mtime):
            raise ValueError(
                f"shard {name} was added or changed since the index {place} was made; delete the index to build it again"
            )
    if recorded:
        raise ValueError(
            f"shard {next(iter(recorded))} of the index {place} is gone; delete the index to build it again"
        )
    return meta, arrays


def _scan(paths: List[Path], extensions: Sequence[str], what: str):
    rows, samples = [], []
    for number, path in enumerate(paths):
        found: dict = {}
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    if not member.isreg():
                        continue
                    parent, _, base = member.name.rpartition("/")
                    stem, _, extension = base.partition(".")  # webdataset: up to the first dot of the base name
                    key = f"{parent}/{stem}"
                    entry = found.setdefault(key, {})
                    if extension.lower() in extensions:
                        entry[what] = (member.offset_data, member.size)
                    elif extension == "cls":
                        text = tar.extractfile(member).read(32).decode("ascii", "replace").strip()
                        if not text.isdigit():
                            raise ValueError(
                                f"{path}: {member.name} holds {text!r}, expected a class number of 0 or more"
                            )
                        entry["label"] = int(text)
        except tarfile.TarError as error:
            raise ValueError(f"{path}: not a readable tar file ({error})") from None
        for key, entry in found.items():
            if set(entry) != {what, "label"}:
                missing = what if what not in entry else ".cls file"
                raise ValueError(f"{path}: sample {key.removeprefix('/')} has no {missing}")
            rows.append((number, *entry[what], entry["label"]))
        samples.append(len(found))
    if not rows:
        raise ValueError(f"{paths[0].parent}: the shards hold no samples")
    table = np.array(rows, dtype=np.int64)
    arrays = {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(("shard", "offset", "size", "label"))}
    return arrays, samples
