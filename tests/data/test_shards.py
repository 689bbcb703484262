"""The command `shards`: what it stores, what it refuses, and that training and webdataset read its shards."""

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image, ImageOps

from moh_vision.__main__ import main
from moh_vision.common import progress
from moh_vision.data import write_shards
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.folder import IMAGES, ImageFolder
from moh_vision.data.shards import Shards
from moh_vision.data.sources import ImageSource
from moh_vision.data.splits import SOURCES, open_source
from moh_vision.data.stream import ShardStream
from moh_vision.data.write_shards import encode_sample
from tests.support import refusals
from tests.support.refusals import assert_says, refuse


def write_folder(root, classes=("cat", "dog", "owl"), each=8, extension="png", first=0):
    """Write `each` images of every class, numbered from `first` on, to root/CLASS, and return `root`."""
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(first, first + each):
            Image.new("RGB", (6, 4), (i, 10 * c, 200)).save(root / name / f"{i:02d}.{extension}")
    return root


def run(source, out, *more, workers=1):
    """Run the command `shards` and return its exit code."""
    argv = ["shards", "--in", source, "--out", out, "--workers", workers, *more]
    return main([str(word) for word in argv])


error_line = partial(refusals.error_line, command="shards")


def test_a_folder_of_classes_is_divided(tmp_path, capfd):
    """--val-fraction: a file stays in its split when files are added; a line names classes without a validation image."""
    root = write_folder(tmp_path / "images", each=40)
    assert run(root, tmp_path / "out", "--val-fraction", 0.25) == 0
    train, val = (
        set((tmp_path / "out" / f"{split}.files.txt").read_text().splitlines())
        for split in ("train", "val")
    )
    assert len(train | val) == 120 and not train & val and 15 < len(val) < 50
    write_folder(root, each=40, first=40)
    assert run(root, tmp_path / "more", "--val-fraction", 0.25) == 0
    more = set((tmp_path / "more" / "val.files.txt").read_text().splitlines())
    assert val == more - {name for name in more if int(name[-6:-4]) >= 40}
    # Bad files are counted over both splits, and finished shards are kept.
    for names in (train, val):
        (root / min(names)).write_bytes(min(names).encode())
    allowing = partial(run, root, tmp_path / "bad", "--val-fraction", 0.25, "--max-bad-fraction")
    assert allowing(0.008) == 2
    facts = f"{root}/{min(train)} 2 --max-bad-fraction 0.008 240 0.009 kept"
    assert_says(error_line(capfd), facts)
    assert allowing(0.009) == 0 and "bad images left out" in capfd.readouterr().out
    write_folder(tmp_path / "one", each=1)
    assert run(tmp_path / "one", tmp_path / "few", "--val-fraction", 0.9999) == 2
    assert_says(error_line(capfd), f"{tmp_path}/one 3 val_fraction 0.9999 train val")
    (root / "eel").mkdir()
    shutil.copy(root / max(train), root / "eel")
    assert run(root, tmp_path / "small", "--val-fraction", 0.25, "--max-bad-fraction", 0.1) == 0
    assert_says(capfd.readouterr().out, "1 4 classes validation eel")
    assert Shards(str(tmp_path / "small"), "val").classes == ["cat", "dog", "eel", "owl"]
    for split in ("train", "val"):
        write_folder(tmp_path / "split" / split)
    assert run(tmp_path / "split", tmp_path / "b", "--val-fraction", 0.1) == 2
    assert_says(error_line(capfd), f"--val-fraction 0.1 --in {tmp_path}/split split val")


@pytest.mark.parametrize("val", ["val", "validation"])
def test_both_splits_are_written_and_read_by_training(tmp_path, val):
    """webdataset reads them too. The record has the sha256 of each shard, and members have neither time nor owner."""
    root = tmp_path / "images"
    out = tmp_path / "out"
    write_folder(root / "train")
    write_folder(root / val, each=2, first=50)
    assert run(root, out, "--samples-per-shard", 7) == 0
    for split, folder, sizes in (
        ("train", root / "train", (6, 6, 6, 6)),
        ("val", root / val, (6,)),
    ):
        source = Shards(str(out), split)
        assert source.classes == ["cat", "dog", "owl"] and source.shard_sizes == sizes
        files = (out / f"{split}.files.txt").read_text().splitlines()
        assert sorted(files) == sorted(str(p.relative_to(folder)) for p in folder.glob("*/*"))
        stored = webdataset.WebDataset([str(path) for path in source.paths], shardshuffle=False)
        for i, (path, sample) in enumerate(zip(files, stored, strict=True)):
            assert source.classes[source.labels[i]] == path.split("/")[0]
            assert source.read(i) == sample["png"] == (folder / path).read_bytes()
        record = json.loads((out / f"{split}.shards.json").read_text())
        made_from = record["made_from"]
        entries = record["shards"]
        options = ("size", "quality", "samples-per-shard", "seed")
        assert [made_from[f"--{option}"] for option in options] == [None, None, 7, 0]
        counts = [made_from[f"images of class {name}"] for name in source.classes]
        assert counts == [len(files) // 3] * 3
        for entry, path in zip(entries, source.paths, strict=True):
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            assert entry == dict(
                shard=path.name, samples=6, bytes=path.stat().st_size, sha256=sha256, bad=[]
            )
            with tarfile.open(path) as tar:
                owners = {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar}
            assert owners == {(0, 0, 0, "", "")}
    assert (out / ".train-000000.tar.index.npy").exists()
    train = Shards(str(out), "train").labels
    assert all(len(set(train[i : i + 6])) > 1 for i in range(0, 24, 6)), "a shard of one class"


def save(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def photograph(mode="RGB", size=(60, 40)):
    """Return an image whose left half is dark and whose right half is light."""
    image = Image.new("L", size, 20)
    image.paste(230, (size[0] // 2, 0, *size))
    return image.convert(mode)


@pytest.mark.parametrize(
    "data, size",
    [
        (save(photograph(), "PNG"), (30, 20)),
        (
            save(photograph(size=(40, 60)), "JPEG", comment=b"secret", icc_profile=b"secret" * 9),
            (20, 30),
        ),
        (save(photograph("CMYK"), "JPEG"), (30, 20)),
        (save(photograph("L"), "JPEG"), (30, 20)),
        (save(photograph("RGBA"), "PNG"), (30, 20)),
        (save(photograph("P"), "PNG"), (30, 20)),
        (save(Image.fromarray(np.asarray(photograph("L"), np.uint16) * 257), "PNG"), (30, 20)),
        (save(photograph("L"), "BMP"), (30, 20)),
        (save(photograph("L"), "TIFF"), (30, 20)),
        (save(photograph("LA"), "WEBP"), (30, 20)),
        (save(photograph(size=(18, 12)), "PNG"), (18, 12)),  # not enlarged
        (save(photograph(size=(61, 40)), "PNG"), (30, 20)),
        (save(photograph(), "MPO", save_all=True, append_images=[photograph()]), (30, 20)),
    ],
    ids="rgb portrait cmyk grey alpha palette 16-bit bmp tiff webp small uneven mpo".split(),
)
def test_reencoded_images_are_rgb_jpegs_of_the_size(data, size):
    extension, stored = encode_sample(data, 20, 95)
    image = Image.open(io.BytesIO(stored))
    assert (extension, image.format, image.mode, image.size) == ("jpg", "JPEG", "RGB", size)
    assert b"secret" not in stored
    pixels = np.asarray(image).astype(int)
    quarter = size[0] // 4
    assert abs(pixels[:, :quarter] - 20).max() < 12
    assert abs(pixels[:, -quarter:] - 230).max() < 12


def test_reduction_is_antialiased():
    stripes = Image.fromarray(np.tile(np.uint8([0, 255, 255, 0]), (64, 16)))
    image = Image.open(io.BytesIO(encode_sample(save(stripes, "PNG"), 16, 95)[1]))
    assert abs(np.asarray(image).astype(int)[2:-2, 2:-2] - 127).max() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_photographs_are_turned_upright_when_reencoded(orientation):
    image = photograph()
    exif = Image.Exif()
    image.paste(120, (0, 0, 30, 10))
    exif[0x0112] = orientation
    data = save(image, "JPEG", exif=exif, quality=95)
    stored = Image.open(io.BytesIO(encode_sample(data, 40, 95)[1]))
    assert stored.getexif().get(0x0112, 1) == 1
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert stored.size == upright.size
    assert np.abs(np.asarray(stored).astype(int) - np.asarray(upright.convert("RGB"))).mean() < 3
    assert encode_sample(data, None, 95) == ("jpg", data)


@pytest.mark.parametrize(
    "data, size, facts",
    [
        (b"", None, "format 0 bytes"),
        (b"not an image", None, "format 12 bytes"),
        (save(photograph(), "PNG")[:-40], None, ""),  # Pillow's words
        (save(photograph(size=(200, 200)), "JPEG")[:500], 20, ""),
        (save(photograph(), "GIF"), None, "GIF jpg png webp bmp ppm tif --size"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n", 20, "format 53 bytes"),
    ],
    ids="empty text png jpeg gif eps".split(),
)
def test_bad_images_say_what_is_wrong(data, size, facts):
    refuse(facts, encode_sample, data, size, 95, error=UnreadableImage)


def slow_encoding(*arguments):
    time.sleep(0.01)
    return encode_sample(*arguments)


def test_bad_images_end_the_command_or_are_left_out_and_listed(tmp_path, capfd):
    root = write_folder(tmp_path / "images")
    out = tmp_path / "out"
    (root / "dog" / "03.png").write_bytes(b"")
    assert run(root, out, workers=2) == 2
    bad = f"{root}/dog/03.png format 0 bytes"
    assert_says(error_line(capfd), f"{bad} 1 --max-bad-fraction 0 24 0.042")
    mended = shutil.copytree(root, tmp_path / "mended")
    (mended / "dog" / "03.png").unlink()
    # No shard is finished yet, so the same --out may be filled from another input.
    assert run(mended, out) == 0 and len(Shards(str(out), "train")) == 23
    capfd.readouterr()
    (root / "owl" / "05.png").write_bytes(b"text")
    fresh = tmp_path / "fresh"
    assert run(root, fresh, "--samples-per-shard", 6, "--max-bad-fraction", 0.05) == 2
    assert_says(error_line(capfd), f"{bad} 2 --max-bad-fraction 0.05 24 0.084")
    assert run(root, fresh, "--samples-per-shard", 6, "--max-bad-fraction", 0.1, workers=2) == 0
    shown = capfd.readouterr().out
    assert "22 images" in shown and "2 bad images left out, train.bad.txt" in shown
    listed = (fresh / "train.bad.txt").read_text().splitlines()
    bad = (("dog/03.png", 0), ("owl/05.png", 4))
    assert sorted(listed) == [
        f"{name}\tcannot identify the image format ({size} bytes)" for name, size in bad
    ]
    source = Shards(str(fresh), "train")
    files = (fresh / "train.files.txt").read_text().splitlines()
    assert len(source) == len(files) == 22
    assert all(source.classes[c] == f.split("/")[0] for c, f in zip(source.labels, files))
    # The limit of an earlier call does not hold for the next one.
    assert run(root, fresh, "--samples-per-shard", 6) == 2
    assert_says(error_line(capfd), f"{root}/dog/03.png 2 --max-bad-fraction 0 24 0.084")


def test_an_unreadable_file_is_no_bad_image(tmp_path, capfd, monkeypatch):
    """An error of the disk ends the command, however many bad images are allowed."""

    def gone(self, *_):
        raise OSError(5, "Input/output error", str(self))

    monkeypatch.setattr(Path, "read_bytes", gone)
    assert run(write_folder(tmp_path / "images"), tmp_path / "out", "--max-bad-fraction", 1) == 2
    assert_says(error_line(capfd), f"{tmp_path}/images/dog/01.png Input/output")


def test_a_worker_that_dies_is_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(
        write_shards, "encode_sample", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    assert run(write_folder(tmp_path / "images"), tmp_path / "out") == 2
    assert_says(error_line(capfd), "worker 1 died memory --workers")
    assert not list((tmp_path / "out").glob(".*.tmp"))


def control_c(*_):
    """Send SIGINT to this process and its workers, as a terminal does."""
    for process in (*multiprocessing.active_children(), multiprocessing.current_process()):
        os.kill(process.pid, signal.SIGINT)


def test_an_interrupted_run_cleans_up_and_goes_on(tmp_path, capfd, monkeypatch):
    root = write_folder(tmp_path / "images")
    out = tmp_path / "out"
    # If a shell started the tests in the background, this process ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(write_shards, "encode_sample", slow_encoding)
            patch.setattr(progress.Progress, "add", control_c)
            assert run(root, out, "--samples-per-shard", 6) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["shards: interrupted; finished shards are kept, the same command goes on"]
    assert not list(out.glob(".*.tmp")) and len(list(out.glob("*.tar"))) < 4
    assert run(root, out, "--samples-per-shard", 6) == 0


def test_shards_store_every_format_that_folders_have(tmp_path):
    """Files are stored and read back unchanged, by random access and as a stream."""
    root = tmp_path / "images"
    endings = [ending.removeprefix(".") for ending in IMAGES]
    for ending in endings:
        write_folder(root, each=1, extension=ending, first=endings.index(ending))
    assert run(root, tmp_path / "out") == 0
    folder = ImageFolder(root)
    shards = Shards(str(tmp_path / "out"), "train")
    read = {shards.read(i) for i in range(len(shards))}
    assert read == {folder.read(i) for i in range(len(folder))} and len(shards) == 3 * len(endings)
    stream = ShardStream([str(shards.paths[0])], shards.classes, len(shards), "out")
    samples = list(itertools.islice(stream.samples(0, 0, 1), len(shards)))
    assert {sample.content for sample in samples} <= read
    assert {stream.decode(sample).size for sample in samples} == {shards.image(0).size}


def test_the_rule_of_names_is_in_the_message(tmp_path):
    """As in webdataset, 2021.05.01.jpg is a file of sample 2021. Names of photographs like these are a common mistake."""
    rule = "dot a.b.jpg a"
    for names, facts in (
        (["2021.05.01.txt", "2021.cls"], "no image"),
        (["2021.05.01.jpg", "2021.05.02.jpg", "2021.cls"], "2 images 05.01.jpg 05.02.jpg"),
        (["2021.jpg", "2021.jpeg", "2021.cls"], "2 images jpg jpeg"),
        (["2021.jpg", "2021.jpg", "2021.cls"], "2 images jpg"),
        (["2021.jpg", "2021.a.cls", "2021.b.cls"], "2 .cls a.cls b.cls"),
    ):
        with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 1
                tar.addfile(member, io.BytesIO(b"1"))
        refuse(f"{tmp_path}/train-000000.tar 2021 {facts} {rule}", Shards, str(tmp_path), "train")


def test_what_is_left_out_is_said(tmp_path, capfd):
    root = tmp_path / "images"
    write_folder(root / "train", each=1)
    write_folder(root / "val", each=1)
    write_folder(root / "test", each=1)
    (root / "devkit").mkdir()
    (root / "train" / "cat" / "Thumbs.db").write_text("x")
    (root / "train" / "cat" / "._00.png").write_text("hidden")
    assert run(root, tmp_path / "out") == 0
    shown = capfd.readouterr().out
    assert f"left out of {root}: 2 in no split (devkit, test)\n" in shown
    train = f"left out of {root}/train: 1 .db (cat/Thumbs.db), 1 hidden (cat/._00.png)\n"
    assert train in shown and shown.count("left out of") == 2
    assert not (tmp_path / "out" / "test-000000.tar").exists()
    for name in "abcd":
        (root / name).mkdir()
    assert run(root, tmp_path / "more") == 0
    assert "6 in no split (a, b, c, d, devkit and 1 more)\n" in capfd.readouterr().out


def test_a_class_called_train(tmp_path):
    write_folder(tmp_path / "images", ["train", "tram"], each=2)  # pictures of trains, no split
    assert run(tmp_path / "images", tmp_path / "out") == 0
    assert Shards(str(tmp_path / "out"), "train").classes == ["train", "tram"]


def test_images_deeper_in_a_class_and_behind_links_are_found(tmp_path):
    root = write_folder(tmp_path / "images", each=1)
    write_folder(tmp_path / "elsewhere", ["x"], each=3)
    (root / "ant").symlink_to(tmp_path / "elsewhere" / "x")
    write_folder(root / "cat", ["deep"], each=2)
    assert run(root, tmp_path / "out") == 0
    assert np.bincount(Shards(str(tmp_path / "out"), "train").labels).tolist() == [3, 3, 1, 1]


def test_names_that_are_not_utf8(tmp_path):
    root = write_folder(tmp_path / "images", ["Käfer", "cat dog"], each=1)
    os.rename(root / "cat dog" / "00.png", os.fsencode(root / "cat dog") + b"/\xff\n.png")
    assert run(root, tmp_path / "out") == 0
    assert Shards(str(tmp_path / "out"), "train").classes == ["Käfer", "cat dog"]
    assert (
        "cat dog/\\udcff\\n.png" in (tmp_path / "out" / "train.files.txt").read_text().splitlines()
    )


def move_classes_out_of_train(root):
    for folder in list((root / "train").iterdir()):
        folder.rename(root / folder.name)


def move_images_out_of_classes(root):
    for file in list(root.glob("train/*/*")):
        file.rename(root / "train" / f"{file.parent.name}.png")
    for folder in list(root.glob("train/*/")):
        folder.rmdir()


# Case -> (changes a folder of two splits, facts of the error).
CHANGES = {
    "a class in one split": (
        lambda root: (root / "val" / "owl").rename(root / "val" / "elk"),
        "--in {root} 3 classes train val elk",
    ),
    "an empty split": (
        move_classes_out_of_train,
        "{root}/train images .jpg .png {root}/train/CLASS/*.jpg",
    ),
    "a split without classes": (
        move_images_out_of_classes,
        "--in {root} 0 3 classes train val cat",
    ),
    "two validation splits": (
        lambda root: write_folder(root / "validation"),
        "{root} both val validation",
    ),
    "a class that ends in a space": (
        lambda root: (root / "train" / "cat").rename(root / "train" / "cat "),
        "{root}/train class 'cat UTF-8 spaces",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_folders_that_cannot_be_converted(tmp_path, capfd, case):
    change, facts = CHANGES[case]
    root = tmp_path / "images"
    write_folder(root / "train", each=1)
    write_folder(root / "val", each=1)
    change(root)
    assert run(root, tmp_path / "out") == 2
    line = error_line(capfd)
    assert_says(line, facts.format(root=root))
    if case == "a class in one split":
        assert line.endswith(" val")  # the class is only there
    assert not (tmp_path / "out").exists()


# Case -> (options, facts of the error).
MISTAKES = {
    "no out": ("--in {root}", "required --out"),
    "no such input": ("--in {root}/none --out {out}", "--in {root}/none file folder"),
    "out in a class": ("--in {root} --out {root}/cat/out", "--out {root}/cat/out inside --in"),
    "out is in": ("--in {root} --out {root}", "--out {root} inside --in"),
    "out is a file": (
        "--in {root} --out {file}",
        "--out {file}/train.shards.json {file} directory",
    ),
    "out in a file": (
        "--in {root} --out {file}/x",
        "--out {file}/x/train.shards.json {file} directory",
    ),
    "size": ("--in {root} --out {out} --size 0", "--size 0 1"),
    "workers": ("--in {root} --out {out} --workers 0", "--workers 0 1"),
    "samples per shard": (
        "--in {root} --out {out} --samples-per-shard 0",
        "--samples-per-shard 0 1",
    ),
    "quality without size": ("--in {root} --out {out} --quality 90", "--quality 90 JPEG --size"),
    "quality": ("--in {root} --out {out} --size 9 --quality 101", "--quality 101 1 100"),
    "bad fraction": (
        "--in {root} --out {out} --max-bad-fraction 2",
        "--max-bad-fraction 2 0 1",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(tmp_path, refused, case):
    options, facts = MISTAKES[case]
    root = write_folder(tmp_path / "images", each=1)
    names = dict(root=root, out=tmp_path / "out", file=tmp_path / "file")
    names["file"].write_text("mine")
    argv = [word.format(**names) for word in options.split()]
    assert_says(refused("shards", *argv), facts.format(**names))
    assert not names["out"].exists() and names["file"].read_text() == "mine"


def test_a_terminal_gets_a_bar(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(write_folder(tmp_path / "images"), tmp_path / "out") == 0
    assert "train: 100%" in capfd.readouterr().err


class Colours(ImageSource):
    """Plain colours, as pixels and not as files."""

    classes = ["red", "blue"]

    @classmethod
    def opens(cls, root):
        return root == "colours"

    def __init__(self, root, split):
        self.labels = np.array([0, 1, 1])

    def read(self, index):
        return np.full((4, 6, 3), 100 * index, np.uint8)


@pytest.mark.parametrize("case", ["pixels", "shards"])
def test_what_data_root_takes_is_written_as_shards(case, tmp_path, monkeypatch):
    """Pixels are stored as PNG; a sample of a source without names is called by its number."""
    monkeypatch.setitem(SOURCES, "colours", Colours)
    root = "colours"
    if case == "shards":
        for split, each in (("train", 3), ("val", 2)):
            write_folder(tmp_path / "images" / split, each=each)
        assert run(tmp_path / "images", tmp_path / "first") == 0
        root = str(tmp_path / "first")
    assert run(root, tmp_path / "out") == 0
    for split in ("train", "val"):
        source = open_source(root, split)
        written = open_source(str(tmp_path / "out"), split)
        assert len(written) == len(source) and written.classes == source.classes
        for index, name in enumerate(written.file_names()):
            assert written.labels[index] == source.labels[int(name)]
            pixels = np.asarray(written.image(index))
            assert (pixels == np.asarray(source.image(int(name)))).all()


def test_a_folder_that_is_not_there_is_refused_with_its_neighbour(tmp_path, capfd):
    write_folder(tmp_path / "images", each=1)
    assert run(tmp_path / "imagse", tmp_path / "out") == 2
    assert_says(error_line(capfd), f"--in {tmp_path}/imagse no {tmp_path}/images digits hfds/NAME")
