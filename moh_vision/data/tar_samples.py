"""Members of webdataset shards, read at random through an index."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Iterator, Optional, Sequence

from moh_vision.data.decode import UnreadableImage
from moh_vision.data.tar_index import read_index, scan, write_index

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
        for path in self.paths:
            if not path.is_file():
                raise ValueError(f"{path}: not a file, expected a shard")
        self._stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in self.paths]
        meta, arrays = self._index(folder, split, Path(index_dir) if index_dir else None)
        self.shard_sizes = tuple(meta["samples"])
        self.shard, self.offset, self.bytes, self.labels = (arrays[k] for k in ("shard", "offset", "size", "label"))
        names = folder / "classes.txt"
        if names.exists():
            self.classes = _class_names(names)
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
        """The member of a sample.

        Raises:
            UnreadableImage: if the shard is gone, or another than when its index was made.
        """
        shard, size = int(self.shard[index]), int(self.bytes[index])
        try:
            data = os.pread(self._file(shard), size, int(self.offset[index]))
        except OSError as error:
            raise UnreadableImage(f"{self.where(index)}: {error.strerror}") from None
        if len(data) != size:
            raise UnreadableImage(f"{self.where(index)}: {len(data)} bytes of {size} are there; the shard is damaged")
        return data

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
            descriptor = os.open(self.paths[shard], os.O_RDONLY)
            found = os.fstat(descriptor)
            if (found.st_size, found.st_mtime_ns) != self._stats[shard][1:]:
                os.close(descriptor)
                raise UnreadableImage(f"{self.paths[shard]}: the shard has changed since its index was made")
            self._files[shard] = descriptor
        return self._files[shard]

    def _index(self, folder: Path, split: str, index_dir: Optional[Path]):
        places = [folder / f".{split}.index.safetensors"]
        if index_dir is not None:
            which = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]  # other folders have the same name
            places.append(index_dir / f"{folder.name}-{which}.{split}.index.safetensors")
        for place in places:
            if place.exists():
                return read_index(place, self._stats)
        arrays, samples = scan(self.paths, self.extensions, self.what)
        meta = dict(shards=self._stats, samples=samples)
        # The mode is asked too, because root may write into folders that are meant to be read-only.
        writable = folder.stat().st_mode & stat.S_IWUSR and os.access(folder, os.W_OK)
        place = places[0] if writable else places[-1]
        if writable or index_dir is not None:
            write_index(place, meta, arrays)
        return meta, arrays


def _class_names(file: Path) -> list:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error})") from None
