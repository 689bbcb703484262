"""Files of documents: a line each of plain text, or of JSON with the text under a key; plain or gzip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Iterator, Tuple

from moh_vision.language.data.lines import decoded, raw_lines

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
    for number, line, position in raw_lines(path, MAX_LINE, "document"):
        where = f"{path}, line {number}"
        text = decoded(line, where).strip()
        if text and not plain:
            text = _text_of(text, key, where)
        if "\0" in text:
            raise ValueError(f"{where}: a NUL character; expected text")
        if text:
            yield text, position


def _text_of(line: str, key: str, where: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), str):
        raise ValueError(f"{where}: no text under the key {key!r}; expected an object a line that has it (--key)")
    return content[key]
