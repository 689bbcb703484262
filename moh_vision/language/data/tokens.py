"""Token ids on disk: stores, which `write_store` makes of text.

A store is a folder: ids.bin (little-endian uint16 or uint32), ends.npy (where each text ends in it) and meta.json,
written last. A split is one store, SPLIT, or several, SPLIT-*, joined in order of name. ids.bin is never read into memory
as a whole.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from moh_vision.engine.errors import reason_of
from moh_vision.engine.io import whole_file, write_whole
from moh_vision.engine.progress import Progress
from moh_vision.engine.ranks import say
from moh_vision.language.data.sources import IDS
from moh_vision.language.data.vocabulary import FORMAT, Vocabulary, cached

ENDS, META = "ends.npy", "meta.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
TEXTS_AT_ONCE, CHARACTERS_AT_ONCE = 2000, 1 << 23
# What is read of meta.json: words are separated by blanks, with one for each text's end; tokenizer is the sha256 of its
# tokenizer.json, sha256 that of ids.bin and ends.npy.
META_FIELDS = dict(dtype=str, tokens=int, words=int, tokenizer=str, sha256=str)


class Tokens:
    """Token ids of a split: its stores, joined. `name` is for messages.

    Attributes:
        metas: what each store's meta.json says.
        ids: has a length, and takes slices: a memory map, or several.
        ends, lengths: of the texts of a single store; lengths include eos.
        words: see `META_FIELDS`.
    """

    def __init__(self, paths: Sequence[Path], name: str = ""):
        self.arguments, self.paths = (paths, name), paths
        self.metas = [read_meta(path) for path in paths]
        parts = [_mapped(path / IDS, meta) for path, meta in zip(paths, self.metas)]
        self.ids = parts[0] if len(parts) == 1 else Joined(parts)
        self.name = name or str(paths[0]) + (
            f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        )
        self.words = sum(meta["words"] for meta in self.metas)

    def __reduce__(self):
        return Tokens, self.arguments  # a pickled memory map would be a copy

    @cached_property
    def ends(self) -> np.ndarray:
        return np.load(self.paths[0] / ENDS)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, text: int) -> np.ndarray:
        """Ids of a text of a store, int64."""
        return np.array(self.ids[self.ends[text] - self.lengths[text] : self.ends[text]], np.int64)

    def fingerprint(self) -> str:
        """sha256 of all stores, as they were written."""
        return hashlib.sha256(" ".join(meta["sha256"] for meta in self.metas).encode()).hexdigest()


class Joined:
    """Vectors, such as memory maps, one after the other without a copy."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts, self.starts = parts, np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        """A piece of the whole, int64."""
        first, end, _ = where.indices(len(self))
        pieces = [np.empty(0, np.int64)]
        one = np.searchsorted(self.starts, first, "right") - 1
        for number in range(one, np.searchsorted(self.starts, end)):
            start = self.starts[number]
            pieces.append(self.parts[number][max(0, first - start) : end - start])
        return np.concatenate(pieces)


def cache_beside(run: str) -> str:
    """Return the folder of encoded text and vocabularies that runs in one place share."""
    return str(Path(run).resolve().with_name(".index") / "text")


def encoded(lines, vocabulary: Vocabulary, cache_dir: str, skip_empty: bool = False) -> Tokens:
    """Return the store of a text, `TextFile` or `HubText`, from the cache, or make it."""
    last = Path(lines.name.removesuffix(".gz")).name
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in last)[:60]

    def make(place: Path) -> None:
        texts = Progress.over(lines, f"encoding {name}", "line")
        write_store(place, filter(None, texts) if skip_empty else texts, vocabulary, lines.name)

    def load(place: Path) -> Tokens:
        with open(place / IDS, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update((place / ENDS).read_bytes())
        tokens = Tokens([place], lines.name)
        if digest.hexdigest() != tokens.metas[0]["sha256"]:
            raise ValueError("another sha256 than that of what was written")
        return tokens

    # A tokenizer.json does not name its eos.
    made_from = [FORMAT, lines.fingerprint(), vocabulary.fingerprint, vocabulary.eos, skip_empty]
    return cached(cache_dir, name, made_from, load, make)


def write_store(
    place: Path, texts: Iterable[str], vocabulary: Vocabulary, name: str, **made_from: str
) -> dict:
    """Encode texts, each with eos, into a folder, which several processes may do at once; return its meta.json, with
    `made_from`. Memory grows by 8 bytes a text."""
    kind = "uint16" if len(vocabulary) <= 1 << 16 else "uint32"
    lengths, words, largest, digest = [], 0, 0, hashlib.sha256()
    marked: Counter = Counter()  # texts by the first special token that stands in them
    try:
        with whole_file(place / IDS, shared=True) as file:
            for batch in _batched(texts):
                rows = [[*ids, vocabulary.eos] for ids in vocabulary.encode(batch)]
                lengths += map(len, rows)
                marked.update(filter(None, map(vocabulary.marker_in, batch)))
                words += sum(len(text.split()) + 1 for text in batch)
                ids = np.array([i for row in rows for i in row], DTYPES[kind])
                largest = max(largest, int(ids.max()))
                digest.update(ids)
                file.write(ids)
            if sum(lengths) == len(lengths):
                raise ValueError(f"{name}: no text but empty lines")
    except BaseException:
        with contextlib.suppress(OSError):
            place.rmdir()
        raise
    if marked:
        say(
            f"{name}: {marked.total()} of {len(lengths)} texts hold special tokens of the tokenizer, such as "
            f"{marked.most_common(1)[0][0]}: they are encoded as any other text, not as these tokens"
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    with whole_file(place / ENDS, shared=True) as file:
        np.save(file, ends)
        file.seek(0)
        digest.update(file.read())
    counts = dict(tokens=int(ends[-1]), largest=largest, words=words, texts=len(ends))
    sums = dict(tokenizer=vocabulary.fingerprint, sha256=digest.hexdigest())
    meta = dict(dtype=kind, eos=vocabulary.eos, **counts, **sums, **made_from)
    write_whole(place / META, json.dumps(meta, indent=1) + "\n", shared=True)
    return meta


def sums_of(store: Path, meta: dict) -> dict:
    """Return the SHA-256 of a store's files by its meta.json, for `moh_vision.data.records.check_sums`."""
    return {IDS: ([store / IDS, store / ENDS], meta["sha256"])}


def read_meta(store: Path) -> dict:
    """Read the meta.json of a store; it has all `META_FIELDS`."""
    side = store / META
    if not side.is_file():
        raise ValueError(f"{store}: not a finished store of token ids; it has no {META}")
    try:
        meta = json.loads(side.read_text("utf-8"))
        for name, kind in META_FIELDS.items():
            if type(meta[name]) is not kind or kind is int and meta[name] < 1:
                raise ValueError(f"{name} is {meta[name]!r}")
        DTYPES[meta["dtype"]]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{side}: not the record of a store of token ids ({reason_of(error)})"
        ) from None
    return meta


def _mapped(file: Path, meta: dict) -> np.ndarray:
    """Map the ids of a store."""
    dtype, size = DTYPES[meta["dtype"]], file.stat().st_size
    if size != meta["tokens"] * dtype.itemsize:
        raise ValueError(
            f"{file}: {size} bytes, but {META} says {meta['tokens']} tokens of {meta['dtype']}"
        )
    return np.memmap(file, dtype, "r")


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts, so many at a time that memory does not grow with their number."""
    batch, characters = [], 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= TEXTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
