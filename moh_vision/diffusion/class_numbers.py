"""Numbers of the classes that are drawn, by name or number."""

from __future__ import annotations

from typing import Mapping, Sequence

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
            allowed = f"there are {count}, such as {', '.join(near)}, or 0 to {count - 1}"
            raise ValueError(f"{key} {text}: no such class; {allowed}")
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
