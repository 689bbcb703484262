"""Token ids on disk: `write_store` encodes text into a store.

A store is a folder: ids.bin (little-endian uint16 or uint32), ends.npy (for each text the index in ids.bin behind its
last token) and meta.json, which is written last. A split is one store, SPLIT, or several, SPLIT-*, joined in order of
name. ids.bin is never read into memory as a whole.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from moh_vision.common.errors import reason_of
from moh_vision.common.io import whole_file, write_whole
from moh_vision.common.progress import Progress
from moh_vision.engine.ranks import say
from moh_vision.language.data.sources import IDS
from moh_vision.language.data.vocabulary import FORMAT, Vocabulary, cached

ENDS = "ends.npy"
META = "meta.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
TEXTS_AT_ONCE = 2000
CHARACTERS_AT_ONCE = 1 << 23
# Fields that are read from meta.json.
# words: number of words between blanks, plus one for the end of each text.
# tokenizer: fingerprint of the `Vocabulary`.
# sha256: of ids.bin and ends.npy together.
META_FIELDS = dict(dtype=str, tokens=int, words=int, tokenizer=str, sha256=str)


class Tokens:
    """Token ids of a split: its stores, joined. `name` is for messages.

    Attributes:
        metas: the content of each store's meta.json.
        ids: a memory map, or several as one `Joined`: it has a length and takes slices.
        ends, lengths: of the texts of a single store; lengths include eos.
        words: see `META_FIELDS`.
    """

    def __init__(self, paths: Sequence[Path], name: str = ""):
        self.arguments = (paths, name)
        self.paths = paths
        self.metas = [read_meta(path) for path in paths]
        parts = [_mapped(path / IDS, meta) for path, meta in zip(paths, self.metas)]
        self.ids = parts[0] if len(parts) == 1 else Joined(parts)
        self.name = name
        if not name:
            self.name = str(paths[0])
            if len(paths) > 1:
                self.name += f" and {len(paths) - 1} more"
        self.words = sum(meta["words"] for meta in self.metas)

    def __reduce__(self):
        return Tokens, self.arguments  # opens the files again: a pickled memory map would be a copy

    @cached_property
    def ends(self) -> np.ndarray:
        return np.load(self.paths[0] / ENDS)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, text: int) -> np.ndarray:
        """Return the ids of one text as int64; only for a single store."""
        end = self.ends[text]
        return np.array(self.ids[end - self.lengths[text] : end], np.int64)

    def fingerprint(self) -> str:
        """Return a sha256 made of those that the stores' meta.json files state."""
        sums = " ".join(meta["sha256"] for meta in self.metas)
        return hashlib.sha256(sums.encode()).hexdigest()


class Joined:
    """Concatenation of vectors, such as memory maps, without a copy."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return a slice of the concatenation, int64."""
        first, end, _ = span.indices(len(self))
        pieces = [np.empty(0, np.int64)]  # makes the result int64, also for an empty slice
        first_part = np.searchsorted(self.starts, first, "right") - 1
        for part in range(first_part, np.searchsorted(self.starts, end)):
            start = self.starts[part]
            pieces.append(self.parts[part][max(0, first - start) : end - start])
        return np.concatenate(pieces)


def cache_beside(run: str) -> str:
    """Return the folder in which the runs of one parent folder share encoded texts and vocabularies."""
    return str(Path(run).resolve().with_name(".index") / "text")


def encoded(lines, vocabulary: Vocabulary, cache_dir: str, skip_empty: bool = False) -> Tokens:
    """Return the token ids of `lines`, a `TextFile` or `HubText`, from the cache; encode them if they are not there."""
    last = Path(lines.name.removesuffix(".gz")).name
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in last)[:60]

    def make(store: Path) -> None:
        texts = Progress.over(lines, f"encoding {name}", "line")
        if skip_empty:
            texts = filter(None, texts)
        write_store(store, texts, vocabulary, lines.name)

    def load(store: Path) -> Tokens:
        with open(store / IDS, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update((store / ENDS).read_bytes())
        tokens = Tokens([store], lines.name)
        if digest.hexdigest() != tokens.metas[0]["sha256"]:
            raise ValueError("another sha256 than that of what was written")
        return tokens

    # eos is listed beside the fingerprint, because a tokenizer.json does not say which token is eos.
    made_from = [FORMAT, lines.fingerprint(), vocabulary.fingerprint, vocabulary.eos, skip_empty]
    return cached(cache_dir, name, made_from, load, make)


def write_store(
    store: Path, texts: Iterable[str], vocabulary: Vocabulary, name: str, **made_from: str
) -> dict:
    """Encode texts, each followed by eos, into a store; return the content of its meta.json.

    Several processes may write the same store at once. `name` stands for the texts in messages; `made_from` are further
    entries of meta.json. Memory grows by 8 bytes a text.
    """
    dtype = "uint16" if len(vocabulary) <= 1 << 16 else "uint32"
    lengths: list[int] = []
    words = 0
    largest = 0
    digest = hashlib.sha256()
    marked: Counter = Counter()  # special token -> number of texts in which it is the first
    try:
        with whole_file(store / IDS, shared=True) as file:
            for batch in _batched(texts):
                rows = [[*ids, vocabulary.eos] for ids in vocabulary.encode(batch)]
                lengths += map(len, rows)
                marked.update(filter(None, map(vocabulary.marker_in, batch)))
                words += sum(len(text.split()) + 1 for text in batch)
                ids = np.array([token_id for row in rows for token_id in row], DTYPES[dtype])
                largest = max(largest, int(ids.max()))
                digest.update(ids)
                file.write(ids)
            if sum(lengths) == len(lengths):  # every text is eos alone
                raise ValueError(f"{name}: no text but empty lines")
    except BaseException:
        with contextlib.suppress(OSError):
            store.rmdir()
        raise
    if marked:
        say(
            f"{name}: {marked.total()} of {len(lengths)} texts hold special tokens of the tokenizer, such as "
            f"{marked.most_common(1)[0][0]}: they are encoded as any other text, not as these tokens"
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    with whole_file(store / ENDS, shared=True) as file:
        np.save(file, ends)
        file.seek(0)
        digest.update(file.read())
    meta = dict(
        dtype=dtype,
        eos=vocabulary.eos,
        tokens=int(ends[-1]),
        largest=largest,
        words=words,
        texts=len(ends),
        tokenizer=vocabulary.fingerprint,
        sha256=digest.hexdigest(),
        **made_from,
    )
    write_whole(store / META, json.dumps(meta, indent=1) + "\n", shared=True)
    return meta


def sums_of(store: Path, meta: dict) -> dict:
    """Return {name: (files, the SHA-256 that meta.json states of them)}, for `moh_vision.data.records.check_sums`."""
    return {IDS: ([store / IDS, store / ENDS], meta["sha256"])}


def read_meta(store: Path) -> dict:
    """Return the content of a store's meta.json; raise ValueError unless it has all `META_FIELDS`."""
    file = store / META
    if not file.is_file():
        raise ValueError(f"{store}: not a finished store of token ids; it has no {META}")
    try:
        meta = json.loads(file.read_text("utf-8"))
        for name, field_type in META_FIELDS.items():
            value = meta[name]
            if type(value) is not field_type or (field_type is int and value < 1):
                raise ValueError(f"{name} is {value!r}")
        DTYPES[meta["dtype"]]  # raises KeyError for an unknown dtype
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{file}: not the record of a store of token ids ({reason_of(error)})"
        ) from None
    return meta


def _mapped(file: Path, meta: dict) -> np.ndarray:
    """Return the ids of a store as a memory map, after a check of the file's size."""
    dtype = DTYPES[meta["dtype"]]
    size = file.stat().st_size
    if size != meta["tokens"] * dtype.itemsize:
        raise ValueError(
            f"{file}: {size} bytes, but {META} says {meta['tokens']} tokens of {meta['dtype']}"
        )
    return np.memmap(file, dtype, "r")


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of at most TEXTS_AT_ONCE texts, or about CHARACTERS_AT_ONCE characters."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= TEXTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
