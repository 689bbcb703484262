"""Where the samples of webdataset shards are: read from the tar headers once, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tarfile
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from safetensors import safe_open

from moh_vision.engine.commands import BadData, Progress, reason_of
from moh_vision.engine.io import write_tensors

INDEX_FORMAT = 1
MAX_CLASSES = 1_000_000  # without classes.txt the largest label says how many there are
ARRAYS = ("shard", "offset", "size", "label")
MOST_ZEROS = tarfile.RECORDSIZE + tarfile.BLOCKSIZE  # two blocks, filled up to a record of 20 (tar's -b)

ShardStat = Tuple[str, int, int]  # name, bytes, time of change in ns


Index = Tuple[dict, Dict[str, np.ndarray]]  # meta: shards, and samples of each; arrays


def indexed(
    folder: Path,
    name: str,
    index_dir: Optional[str],
    stats: List[ShardStat],
    build: Callable[[], Tuple[Dict[str, np.ndarray], List[int]]],
    wrong: Callable[[Dict[str, np.ndarray], List[int], List[int]], str],
) -> Index:
    """The index of a folder's shards: read where there is one, else made and kept.

    Args:
        folder: of the shards; the index goes there if it can.
        name: of the index.
        index_dir: where it goes if the folder is read-only; None: nowhere.
        stats: the shards as they are now.
        build: makes (arrays, samples of each shard).
        wrong: see `read_index`.
    """
    places = [folder / f".{name}.safetensors"]
    if index_dir is not None:
        which = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]  # other folders have the same name
        places.append(Path(index_dir) / f"{folder.name}-{which}.{name}.safetensors")
    for place in places:
        if place.exists():
            return read_index(place, stats, wrong)
    arrays, samples = build()
    meta = dict(shards=stats, samples=samples)
    # The mode is asked too, because root may write into folders that are meant to be read-only.
    writable = folder.stat().st_mode & stat.S_IWUSR and os.access(folder, os.W_OK)
    if writable or index_dir is not None:
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        write_tensors(places[0] if writable else places[-1], tensors, dict(format=INDEX_FORMAT, meta=meta), shared=True)
    return meta, arrays


def read_index(place: Path, stats: List[ShardStat], wrong: Callable) -> Index:
    """(meta: shards and samples of each; arrays) of an index.

    Args:
        place: the file.
        stats: the shards as they are now.
        wrong: (arrays, samples of each shard, bytes of each) -> what cannot be so; "" if nothing. See `contradiction`.

    Raises:
        ValueError: naming the file, if it is damaged or of other shards.
    """
    again = "delete it to build it again"
    try:
        with safe_open(place, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        ours, meta = metadata.get("format") == str(INDEX_FORMAT), json.loads(metadata.get("meta", "null"))
        if ours:
            recorded = {name: (size, mtime) for name, size, mtime in meta["shards"]}
    except Exception as error:  # damaged headers make many kinds
        raise ValueError(f"{place}: not an index that can be read ({reason_of(error)}); {again}") from None
    if not ours:
        raise ValueError(f"{place}: not an index of this version; {again}")
    for name, size, mtime in stats:
        if recorded.pop(name, None) != (size, mtime):
            raise ValueError(
                f"shard {name} was added or changed since the index {place} was made; delete the index to build it again"
            )
    if recorded:
        raise ValueError(
            f"shard {next(iter(recorded))} of the index {place} is gone; delete the index to build it again"
        )
    why = wrong(arrays, meta.get("samples"), [size for _, size, _ in stats])
    if why:
        raise ValueError(f"{place}: not an index that can be right ({why}); {again}")
    return meta, arrays


def contradiction(arrays: Dict[str, np.ndarray], samples, sizes: List[int]) -> str:
    """What cannot be so in an index of labelled samples; "" if nothing."""
    why = wrong_columns(arrays, ARRAYS, samples, len(sizes))
    if why:
        return why
    shard, offset, size, label = (arrays[name] for name in ARRAYS)
    if label.min() < 0 or label.max() >= MAX_CLASSES:
        return f"labels outside of 0 to {MAX_CLASSES - 1}"
    room = np.array(sizes, dtype=np.int64)[shard]
    if offset.min() < 0 or size.min() < 0 or (size > room).any() or (offset > room - size).any():
        return "samples outside of their shard"
    return ""


def wrong_columns(arrays: Dict[str, np.ndarray], names: Sequence[str], samples, shards: int) -> str:
    """What cannot be so in the arrays `names` of an index, one of them "shard"; "" if nothing."""
    if set(arrays) != set(names) or any(a.dtype != np.int64 or a.ndim != 1 for a in arrays.values()):
        return f"expected {', '.join(names)} as vectors of int64"
    shard = arrays["shard"]
    if len({len(a) for a in arrays.values()}) > 1 or not len(shard):
        return "vectors of unequal length, or empty"
    if shard.min() < 0 or shard.max() >= shards or np.bincount(shard, minlength=shards).tolist() != samples:
        return "samples that no shard has"
    return "shards out of order" if (np.diff(shard) < 0).any() else ""


def columns(names: Sequence[str], rows: List[tuple]) -> Dict[str, np.ndarray]:
    """Rows of whole numbers -> a vector of int64 for each name."""
    return dict(zip(names, np.array(rows, np.int64).T.copy()))


def scan(paths: List[Path], extensions: Sequence[str], what: str) -> Tuple[Dict[str, np.ndarray], List[int]]:
    """(arrays of ARRAYS, samples of each shard), from the headers of the shards.

    Nothing is extracted; links, devices and folders are passed over, whatever their names say.

    Args:
        extensions: of a sample's member.
        what: that member, in errors.

    Raises:
        ValueError: naming shard and member: cut off or damaged, a sample that is not whole or comes twice, a label that
            is none.
    """
    rows, samples = [], []
    for number, path in enumerate(Progress.over(paths, "indexing", "shard")):
        found: dict = {}
        with open_tar(path) as tar:
            for member in members(tar, path, path.stat().st_size):
                parent, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")  # webdataset: up to the first dot of the base name
                kind = what if extension.lower() in extensions else "label" if extension == "cls" else None
                entry = found.setdefault(f"{parent}/{stem}", {})
                if kind in entry:
                    raise ValueError(f"{path}: {member.name} is a second {kind} of the same sample")
                if kind == what:
                    entry[what] = (member.offset_data, member.size)
                elif kind == "label":
                    entry["label"] = _label(tar, member, path)
        for key, entry in found.items():
            if set(entry) != {what, "label"}:
                missing = what if what not in entry else ".cls file"
                raise ValueError(f"{path}: sample {key.removeprefix('/')} has no {missing}")
            rows.append((number, *entry[what], entry["label"]))
        samples.append(len(found))
    if not rows:
        raise ValueError(f"{paths[0].parent}: the shards hold no samples")
    return columns(ARRAYS, rows), samples


class _Header(tarfile.TarInfo):
    """A header that is an error when it is damaged: tarfile takes such a one for the end."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # a block of zeros
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def open_tar(name: Union[Path, str], stream=None) -> tarfile.TarFile:
    """A shard; raises ValueError, naming it.

    Args:
        name: its path, or what errors call it.
        stream: a file that is read once through.
    """
    try:
        # Not compressed: the offsets would not be those of the file.
        return tarfile.open(name, "r|" if stream else "r:", stream, tarinfo=_Header)
    except tarfile.TarError as error:
        raise ValueError(f"{name}: not a readable tar file, uncompressed ({error})") from None


def members(tar: tarfile.TarFile, name: Union[Path, str], size: float = math.inf) -> Iterator[tarfile.TarInfo]:
    """The regular files of a shard that `open_tar` has opened; it is read to its last byte.

    Args:
        name: of the shard, in errors.
        size: its bytes, where they are known.

    Raises:
        ValueError: naming shard and byte: damaged, cut off, or not at its end where tar's end mark is.
    """
    count = 0
    while True:
        try:
            member = tar.next()
        except BadData:  # of the stream
            raise
        except Exception as error:  # damaged headers make many kinds
            raise ValueError(
                f"{name}: cut off or damaged behind member {count}, at byte {tar.offset} ({reason_of(error)})"
            ) from None
        if member is None:
            break
        count += 1
        tar.members.clear()  # it would keep them all
        if member.size < 0 or member.issparse():
            raise ValueError(f"{name}: {member.name} is a sparse file, or has a negative size; expected plain files")
        if not member.isreg():
            continue
        if member.offset_data + member.size > size:
            raise ValueError(f"{name}: cut off within {member.name}, member {count}; the file has {size} bytes")
        yield member
    _refuse_more(tar, f"behind member {count}", name)


def _refuse_more(tar: tarfile.TarFile, where: str, name: Union[Path, str]) -> None:
    """Raise ValueError unless what follows a tar's first block of zeros are zeros, and no more than tar writes."""
    end = tar.offset
    place = end + tarfile.BLOCKSIZE
    while data := tar.fileobj.read(2**20):
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            raise ValueError(
                f"{name}: byte {place + zeros} is not zero, but a block of zeros {where}, at byte {end}, "
                "ends a tar: damaged, or several tars in one file"
            )
        place += len(data)
    if place - end > MOST_ZEROS:
        raise ValueError(
            f"{name}: {place - end} zeros {where}, from byte {end} to the end; tar writes at most {MOST_ZEROS}: damaged"
        )


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> int:
    text = tar.extractfile(member).read(32).decode("ascii", "replace").strip()
    if not text.isdigit():
        raise ValueError(f"{path}: {member.name} holds {text!r}, expected a class number of 0 or more")
    if int(text) >= MAX_CLASSES:
        raise ValueError(f"{path}: {member.name} holds class number {text}, allowed are 0 to {MAX_CLASSES - 1}")
    return int(text)
