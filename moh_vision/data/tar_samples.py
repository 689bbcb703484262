"""Members of webdataset shards, read at random through an index."""

from __future__ import annotations

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Dict, Iterator, Optional, Sequence, Tuple

from moh_vision.data.decode import UnreadableImage
from moh_vision.data.shard_files import ShardFiles, record_path, recorded
from moh_vision.data.tar_index import contradiction, indexed, scan


class TarSamples:
    """A folder of webdataset shards `{split}-*.tar` whose samples are one member and a .cls file with the label.

    webdataset itself only streams; an index of member offsets, built once, makes any sample readable by one pread, so
    that the order of a run can be a pure function. The index records each shard's size and time; a shard that changed
    since is refused, and so is one that is not what its record says, where there is a record. Class names come from
    classes.txt (one a line) or are the numbers 0 .. largest label.

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
        self._files = ShardFiles(self.paths, UnreadableImage)
        agree = partial(self._files.agree, *self._record(folder, split))

        def build():
            arrays, samples = scan(self.paths, self.extensions, self.what)
            agree(samples)  # before the index is kept
            return arrays, samples

        meta, arrays = indexed(folder, f"{split}.index", index_dir, self._files.stats, build, contradiction)
        agree(meta["samples"])
        self.shard_sizes = tuple(meta["samples"])
        self.shard, self.offset, self.bytes, self.labels = (arrays[k] for k in ("shard", "offset", "size", "label"))
        names = folder / "classes.txt"
        if names.exists():
            self.classes = class_names(names)
            if self.labels.max() >= len(self.classes):
                worst = int(self.labels.argmax())
                raise ValueError(
                    f"{self.paths[self.shard[worst]]}: label {self.labels[worst]}, but {names} names {len(self.classes)} classes"
                )
        else:
            self.classes = [str(c) for c in range(int(self.labels.max()) + 1)]

    def _record(self, folder: Path, split: str) -> Tuple[Path, Optional[Dict[str, dict]]]:
        """The record of what was written, and its entries by the names of the shards; None: there is no record."""
        path = record_path(folder, split)
        return path, recorded(path)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """The member of a sample.

        Raises:
            UnreadableImage: if the shard is gone, or another than when its index was made.
        """
        shard, size = int(self.shard[index]), int(self.bytes[index])
        try:
            data = self._files.read(shard, size, int(self.offset[index]))
        except OSError as error:
            raise UnreadableImage(f"{self.where(index)}: {error.strerror}") from None
        if len(data) != size:
            raise UnreadableImage(f"{self.where(index)}: {len(data)} bytes of {size} are there; the shard is damaged")
        return data

    def where(self, index: int) -> str:
        """Names a sample in errors: its shard, its member (100 characters of it where there are more) and byte."""
        shard, offset = int(self.shard[index]), int(self.offset[index])
        try:
            header = self._files.read(shard, tarfile.BLOCKSIZE, offset - tarfile.BLOCKSIZE)
            name = tarfile.TarInfo.frombuf(header, "utf-8", "replace").name
        except (OSError, UnreadableImage, tarfile.TarError):  # the shard is gone, or another
            name = self.what
        return f"{self.paths[shard]}, {name} at byte {offset}"

    def listing(self) -> Iterator[bytes]:
        """Bytes that tell where each sample is: the names of the shards, and the samples' offsets and sizes."""
        yield json.dumps([[path.name for path in self.paths], self.shard_sizes]).encode()
        yield self.offset.tobytes()
        yield self.bytes.tobytes()

    def identities(self) -> Iterator[bytes]:
        """For each sample what tells it from a changed one: its place, and its shard's size and time."""
        shards = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths]
        for shard, offset, size in zip(self.shard.tolist(), self.offset.tolist(), self.bytes.tolist()):
            yield repr((shards[shard], offset, size)).encode()


def class_names(file: Path) -> list:
    """The names in a classes.txt, one a line; raises ValueError, naming the file, if it is not text."""
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error})") from None
