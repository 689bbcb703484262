"""The lines of a text file, plain or gzip, one at a time."""

from __future__ import annotations

import gzip
import itertools
import zlib
from pathlib import Path
from typing import Iterator

from moh_vision.engine.io import sha256_of

MAX_LINE = 1 << 28  # bytes; a file may have no line breaks
BYTE_ORDER_MARK = "\ufeff"


class TextFile:
    """A file of one sentence, paragraph or document a line; compressed if its name ends in .gz."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)

    def __iter__(self) -> Iterator[str]:
        """The lines, without what is blank at either end."""
        return (text for _, text, _ in text_lines(self.path))

    def fingerprint(self) -> str:
        """sha256 of the file."""
        return sha256_of(self.path)


def text_lines(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (file and line number for messages, stripped line, bytes of the file read so far)."""
    with open(path, "rb") as raw, gzip.open(raw, "rb") if path.suffix == ".gz" else raw as file:
        for number in itertools.count(1):
            where = f"{path}, line {number}"
            try:
                line = file.readline(MAX_LINE + 1)
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise ValueError(f"{path}: damaged gzip file behind line {number - 1} ({error})") from None
            if not line:
                break
            if len(line) > MAX_LINE:
                raise ValueError(f"{where}: more than {MAX_LINE >> 20} MiB; expected a sentence or document a line")
            if b"\0" in line:
                raise ValueError(f"{where}: a NUL character; expected UTF-8 text")
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at {error.start + 1})") from None
            if number == 1:
                text = text.removeprefix(BYTE_ORDER_MARK)
            yield where, text.strip(), raw.tell()
    if number == 1:
        raise ValueError(f"{path}: the file is empty")
