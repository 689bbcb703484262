"""Text as token ids in webdataset shards: SPLIT-*.tar with one .npy of ids per document.

An index of all documents, with their largest ids, is built once and kept (see `tar_index`). So any piece of the
text takes a few reads, and the order of a run can be a pure function. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import io
from functools import partial
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from moh_vision.data.shard_files import ShardFiles
from moh_vision.data.tar_index import columns, indexed, members, open_tar, wrong_columns
from moh_vision.engine.commands import Progress, reason_of
from moh_vision.language.data.token_files import Chained, read_about, refuse_ids

KINDS = tuple(np.dtype(kind) for kind in ("<u2", "<u4", "<i4", "<i8", "<i2", "<u8"))
ARRAYS = ("shard", "offset", "count", "kind", "smallest", "largest")


class TokenShards(Chained):
    """Token ids of a split, documents in the shards' order, with eos where the documents have it. The index
    goes to `index_dir` if the folder is read-only. SPLIT.json gives eos, words and tokenizer, see
    `TokenFiles`.
    """

    def __init__(self, paths: Sequence[Path], split: str, index_dir: Optional[str] = None):
        folder = Path(paths[0]).parent
        self.name = str(folder / f"{split}-*.tar")
        self.files = ShardFiles(paths, ValueError)
        about = read_about(folder / f"{split}.tar")
        self.eos, self.words = about.eos, about.words
        self.tokenizers = {about.tokenizer} - {None}
        build = partial(_scan, self.files.paths)
        _, self.arrays = indexed(folder, f"{split}.tokens.index", index_dir, self.files.stats, build, _contradiction)
        self.ends = np.cumsum(self.arrays["count"])
        self.ids = self
        if about.tokens not in (None, len(self)):
            raise ValueError(f"{self.name}: {len(self)} tokens, but {split}.json says {about.tokens}")

    def read(self, number: int, first: int, end: int) -> np.ndarray:
        """A piece of one document, int64."""
        shard, offset, _, kind, _, _ = (int(self.arrays[name][number]) for name in ARRAYS)
        size = KINDS[kind].itemsize
        wanted = (end - first) * size
        try:
            data = self.files.read(shard, wanted, offset + first * size)
        except OSError as error:
            raise ValueError(f"{self.files.paths[shard]}: {error.strerror}") from None
        if len(data) != wanted:
            raise ValueError(f"{self.files.paths[shard]}: cut off; {len(data)} bytes of {wanted} are there")
        return np.frombuffer(data, KINDS[kind]).astype(np.int64)

    def check_ids(self, size: int, cache_dir: str = "") -> None:
        """See `TokenFiles.check_ids`; the index has what it needs."""
        for name, worst in (("smallest", np.argmin), ("largest", np.argmax)):
            document = int(worst(self.arrays[name]))
            smallest, largest = (int(self.arrays[which][document]) for which in ("smallest", "largest"))
            refuse_ids(self._document(document), smallest, largest, size)

    def where(self, place: int) -> str:
        """Names the token at a place, in errors."""
        return self._document(int(np.searchsorted(self.ends, place, "right")))

    def _document(self, number: int) -> str:
        shard = self.files.paths[self.arrays["shard"][number]]
        return f"{shard}, ids at byte {self.arrays['offset'][number]}"

    def fingerprint(self) -> str:
        """Return the sha256 of the index: places, lengths, extreme ids, and the shards' names and sizes."""
        digest = hashlib.sha256(repr([stat[:2] for stat in self.files.stats]).encode())
        for name in ARRAYS:
            digest.update(np.ascontiguousarray(self.arrays[name]).tobytes())
        return digest.hexdigest()


def _scan(paths: List[Path]) -> Tuple[Dict[str, np.ndarray], List[int]]:
    """(arrays of ARRAYS, documents of each shard); every id is read once."""
    rows, samples = [], []
    for number, path in enumerate(Progress.over(paths, "indexing", "shard")):
        before = len(rows)
        with open_tar(path) as tar:
            for member in members(tar, path, path.stat().st_size):
                if not member.name.lower().endswith(".npy"):
                    continue
                found = _document(tar.extractfile(member), member.size, f"{path}: {member.name}")
                if found is not None:
                    start, ids = found
                    kind = KINDS.index(ids.dtype)
                    place = member.offset_data + start
                    rows.append((number, place, len(ids), kind, int(ids.min()), int(ids.max())))
        samples.append(len(rows) - before)
    if not rows:
        raise ValueError(f"{paths[0].parent}: the shards hold no .npy of token ids")
    return columns(ARRAYS, rows), samples


def _document(file, size: int, where: str) -> Optional[Tuple[int, np.ndarray]]:
    """(bytes before the ids, ids) of a member; None if it has no ids."""
    data = io.BytesIO(file.read(size))
    try:
        version = np.lib.format.read_magic(data)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(data)
    except Exception as error:  # damaged headers make many kinds
        raise ValueError(f"{where}: not an array that can be read ({reason_of(error)})") from None
    if len(shape) != 1 or kind not in KINDS:
        allowed = ", ".join(str(k) for k in KINDS)
        raise ValueError(f"{where}: {kind} of shape {shape}; expected a vector of {allowed}, little-endian")
    start = data.tell()
    if size - start != shape[0] * kind.itemsize:
        raise ValueError(f"{where}: {size - start} bytes of ids, expected {shape[0] * kind.itemsize}")
    ids = np.frombuffer(data.getbuffer(), kind, offset=start)
    if not len(ids):
        return None
    if kind.itemsize == 8 and int(ids.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{where}: token id {int(ids.max())}")
    return start, ids


def _contradiction(arrays: Dict[str, np.ndarray], samples, sizes: List[int]) -> str:
    """Return what contradicts itself in an index, or ""."""
    why = wrong_columns(arrays, ARRAYS, samples, len(sizes))
    if why:
        return why
    shard, offset, count, kind = (arrays[name] for name in ARRAYS[:4])
    if kind.min() < 0 or kind.max() >= len(KINDS) or count.min() < 1 or offset.min() < 0:
        return "documents without ids, or of no known kind"
    room = np.array(sizes, np.int64)[shard]
    width = np.array([k.itemsize for k in KINDS], np.int64)[kind]
    if (count > room // width).any() or (offset > room - count * width).any():
        return "documents outside of their shard"
    return ""
