"""Find the texts in `data.root`: pairs for translation, lines or token ids for language models."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Union

from moh_vision.data.hub import PREFIX
from moh_vision.language.data.hub import HubText, hub_column
from moh_vision.language.data.lines import TextFile, find_text, there

# What a validation split is called elsewhere; other splits go by their own name.
SPLIT_NAMES = {"val": ("val", "valid", "validation", "dev")}

Lines = Union[TextFile, HubText]
TOKEN_ENDINGS = (".bin", ".npy", ".tokens.safetensors")


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
    names = SPLIT_NAMES.get(split, (split,))
    if source == target:
        raise ValueError(f"data.source {source} and data.target {target} are the same language")
    if root.startswith(PREFIX):
        table, name = hub_column(root, names, "translation")
        languages = getattr(table.features["translation"], "languages", None) or (source, target)
        for language in (source, target):
            if language not in languages:
                raise ValueError(f"{name}: no language {language}; it has {', '.join(languages)}")
        return ParallelText(HubText(table, name, source), HubText(table, name, target))
    folder = _folder(root, f"{split}.{source} and {split}.{target}")
    # One name for both sides: val.de does not belong to valid.en.
    suffixes = [f".{language}" for language in (source, target)]
    whole = [name for name in names if all(there(folder, name, suffix) for suffix in suffixes)]
    return ParallelText(*(find_text(folder, (*whole[:1], *names), suffix) for suffix in suffixes))


def find_lines(root: str, split: str) -> Lines:
    """Find the lines of a split, with empty ones, unread. `root` is a folder with {split}.txt[.gz],
    or hfds/NAME[:CONFIG], a data set with a column text.
    """
    names = SPLIT_NAMES.get(split, (split,))
    if root.startswith(PREFIX):
        return HubText(*hub_column(root, names, "text"))
    return find_text(_folder(root, f"{split}.txt"), names, ".txt")


def find_tokens(root: str, split: str) -> Optional[List[Path]]:
    """Return the files with token ids of a split, or None if there are none."""
    folder = Path(root)
    if root.startswith(PREFIX) or not folder.is_dir():
        return None
    for name in SPLIT_NAMES.get(split, (split,)):
        forms: Dict[str, List[Path]] = {}
        for ending in TOKEN_ENDINGS:
            forms[f"{name}{ending}"] = [p for p in (folder / f"{name}{ending}",) if p.exists()]
            forms[f"{name}-*{ending}"] = sorted(folder.glob(f"{name}-*{ending}"))
        forms[f"{name}.txt"] = there(folder, name, ".txt")
        found = [files for files in forms.values() if files]
        if len(found) > 1:
            raise ValueError(f"data.root {root}: both {found[0][0].name} and {found[1][0].name}; remove one")
        if found:
            return None if found[0] is forms[f"{name}.txt"] else found[0]
    return None


def _folder(root: str, files: str) -> Path:
    if not Path(root).is_dir():
        raise FileNotFoundError(f"data.root {root}: no such folder (give a folder with {files}, or hfds/NAME)")
    return Path(root)
