"""Folders from top to bottom, links followed: a link that leads back, and what would be read for ever, are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, List, Tuple

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")  # the extensions that are looked for


def subfolders(folder: Path) -> List[str]:
    """Names of the folders in `folder`, sorted, as those of classes are; without hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def walk(folder: Path, prefix: str, hidden: bool, above: tuple = ()) -> Iterator[Tuple[os.DirEntry, str]]:
    """(entry, `prefix`/...) of everything in `folder` and below that is no folder.

    Args:
        hidden: also what begins with a dot.
        above: (device, inode) of the folders that led here.

    Raises:
        ValueError: naming a link to a folder above it.
    """
    here = folder.stat()
    if (here.st_dev, here.st_ino) in above:
        raise ValueError(f"{folder}: a link to a folder above it")
    for entry in os.scandir(folder):
        path = f"{prefix}/{entry.name}"
        if entry.name.startswith(".") and not hidden:
            continue
        if entry.is_dir():
            yield from walk(folder / entry.name, path, hidden, (*above, (here.st_dev, here.st_ino)))
        else:
            yield entry, path


def refuse_special(entry: os.DirEntry) -> None:
    """Raise ValueError for what is there and no file: reading a pipe would wait for ever. A dangling link is let
    through."""
    if os.path.exists(entry.path) and not entry.is_file():
        raise ValueError(f"{entry.path}: not a file but a pipe, socket or device")
