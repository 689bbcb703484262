"""Look at every image of a data set before anyone trains on it.   python -m moh_vision check ROOT

ROOT is what data.root takes: a folder with train/CLASS/* and val/CLASS/*, one of shards, or either without classes;
also a folder of classes alone. Prints the number of images and classes of each split, what cannot be read, and what
training would refuse. Exit code 0: training takes all of it; 1: it does not; 2: ROOT cannot be opened.
"""

import os
import warnings
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import numpy as np
from torch.utils.data import DataLoader

from moh_vision.data.decode import UnreadableImage, fraction_for
from moh_vision.data.folder import ImageFolder, holds_images
from moh_vision.data.shard_writer import one_line
from moh_vision.data.sources import ImageSource
from moh_vision.data.splits import EXCHANGED, check_same_classes, dividing, has_split, of_classes, open_source
from moh_vision.data.workers import leave_signals_to_the_parent
from moh_vision.engine.commands import Progress, say

SHOWN = 20  # unreadable images that are named


def shorter_sides(source: ImageSource, numbers: list[int]) -> tuple[list[int], list[str]]:
    """Decode samples as training does; return the shorter sides, and what is wrong with the unreadable ones."""
    sides, problems = [], []
    for index in numbers:
        try:
            sides.append(min(source.image(index).size))
        except UnreadableImage as error:
            problems.append(str(error))
    return sides, problems


def open_all(root: str) -> dict[str, ImageSource]:
    """Return split -> source, of the splits that there are; "" for a folder of classes."""
    if not os.path.isdir(root):
        raise FileNotFoundError(f"{root}: no such folder; a folder of classes or of shards is checked")
    splits = [split for split in ("train", "val") if has_split(root, split)]
    if not splits and not holds_images(root):
        return {"": ImageFolder(root, allow_empty=True)}
    return {split: open_source(root, split, allow_empty=True) for split in splits or ["train"]}


def check(root: str, split: str, source, workers: int) -> list[str]:
    """Print what a split holds; return what training would refuse, a line each."""
    counts = np.bincount(source.labels, minlength=len(source.classes))
    empty = [name for name, count in zip(source.classes, counts) if not count]
    title, sides, bad, refused = split or root, [], [], []
    how = dict(num_workers=workers, worker_init_fn=leave_signals_to_the_parent)
    with Progress(title, len(source), "image") as progress:
        batches = DataLoader(range(len(source)), batch_size=64, collate_fn=partial(shorter_sides, source), **how)
        for some, problems in batches:
            sides += some
            bad += problems
            progress.add(len(some) + len(problems))
    plain = "" if split else " (neither train nor val is in it: its folders are taken as classes)"
    pixels = f"; shorter side {_range(sides)} pixels, median {np.median(sides):.0f}" if sides else ""
    each = f", {_range(counts)} each" if source.classes else ""
    say(f"{title}{plain}: {len(source)} images {of_classes(source)}{each}{pixels}")
    for row, names in (
        ("classes without images", empty),
        ("files that are no images, passed over", getattr(source, "left_out", [])),
    ):
        if names:
            say(f"  {row}: {len(names)}, the first {one_line(names[0])}")
    if bad:
        say(f"  unreadable: {len(bad)}")
    for problem in bad[:SHOWN]:
        say(f"    {one_line(problem)}")
    if len(bad) > SHOWN:
        say(f"    and {len(bad) - SHOWN} more")
    fraction = fraction_for(len(bad), len(source)) if 0 < len(bad) < len(source) else ""
    if empty and isinstance(source, ImageFolder):
        refused.append(f"{title}: training refuses class folders without images")
    if not split:
        leave = f" --max-bad-fraction {fraction}" if fraction else ""
        and_more = " and leaves out what cannot be read" if fraction else ""
        refused.append(f"{title}: training needs the classes in train and val; {dividing(root, leave)}{and_more}")
    elif bad:
        way = f", or leaves them out with --data.max_bad_fraction {fraction}" if fraction else ""
        refused.append(f"{title}: {len(bad)} of {len(source)} images cannot be read: training stops{way}")
    return refused


def _range(numbers) -> str:
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else f"{max(numbers)}"


def options(add: Callable) -> None:
    add("root", metavar="ROOT", help="a folder of classes or of shards")
    add("--workers", type=int, help="processes that read (the processors there are)")


def work(options: Namespace) -> None:
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if workers < 0:
        raise ValueError(f"--workers {workers}: expected 0 or more")
    sources, refused = open_all(options.root), []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # of oddities in files that decode all the same
        for split, source in sources.items():
            refused += check(options.root, split, source, workers)
    if {"train", "val"} <= sources.keys():
        try:
            check_same_classes(sources["train"].classes, "train", sources["val"], f"data.root {options.root}")
        except ValueError as error:
            refused.append(f"classifiers refuse this: {error}")
        if len(sources["val"]) > len(sources["train"]):
            say(EXCHANGED)
    elif "" not in sources and any(source.classes for source in sources.values()):
        refused.append(f"classifiers refuse this: only {''.join(sources)}, where train and val are needed")
    if not any(source.classes for source in sources.values()):
        say("train_dit.py takes images without classes, train_cls.py does not")
    say("\n".join(refused) or "nothing that training would refuse")
    if refused:
        raise SystemExit(1)
