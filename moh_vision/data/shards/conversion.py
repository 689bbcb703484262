"""From an image folder to shards: checks first, then one split after the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable, Dict, Optional

from moh_vision.data.shards.class_folders import ClassFolders, divided, list_class_folders, split_folders
from moh_vision.data.shards.out_folder import check_out, full_disk_in_one_line, write_classes
from moh_vision.data.shards.record import BadLimit, one_line
from moh_vision.data.shards.writer import SplitWriter
from moh_vision.engine.io import only_one


def convert(
    source: str,
    out: str,
    *,
    split: Optional[str] = None,
    val_fraction: Optional[float] = None,
    size: Optional[int] = None,
    quality: int = 95,
    samples_per_shard: int = 1000,
    seed: int = 0,
    workers: Optional[int] = None,
    max_bad_fraction: float = 0.0,
    say: Callable[[str], None] = print,
) -> None:
    """Write an image folder as shards; see the top of this file and `--help`.

    Args:
        source, split: see `class_folders.split_folders`.
        val_fraction: divide a folder of classes into train and val, see `class_folders.divided`.
        out: folder, made if need be; other files in it are not touched.
        size, quality, samples_per_shard, seed: see `SplitWriter`.
        max_bad_fraction: share of the images of all splits that may be bad before it stops.
        workers: shards written at a time; default: one a processor.
        say: takes the lines about what was done.

    Raises:
        ValueError, OSError: one line that names the argument or file.
    """
    for name, value, least in (("size", size, 1), ("samples-per-shard", samples_per_shard, 1), ("workers", workers, 1)):
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: expected {least} or more")
    if not 1 <= quality <= 100:
        raise ValueError(f"--quality {quality}: expected 1 to 100")
    if not 0 <= max_bad_fraction <= 1:
        raise ValueError(f"--max-bad-fraction {max_bad_fraction:g}: expected 0 to 1")
    if split is not None and not (split.isascii() and split.replace("_", "").isalnum()):
        raise ValueError(f"--split {split!r}: expected letters, digits and _ (training reads train and val)")
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction:g}: expected a share between 0 and 1")
    root, folder = Path(source), Path(out)
    if folder.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"--out {out} is inside --in {source}; the shards would be taken for input")
    check_out(out)

    places = split_folders(root, split)
    if val_fraction is not None and (split or places != {"train": root}):
        raise ValueError(f"--val-fraction has no effect: --in {source} has splits ({', '.join(places)})")
    listings = {name: list_class_folders(place) for name, place in places.items()}
    if val_fraction is not None:
        listings = divided(listings["train"], val_fraction)
    for name, listing in listings.items():
        if size is None:
            _refuse_unreadable_formats(listing)
        say(f"{name}: {len(listing.files)} images of {len(listing.classes)} classes in {listing.root}")
        if listing.left_out:
            first = one_line(listing.left_out[0])
            say(f"{name}: left out, not images by their names: {len(listing.left_out)}, the first {first}")
    _refuse_other_classes(listings)
    used = {x.root.name for x in listings.values() if x.root != root}
    if used:
        others = sorted(e.name for e in os.scandir(root) if e.name not in used and not e.name.startswith("."))
        if others:
            say(f"left out, not a split: {', '.join(map(one_line, others[:5]))}{', ...' * (len(others) > 5)}")

    Path(out).mkdir(parents=True, exist_ok=True)
    with only_one(folder, "--out", with_children=True), full_disk_in_one_line(out):
        arguments = dict(size=size, quality=quality, samples_per_shard=samples_per_shard, seed=seed)
        # All are checked before anything is written.
        limit = BadLimit(max_bad_fraction, sum(len(listing.files) for listing in listings.values()))
        writers = [SplitWriter(listing, name, folder, limit, **arguments) for name, listing in listings.items()]
        write_classes(folder, next(iter(listings.values())).classes, source)
        bad = 0
        for writer in writers:
            bad += writer.write(workers or len(os.sched_getaffinity(0)), say, bad)


def _refuse_unreadable_formats(listing: ClassFolders) -> None:
    for file in listing.files:
        if file.path.lower().endswith((".bmp", ".ppm", ".pgm", ".tif", ".tiff")):
            raise ValueError(
                f"{listing.root / file.path}: training reads jpg, png and webp; give --size to store JPEG, or convert it"
            )


def _refuse_other_classes(listings: Dict[str, ClassFolders]) -> None:
    if len(listings) < 2:
        return
    (a, first), (b, second) = listings.items()
    for here, there, x, y in ((a, b, first, second), (b, a, second, first)):
        missing = sorted(set(x.classes) - set(y.classes))
        if missing:
            raise ValueError(
                f"class folders of {x.root} that {y.root} does not have: {len(missing)} ({', '.join(missing[:5])}"
                f"{', ...' * (len(missing) > 5)}); {here} and {there} need the same classes"
            )
