"""Text as token ids in plain files: .bin, .npy, and this package's own token caches.

    SPLIT.bin               little-endian uint16 or uint32, no header; SPLIT.json beside it says which
    SPLIT.npy               one vector of whole numbers
    SPLIT.tokens.safetensors    see `token_cache`

or SPLIT-*.bin and so on, joined in order of name. Nothing is unpickled or read into memory as a whole.
SPLIT.json (optional but for .bin) may have: dtype; eos, the id that ends a text; tokens, their number;
largest, the largest id; words; tokenizer, the sha256 of tokenizer.json. `tokenise` writes all of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from moh_vision.engine.commands import Progress, reason_of
from moh_vision.engine.io import write_whole
from moh_vision.engine.ranks import say
from moh_vision.language.data.token_cache import TokenCache

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
WHOLE_NUMBERS = {"eos": 0, "tokens": 1, "largest": 0, "words": 1}  # keys and least values
AT_ONCE = 1 << 24  # ids
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a fingerprint


class About(NamedTuple):
    """Facts about a file of ids; None: not known."""

    dtype: Optional[str] = None
    eos: Optional[int] = None
    tokens: Optional[int] = None
    largest: Optional[int] = None
    words: Optional[int] = None
    tokenizer: Optional[str] = None


class TokenFiles:
    """Token ids of a split's files, all of one kind. `ids` has a length and takes slices; `eos` ends every
    text; `words` (None: unknown) is for perplexity per word; `tokenizers` are the sha256 of the files'
    tokenizer.json.
    """

    def __init__(self, paths: Sequence[Path], dtype: Optional[str] = None):
        self.paths, self.dtype = [Path(path) for path in paths], dtype
        read = [_opened(path, dtype) for path in self.paths]
        self.parts = [ids for ids, _ in read]
        self.abouts = [about for _, about in read]
        self.ids = self.parts[0] if len(read) == 1 else Chained(self.parts)
        self.name = str(self.paths[0]) + (f" and {len(read) - 1} more" if len(read) > 1 else "")
        told = zip(self.paths, self.abouts)
        known = {about.eos: path for path, about in told if about.eos is not None}
        if len(known) > 1:
            told = ", ".join(f"{path.name} {eos}" for eos, path in known.items())
            raise ValueError(f"{self.paths[0].parent}: files of one split with different eos: {told}")
        self.eos = next(iter(known), None)
        words = [about.words for about in self.abouts]
        self.words = None if None in words else sum(words)
        self.tokenizers = {about.tokenizer for about in self.abouts if about.tokenizer}

    def __reduce__(self):
        return TokenFiles, (self.paths, self.dtype)  # a pickled memory map would be a copy

    def check_ids(self, size: int, cache_dir: str) -> None:
        """Raise ValueError, naming file and value, for an id that a vocabulary of `size` tokens lacks.

        A file without its largest id is read once; the result is kept by the file's size and time.
        """
        for path, ids, about in zip(self.paths, self.parts, self.abouts):
            if about.largest is not None and ids.dtype.kind == "u":
                smallest, largest = 0, about.largest
            else:
                smallest, largest = _range(path, ids, cache_dir)
            refuse_ids(str(path), smallest, largest, size)

    def where(self, place: int) -> str:
        """Names the token at a place, in errors."""
        for path, ids in zip(self.paths, self.parts):
            if place < len(ids):
                return f"{path}, token {place}"
            place -= len(ids)
        raise IndexError(place)

    def fingerprint(self) -> str:
        """Hash sizes and 64 pieces of every file, without reading it whole."""
        digest = hashlib.sha256()
        for path, ids in zip(self.paths, self.parts):
            digest.update(json.dumps([path.name, ids.dtype.str, len(ids)]).encode())
            width = SAMPLE_BYTES // ids.itemsize
            for number in range(SAMPLES):
                first = number * max(0, len(ids) - width) // (SAMPLES - 1)
                digest.update(np.ascontiguousarray(ids[first : first + width]).tobytes())
                if len(ids) <= width:
                    break
        return digest.hexdigest()


class Chained:
    """Vectors, such as memory maps, one after the other without a copy."""

    def __init__(self, parts: List[np.ndarray]):
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        """A piece of the whole, int64."""
        first, end, step = where.indices(len(self))
        assert step == 1
        number = int(np.searchsorted(self.ends, first, "right"))
        found = []
        while first < end:
            start = int(self.ends[number - 1]) if number else 0
            stop = int(self.ends[number])
            found.append(self.read(number, first - start, min(end, stop) - start))
            first, number = stop, number + 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def read(self, number: int, first: int, end: int) -> np.ndarray:
        """A piece of one vector, int64."""
        return self.parts[number][first:end].astype(np.int64)


def refuse_ids(where: str, smallest: int, largest: int, size: int) -> None:
    """Raise ValueError unless all ids are below `size`."""
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"{where}: token id {wrong}, but the vocabulary has {size} tokens, 0 to {size - 1}")


def read_about(path: Path) -> About:
    """Read the .json beside a file of ids; without it all fields are None."""
    side = path.with_suffix(".json")
    if not side.is_file():
        return About()
    try:
        content = json.loads(side.read_text("utf-8"))
        found = {name: content.get(name) for name in About._fields}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{side}: not a JSON object ({reason_of(error)})") from None
    for name, least in WHOLE_NUMBERS.items():
        value = found[name]
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{side}: {name} {value!r}; expected a whole number of at least {least}")
    if found["dtype"] not in (None, *DTYPES):
        raise ValueError(f"{side}: dtype {found['dtype']!r}; allowed are {', '.join(DTYPES)}")
    if not isinstance(found["tokenizer"], (str, type(None))):
        raise ValueError(f"{side}: tokenizer {found['tokenizer']!r}; expected the sha256 of a tokenizer.json")
    return About(**found)


def _opened(path: Path, dtype: Optional[str]) -> Tuple[np.ndarray, About]:
    """(memory map of the ids, what is known of them) of a file."""
    if not path.is_file():
        raise ValueError(f"{path}: not a file, expected token ids")
    if path.name.endswith(".safetensors"):
        cache = TokenCache(path)
        return cache.ids, About(tokens=len(cache.ids), words=cache.words)
    about = read_about(path)
    if path.suffix == ".npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{path}: not an array that can be read ({reason_of(error)})") from None
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "ui":
            what = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else "several arrays"
            raise ValueError(f"{path}: {what}; expected one vector of whole numbers")
    else:
        kind, size = about.dtype or dtype, path.stat().st_size
        if kind is None:
            raise ValueError(
                f"{path}: nothing says what its numbers are; write {path.with_suffix('.json').name} beside it with "
                '{"dtype": "uint16"} (or uint32), or set data.bin_dtype'
            )
        if not size or size % DTYPES[kind].itemsize:
            raise ValueError(f"{path}: {size} bytes are not a whole number of {kind}, or none; the file is cut off")
        ids = np.memmap(path, DTYPES[kind], "r")
    if about.tokens is not None and about.tokens != len(ids):
        raise ValueError(f"{path}: {len(ids)} tokens, but {path.with_suffix('.json').name} says {about.tokens}")
    if not len(ids):
        raise ValueError(f"{path}: no tokens")
    return ids, about


def _range(path: Path, ids: np.ndarray, cache_dir: str) -> Tuple[int, int]:
    """(smallest, largest) id of a file; remembered in `cache_dir`."""
    stat = path.stat()
    made_from = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns, ids.dtype.str])
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    place = Path(cache_dir, f"{path.stem}.{digest[:16]}.range.json")
    if place.exists():
        try:
            smallest, largest = map(int, json.loads(place.read_text()))
            return smallest, largest
        except (OSError, ValueError, TypeError):
            say(f"{place}: not readable; making it again")
    pieces = range(0, len(ids), AT_ONCE)
    smallest, largest = int(ids[0]), int(ids[0])
    with Progress(f"checking {path.name}", len(ids), "token", scaled=True) as progress:
        for first in pieces:
            piece = ids[first : first + AT_ONCE]
            smallest = min(smallest, int(piece.min()))
            largest = max(largest, int(piece.max()))
            progress.add(len(piece))
    write_whole(place, json.dumps([smallest, largest]), shared=True)
    return smallest, largest
