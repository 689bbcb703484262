"""The lines of a text file, plain or gzip, one at a time."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from moh_vision.engine.io import sha256_of

MAX_LINE = 1 << 24  # bytes; a file may have no line breaks
BYTE_ORDER_MARK = "\ufeff"


class TextFile:
    """A file of one sentence or paragraph a line; compressed if its name ends in .gz."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)
        self._sha256: Optional[str] = None

    def __iter__(self) -> Iterator[str]:
        """The lines, without what is blank at either end."""
        number = 0
        for number, line, _ in raw_lines(self.path, MAX_LINE, "sentence or paragraph"):
            where = f"{self.name}, line {number}"
            if b"\0" in line:
                raise ValueError(f"{where}: a NUL character; expected UTF-8 text")
            text = decoded(line, where)
            yield (text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text).strip()
        if not number:
            raise ValueError(f"{self.name}: the file is empty")

    def fingerprint(self) -> str:
        """sha256 of the file."""
        self._sha256 = self._sha256 or sha256_of(self.path)
        return self._sha256


def raw_lines(path: Path, most: int, what: str) -> Iterator[Tuple[int, bytes, int]]:
    """Yield (line number, line, bytes of the file read so far). A name that ends in .gz is unpacked.
    A line has at most `most` bytes; messages call its content `what`.
    """
    number = 0
    with open(path, "rb") as raw, gzip.open(raw, "rb") if path.suffix == ".gz" else raw as file:
        while True:
            try:
                line = file.readline(most + 1)
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise ValueError(f"{path}: damaged gzip file behind line {number} ({error})") from None
            if not line:
                return
            number += 1
            if len(line) > most:
                raise ValueError(f"{path}, line {number}: more than {most >> 20} MiB; expected a {what} a line")
            yield number, line, raw.tell()


def decoded(line: bytes, where: str) -> str:
    """Decode a line; raises ValueError, naming `where` and the byte, unless it is UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at {error.start + 1})") from None


def there(folder: Path, name: str, suffix: str) -> List[Path]:
    """Which of NAME{suffix} and NAME{suffix}.gz there are."""
    return [path for path in (folder / f"{name}{suffix}", folder / f"{name}{suffix}.gz") if path.exists()]


def find_text(folder: Path, names: tuple, suffix: str) -> TextFile:
    """The file NAME{suffix} or NAME{suffix}.gz of the first name that has one."""
    for name in names:
        files = there(folder, name, suffix)
        if len(files) == 2:
            raise ValueError(f"data.root {folder}: both {files[0].name} and {files[1].name}; remove one")
        if files and not files[0].is_file():
            raise ValueError(f"{files[0]}: not a file but a folder, pipe, socket or device")
        if files:
            return TextFile(files[0])
    found = sorted(p.name for p in folder.iterdir() if p.name[0] != ".")
    listed = ", ".join(found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")
    wanted = " or ".join(f"{name}{suffix}" for name in names)
    raise FileNotFoundError(f"data.root {folder}: no {wanted} (or .gz); it holds {listed or 'nothing'}")
