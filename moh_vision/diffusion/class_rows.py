"""Which classes are drawn, and which of their images a grid shows, one class a row."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from moh_vision.data.imagenet import numbers_by_name
from moh_vision.engine.commands import nearest


def class_numbers(key: str, asked: Optional[Sequence[str]], names: List[str]) -> List[int]:
    """Numbers of classes.

    Args:
        key: option that names the classes, for messages.
        asked: names of classes, words of ImageNet's, or numbers where no class has that name; None: all classes.
        names: of all classes, in the order of their numbers.

    Raises:
        ValueError: for a class that does not exist, or one that is named twice.
    """
    if asked is None:
        return list(range(len(names)))
    by_name, found = numbers_by_name({name: number for number, name in enumerate(names)}), []
    for text in asked:
        by_number = [int(text)] if text.isdecimal() and int(text) < len(names) else []
        numbers = by_name.get(text, by_number)
        if len(numbers) > 1:
            raise ValueError(f"{key} {text}: classes {', '.join(map(str, numbers))} are called so; give a number")
        if not numbers:
            near = [] if text.isdecimal() else nearest(text, by_name, 1)
            raise ValueError(
                f"{key} {text}: no such class; there are {len(names)}, such as {', '.join(near or names[:5])}, or 0 to {len(names) - 1}"
            )
        (number,) = numbers
        if number in found:
            raise ValueError(f"{key} {text}: class {number} ({names[number]}) is named twice")
        found.append(number)
    return found


def class_rows(labels: Tensor, classes: Sequence[int], columns: int) -> Tuple[List[int], List[int], int]:
    """The images of a grid with one class a row.

    Args:
        labels: [N], the class of every image.
        classes: those to show; one without an image is left out.
        columns: at most.

    Returns:
        (class of each row, numbers of the images row by row, columns)
    """
    drawn = {c: torch.nonzero(labels == c).flatten().tolist() for c in classes}
    rows = [c for c in classes if drawn[c]]
    columns = min([columns, *(len(drawn[c]) for c in rows)])
    return rows, [i for c in rows for i in drawn[c][:columns]], columns
