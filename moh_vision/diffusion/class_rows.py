"""Which classes are drawn, and which of their images a grid shows, one class a row."""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor

from moh_vision.data.imagenet import numbers_by_name
from moh_vision.engine.commands import nearest


def class_numbers(key: str, asked: Sequence[str], names: Mapping[str, int], count: int) -> list[int]:
    """Look up classes by name, by a word of ImageNet's names, or by number; names come first."""
    by_name, found = numbers_by_name(names), []
    for text in asked:
        by_number = [int(text)] if text.isdecimal() and int(text) < count else []
        numbers = by_name.get(text, by_number)
        if len(numbers) > 1:
            raise ValueError(f"{key} {text}: classes {', '.join(map(str, numbers))} are called so; give a number")
        if not numbers:
            near = ([] if text.isdecimal() else nearest(text, by_name, 1)) or list(names)[:5]
            raise ValueError(
                f"{key} {text}: no such class; there are {count}, such as {', '.join(near)}, or 0 to {count - 1}"
            )
        found += numbers
    return found


def chosen_classes(key: str, asked: Sequence[str] | None, names: list[str]) -> list[int]:
    """Return the numbers of the classes asked for, each once; None: all of `names`."""
    if asked is None:
        return list(range(len(names)))
    found = class_numbers(key, asked, {name: number for number, name in enumerate(names)}, len(names))
    for place, number in enumerate(found):
        if number in found[:place]:
            raise ValueError(f"{key} {asked[place]}: class {number} ({names[number]}) is named twice")
    return found


def class_rows(labels: Tensor, classes: Sequence[int], columns: int) -> tuple[list[int], list[int], int]:
    """Return (class of each row that has images, image numbers row by row, columns) of a grid, given `labels` [N]."""
    drawn = {c: torch.nonzero(labels == c).flatten().tolist() for c in classes}
    rows = [c for c in classes if drawn[c]]
    columns = min([columns, *(len(drawn[c]) for c in rows)])
    return rows, [i for c in rows for i in drawn[c][:columns]], columns
