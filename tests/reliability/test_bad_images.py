"""Odd images are decoded correctly; unreadable ones are named in an error, or counted exactly and left out."""

import json
import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from moh_vision.data.batches import (
    BadSamples,
    LabelledImages,
    evaluation_loader,
    image_transform,
    training_loader,
)
from moh_vision.data.decode import MAX_PIXELS, UnreadableImage, center_crop, decode_image
from moh_vision.data.imagenet import validation_transform
from moh_vision.data.order import PositionSampler
from moh_vision.data.splits import open_source
from moh_vision.data.write_shards import encode_sample
from moh_vision.diffusion import train as dit
from moh_vision.evaluation.fidelity.images import ScoredFolder
from tests.support.pictures import encoded, gradient, write_folder
from tests.support.processes import fork, wait
from tests.support.refusals import assert_says, one_line, refuse, refused
from tests.support.shards import append, write_shards
from tests.support.small_runs import SMALL


def png(width, height, depth, color, rows) -> bytes:
    """Return a PNG file; `rows` are its filtered pixel rows, still to be compressed."""
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    for chunk_type, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b"")):
        out += (
            struct.pack(">I", len(data))
            + chunk_type
            + data
            + struct.pack(">I", zlib.crc32(chunk_type + data))
        )
    return out


def bomb(width=30_000, height=30_000) -> bytes:
    """Return a valid black PNG of one bit a pixel, whose file is a thousandth of the size of its pixels."""
    return png(width, height, 1, 0, bytes((1 + -(-width // 8)) * height))


PHOTO = encoded(gradient(64, 64), "JPEG", quality=95)


def animation(form) -> bytes:
    return encoded(
        gradient(), form, save_all=True, append_images=[Image.new("RGB", (12, 8), "blue")] * 2
    )


def cut(percent) -> bytes:
    return PHOTO[: len(PHOTO) * percent // 100]


# File name -> (its bytes, what the error says).
REFUSED = {
    "empty.jpg": (b"", "format 0 bytes"),
    "text.jpg": (b"not an image at all", "format 19 bytes"),
    "cut10.jpg": (cut(10), ""),  # versions of Pillow say this of other faults
    "cut50.jpg": (cut(50), "truncated"),
    "cut90.jpg": (cut(90), "truncated"),
    "bomb.png": (bomb(), "900000000 pixels"),
    "large.png": (bomb(10_000, 9_000), f"10000 9000 {MAX_PIXELS}"),
    "float.tiff": (
        encoded(Image.fromarray(np.ones((8, 12), np.float32)), "TIFF"),
        "floating-point",
    ),
    "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "format"),
}
# File name -> (its bytes, the expected image, the largest allowed difference of a pixel). tests/data/test_decode.py has
# the usual formats.
READ = {
    "colour16.png": (
        png(1, 1, 16, 2, b"\0\xff\xff\x80\x00\x00\x00"),
        Image.new("RGB", (1, 1), (255, 128, 0)),
        1,
    ),
    "animated.gif.jpg": (animation("GIF"), gradient(), 80),
    "animated.png": (animation("PNG"), gradient(), 0),
    "animated.webp": (animation("WEBP"), gradient(), 40),
    "one.png": (
        encoded(Image.new("RGB", (1, 1), (1, 2, 3))),
        Image.new("RGB", (1, 1), (1, 2, 3)),
        0,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name):
    data, facts = REFUSED[name]
    refuse(f"some/{name} {facts}", decode_image, data, f"some/{name}", error=UnreadableImage)


@pytest.mark.parametrize("name", READ)
def test_what_is_odd_is_read_rightly(name):
    data, expected, tolerance = READ[name]
    image = decode_image(data, name)
    assert (image.size, image.mode) == (expected.size, expected.mode)
    difference = np.asarray(image).astype(int) - np.asarray(expected).astype(int)
    assert np.abs(difference).max() <= tolerance


def labelled(source, **more):
    return LabelledImages(source, image_transform("none", 8, 3, [0.5] * 3, [0.5] * 3), 0, **more)


def trained_on(source, size, steps, counted=None, workers=0):
    """Load the batches of `steps` training steps and return how many images each has."""
    order_options = dict(
        group=1, seed=0, batch_size=size, accumulation=1, rank=0, world=1, start=0, stop=steps
    )
    batches = training_loader(
        labelled(source), PositionSampler(source.shard_sizes, **order_options), workers, counted
    )
    return [len(batch["images"]) for batch in batches]


def evaluated(source, counted):
    """Return how many images of `source` an evaluation can read; `counted` collects the unreadable ones."""
    batches = evaluation_loader(
        labelled(source, replace_unreadable=False), [list(range(len(source)))], 0, counted
    )
    return sum(len(batch["images"]) for batch in batches)


def test_every_bad_image_is_counted_and_left_out(tmp_path):
    """The folder holds 12 good images of two classes and all nine of `REFUSED`."""
    root = write_folder(tmp_path, train=6, val=1)
    for name, (data, _) in REFUSED.items():
        (root / "train" / "dog" / name).write_bytes(data)
    source = open_source(str(root), "train")
    counted = BadSamples(len(source), 9 / 21 + 1e-9)
    assert len(source) == 21 and evaluated(source, counted) == 12
    named = {os.path.basename(os.fsdecode(bytes(source.files[i]))) for i in counted.seen}
    assert named == set(REFUSED)


@pytest.mark.parametrize(
    "total, fraction, allowed", [(100, 0.29, 29), (30, 0.1, 3), (2000, 0.001, 2), (1999, 0.001, 1)]
)
def test_the_bad_fraction_holds_to_the_sample(total, fraction, allowed):
    counted = BadSamples(total, fraction)
    counted.check([(i, f"{i}.png: bad") for i in range(allowed)])
    counted.check([(0, "0.png: bad")])  # a sample that is met again is not counted again
    with one_line(f"new.png {allowed + 1} {fraction} {total}", UnreadableImage):
        counted.check([(allowed, "new.png: bad")])


@pytest.mark.parametrize("layout", ["folder", "shards"])
def test_a_run_goes_on_where_more_images_may_be_bad(tmp_path, capsys, layout):
    """The error names the bad image and the fraction that would allow it; with that fraction the run resumes."""
    root = write_folder(tmp_path / "images", train=8, val=1)
    bad = "dog/3.png"
    if layout == "shards":
        root = write_shards(tmp_path / "shards", count=15)
        bad = "train-000001.tar, a/long.name/9.png at byte "
        for end, data in (("png", b"bad"), ("cls", b"0")):
            append(root / "train-000001.tar", f"a/long.name/9.{end}", data)
    argv = SMALL["dit"].split()
    argv += ["--data.root", str(root), "--output", str(tmp_path / "run")]
    argv += "--data.img_size 8 --preview.every 0 --optim.batch_size 4 --max-steps".split()
    dit.main([*argv, "1"])
    if layout == "folder":
        (root / "train" / bad).write_bytes(b"bad")
    line = refused(capsys, dit.main, *argv, 8)
    assert bad in line
    assert_says(line, "data.max_bad_fraction 0.063")
    dit.main([*argv, "8", "--data.max_bad_fraction", "0.063"])
    assert "resuming" in capsys.readouterr().out
    assert "max_bad_fraction: 0.063" in (tmp_path / "run" / "config.yaml").read_text()


# ---------------------------------------------------------------- small files of huge images


def cost(work) -> SimpleNamespace:
    """Call `work` in a fork and return the MiB by which peak resident memory grew, and its result.

    The result of a call that fails is the text of its error.
    """
    reader, writer = os.pipe()

    def resident(key):
        """Return an entry of /proc/self/status in MiB."""
        lines = open("/proc/self/status")
        kib = next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
        return kib / 1024

    def measured():
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM, the peak
        try:
            result = work()
        except (ValueError, OSError) as error:
            result = str(error)
        spent = dict(mib=resident("VmHWM") - before, result=result)
        os.write(writer, json.dumps(spent).encode())

    assert wait(fork(measured), 120) == 0
    os.close(writer)
    with os.fdopen(reader) as file:
        return SimpleNamespace(**json.load(file))


@pytest.mark.parametrize(
    "reader", ["training", "shards", "shards with a size", "latents", "scores"]
)
def test_a_bomb_is_refused_in_little_memory(tmp_path, reader):
    """Its 2.7 GB of pixels are never decoded."""
    root = write_folder(tmp_path, classes=("cat",), train=1, val=1)
    path = root / "train" / "cat" / "0.png"
    data = bomb()
    path.write_bytes(data)
    source = open_source(str(root), "train")
    crop = image_transform("none", 16, 3, [0.5] * 3, [0.5] * 3, fit="crop")
    calls = {
        "training": lambda: source.image(0),
        "shards": lambda: encode_sample(data, None, 95),
        "shards with a size": lambda: encode_sample(data, 256, 95),
        "latents": lambda: LabelledImages(source, crop, 0, replace_unreadable=False)[0, 0]["bad"][
            0
        ][1],
        "scores": lambda: next(ScoredFolder(path.parent).batches(4)),
    }
    spent = cost(calls[reader])
    assert "900000000 pixels" in spent.result and ("shards" in reader or str(path) in spent.result)
    assert spent.mib <= 200, spent


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_a_thread_of_pixels_is_not_enlarged_to_gigabytes(size):
    """Resizing the short side of 1 pixel to 256 would make the long side 15 million pixels."""
    picture = decode_image(encoded(Image.new("RGB", size, (9, 8, 7))), "thread.png")
    cfg = dict(
        mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bicubic", crop_pct=0.875, crop_mode="center"
    )
    val = validation_transform(dict(cfg, input_size=(3, 256, 256)))
    for work in (
        lambda: center_crop(picture, 256).getpixel((128, 128)),
        lambda: list(val(picture).shape),
    ):
        spent = cost(work)
        assert spent.result in ([9, 8, 7], [3, 256, 256]) and spent.mib <= 200, spent


# ---------------------------------------------------------------- files that go away


def test_files_deleted_while_reading_are_counted(tmp_path):
    root = write_folder(tmp_path, train=10)
    source = open_source(str(root), "train")
    for name in ("cat/3.png", "dog/7.png"):
        (root / "train" / name).unlink()
    for workers in (0, 1):
        counted = BadSamples(20, 0.1)
        assert trained_on(source, 10, 2, counted, workers) == [10, 10]
        assert set(counted.seen) == {3, 17}
    refuse(
        f"{root}/train No file data.max_bad_fraction 0 20 0.05",
        trained_on,
        source,
        10,
        2,
        error=UnreadableImage,
    )


# Fault -> what the error says.
CHANGES = {
    "deleted": "15872 No file",
    "cut": "changed index",
    "cut while it is open": "15872 0 77 damaged",
    "replaced": "changed index",
}


@pytest.mark.parametrize("fault, facts", CHANGES.items(), ids=CHANGES)
def test_a_shard_that_changes_during_a_run_is_named(tmp_path, fault, facts):
    folder = write_shards(tmp_path / "d", count=20)
    source = open_source(str(folder), "train")
    shard = folder / "train-000001.tar"
    if fault == "deleted":
        shard.unlink()
    elif fault == "cut":
        os.truncate(shard, 2000)
    elif fault == "replaced":
        other = write_shards(tmp_path / "other", count=20, classes=2)
        os.replace(other / "train-000001.tar", shard)
    else:
        source.image(19)  # opens the shard
        os.truncate(shard, int(source.offset[10]) + 10)
    assert source.image(3).size == (6, 4)
    refuse(f"{shard} {facts}", source.image, 13, error=UnreadableImage)
    counted = BadSamples(20, 0.5)
    assert evaluated(source, counted) == 10 and set(counted.seen) == set(range(10, 20))
