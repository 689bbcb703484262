"""Find the texts in `data.root`: pairs for translation, lines or token ids for language models."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Iterator, NamedTuple

from moh_vision.data.hub import PREFIX, hub_split
from moh_vision.language.data.lines import TextFile
from moh_vision.language.data.tokens import IDS

# What a validation split is called elsewhere; other splits go by their own name.
SPLIT_NAMES = {"val": ("val", "valid", "validation", "dev")}


class HubText:
    """Texts of a split of a data set: its column text, or `language` of its column translation."""

    def __init__(self, root: str, split: str, language: str | None = None):
        self.language = language
        column = "translation" if language else "text"
        self.table, name = hub_split(root, SPLIT_NAMES.get(split, (split,)))
        if column not in self.table.column_names:
            raise ValueError(f"data.root {name}: no column {column}; it has {', '.join(self.table.column_names)}")
        languages = getattr(self.table.features[column], "languages", None) or (language,)
        if language not in languages and language:
            raise ValueError(f"{name}: no language {language}; it has {', '.join(languages)}")
        self.name = f"{name}, {language}" if language else name

    def __iter__(self) -> Iterator[str]:
        """The texts, on one line each."""
        row = 0
        for row, cell in enumerate(self.table, 1):
            text = cell["translation"].get(self.language) if self.language else cell["text"]
            if not isinstance(text, str) or "\0" in text:
                raise ValueError(f"{self.name}, row {row}: {'a NUL character' if text else 'no text'}")
            yield " ".join(text.splitlines()).strip()
        if not row:
            raise ValueError(f"{self.name}: no rows")

    def fingerprint(self) -> str:
        """The one that `datasets` gives the table, with the column."""
        return f"{self.table._fingerprint} {self.language or 'text'}"


Lines = TextFile | HubText


class ParallelText(NamedTuple):
    """Aligned sentences: source and target, each an iterable of lines."""

    source: Lines
    target: Lines

    def check(self, allow_empty: bool = False) -> int:
        """Check and count the pairs; with `allow_empty` a side may be empty."""
        source_lines = target_lines = empty = 0
        for source, target in zip_longest(self.source, self.target):
            source_lines += source is not None
            target_lines += target is not None
            if source_lines == target_lines and not (source and target) and not allow_empty:
                if not empty:
                    first = f"{self.target.name if source else self.source.name}, line {source_lines}: empty"
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
    """Find the pairs of a split, unread. `root` is a folder with {split}.{language}[.gz], or hfds/NAME[:CONFIG],
    a data set with a column translation. The split "val" may also be named valid, validation or dev.
    """
    if source == target:
        raise ValueError(f"data.source {source} and data.target {target} are the same language")
    if root.startswith(PREFIX):
        return ParallelText(HubText(root, split, source), HubText(root, split, target))
    return ParallelText(*_find_text(root, split, f".{source}", f".{target}"))


def find_lines(root: str, split: str) -> Lines:
    """Find the lines of a split, with empty ones, unread. `root` is a folder with {split}.txt[.gz],
    or hfds/NAME[:CONFIG], a data set with a column text.
    """
    return HubText(root, split) if root.startswith(PREFIX) else _find_text(root, split, ".txt")[0]


def find_tokens(root: str, split: str) -> list[Path]:
    """Return the files or stores with token ids of a split; none if it is text, or not there."""
    folder = Path(root)
    for name in SPLIT_NAMES.get(split, (split,)) if folder.is_dir() else ():
        whole = [folder / f"{name}{ending}" for ending in (".bin", ".npy", "")]
        forms = []
        for paths in (whole, sorted(folder.glob(f"{name}-*"))):
            forms += [[p for p in paths if p.suffix == ending and p.exists()] for ending in (".bin", ".npy")]
            forms += [[p for p in paths if (p / IDS).exists()]]
        forms += [_there(folder, name, ".txt")]
        found = [files for files in forms if files]
        if len(found) > 1:
            raise ValueError(f"data.root {root}: both {found[0][0].name} and {found[1][0].name}; remove one")
        if found:
            return [] if forms[-1] else found[0]
    return []


def _there(folder: Path, name: str, suffix: str) -> list[Path]:
    """Which of NAME{suffix} and NAME{suffix}.gz there are."""
    return [path for path in (folder / f"{name}{suffix}", folder / f"{name}{suffix}.gz") if path.exists()]


def _find_text(root: str, split: str, *suffixes: str) -> list[TextFile]:
    """Find a file NAME{suffix} or NAME{suffix}.gz for every suffix, under one of the split's names for all:
    val.de does not belong to valid.en.
    """
    folder, names = Path(root), SPLIT_NAMES.get(split, (split,))
    if not folder.is_dir():
        wanted = " and ".join(split + suffix for suffix in suffixes)
        raise FileNotFoundError(f"data.root {root}: no such folder (give a folder with {wanted}, or hfds/NAME)")
    found = {name: [_there(folder, name, suffix) for suffix in suffixes] for name in names}
    best = max(names, key=lambda name: sum(map(bool, found[name])))
    for suffix, paths in zip(suffixes, found[best]):
        if not paths:
            held = sorted(p.name for p in folder.iterdir() if p.name[0] != ".")
            listed = ", ".join(held[:12]) + (f" and {len(held) - 12} more" if len(held) > 12 else "")
            wanted = " or ".join(f"{name}{suffix}" for name in names)
            raise FileNotFoundError(f"data.root {folder}: no {wanted} (or .gz); it holds {listed or 'nothing'}")
        if len(paths) > 1:
            raise ValueError(f"data.root {folder}: both {paths[0].name} and {paths[1].name}; remove one")
        if not paths[0].is_file():
            raise ValueError(f"{paths[0]}: not a file but a folder, pipe, socket or device")
    return [TextFile(paths[0]) for paths in found[best]]
