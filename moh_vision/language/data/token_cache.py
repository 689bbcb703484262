"""Encoded texts on disk: the token ids of all lines in order, read through a memory map.

A safetensors file with `ids` (uint16 or int32), `ends` (int64: where each line ends), and metadata: what it was
made from, the sha256 of the numbers, and the number of words. Safe to delete at any time.
"""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Iterable, Optional

import numpy as np
from safetensors import safe_open

from moh_vision.engine.commands import Progress, reason_of
from moh_vision.engine.io import whole_file
from moh_vision.engine.ranks import say
from moh_vision.language.data.vocabulary import Vocabulary

FORMAT = "1"
HEADER = 1024  # bytes before the ids; safetensors allows blanks after its JSON
LINES_AT_ONCE = 2000
DTYPES = {"U16": np.uint16, "I32": np.int32}


class TokenCache:
    """The lines of a text as token ids, each with eos. Raises ValueError, naming the file, if it is
    damaged or not made from `made_from` (None: any).

    Attributes: `ids` (all, a memory map), `ends` (of each line in `ids`), `lengths` (of lines, with eos),
    `words` (blank-separated words plus one per line end, as word-level perplexity counts them).
    """

    def __init__(self, path: Path, made_from: Optional[str] = None):
        self.path = Path(path)
        try:
            with safe_open(self.path, "numpy") as file:  # checks the header
                metadata = file.metadata() or {}
                slices = {name: file.get_slice(name) for name in file.keys()}
                shapes = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
            if metadata.get("format") != FORMAT or set(shapes) != {"ids", "ends"}:
                raise ValueError("another format")
            (kind, (total,)), (_, (lines,)) = shapes["ids"], shapes["ends"]
            with open(self.path, "rb") as file:
                first = 8 + int.from_bytes(file.read(8), "little")
                file.seek(first)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != metadata["sha256"]:
                raise ValueError("the numbers do not have their sha256")
            self.words = int(metadata["words"])
            self.ids = np.memmap(self.path, DTYPES[kind], "r", first, (total,))
            self.ends = np.fromfile(self.path, np.int64, lines, offset=first + self.ids.nbytes)
            if self.ends[-1] != total or np.diff(self.ends, prepend=0).min() < 1:
                raise ValueError("lines that do not fill it")
        except Exception as error:  # damaged headers make many kinds
            reason = reason_of(error)
            raise ValueError(
                f"{path}: not encoded text that can be read ({reason}); delete it to make it again"
            ) from None
        if made_from is not None and metadata.get("made_from") != made_from:
            raise ValueError(
                f"{path}: encoded from another text or with another vocabulary; delete it to make it again"
            )

    def __reduce__(self):
        return TokenCache, (self.path,)  # a pickled memory map would be a copy

    @property
    def name(self) -> str:
        return self.path.name.partition(".")[0]

    def where(self, place: int) -> str:
        """Names the token at a place, in errors."""
        return f"{self.path}, token {place}"

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, line: int) -> np.ndarray:
        """Ids of a line, int64."""
        return np.array(self.ids[self.ends[line - 1] if line else 0 : self.ends[line]], np.int64)


def encoded(lines, vocabulary: Vocabulary, cache_dir: str, *, skip_empty: bool = False) -> TokenCache:
    """Return the token cache of a text, `TextFile` or `HubText`; make it if missing or damaged. The file's
    name depends on what it is made from, so a changed text gets a new file.
    """
    made_by = vocabulary.fingerprint
    if vocabulary.kind == "foreign":  # its tokenizer.json does not name its eos
        made_by += f" eos {vocabulary.eos}"
    made_from = json.dumps([FORMAT, lines.fingerprint(), made_by, skip_empty])
    key = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    place = Path(cache_dir, f"{_plain_name(lines.name)}.{key}.tokens.safetensors")
    if place.exists():
        try:
            return TokenCache(place, made_from)
        except ValueError as error:
            say(f"{error}; making it again")
    write_tokens(place, lines, vocabulary, made_from, skip_empty)
    return TokenCache(place, made_from)


def write_tokens(place: Path, lines: Iterable[str], vocabulary: Vocabulary, made_from: str, skip_empty: bool) -> None:
    """Encode lines into a file, `LINES_AT_ONCE` at a time, so memory grows by 8 bytes a line only."""
    kind = "U16" if len(vocabulary) <= 1 << 16 else "I32"
    lengths, words, digest = [], 0, hashlib.sha256()
    title = f"encoding {place.name.partition('.')[0]}"
    with whole_file(place, shared=True) as file, Progress(title, None, "line") as progress:
        file.seek(HEADER)
        rest = iter(lines)
        while texts := list(islice(rest, LINES_AT_ONCE)):
            progress.add(len(texts))
            texts = [text for text in texts if text or not skip_empty]
            rows = [ids + [vocabulary.eos] for ids in vocabulary.encode(texts)]
            lengths += map(len, rows)
            words += sum(len(text.split()) + 1 for text in texts)
            data = np.array([i for row in rows for i in row], DTYPES[kind]).tobytes()
            digest.update(data)
            file.write(data)
        if sum(lengths) == len(lengths):
            raise ValueError(f"{getattr(lines, 'name', place)}: no text but empty lines")
        total = sum(lengths)
        ends = np.cumsum(lengths, dtype=np.int64).tobytes()
        digest.update(ends)
        file.write(ends)
        middle = total * np.dtype(DTYPES[kind]).itemsize
        metadata = dict(format=FORMAT, made_from=made_from, words=str(words), sha256=digest.hexdigest())
        header = dict(
            __metadata__=metadata,
            ids=dict(dtype=kind, shape=[total], data_offsets=[0, middle]),
            ends=dict(dtype="I64", shape=[len(lengths)], data_offsets=[middle, middle + len(ends)]),
        )
        text = json.dumps(header).encode()
        assert len(text) <= HEADER - 8
        file.seek(0)
        file.write((HEADER - 8).to_bytes(8, "little") + text.ljust(HEADER - 8))


def _plain_name(name: str) -> str:
    """Return the last part of a name, with letters, digits and - only."""
    last = name.rstrip("/").rpartition("/")[2].removesuffix(".gz")
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in last)[:60]
