"""Look at every image of a data set before anyone trains on it.   python -m moh_vision check ROOT

ROOT is what data.root takes: a folder with train/CLASS/* and val/CLASS/*, one of shards, or either without classes;
also a folder of classes alone. Prints the number of images and classes of each split, what cannot be read, what
training would refuse, and what it takes but may surprise. Exit code 0: training takes all of it; 1: it does not; 2: ROOT
cannot be opened.
"""

import contextlib
import io
import os
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader

from moh_vision.data.decode import UnreadableImage, decode_image, fraction_for, open_image
from moh_vision.data.folder import ImageFolder, holds_images
from moh_vision.data.shard_writer import one_line
from moh_vision.data.sources import ImageSource
from moh_vision.data.splits import EXCHANGED, check_same_classes, dividing, has_split, of_classes, open_source
from moh_vision.data.workers import leave_signals_to_the_parent
from moh_vision.engine.commands import Progress, say

SMALL = 32  # pixels of the shorter side
LONG = 4  # times the shorter side
SHOWN = 20  # unreadable images that are named


def look(source: ImageSource, numbers: list[int]) -> list[tuple[str, int, list[str]]]:
    """Decode samples as training does; return (file, shorter side, oddities), or of an unreadable one (problem, 0, [])."""
    seen = []
    for index in numbers:
        where = source.where(index)
        try:
            data = source.read(index)
            side = min(decode_image(data, where).size)
            seen.append((where, side, list(oddities(open_image(io.BytesIO(data))))))
        except UnreadableImage as error:
            seen.append((str(error), 0, []))
    return seen


def oddities(image: Image.Image) -> Iterator[str]:
    """Yield what is odd about an image, and what training makes of it."""
    if image.mode in ("1", "L", "LA", "La"):
        yield "grey"
    if image.mode.startswith("I"):
        yield "16-bit grey, scaled to 8 bits"
    if image.mode == "CMYK":
        yield "CMYK, turned into RGB"
    if image.mode == "P" and "transparency" in image.info:
        yield "palette with transparency, which is dropped"
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        yield "transparency, which is dropped"
    with contextlib.suppress(Exception):  # damage behind the first picture makes many kinds
        if image.n_frames > 1:
            yield "several pictures, of which the first is taken"
    if min(image.size) < SMALL:
        yield f"under {SMALL} pixels"
    if max(image.size) > LONG * min(image.size):
        yield f"over {LONG} times as long as wide"


def open_all(root: str) -> dict[str, ImageSource]:
    """Return split -> source, of the splits that there are; "" for a folder of classes."""
    if not os.path.isdir(root):
        raise FileNotFoundError(f"{root}: no such folder; a folder of classes or of shards is checked")
    splits = [split for split in ("train", "val") if has_split(root, split)]
    if not splits and not holds_images(root):
        return {"": ImageFolder(root, "", allow_empty=True)}
    return {split: open_source(root, split, allow_empty=True) for split in splits or ["train"]}


def check(root: str, split: str, source, workers: int) -> list[str]:
    """Print what a split holds; return what training would refuse, a line each."""
    rows: dict[str, list[str]] = defaultdict(list)  # what is told -> names of files or classes
    counts = np.bincount(source.labels, minlength=len(source.classes))
    alike = defaultdict(list)
    for name in source.classes:
        alike[name.casefold()].append(name)
    empty = [name for name, count in zip(source.classes, counts) if not count]
    rows["classes without images"] = empty
    rows["classes that differ by case alone"] = [" ".join(names) for names in alike.values() if len(names) > 1]
    rows["files that are no images, passed over"] = getattr(source, "left_out", [])

    title, bad, sides = split or root, [], []
    how = dict(num_workers=workers, worker_init_fn=leave_signals_to_the_parent)
    with Progress(title, len(source), "image") as progress:
        for batch in DataLoader(range(len(source)), batch_size=64, collate_fn=partial(look, source), **how):
            bad += [problem for problem, side, _ in batch if not side]
            sides += [side for _, side, _ in batch if side]
            for where, _, odd in batch:
                for oddity in odd:
                    rows[oddity].append(where)
            progress.add(len(batch))

    plain = "" if split else " (neither train nor val is in it: its folders are taken as classes)"
    pixels = f"; shorter side {_range(sides)} pixels, median {np.median(sides):.0f}" if sides else ""
    each = f", {_range(counts)} each" if source.classes else ""
    say(f"{title}{plain}: {len(source)} images {of_classes(source)}{each}{pixels}")
    rows = {row: (len(names), one_line(names[0])) for row, names in rows.items() if names}
    rows.update({"unreadable": (len(bad), "")} if bad else {})
    wide = max(map(len, rows), default=0)
    for row, (count, first) in rows.items():
        say(f"  {row:<{wide}}  {count:>9}  {first}".rstrip())
    for problem in bad[:SHOWN]:
        say(f"    {one_line(problem)}")
    if len(bad) > SHOWN:
        say(f"    and {len(bad) - SHOWN} more")
    refused = []
    if empty and isinstance(source, ImageFolder):
        refused.append(f"{title}: training refuses class folders without images")
    some = 0 < len(bad) < len(source)
    if not split:
        leave = f" --max-bad-fraction {fraction_for(len(bad), len(source))}" if some else ""
        and_more = " and leaves out what cannot be read" if some else ""
        refused.append(f"{title}: training needs the classes in train and val; {dividing(root, leave)}{and_more}")
    elif bad:
        way = f", or leaves them out with --data.max_bad_fraction {fraction_for(len(bad), len(source))}" if some else ""
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
