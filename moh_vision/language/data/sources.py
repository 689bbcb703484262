"""The texts in `data.root`: pairs for translation, lines, documents or token ids for language models."""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moh_vision.common.errors import reason_of, some_of
from moh_vision.common.io import sha256_of
from moh_vision.common.progress import Progress
from moh_vision.data.hub import PREFIX, hub_split
from moh_vision.engine.ranks import say

# Names under which a validation split may be found; any other split has only its own name.
SPLIT_NAMES = {"val": ("val", "valid", "validation", "dev")}
IDS = "ids.bin"  # in a folder of token ids
TEXTS = (".txt", ".jsonl")  # endings of text for language models; .gz may follow
MAX_LINE = 1 << 28  # bytes; stops at files without line breaks
BYTE_ORDER_MARK = "\ufeff"
INDENTED = re.compile(r"\t|  |\u3000")  # start of a line whose leading blanks may have a meaning
SAID: set[str] = set()  # texts about which this process has warned: they are read more than once


class TextFile:
    """The lines of a file, which is compressed if it ends in .gz: each is a sentence, paragraph or document.

    With `key`, each line is a JSON object with the text under this key.
    """

    def __init__(self, path: Path, key: str | None = None):
        self.path = path
        self.name = str(path)
        self.key = key

    def __iter__(self) -> Iterator[str]:
        return self.read()

    def read(self, progress: Progress | None = None) -> Iterator[str]:
        """Yield the lines without blanks at either end, or the texts of the objects; `progress` counts bytes read."""
        indented: list[int] = []
        with open(self.path, "rb") as raw, self._unpacked(raw) as file:
            for line_number in itertools.count(1):
                try:
                    line = file.readline(MAX_LINE + 1)
                except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                    raise ValueError(
                        f"{self.name}: damaged gzip file behind line {line_number - 1} ({error})"
                    ) from None
                if not line:
                    break
                try:
                    whole = _decoded(line, line_number == 1)
                    text = whole.strip()
                    if text and INDENTED.match(whole):
                        indented.append(line_number)
                    if text and self.key is not None:
                        text = _under(self.key, text)
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{self.name}, line {line_number}: {reason_of(error)}"
                    ) from None
                if text or self.key is None:  # blank lines count, but not between objects
                    yield text
                if progress is not None:
                    progress.add(raw.tell() - progress.done)
        if line_number == 1:
            raise ValueError(f"{self.name}: the file is empty")
        if indented and self.key is None and self.name not in SAID:
            SAID.add(self.name)
            say(
                f"{self.name}: {len(indented)} of {line_number - 1} lines are indented (first line {indented[0]}); "
                "what is blank at either end of a line is left out, a .jsonl keeps it"
            )

    def _unpacked(self, raw: BinaryIO) -> BinaryIO:
        if self.path.suffix == ".gz":
            return gzip.open(raw, "rb")
        return raw

    def fingerprint(self) -> str:
        """Return the sha256 of the file."""
        return sha256_of(self.path)


class HubText:
    """The texts of a split of a Hugging Face data set: the column text, or `language` of the column translation."""

    def __init__(self, root: str, split: str, language: str | None = None):
        self.language = language
        column = "translation" if language else "text"
        self.table, name = hub_split(root, SPLIT_NAMES.get(split, (split,)))
        if column not in self.table.column_names:
            raise ValueError(
                f"data.root {name}: no column {column}; it has {', '.join(self.table.column_names)}"
            )
        languages = getattr(self.table.features[column], "languages", None) or (language,)
        if language and language not in languages:
            raise ValueError(f"{name}: no language {language}; it has {', '.join(languages)}")
        self.name = f"{name}, {language}" if language else name

    def __iter__(self) -> Iterator[str]:
        """Yield each text as one line, without blanks at either end."""
        row = 0
        changed = 0  # number of texts that lose line breaks or indentation
        for row, cell in enumerate(self.table, 1):
            if self.language:
                text = cell["translation"].get(self.language)
            else:
                text = cell["text"]
            if not isinstance(text, str):
                raise ValueError(f"{self.name}, row {row}: no text")
            if "\0" in text:
                raise ValueError(f"{self.name}, row {row}: a NUL character")
            if len(text.splitlines()) > 1 or (INDENTED.match(text) and text.strip()):
                changed += 1
            yield " ".join(text.splitlines()).strip()
        if not row:
            raise ValueError(f"{self.name}: no rows")
        if changed and self.name not in SAID:
            SAID.add(self.name)
            say(
                f"{self.name}: {changed} of {row} texts have several lines or are indented; they are joined to one "
                "line, without what is blank at either end, a .jsonl keeps them as they are"
            )

    def fingerprint(self) -> str:
        """Return the fingerprint that `datasets` gives the table, and the language or column."""
        return f"{self.table._fingerprint} {self.language or 'text'}"


Lines = TextFile | HubText


class ParallelText(NamedTuple):
    """Aligned sentences: source and target, each an iterable of lines."""

    source: Lines
    target: Lines

    def check(self, allow_empty: bool = False) -> int:
        """Return the number of pairs.

        Raises ValueError if the sides have different numbers of lines, or if a line is empty (but with `allow_empty`).
        """
        source_lines = 0
        target_lines = 0
        empty = 0
        for source, target in itertools.zip_longest(self.source, self.target):
            if source is not None:
                source_lines += 1
            if target is not None:
                target_lines += 1
            has_both = source_lines == target_lines
            has_empty_side = not source or not target
            if has_both and has_empty_side and not allow_empty:
                if not empty:
                    side = self.target if source else self.source
                    first = f"{side.name}, line {source_lines}: empty"
                empty += 1
        if source_lines != target_lines:
            raise ValueError(
                f"{self.source.name} has {source_lines} lines, {self.target.name} has {target_lines}; a sentence and "
                "its translation must stand on the same line"
            )
        if empty:
            raise ValueError(
                f"{first} (pairs with an empty side: {empty} of {source_lines}); remove them, or leave them out "
                "with data.allow_empty true"
            )
        return source_lines


def find_pairs(root: str, split: str, source: str, target: str) -> ParallelText:
    """Return the pairs of a split, which are read only when iterated.

    `root` is a folder with {split}.{language}[.gz], or hfds/NAME[:CONFIG], a data set with a column translation. The
    split "val" may also be named valid, validation or dev.
    """
    if source == target:
        raise ValueError(f"data.source {source} and data.target {target} are the same language")
    if root.startswith(PREFIX):
        return ParallelText(HubText(root, split, source), HubText(root, split, target))
    return ParallelText(*map(TextFile, _find_text(root, split, [f".{source}"], [f".{target}"])))


def find_lines(root: str, split: str) -> Lines:
    """Return the lines of a split, empty ones included, or its documents; they are read only when iterated.

    `root` is a folder with {split}.txt[.gz] or {split}.jsonl[.gz] (key text), or hfds/NAME[:CONFIG], a data set with a
    column text.
    """
    if root.startswith(PREFIX):
        return HubText(root, split)
    (path,) = _find_text(root, split, TEXTS)
    return TextFile(path, None if form_of(path) == ".txt" else "text")


def find_tokens(root: str, split: str) -> list[Path]:
    """Return the stores of token ids of a split, SPLIT or SPLIT-*; [] if the split is text or missing."""
    folder = Path(root)
    if not folder.is_dir():
        return []
    for name in SPLIT_NAMES.get(split, (split,)):
        single = _stores([folder / name])
        several = _stores(sorted(folder.glob(f"{name}-*")))
        texts = _there(folder, name, TEXTS)
        found = [paths for paths in (single, several, texts) if paths]
        if len(found) > 1:
            raise ValueError(
                f"data.root {root}: both {found[0][0].name} and {found[1][0].name}; remove one"
            )
        if texts:
            return []
        if found:
            return found[0]
    return []


def _stores(folders: Sequence[Path]) -> list[Path]:
    return [folder for folder in folders if (folder / IDS).exists()]


def form_of(path: Path) -> str:
    """Return the ending of a file's name, without .gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def _there(folder: Path, name: str, endings: Sequence[str]) -> list[Path]:
    """Return the existing paths of `name` with one of these endings, .gz after it or not."""
    paths = (folder / f"{name}{ending}{packed}" for ending in endings for packed in ("", ".gz"))
    return [path for path in paths if path.exists()]


def _find_text(root: str, split: str, *sides: Sequence[str]) -> list[Path]:
    """Return a file for every side, with one of the side's endings.

    All files have the same name of the split: val.de does not go together with valid.en.
    """
    folder = Path(root)
    names = SPLIT_NAMES.get(split, (split,))
    if not folder.is_dir():
        wanted = " and ".join(split + endings[0] for endings in sides)
        raise FileNotFoundError(
            f"data.root {root}: no such folder (give a folder with {wanted}, or hfds/NAME)"
        )
    files = {name: [_there(folder, name, endings) for endings in sides] for name in names}
    best = max(names, key=lambda name: sum(map(bool, files[name])))
    for endings, paths in zip(sides, files[best]):
        if not paths:
            held = sorted(p.name for p in folder.iterdir() if p.name[0] != ".")
            listed = some_of(held, 12)
            wanted = " or ".join(name + ending for name in names for ending in endings)
            raise FileNotFoundError(
                f"data.root {folder}: no {wanted} (or .gz); it holds {listed or 'nothing'}"
            )
        if len(paths) > 1:
            raise ValueError(
                f"data.root {folder}: both {paths[0].name} and {paths[1].name}; remove one"
            )
        if not paths[0].is_file():
            raise ValueError(f"{paths[0]}: not a file but a folder, pipe, socket or device")
    return [paths[0] for paths in files[best]]


def _decoded(line: bytes, first: bool) -> str:
    """Decode a line; from the `first` one also remove a byte order mark."""
    if len(line) > MAX_LINE:
        raise ValueError(f"more than {MAX_LINE >> 20} MiB; expected a sentence or document a line")
    if b"\0" in line:
        raise ValueError("a NUL character; expected UTF-8 text")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 (byte 0x{line[error.start]:02x} at {error.start + 1})"
        ) from None
    if first:
        text = text.removeprefix(BYTE_ORDER_MARK)
    return text


def _under(key: str, line: str) -> str:
    """Return the text under a key of a JSON object."""
    content = json.loads(line)
    if not isinstance(content, dict) or not isinstance(content.get(key), str):
        raise ValueError(
            f"no text under the key {key!r}; expected an object a line that has it (tokenise: --key)"
        )
    if "\0" in content[key]:
        raise ValueError("a NUL character; expected text")
    return content[key]
