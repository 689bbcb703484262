"""Image folder -> webdataset shards.   python -m moh_vision shards --in IMAGEFOLDER --out DIR [--size 256]

    DIR/train-000000.tar ...   an image and a .cls (class number) per sample, shuffled over the classes
    DIR/classes.txt            the class names, sorted; line n is class n; without classes empty, and no .cls in the shards
    DIR/train.shards.json      the record: arguments and input, then samples, bytes, sha256 and bad files of every shard
    DIR/train.files.txt        line n: the file that sample n came from
    DIR/train.bad.txt          bad files and what is wrong with them, if any were left out

The same input, arguments and Pillow give the same bytes, whatever the number of workers. A shard is written under a
hidden name, recorded, flushed and only then renamed, so the same command goes on after a kill at any moment.

Every image is decoded, so that training meets no bad one. Without --size the bytes are stored unchanged, EXIF
included. With --size an image is turned upright, converted to RGB (transparency and colour profile are dropped),
its shorter side reduced to that many pixels (bicubic, antialiased; never enlarged) and stored as JPEG without
chroma subsampling.
"""

import hashlib
import io
import multiprocessing
import os
import signal
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

from moh_vision.data.decode import BadSamples, UnreadableImage, decode_image, in_8_bits
from moh_vision.data.folder import ImageFolder, one_line, split_folders
from moh_vision.data.records import record_path
from moh_vision.data.shard_writer import ShardWriter, end_with, plan_shards
from moh_vision.data.shards import Shards, index_file
from moh_vision.data.splits import match_classes, of_classes, say_transparent
from moh_vision.engine.cli import refuse_missing, refuse_unwritable
from moh_vision.engine.errors import some_of
from moh_vision.engine.io import hidden_path, only_one, whole_file, write_whole
from moh_vision.engine.progress import Progress, say

KEPT = "shards"  # what an interrupted command finds again
# MPO: a JPEG with more pictures behind it.
# Formats of the files that an image folder may have, and their endings in shards.
STORED = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "PPM": "ppm",
    "TIFF": "tif",
}
# fork where it is safe: a fresh interpreter would import torch first, for seconds, in every worker.
CONTEXT = multiprocessing.get_context("fork" if os.uname().sysname == "Linux" else "spawn")


def options(add: Callable) -> None:
    add(
        "--in",
        dest="source",
        required=True,
        metavar="IMAGEFOLDER",
        help="ROOT[/{train,val}]/CLASS/*, or no CLASS",
    )
    add("--out", required=True, metavar="DIR", help="a new folder, or that of the same command")
    add(
        "--val-fraction",
        type=float,
        metavar="F",
        help="of a folder of classes, this share of every class becomes val",
    )
    add(
        "--size",
        type=int,
        help="pixels of the shorter side; without it the bytes are stored unchanged",
    )
    add("--quality", type=int, help="of the JPEG that --size stores, 1 to 100 (95)")
    add("--samples-per-shard", type=int, default=1000, help="at most (1000)")
    add("--seed", type=int, default=0, help="of the shuffle (0)")
    add("--workers", type=int, help="shards written at a time (the processors there are)")
    add(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        help="share of images that may be bad and left out (0)",
    )


def work(o: Namespace) -> None:
    """Write an image folder as shards."""
    _check(o)
    splits, out = _read_folders(o), Path(o.out)
    for images in splits.values():
        _refuse_names(images)
    if o.size is not None:  # else alpha stays in the files
        say_transparent(f"--in {o.source}", splits, say)
    match_classes(next(iter(splits.values())).classes, "train", images, f"--in {o.source}")
    classes = "".join(f"{label}\n" for label in images.classes)
    names = out / "classes.txt"
    if names.exists() and names.read_bytes() != classes.encode():
        raise ValueError(
            f"{names} is there and lists other classes than {o.source}; take another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    with only_one(out, "--out", with_children=True), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module="PIL"
        )  # of oddities in files that decode all the same
        bad = BadSamples(sum(map(len, splits.values())), o.max_bad_fraction, "--max-bad-fraction")
        # All are checked before anything is written.
        writers = [ImageShards(o, name, images, bad) for name, images in splits.items()]
        write_whole(names, classes)
        for writer in writers:
            writer.write()


def _check(o: Namespace) -> None:
    for name, value in (
        ("size", o.size),
        ("samples-per-shard", o.samples_per_shard),
        ("workers", o.workers),
    ):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected 1 or more")
    if o.quality is not None and o.size is None:
        raise ValueError(
            f"--quality {o.quality} is of the JPEG that --size stores; give --size too"
        )
    if o.size is not None and o.quality is None:
        o.quality = 95
    if o.quality is not None and not 1 <= o.quality <= 100:
        raise ValueError(f"--quality {o.quality}: expected 1 to 100")
    if not 0 <= o.max_bad_fraction <= 1:
        raise ValueError(f"--max-bad-fraction {o.max_bad_fraction:g}: expected 0 to 1")
    if o.val_fraction is not None and not 0 < o.val_fraction < 1:
        raise ValueError(f"--val-fraction {o.val_fraction:g}: expected a share between 0 and 1")
    refuse_missing("--in", o.source)
    if Path(o.out).resolve().is_relative_to(Path(o.source).resolve()):
        raise ValueError(
            f"--out {o.out} is inside --in {o.source}; the shards would be taken for input"
        )
    refuse_unwritable("--out", record_path(Path(o.out), "train"))


# ---------------------------------------------------------------- the folder of images


def _read_folders(o: Namespace) -> dict[str, ImageFolder]:
    """Return split name -> images, and say what is there and what is left out."""
    source, val_fraction = Path(o.source), o.val_fraction
    places = split_folders(source) or {"train": source}
    if val_fraction is not None and places != {"train": source}:
        raise ValueError(
            f"--val-fraction has no effect: --in {source} has splits ({', '.join(places)})"
        )
    splits = {name: ImageFolder(place) for name, place in places.items()}
    beside = sorted({p.name for p in source.glob("[!.]*")} - {p.name for p in places.values()})
    if beside and source not in places.values():
        shown = some_of(map(one_line, beside), 5)
        say(f"left out of {source}: {len(beside)} in no split ({shown})")
    for images in splits.values():
        for remark in images.remarks:
            say(remark)
    if val_fraction is not None:
        images = splits["train"]
        # By a hash of their names: more files leave the others where they are.
        hashes = [
            hashlib.sha256(os.fsencode(images.path(i))).digest()[:8] for i in range(len(images))
        ]
        in_val = np.array([int.from_bytes(start, "big") < val_fraction * 2**64 for start in hashes])
        splits = {"train": images.subset(~in_val), "val": images.subset(in_val)}
    for name, images in splits.items():
        say(f"{name}: {len(images)} images {of_classes(images)} in {images.folder}")
        for label in set(range(len(images.classes) or 1)).difference(images.labels.tolist()):
            more = "larger" if name == "val" else "smaller"
            missing = (
                f"class {images.classes[label]} without a file" if images.classes else "no file"
            )
            raise ValueError(
                f"--val-fraction {val_fraction:g} leaves {missing} in {name}; give a {more} one"
            )
    return splits


def _refuse_names(images: ImageFolder) -> None:
    """Refuse classes that classes.txt cannot hold."""
    for label in images.classes:
        if label != label.strip() or label.splitlines() != [label] or label != one_line(label):
            raise ValueError(
                f"{images.folder}: class folder {label!r}: a class name must be UTF-8 without line breaks and outer spaces"
            )


# ---------------------------------------------------------------- the shards of a split


class ImageShards(ShardWriter):
    """Writes the shards of a split of images, each in one of several processes."""

    def __init__(self, o: Namespace, split: str, images: ImageFolder, limit: BadSamples):
        self.options, self.images, self.limit = o, images, limit
        paths = map(images.path, range(len(images)))
        plan = plan_shards(split, "tar", paths, o.samples_per_shard, o.seed)
        names = ("size", "quality", "samples_per_shard", "seed")
        options = {f"--{name.replace('_', '-')}": getattr(o, name) for name in names}
        super().__init__(record_path(Path(o.out), split), plan, images, options)

    def check(self, bad: list[list]) -> None:
        """Raise UnreadableImage if these [file, reason] and those before, of all splits, are too many."""
        self.limit.check(
            (place := f"{self.images.folder}/{path}", f"{place}: {reason}") for path, reason in bad
        )

    def write(self) -> None:
        """Write the shards that are missing."""
        workers = self.options.workers or len(os.sched_getaffinity(0))
        todo = self.begin(workers)
        self.check(self.bad)
        done = sum(len(self.plan[name]) for name in self.entries)
        with (
            Progress(self.split, len(self.images), "image", done) as progress,
            closing(self._in_processes(todo, min(workers, len(todo)) or 1)) as finished,
        ):
            for entry in finished:
                self.entries[entry["shard"]] = entry
                self.check(entry["bad"])
                progress.add(len(self.plan[entry["shard"]]))
        self.end()
        left_out = {path for path, _ in self.bad}
        files = (self.images.path(i) for samples in self.plan.values() for i in samples)
        text = "".join(f"{one_line(path)}\n" for path in files if path not in left_out)
        write_whole(self.out / f"{self.split}.files.txt", text)
        source = Shards(
            str(self.out), self.split
        )  # builds the index: reads every header, and counts the samples
        how = f"written at {progress.rate:.0f} img/s" if todo else "all there already"
        self.report(f"{len(source)} images {of_classes(source)}", how)

    def _in_processes(self, names: list[str], count: int) -> Iterator[dict]:
        """Yield the entry of each shard; what is unfinished when it ends is ended and removed."""
        with ProcessPoolExecutor(
            count, CONTEXT, initializer=_start_worker, initargs=(self, os.getpid())
        ) as pool:
            try:
                yield from pool.map(_write_shard, names)
            except BaseException as error:  # also GeneratorExit, when there are too many bad images
                for process in multiprocessing.active_children():
                    process.kill()  # a shard takes a while, and is written again
                pool.shutdown(cancel_futures=True)
                for name in names:
                    hidden_path(self.out / name).unlink(missing_ok=True)
                if isinstance(error, BrokenProcessPool):
                    raise ValueError(
                        f"a worker of {count} died, of too little memory perhaps; finished shards are kept, the same "
                        "command goes on (--workers may change)"
                    ) from None
                raise


def _start_worker(writer: ImageShards, parent: int) -> None:
    """Leave interrupts to the parent, and end with it."""
    global _writer  # a forked worker has it without a copy
    _writer = writer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


def _write_shard(name: str) -> dict:
    """Write a shard, in a worker; return its entry."""
    writer, images, bad = _writer, _writer.images, []
    index_file(writer.out / name).unlink(missing_ok=True)  # it would no longer fit
    with whole_file(writer.out / name) as file:
        # Headers without time and owner, or every run would have other sums.
        with webdataset.TarWriter(
            file, user="", group="", mtime=0, encoder=False, compress=False
        ) as tar:
            for number in writer.plan[name]:
                try:
                    data = Path(images.where(number)).read_bytes()
                    extension, data = encode_sample(
                        data, writer.options.size, writer.options.quality
                    )
                except UnreadableImage as error:
                    bad.append([images.path(number), str(error)])
                    writer.check(bad)
                else:
                    label = {"cls": str(images.labels[number]).encode()} if images.classes else {}
                    tar.write({"__key__": f"{number:08d}", extension: data, **label})
        return writer.finish(name, file, len(writer.plan[name]) - len(bad), bad)


# ---------------------------------------------------------------- an image


def encode_sample(data: bytes, size: int | None, quality: int) -> tuple[str, bytes]:
    """Check the bytes of an image file; return (extension, bytes to store), or raise UnreadableImage.

    With `size` they are a JPEG of this `quality`, whose shorter side has at most `size` pixels; without, `data` itself.
    """

    def stored(image: Image.Image) -> tuple[str, bytes]:
        image.load()
        if size is None:
            if image.format not in STORED:
                known = ", ".join(dict.fromkeys(STORED.values()))
                raise ValueError(
                    f"{image.format} inside; shards store {known} (--size stores JPEG)"
                )
            return STORED[image.format], data
        image = in_8_bits(image).convert("RGB")
        short = min(image.size)
        if short > size:
            image = image.resize(
                [round(side * size / short) for side in image.size], Image.Resampling.BICUBIC
            )
        image.info = {}  # or the comment of the source would be stored again
        out = io.BytesIO()
        image.save(out, "JPEG", quality=quality, subsampling="4:4:4")
        return "jpg", out.getvalue()

    return decode_image(data, convert=stored)
