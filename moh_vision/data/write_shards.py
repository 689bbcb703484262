"""Images -> webdataset shards.   python -m moh_vision shards --in ROOT --out DIR [--size 256]

    DIR/train-000000.tar ...   an image and a .cls (class number) per sample, shuffled over the classes
    DIR/classes.txt            the class names, sorted; line n is class n; without classes empty, and no .cls in the shards
    DIR/train.shards.json      the record: arguments and input, then samples, bytes, sha256 and bad files of every shard
    DIR/train.files.txt        line n: the file that sample n came from
    DIR/train.bad.txt          bad files and what is wrong with them, if any were left out

The same input, arguments and Pillow give the same bytes, whatever the number of workers. A shard is written under a
hidden name, recorded, flushed and only then renamed, so the same command goes on after a kill at any moment.

Every image is decoded, so that training meets no bad one. Without --size the bytes are stored unchanged, EXIF
included. With --size an image is turned upright, converted to RGB (transparency and colour profile are dropped; with
--colour-space srgb the profile is applied before),
its shorter side reduced to that many pixels (bicubic, antialiased; never enlarged) and stored as JPEG without
chroma subsampling.
"""

import io
import multiprocessing
import os
import signal
import sys
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

from moh_vision.common.cli import refuse_unwritable
from moh_vision.common.errors import some_of
from moh_vision.common.io import hidden_path, only_one, whole_file, write_whole
from moh_vision.common.progress import Progress, say
from moh_vision.data.copies import warn_of_copies
from moh_vision.data.decode import (
    AS_STORED,
    BadSamples,
    Decoding,
    UnreadableImage,
    add_decoding,
    decode_image,
    in_8_bits,
)
from moh_vision.data.division import divide
from moh_vision.data.first_look import say_what_is_lost
from moh_vision.data.folder import ImageFolder, one_line
from moh_vision.data.records import record_path
from moh_vision.data.shard_writer import ShardWriter, end_with, plan_shards
from moh_vision.data.shards import Shards, index_file
from moh_vision.data.sources import ImageSource
from moh_vision.data.splits import match_classes, of_classes, open_source, splits_of

KEPT = "shards"  # what an interrupted command finds again
# Formats of the files that an image folder may have, and their endings in shards.
# MPO: a JPEG with more pictures behind it.
STORED = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "PPM": "ppm",
    "TIFF": "tif",
}
# fork where it is safe: with spawn, every worker imports torch first, which takes seconds.
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def options(add: Callable) -> None:
    add(
        "--in",
        dest="source",
        required=True,
        metavar="ROOT",
        help="what data.root of a training run takes, such as a folder of classes",
    )
    add("--out", required=True, metavar="DIR", help="a new folder, or that of the same command")
    add(
        "--val-fraction",
        type=float,
        metavar="F",
        help="of images without a split val, about this share becomes it",
    )
    add(
        "--size",
        type=int,
        help="pixels of the shorter side; without it the bytes are stored unchanged",
    )
    add("--quality", type=int, help="of the JPEG that --size stores, 1 to 100 (95)")
    add_decoding(add)
    add("--samples-per-shard", type=int, default=1000, help="at most (1000)")
    add("--seed", type=int, default=0, help="of the shuffle (0)")
    add("--workers", type=int, help="shards written at a time (the processors there are)")
    add(
        "--max-bad-fraction",
        type=float,
        default=0.0,
        help="share of images that may be bad and left out (0)",
    )


def work(options: Namespace) -> None:
    """Write the images of a data set as shards."""
    _check(options)
    splits = _open_splits(options)
    out = Path(options.out)
    decoding = Decoding.of(options, "--")
    for images in splits.values():
        _refuse_names(images, str(images.folder or options.source))
        images.decoding = decoding
    if options.size is not None:  # images are encoded again, which drops alpha and profiles
        say_what_is_lost(f"--in {options.source}", splits, say)
    if len(splits) == 2:
        warn_of_copies(f"--in {options.source}", splits["train"], splits["val"], say)
    sources = list(splits.values())  # of "train" and "val", or of one of them
    match_classes(sources[0].classes, "train", sources[-1], f"--in {options.source}")
    classes = "".join(f"{label}\n" for label in sources[-1].classes)
    names = out / "classes.txt"
    if names.exists() and names.read_bytes() != classes.encode():
        raise ValueError(
            f"{names} is there and lists other classes than {options.source}; take another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    with only_one(out, "--out", with_children=True), warnings.catch_warnings():
        # Pillow warns of oddities in files that decode all the same.
        warnings.filterwarnings("ignore", module="PIL")
        bad = BadSamples(
            sum(map(len, splits.values())), options.max_bad_fraction, "--max-bad-fraction"
        )
        # Making the writers checks all splits, before anything is written.
        writers = [ImageShards(options, name, images, bad) for name, images in splits.items()]
        write_whole(names, classes)
        for writer in writers:
            writer.write()


def _check(options: Namespace) -> None:
    for name, value in (
        ("size", options.size),
        ("samples-per-shard", options.samples_per_shard),
        ("workers", options.workers),
    ):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: expected 1 or more")
    if options.quality is not None and options.size is None:
        raise ValueError(
            f"--quality {options.quality} is of the JPEG that --size stores; give --size too"
        )
    decoding = Decoding.of(options, "--")
    if options.size is None and decoding != AS_STORED:
        for name, value in decoding.record.items():
            if value == AS_STORED.record[name]:
                continue
            why = "without --size files are stored unchanged; give it to what reads the shards"
            raise ValueError(f"{decoding.option(name)} {value} has no effect: {why}")
    if options.size is not None and options.quality is None:
        options.quality = 95
    if options.quality is not None and not 1 <= options.quality <= 100:
        raise ValueError(f"--quality {options.quality}: expected 1 to 100")
    if not 0 <= options.max_bad_fraction <= 1:
        raise ValueError(f"--max-bad-fraction {options.max_bad_fraction:g}: expected 0 to 1")
    if options.val_fraction is not None and not 0 < options.val_fraction < 1:
        raise ValueError(
            f"--val-fraction {options.val_fraction:g}: expected a share between 0 and 1"
        )
    source = Path(options.source)
    if source.is_dir() and Path(options.out).resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"--out {options.out} is inside --in {options.source}; the shards would be taken for input"
        )
    refuse_unwritable("--out", record_path(Path(options.out), "train"))


# ---------------------------------------------------------------- the images


def _open_splits(options: Namespace) -> dict[str, ImageSource]:
    """Return split name -> images, and say what is there and what is left out."""
    root = options.source
    val_fraction = options.val_fraction
    names = splits_of(root)
    if val_fraction is not None and "val" in names:
        raise ValueError(
            f"--val-fraction {val_fraction:g} has no effect: --in {root} has a split val"
        )
    if not names and Path(root).is_dir():
        # A folder whose classes data.root does not guess, because one of them has the name of a split.
        splits: dict[str, ImageSource] = {"train": ImageFolder(root)}
    else:
        splits = {name: open_source(root, name, "--in") for name in sorted(names or {"train"})}
    _say_what_is_in_no_split(Path(root), splits)
    if val_fraction is not None:
        whole = splits["train"]
        splits = divide(whole, val_fraction, str(whole.folder or root))
    for remark in dict.fromkeys(remark for images in splits.values() for remark in images.remarks):
        say(remark)
    for name, images in splits.items():
        say(f"{name}: {len(images)} images {of_classes(images)} in {images.folder or root}")
    return splits


def _say_what_is_in_no_split(root: Path, splits: dict[str, ImageSource]) -> None:
    """Say what lies beside the folders of the splits."""
    folders = {images.folder for images in splits.values()}
    if not root.is_dir() or root in folders or None in folders:
        return
    found = {path.name for path in root.glob("[!.]*")}
    in_no_split = sorted(found - {folder.name for folder in folders})
    if in_no_split:
        shown = some_of(map(one_line, in_no_split), 5)
        say(f"left out of {root}: {len(in_no_split)} in no split ({shown})")


def _refuse_names(images: ImageSource, named: str) -> None:
    """Refuse classes that classes.txt cannot hold; messages call the images `named`."""
    for label in images.classes:
        if label != label.strip() or label.splitlines() != [label] or label != one_line(label):
            raise ValueError(
                f"{named}: class {label!r}: a class name must be UTF-8 without line breaks and outer spaces"
            )


# ---------------------------------------------------------------- the shards of a split


class ImageShards(ShardWriter):
    """Writes the shards of a split of images, each in one of several processes."""

    def __init__(self, options: Namespace, split: str, images: ImageSource, limit: BadSamples):
        self.options = options
        self.images = images
        self.limit = limit
        paths = map(images.path, range(len(images)))
        plan = plan_shards(split, "tar", paths, options.samples_per_shard, options.seed)
        names = ("size", "quality", "colour_space", "value_range", "samples_per_shard", "seed")
        compared = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
        super().__init__(record_path(Path(options.out), split), plan, images, compared)

    def check(self, bad: list[list]) -> None:
        """Count bad images, as [file, reason]; raise UnreadableImage if all splits together have too many."""
        problems = []
        for path, reason in bad:
            file = f"{self.images.folder or self.options.source}/{path}"
            problems.append((file, f"{file}: {reason}"))
        self.limit.check(problems)

    def write(self) -> None:
        """Write the shards that are missing."""
        workers = self.options.workers or _cores()
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
        # This builds the index: it reads every header, and counts the samples.
        source = Shards(str(self.out), self.split)
        origin = f"written at {progress.rate:.0f} img/s" if todo else "all there already"
        self.report(f"{len(source)} images {of_classes(source)}", origin)

    def _in_processes(self, names: list[str], count: int) -> Iterator[dict]:
        """Write shards in worker processes and yield their entries.

        If the iterator ends early, kill the workers and remove unfinished shards.
        """
        with ProcessPoolExecutor(
            count, CONTEXT, initializer=_start_worker, initargs=(self, os.getpid())
        ) as pool:
            try:
                yield from pool.map(_write_shard, names)
            except BaseException as error:  # also GeneratorExit, when there are too many bad images
                for process in multiprocessing.active_children():
                    process.kill()  # rather than wait for a shard, which is written again
                pool.shutdown(cancel_futures=True)
                for name in names:
                    hidden_path(self.out / name).unlink(missing_ok=True)
                if isinstance(error, BrokenProcessPool):
                    raise ValueError(
                        f"a worker of {count} died, of too little memory perhaps; finished shards are kept, the same "
                        "command goes on (--workers may change)"
                    ) from None
                raise


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows do not limit a process to some


def _start_worker(writer: ImageShards, parent: int) -> None:
    """Initialise a worker: keep the writer, leave interrupts to the parent, and exit when the parent is gone."""
    global _writer  # handed over once; with fork it is not even copied
    _writer = writer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


def _write_shard(name: str) -> dict:
    """Write a shard, in a worker; return its entry."""
    writer = _writer
    images = writer.images
    bad = []
    index_file(writer.out / name).unlink(missing_ok=True)  # it would not fit the new shard
    with whole_file(writer.out / name) as file:
        # No time and owner in headers, so that every run writes the same bytes.
        plain = dict(user="", group="", mtime=0, encoder=False, compress=False)
        with webdataset.TarWriter(file, **plain) as tar:
            for number in writer.plan[name]:
                content = images.read(number)  # an error of the disk ends the command
                if not isinstance(content, bytes):  # pixels
                    content = png_of(content)
                try:
                    extension, data = encode_sample(
                        content, writer.options.size, writer.options.quality, images.decoding
                    )
                except UnreadableImage as error:
                    bad.append([images.path(number), str(error)])
                    writer.check(bad)
                else:
                    sample = {"__key__": f"{number:08d}", extension: data}
                    if images.classes:
                        sample["cls"] = str(images.labels[number]).encode()
                    tar.write(sample)
        return writer.finish(name, file, len(writer.plan[name]) - len(bad), bad)


# ---------------------------------------------------------------- an image


def png_of(pixels: np.ndarray) -> bytes:
    """Return the bytes of a PNG of pixels, uint8 [h, w] or [h, w, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def encode_sample(
    data: bytes, size: int | None, quality: int, decoding: Decoding = AS_STORED
) -> tuple[str, bytes]:
    """Check the bytes of an image file; return (extension, bytes to store), or raise UnreadableImage.

    With `size`, the bytes to store are a JPEG of this `quality`, whose shorter side has at most `size` pixels; without
    it, they are `data`.
    """

    def stored(image: Image.Image, decoding: Decoding) -> tuple[str, bytes]:
        if size is None:
            image.load()
            if image.format not in STORED:
                known = ", ".join(dict.fromkeys(STORED.values()))
                raise ValueError(
                    f"{image.format} inside; shards store {known} (--size stores JPEG)"
                )
            return STORED[image.format], data
        image = in_8_bits(image, decoding).convert("RGB")
        short = min(image.size)
        if short > size:
            sides = [round(side * size / short) for side in image.size]
            image = image.resize(sides, Image.Resampling.BICUBIC)
        image.info = {}  # else Pillow copies the comment of the source
        out = io.BytesIO()
        image.save(out, "JPEG", quality=quality, subsampling="4:4:4")
        return "jpg", out.getvalue()

    return decode_image(data, decoding=decoding, convert=stored)
