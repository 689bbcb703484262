"""Files of documents: a line each of plain text, or of JSON with the text under a key; plain or gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import BinaryIO, Iterator, Tuple

from moh_vision.engine.commands import reason_of

MAX_LINE = 1 << 28  # bytes
FORMS = (".txt", ".jsonl", ".json")


def form_of(path: Path) -> str:
    """Which of `FORMS` a file is, by its name without .gz.

    Raises:
        ValueError: naming the file.
    """
    form = Path(path.name.removesuffix(".gz")).suffix
    if form not in FORMS:
        raise ValueError(f"{path}: expected {', '.join(FORMS)}, or one of these with .gz")
    return form


def documents(path: Path, key: str = "text") -> Iterator[Tuple[str, int]]:
    """(text, bytes of the file read so far) of every document that is not empty.

    Args:
        path: .txt: a document a line, without what is blank at either end; .jsonl or .json: a line is an object.
        key: of the text in it.

    Raises:
        ValueError: naming file and line: not UTF-8, NUL characters, no JSON, no text under the key, too long, damaged gzip.
    """
    plain = form_of(path) == ".txt"
    with open(path, "rb") as raw:
        for number, line in _lines(path, raw):
            try:
                text = line.decode("utf-8").strip() if plain else _text(line, key)
            except UnicodeDecodeError as error:
                byte = f"0x{line[error.start]:02x} at {error.start + 1}"
                raise ValueError(f"{path}, line {number}: not UTF-8 (byte {byte})") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {reason_of(error)}") from None
            if "\0" in text:
                raise ValueError(f"{path}, line {number}: a NUL character; expected text")
            if text:
                yield text, raw.tell()


def _lines(path: Path, raw: BinaryIO) -> Iterator[Tuple[int, bytes]]:
    number, file = 0, gzip.open(raw, "rb") if path.suffix == ".gz" else raw
    while True:
        try:
            line = file.readline(MAX_LINE + 1)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: damaged gzip file behind line {number} ({error})") from None
        if not line:
            return
        number += 1
        if len(line) > MAX_LINE:
            raise ValueError(f"{path}, line {number}: more than {MAX_LINE >> 20} MiB; expected a document a line")
        yield number, line


def _text(line: bytes, key: str) -> str:
    text = line.decode("utf-8").strip()
    if not text:
        return ""
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get(key), str):
        raise ValueError(f"no text under the key {key!r}; expected an object a line that has it (--key)")
    return content[key]
