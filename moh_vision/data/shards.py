"""Images in webdataset shards, read at random through an index of each shard."""

import json
import os
import tarfile
from collections.abc import Collection, Iterator
from functools import lru_cache
from io import FileIO
from pathlib import Path

import numpy as np

from moh_vision.common.errors import reason_of
from moh_vision.common.io import (
    check_pread,
    class_names,
    places_beside,
    sha256_of,
    whole_file,
    writable_place,
)
from moh_vision.common.progress import Progress
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.folder import refuse_special
from moh_vision.data.records import entries_for, read_record, record_path, refuse_difference
from moh_vision.data.sources import MAX_CLASSES, MIDDLE, ImageSource, middle_of
from moh_vision.data.tars import (
    IMAGE_EXTENSIONS,
    LABEL_EXTENSIONS,
    ending_with,
    members,
    open_tar,
    sample_of,
)

MAX_OPEN_SHARDS = 16
INDEX_FORMAT = 2
NAME_RULE = "a sample is what its files' names have before the first dot: a.b.jpg is of sample a"


class Shards(ImageSource):
    """A folder of webdataset shards `{split}-*.tar` whose samples are an image and a .cls file with the label.

    webdataset itself only streams; with the index, one pread reads any sample. Classes come from classes.txt (one a
    line) or are the numbers 0 .. largest label; if no image has a .cls file, there are no classes.
    """

    takes = "a folder of shards train-*.tar and val-*.tar (URLs of shards go into data.stream)"

    @classmethod
    def opens(cls, root: str) -> bool:
        return bool(cls.splits(root))

    @classmethod
    def splits(cls, root: str) -> Collection[str]:
        return [split for split in ("train", "val") if any(Path(root).glob(f"{split}-*.tar"))]

    def __init__(self, root: str, split: str):
        folder = Path(root)
        check_pread(folder)
        self.folder = folder
        self.split = split
        self.name = folder.name
        self.paths = sorted(folder.glob(f"{split}-*.tar"))
        for path in self.paths:
            refuse_special(path)
        record = record_path(folder, split)
        self._entries = None  # of the record, by the names of the shards
        if record.exists():
            self._entries = entries_for(record, read_record(record), self.paths)
        self._stats = [
            (status.st_size, status.st_mtime_ns) for status in map(Path.stat, self.paths)
        ]
        tables, self.remarks = self._tables(folder, record)
        self.shard_sizes = tuple(map(len, tables))
        if not sum(self.shard_sizes):
            raise ValueError(f"{folder}: the shards hold no samples")
        self._ends = np.cumsum(self.shard_sizes)  # of each shard: the index after its last sample
        self.offset = np.concatenate([table[:, 0] for table in tables])
        self.bytes = np.concatenate([table[:, 1] for table in tables])
        self.labels = np.concatenate([table[:, 2] for table in tables])
        names_file = folder / "classes.txt"
        numbers = range(int(self.labels.max()) + 1)
        self.numbered = not names_file.exists()
        if self.numbered:
            self.classes = [str(c) for c in numbers]
        else:
            self.classes = class_names(names_file)
        if self.classes or numbers:
            self.check_labels(folder if self.numbered else names_file)
        else:  # all labels are -1, and classes.txt is empty or missing
            self.labels = np.zeros_like(self.labels)

    def _tables(self, folder: Path, record: Path) -> tuple[list[np.ndarray], list[str]]:
        """Return offsets, sizes and labels of each shard, and remarks; write the indexes that are missing or stale."""
        tables = []
        found: dict[str, list[Path]] = {"kept": [], "hashed": [], "stale": [], "new": []}
        shards = list(zip(self.paths, self._stats))
        for path, size_and_time in Progress.over(shards, "indexing", "shard"):
            entry = None
            if self._entries is not None:
                entry = self._entries[path.name]
            table, origin = _table_of(path, size_and_time, entry, record)
            found[origin].append(path)
            if entry is not None:
                refuse_difference(path, size_and_time[0], len(table), entry, record)
            # Write the index after the comparison, so that a shard that the record refuses is read again next time.
            if origin != "kept":
                _write_index(index_file(path), size_and_time, table)
            tables.append(table)
        return tables, _on_new_times(folder, found, record)

    def _shard(self, index: int) -> int:
        """Return the number of the shard that holds a sample."""
        return int(np.searchsorted(self._ends, index, "right"))

    def _pread(self, index: int, size: int, offset: int) -> bytes:
        shard = self._shard(index)
        # Keep a reference: the cache may drop the file in another thread, which would close it.
        file = _opened(self.paths[shard], self._stats[shard])
        return os.pread(file.fileno(), size, offset)

    def read(self, index: int) -> bytes:
        size = int(self.bytes[index])
        try:
            data = self._pread(index, size, int(self.offset[index]))
        except OSError as error:
            raise UnreadableImage(f"{self.where(index)}: {error.strerror}") from None
        if len(data) != size:
            raise UnreadableImage(
                f"{self.where(index)}: {len(data)} bytes of {size} are there; the shard is damaged"
            )
        return data

    def size_and_middle(self, index: int) -> tuple[int, bytes]:
        size = int(self.bytes[index])
        start = int(self.offset[index]) + middle_of(size)
        try:
            return size, self._pread(index, min(size, MIDDLE), start)
        except OSError as error:
            raise UnreadableImage(f"{self.where(index)}: {error.strerror}") from None

    def file_names(self) -> list[str] | None:
        """Return the files in SPLIT.files.txt, which `python -m moh_vision shards` writes; None without it."""
        listing = self.folder / f"{self.split}.files.txt"
        if not listing.is_file():
            return None
        text = listing.read_text("utf-8", "backslashreplace")  # other bytes do not raise
        names = text.removesuffix("\n").split("\n")  # splitlines would also split at U+2028
        if len(names) != len(self):
            raise ValueError(
                f"{listing}: {len(names)} files, but the shards hold {len(self)} images"
            )
        return names

    def where(self, index: int) -> str:
        offset = int(self.offset[index])
        try:
            header = self._pread(index, tarfile.BLOCKSIZE, offset - tarfile.BLOCKSIZE)
            name = tarfile.TarInfo.frombuf(header, "utf-8", "replace").name
        except (OSError, UnreadableImage, tarfile.TarError):  # the shard is gone or was replaced
            name = "image"
        return f"{self.paths[self._shard(index)]}, {name} at byte {offset}"

    def sizes(self) -> np.ndarray:
        return self.bytes

    def listing(self) -> Iterator[bytes]:
        yield json.dumps([[path.name for path in self.paths], self.shard_sizes]).encode()
        yield self.offset.tobytes()
        yield self.bytes.tobytes()

    def identities(self) -> Iterator[bytes]:
        if self._entries is None:
            yield json.dumps(self._stats).encode()
        else:  # a copy of the folder has the same sums, but other times
            yield json.dumps([self._entries[path.name]["sha256"] for path in self.paths]).encode()
        yield from self.listing()


def scan(path: Path) -> np.ndarray:
    """Read offset, size and label of each sample of a shard from its headers, int64 [N, 3]; label -1 without a .cls.

    Nothing is extracted; links, devices and folders are passed over, whatever their names say.
    """
    samples: dict[str, dict[str, list]] = {}
    with open_tar(path) as tar:
        for member in members(tar, path, path.stat().st_size):
            sample = sample_of(member.name)
            if sample is None:
                continue
            key, extension = sample
            found = samples.setdefault(key, dict(images=[], labels=[]))
            if ending_with([extension], IMAGE_EXTENSIONS):
                found["images"].append((extension, member.offset_data, member.size))
            elif ending_with([extension], LABEL_EXTENSIONS):
                text = tar.extractfile(member).read(32).decode("ascii", "replace").strip()
                found["labels"].append((extension, text))
    labelled = any(found["labels"] for found in samples.values())
    rows = []
    for key, found in samples.items():
        where = f"{path}: sample {key.removeprefix('/')}"
        _, offset, size = _only(where, "image", found["images"], IMAGE_EXTENSIONS)
        label = -1
        if labelled:
            extension, text = _only(where, ".cls file", found["labels"], LABEL_EXTENSIONS)
            label = _label(f"{path}: {key}.{extension}", text)
        rows.append((offset, size, label))
    return np.array(rows, np.int64).reshape(-1, 3)


def _only(where: str, title: str, files: list[tuple], wanted: Collection[str]) -> tuple:
    """Return the one of a sample's files, (extension, ...), whose extension is wanted; raise ValueError for others."""
    extensions = ending_with([extension for extension, *_ in files], wanted)
    if len(extensions) > 1:
        raise ValueError(
            f"{where} has {len(extensions)} {title}s ({', '.join(extensions)}); {NAME_RULE}"
        )
    if not extensions:
        raise ValueError(f"{where} has no {title}; {NAME_RULE}")
    return next(file for file in files if file[0] == extensions[0])


def _label(where: str, text: str) -> int:
    """Return the class number that the text of a .cls file says."""
    if not text.isdigit() or int(text) >= MAX_CLASSES:
        raise ValueError(
            f"{where} holds {text!r}, expected a class number of 0 to {MAX_CLASSES - 1}"
        )
    return int(text)


# ---------------------------------------------------------------- the index of a shard
# int64 [1 + N, 3] as .npy: first INDEX_FORMAT and the shard's size and time, then offset, size and label of each sample.


def _index_places(shard: Path) -> tuple[Path, Path]:
    """Return where the index of a shard may be: beside it, and in the user's cache."""
    return places_beside(shard.parent, f".{shard.name}.index.npy")


def index_file(shard: Path) -> Path:
    """Return where the index of a shard is written: beside it, or in the user's cache if that cannot be."""
    return writable_place(shard.parent, f".{shard.name}.index.npy")


def _table_of(
    shard: Path, size_and_time: tuple[int, int], entry: dict | None, record: Path
) -> tuple[np.ndarray, str]:
    """Return offsets, sizes and labels of a shard, int64 [N, 3], and where they come from.

    "kept": from the index. "hashed": from the index although the shard has another time now, as a copy has, because its
    sha256 is still that of its `entry` in the record. "stale": from the shard, which has another time now and no entry.
    "new": from the shard, which had no index.
    """
    earlier = None
    for file in filter(Path.exists, _index_places(shard)):
        made_of, table = _read_index(file, size_and_time[0])
        if made_of == size_and_time:
            return table, "kept"
        earlier = (file, made_of, table)
    if earlier is None:
        return scan(shard), "new"
    file, made_of, table = earlier
    problem = f"{shard} was changed since the index {file} was made"
    if made_of[0] != size_and_time[0]:
        raise ValueError(f"{problem}; delete the index to build it again")
    if entry is None:
        return scan(shard), "stale"
    if sha256_of(shard) != entry["sha256"]:
        raise ValueError(
            f"{problem}: it does not have the sha256 of {record.name}; bring it back, or delete both to take it as it is"
        )
    return table, "hashed"


def _on_new_times(folder: Path, found: dict[str, list[Path]], record: Path) -> list[str]:
    """Return remarks on the shards that have another time than their index says."""
    remarks = []
    for origin, then in (
        ("hashed", f"their sha256 is that of {record.name}"),
        ("stale", f"they are indexed anew, since no {record.name} has their sha256"),
    ):
        if found[origin]:
            count = f"{len(found[origin])} of {sum(map(len, found.values()))} shards"
            remarks.append(f"{folder}: {count} have another time than their index; {then}")
    return remarks


def _write_index(file: Path, size_and_time: tuple[int, int], table: np.ndarray) -> None:
    rows = np.concatenate([[(INDEX_FORMAT, *size_and_time)], table])
    with whole_file(file, shared=True) as opened:
        np.save(opened, rows, allow_pickle=False)


def _read_index(file: Path, size: int) -> tuple[tuple[int, int], np.ndarray]:
    """Read an index: size and time of the shard when it was indexed, and offsets, sizes and labels, int64 [N, 3].

    Raise ValueError for an index that is damaged; `size` is that of the shard now.
    """
    try:
        with open(file, "rb") as opened:
            table = np.lib.format.read_array(opened, allow_pickle=False)
        if table.dtype != np.int64 or table.shape[1:] != (3,) or table[0, 0] != INDEX_FORMAT:
            raise ValueError("of another version")
        made_of = tuple(table[0, 1:].tolist())
        table = table[1:]
        offset, length, label = table.T
        outside = (np.minimum(offset, length) < 0) | (offset > size - length)
        wrong = outside | (label < -1) | (label >= MAX_CLASSES)
        if made_of[0] == size and wrong.any():
            raise ValueError(
                f"samples outside of their shard, or labels outside of -1 to {MAX_CLASSES - 1}"
            )
    except Exception as error:  # damaged headers raise exceptions of many classes
        problem = f"not an index that can be read ({reason_of(error)})"
        raise ValueError(f"{file}: {problem}; delete it to build it again") from None
    return made_of, table


@lru_cache(maxsize=MAX_OPEN_SHARDS)  # a process may not open as many files as there are shards
def _opened(shard: Path, size_and_time: tuple[int, int]) -> FileIO:
    """Open a shard for random reads; raise UnreadableImage if it has changed since its index was made."""
    file = open(shard, "rb", buffering=0)
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != size_and_time:
        raise UnreadableImage(f"{shard}: the shard has changed since its index was made")
    return file
