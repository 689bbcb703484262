"""Image folders in the layout of ImageNet and torchvision's ImageFolder: a folder a class, with or without splits."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from moh_vision.data.walk import IMAGES, refuse_special, subfolders, walk

EXTENSIONS = (*IMAGES, ".pgm")


class ImageFile(NamedTuple):
    """One file: its path below the folder of the split, with /; its class number, bytes and time of change."""

    path: str
    label: int
    size: int
    mtime_ns: int


@dataclass
class ClassFolders:
    """What `list_class_folders` found, sorted by path; `left_out` names files that are no images by their extension."""

    root: Path
    classes: List[str]
    files: List[ImageFile]
    left_out: List[str] = field(default_factory=list)

    def fingerprint(self) -> Dict[str, List]:
        """Class name -> [number of images, digest of their paths, sizes and times], to tell one listing from another."""
        digests = defaultdict(hashlib.sha256)
        counts = [0] * len(self.classes)
        for file in self.files:
            counts[file.label] += 1
            digests[file.label].update(
                f"{file.path}\0{file.size}\0{file.mtime_ns}\0".encode("utf-8", "surrogateescape")
            )
        return {name: [counts[i], digests[i].hexdigest()[:16]] for i, name in enumerate(self.classes)}


def split_folders(root: Path, split: Optional[str] = None) -> Dict[str, Path]:
    """Split name -> folder of its class folders.

    ROOT/train and ROOT/val (or ROOT/validation; or, if there is neither, ROOT/test) that hold folders are splits;
    otherwise the folders in ROOT are classes. `test` beside a validation split is no split: ImageNet's has no labels.

    Args:
        root: the image folder.
        split: take the folders in ROOT as classes, whatever they are called, and name the split so.

    Raises:
        ValueError, FileNotFoundError: naming the folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"--in {root}: no such folder")
    if split is not None:
        return {split: root}
    names = {name for name in ("train", "val", "validation", "test") if (root / name).is_dir()}
    with_classes = {name for name in names if subfolders(root / name)}
    if not with_classes:
        return {"train": root}
    for name in sorted(names - with_classes - {"test"}):
        raise ValueError(f"--in {root}: {name} has no class folders in it, but {min(with_classes)} has")
    if {"val", "validation"} <= with_classes:
        raise ValueError(f"--in {root}: both val and validation are there; move one away")
    found = {"train": root / "train"} if "train" in with_classes else {}
    for name in ("val", "validation", "test"):
        if name in with_classes and "val" not in found:
            found["val"] = root / name
    return found


def divided(listing: ClassFolders, val_fraction: float) -> Dict[str, ClassFolders]:
    """Training and validation files of a folder of classes, by a hash of their names: more files leave the others
    where they are.

    Raises:
        ValueError: naming a class that would have no file in one of the two.
    """
    parts = {"train": [], "val": []}
    for file in listing.files:
        number = int.from_bytes(hashlib.sha256(os.fsencode(file.path)).digest()[:8], "big")
        parts["val" if number < val_fraction * 2**64 else "train"].append(file)
    for split, files in parts.items():
        for label in set(range(len(listing.classes))).difference(file.label for file in files):
            other, name = "larger" if split == "val" else "smaller", listing.classes[label]
            raise ValueError(
                f"--val-fraction {val_fraction:g} leaves class {name} without a file in {split}; give a {other} one"
            )
    (train, val), left_out = parts.values(), listing.left_out
    return {"train": replace(listing, files=train), "val": replace(listing, files=val, left_out=left_out[:0])}


def list_class_folders(root: Path) -> ClassFolders:
    """The images in ROOT/CLASS and below; links are followed, hidden files are not looked at.

    Raises:
        ValueError: no class folders, one without images, or one whose name a line of classes.txt cannot hold.
    """
    classes = subfolders(root)
    if not classes:
        raise ValueError(f"--in {root}: no class folders in it (expected {root}/CLASS/*.jpg)")
    found = ClassFolders(root, classes, [])
    for label, name in enumerate(classes):
        if name != name.strip() or name.splitlines() != [name] or name != name.encode("utf-8", "replace").decode():
            raise ValueError(
                f"--in {root}: class folder {name!r}: a class name must be UTF-8 without line breaks and outer spaces"
            )
        before = len(found.files)
        _collect(root, name, label, found)
        if len(found.files) == before:
            raise ValueError(f"--in {root}: class folder {name} holds no images ({', '.join(EXTENSIONS)})")
    found.left_out += sorted(e.name for e in os.scandir(root) if not e.name.startswith(".") and not e.is_dir())
    found.files.sort()
    return found


def _collect(folder: Path, name: str, label: int, found: ClassFolders) -> None:
    for entry, path in walk(folder / name, name, hidden=False):
        if entry.name.lower().endswith(EXTENSIONS):
            stat = entry.stat()  # a dangling link is an error that names it
            refuse_special(entry)
            found.files.append(ImageFile(path, label, stat.st_size, stat.st_mtime_ns))
        else:
            found.left_out.append(path)
