"""Token ids on disk: of files, or of a store that this package made of text.

    SPLIT.bin    little-endian uint16 or uint32, no header; SPLIT.json beside it says which
    SPLIT.npy    one vector of whole numbers
    SPLIT        a store, a folder: ids.bin, ends.npy (where each text ends in it) and meta.json, written last

or SPLIT-*.bin and so on, joined in order of name. Nothing is unpickled or read into memory as a whole. SPLIT.json and
meta.json may say what is in `META_FIELDS`.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from moh_vision.engine.commands import Progress, reason_of
from moh_vision.engine.io import whole_file, write_whole
from moh_vision.language.data.sources import IDS
from moh_vision.language.data.vocabulary import FORMAT, Vocabulary, cached

ENDS, META = "ends.npy", "meta.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
TEXTS_AT_ONCE, CHARACTERS_AT_ONCE, IDS_AT_ONCE = 2000, 1 << 23, 1 << 24
SAMPLES, SAMPLE = 64, 1 << 15  # ids of a fingerprint


# Facts about token ids -> the least whole number, or the texts, that they may be; None: any text.
META_FIELDS = dict(
    dtype=list(DTYPES),
    eos=0,  # ends a text
    tokens=1,
    largest=0,
    words=1,  # separated by blanks, and one for each text's end: for perplexity per word
    tokenizer=None,  # sha256 of its tokenizer.json
    sha256=None,  # of ids, and of ends.npy
)


class Tokens:
    """Token ids of a split: its files or stores, joined. `name` is for messages.

    Attributes:
        ids: has a length, and takes slices: a memory map, or several.
        ends, lengths: of the texts of a single store; lengths include eos.
        eos, words: see `META_FIELDS`; None: not known.
        tokenizers: sha256 of each tokenizer.json that made some of them.
    """

    def __init__(self, paths: Sequence[Path], dtype: str | None = None, name: str = ""):
        self.arguments, self.paths = (paths, dtype, name), paths
        self.parts, self.metas = zip(*(_opened(path, dtype) for path in paths))
        self.ids = self.parts[0] if len(paths) == 1 else Joined(self.parts)
        self.name = name or str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        known = {meta["eos"]: path.name for path, meta in zip(paths, self.metas) if meta["eos"] is not None}
        if len(known) > 1:
            listed = ", ".join(f"{name} {eos}" for eos, name in known.items())
            raise ValueError(f"{paths[0].parent}: files of one split with different eos: {listed}")
        self.eos = next(iter(known), None)
        words = [meta["words"] for meta in self.metas]
        self.words = None if None in words else sum(words)
        self.tokenizers = {meta["tokenizer"] for meta in self.metas if meta["tokenizer"]}
        if len(paths) == 1 and paths[0].is_dir():
            self.ends = np.array(_vector(paths[0] / ENDS))  # a memory map of it would be read slowly
            self.lengths = np.diff(self.ends, prepend=0)

    def __reduce__(self):
        return Tokens, self.arguments  # a pickled memory map would be a copy

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, text: int) -> np.ndarray:
        """Ids of a text of a store, int64."""
        return np.array(self.ids[self.ends[text] - self.lengths[text] : self.ends[text]], np.int64)

    def check_ids(self, size: int, cache_dir: str) -> None:
        """Refuse ids that a vocabulary of `size` tokens lacks. A file that does not say its largest is read once."""
        for path, ids, meta in zip(self.paths, self.parts, self.metas):
            known = meta["largest"] is not None and ids.dtype.kind == "u"
            smallest, largest = (0, meta["largest"]) if known else _range(path, ids, cache_dir)
            refuse_ids(str(path), smallest, largest, size)

    def fingerprint(self) -> str:
        """Hash sizes and 64 pieces of every file, without reading it whole."""
        digest = hashlib.sha256()
        for ids in self.parts:
            digest.update(f"{ids.dtype.str} {len(ids)} ".encode())
            for first in np.linspace(0, max(0, len(ids) - SAMPLE), SAMPLES).astype(np.int64):
                digest.update(np.ascontiguousarray(ids[first : first + SAMPLE]))
        return digest.hexdigest()


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


def refuse_ids(where: str, smallest: int, largest: int, size: int) -> None:
    """Raise ValueError unless all ids are below `size`."""
    if smallest < 0 or largest >= size:
        outside = smallest if smallest < 0 else largest
        raise ValueError(f"{where}: token id {outside}, but the vocabulary has {size} tokens, 0 to {size - 1}")


def cache_beside(run: str) -> str:
    """Return the folder of encoded text, vocabularies and ranges that runs in one place share."""
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
        tokens = Tokens([place], name=lines.name)
        if digest.hexdigest() != tokens.metas[0]["sha256"]:
            raise ValueError("another sha256 than that of what was written")
        return tokens

    # A tokenizer.json does not name its eos.
    made_from = [FORMAT, lines.fingerprint(), vocabulary.fingerprint, vocabulary.eos, skip_empty]
    return cached(cache_dir, name, made_from, load, make)


def write_store(place: Path, texts: Iterable[str], vocabulary: Vocabulary, name: str, **made_from: str) -> dict:
    """Encode texts, each with eos, into a folder, which several processes may do at once; return its meta.json, with
    `made_from`. Memory grows by 8 bytes a text."""
    kind = "uint16" if len(vocabulary) <= 1 << 16 else "uint32"
    lengths, words, largest, digest = [], 0, 0, hashlib.sha256()
    try:
        with whole_file(place / IDS, shared=True) as file:
            for batch in _batched(texts):
                rows = [[*ids, vocabulary.eos] for ids in vocabulary.encode(batch)]
                lengths += map(len, rows)
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


def read_meta(side: Path) -> dict:
    """Read the .json of ids, with all `META_FIELDS`; None: it does not say, or is not there."""
    try:
        meta = dict.fromkeys(META_FIELDS) | (json.loads(side.read_text("utf-8")) if side.is_file() else {})
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{side}: not a JSON object ({reason_of(error)})") from None
    for name, limit in META_FIELDS.items():
        if isinstance(limit, int):
            fits, allowed = type(meta[name]) is int and meta[name] >= limit, f"a whole number of at least {limit}"
        else:
            fits = isinstance(meta[name], str) and (limit is None or meta[name] in limit)
            allowed = "a text" if limit is None else " or ".join(limit)
        if meta[name] is not None and not fits:
            raise ValueError(f"{side}: {name} {meta[name]!r}; expected {allowed}")
    return meta


def _opened(path: Path, dtype: str | None) -> tuple[np.ndarray, dict]:
    """(memory map of the ids, what is known of them) of a file or store."""
    store = path.is_dir()
    file, side = (path / IDS, path / META) if store else (path, path.with_suffix(".json"))
    if not file.is_file() or store and not side.is_file():
        raise ValueError(f"{path}: not a file of token ids or a finished store of them")
    meta, size = read_meta(side), file.stat().st_size
    kind = meta["dtype"] or dtype
    if file.suffix == ".npy":
        ids = _vector(file)
    elif kind is None:
        raise ValueError(
            f"{path}: nothing says what its numbers are; write {side.name} beside it with "
            '{"dtype": "uint16"} (or uint32), or set data.bin_dtype'
        )
    elif not size or size % DTYPES[kind].itemsize:
        raise ValueError(f"{path}: {size} bytes are not a whole number of {kind}, or none; the file is cut off")
    else:
        ids = np.memmap(file, DTYPES[kind], "r")
    if meta["tokens"] not in (None, len(ids)):
        raise ValueError(f"{path}: {len(ids)} tokens, but {side.name} says {meta['tokens']}")
    if not len(ids):
        raise ValueError(f"{path}: no tokens")
    return ids, meta


def _vector(path: Path) -> np.ndarray:
    """Map a .npy of one vector of whole numbers."""
    try:
        vector = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not an array that can be read ({reason_of(error)})") from None
    if not isinstance(vector, np.ndarray) or vector.ndim != 1 or vector.dtype.kind not in "ui":
        form = f"{vector.dtype} of shape {vector.shape}" if isinstance(vector, np.ndarray) else "several arrays"
        raise ValueError(f"{path}: {form}; expected one vector of whole numbers")
    return vector


def _range(file: Path, ids: np.ndarray, cache_dir: str) -> list[int]:
    """Return smallest and largest id of a file, which are kept in the cache by the file's size and time."""

    def make(place: Path) -> None:
        firsts = Progress.over(range(0, len(ids), IDS_AT_ONCE), f"checking {file.name}", "piece")
        ends = [end for n in firsts for end in (ids[n : n + IDS_AT_ONCE].min(), ids[n : n + IDS_AT_ONCE].max())]
        write_whole(place, json.dumps([int(min(ends)), int(max(ends))]), shared=True)

    def load(place: Path) -> list[int]:
        smallest, largest = map(int, json.loads(place.read_text("utf-8")))
        return [smallest, largest]

    stat = file.stat()
    return cached(cache_dir, file.name, [FORMAT, str(file.resolve()), stat.st_size, stat.st_mtime_ns], load, make)


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
