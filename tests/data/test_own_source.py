"""A source that is defined here, an SQLite file of JPEGs, goes through scripts and commands without a change of the package."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from moh_vision.__main__ import main as command
from moh_vision.classification import validate
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.sources import ImageSource
from moh_vision.data.splits import SOURCES, open_source, open_splits
from moh_vision.diffusion import sample
from moh_vision.evaluation.fidelity.__main__ import main as fidelity
from tests.support.pictures import convert, encoded, write_folder
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, script, whole_and_resumed


class Pictures(ImageSource):
    """The table `pictures` (split, name, label, file) of an SQLite file."""

    takes = "FILE.sqlite with a table of pictures"
    name = "pictures"

    @classmethod
    def opens(cls, root):
        return root.endswith(".sqlite")

    @classmethod
    def splits(cls, root):
        return [split for (split,) in rows(root, "SELECT DISTINCT split FROM pictures")]

    def __init__(self, root, split):
        self.root = root
        table = rows(root, "SELECT rowid, name, label FROM pictures WHERE split = ?", split)
        self.numbers, self.names, labels = zip(*table)
        self.classes = sorted(set(labels))
        self.labels = np.array([self.classes.index(label) for label in labels])

    def read(self, index):
        (found,) = rows(self.root, "SELECT file FROM pictures WHERE rowid = ?", self.numbers[index])
        return found[0]

    def where(self, index):
        return f"{self.root}, {self.names[index]}"

    def path(self, index):
        return self.names[index]

    def listing(self):
        yield json.dumps(self.names).encode()


def rows(root, query, *values):
    """Ask a file. A connection is not shared with a loader's processes."""
    with closing(sqlite3.connect(root)) as opened:
        return opened.execute(query, values).fetchall()


def write_pictures(path, splits):
    """Write JPEGs of two classes, which differ in colour; splits: name -> images of each class."""
    rng = np.random.default_rng(0)
    with closing(sqlite3.connect(path)) as opened:
        opened.execute("CREATE TABLE pictures (split TEXT, name TEXT, label TEXT, file BLOB)")
        for split, count in splits.items():
            for c, label in enumerate(("cat", "dog")):
                for number in range(count):
                    pixels = rng.integers(0, 60, (8, 8, 3), dtype=np.uint8)
                    pixels[..., c] += 150
                    file = encoded(Image.fromarray(pixels), "JPEG")
                    row = (split, f"{label}{number}.jpg", label, file)
                    opened.execute("INSERT INTO pictures VALUES (?, ?, ?, ?)", row)
        opened.commit()
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SOURCES, "pictures", Pictures)
        yield


@pytest.fixture
def root(tmp_path):
    return write_pictures(tmp_path / "pictures.sqlite", dict(train=12, val=4))


def options(root):
    """Return the options of a small run on this data. Another process reads, which a source must bear."""
    return ["--data.root", root, "--data.img_size", "8", "--data.workers", "1"]


@pytest.mark.parametrize("name", ["cls", "dit"])
def test_a_run_is_trained_and_resumed(name, root, tmp_path, capsys):
    """It has the same bits; and goes on with no other file."""
    run, _ = whole_and_resumed(name, tmp_path, (2, 4), *options(root))
    assert f"{root}: 24 training images of 2 classes" in capsys.readouterr().out
    record = json.loads((run / "data.json").read_text())
    assert record["train"]["classes"] == ["cat", "dog"] and record["train"]["samples"] == [12, 12]
    with closing(sqlite3.connect(root)) as opened:
        opened.execute("UPDATE pictures SET name = 'zebra.jpg' WHERE name = 'cat3.jpg'")
        opened.commit()
    said = refused(capsys, script(name).main, *arguments(name, run, 6, 100, *options(root)))
    assert_says(said, f"data.root {root} train files --allow-change data.root")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a classifier's run, and the file that it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    root = write_pictures(folder / "pictures.sqlite", dict(train=12, val=4))
    more = [*options(root), "--optim.lr", "1e-2"]
    script("cls").main(arguments("cls", folder / "run", 20, 100, *more))
    return folder / "run", root


def test_it_is_validated(trained, tmp_path, capsys):
    """Predictions have the names of the samples, since there are no files."""
    run, root = trained
    validate.main(["--checkpoint", str(run), "--predictions", str(tmp_path / "p.csv")])
    assert f"{root}, val): top-1 100.00 %" in capsys.readouterr().out
    lines = (tmp_path / "p.csv").read_text().splitlines()[1:]
    assert len(lines) == 8 and all(f"{root}, " in line for line in lines)


def test_its_images_are_classified(trained, tmp_path, capsys):
    """With a picture from elsewhere: the classes differ in colour."""
    run, root = trained
    write_folder(tmp_path / "data", train=1)
    elsewhere = tmp_path / "data" / "train" / "dog" / "0.png"
    argv = ["predict", str(run), root, str(elsewhere), "--output", str(tmp_path / "c.json")]
    assert command(argv) == 0
    images = json.loads((tmp_path / "c.json").read_text())["images"]
    assert len(images) == 24 + 8 + 1
    assert images[0]["image"] == f"{root}, cat0.jpg" and images[-1]["image"] == str(elsewhere)
    assert [image["classes"][0][0] for image in images] == [
        *["cat"] * 12,
        *["dog"] * 12,
        *["cat"] * 4,
        *["dog"] * 4,
        "dog",
    ]


def test_samples_and_images_are_scored_against_it(trained, tmp_path, capsys):
    run, root = trained
    script("dit").main(arguments("dit", tmp_path / "dit", 1, 1, *options(root)))
    argv = ["--checkpoint", str(tmp_path / "dit"), "--num-images", "6", "--steps", "2"]
    argv += ["--extractor", str(run), "--score", root, "--score-file", str(tmp_path / "s.json")]
    sample.main([*argv, "--out", str(tmp_path / "samples")])
    assert f"{root}, val split" in (tmp_path / "s.json").read_text()
    options_of_score = [
        "--extractor",
        str(run),
        "--size",
        "8",
        "--allow-biased",
        "--out",
        str(tmp_path / "f.json"),
    ]
    assert fidelity([root, root, *options_of_score]) == 0
    scored = json.loads((tmp_path / "f.json").read_text())
    assert (scored["num_generated"], scored["num_reference"]) == (24, 8)
    assert (scored["generated"], scored["reference"]) == (
        f"{root}, train split",
        f"{root}, val split",
    )


def test_it_is_written_as_shards(root, tmp_path):
    """Bytes and classes are those of the file, and a sample has the name that the source gives it."""
    assert convert(root, tmp_path / "shards") == 0
    for split in ("train", "val"):
        written = open_source(str(tmp_path / "shards"), split)
        source = open_source(root, split)
        assert written.classes == source.classes
        of_name = {source.path(i): i for i in range(len(source))}
        for i, name in enumerate(written.file_names()):
            assert written.read(i) == source.read(of_name[name])
            assert written.labels[i] == source.labels[of_name[name]]


def test_it_is_divided_where_it_has_no_validation_images(tmp_path, capsys):
    """As shards of it are."""
    root = write_pictures(tmp_path / "pictures.sqlite", dict(train=20))
    said = refused(
        capsys, script("cls").main, *arguments("cls", tmp_path / "run", 1, 1, *options(root))
    )
    assert_says(said, f"data.root {root} val train data.val_fraction")
    train, val = open_splits(root, val_fraction=0.3)
    assert len(train) + len(val) == 40 and 2 <= len(val) <= 24
    assert convert(root, tmp_path / "shards", "--val-fraction 0.3") == 0
    of_shards = open_source(str(tmp_path / "shards"), "val")
    assert sorted(of_shards.file_names()) == sorted(val.path(i) for i in range(len(val)))
    run = tmp_path / "run"
    argv = arguments("cls", run, 1, 1, *options(root), "--data.val_fraction", "0.3")
    script("cls").main(argv)
    capsys.readouterr()
    validate.main(["--checkpoint", str(run)])
    assert (
        f"{len(val)} of the 40 images in {root} are for validation alone" in capsys.readouterr().out
    )


def test_a_root_that_nothing_takes_is_told_what_is_taken(tmp_path):
    facts = "digits hfds/NAME train/CLASS train-*.tar CLASS latents FILE.sqlite"
    (tmp_path / "notes.txt").write_text("no images")
    for root in (tmp_path / "notes.txt", tmp_path):
        refuse(f"data.root {root} {facts}", open_source, str(root), "train")
    facts = f"data.root {tmp_path}/gone no file folder {facts}"
    refuse(facts, open_source, f"{tmp_path}/gone", "train", error=FileNotFoundError)


def test_a_sample_that_cannot_be_read_is_named(root, tmp_path, capsys):
    with closing(sqlite3.connect(root)) as opened:
        opened.execute("UPDATE pictures SET file = x'00' WHERE name = 'cat3.jpg'")
        opened.commit()
    argv = arguments("cls", tmp_path / "run", 4, 4, *options(root))
    assert_says(refused(capsys, script("cls").main, *argv), f"{root} cat3.jpg")
    with pytest.raises(UnreadableImage):
        open_source(root, "train").image(3)


def test_a_source_that_nobody_imported_is_refused_with_the_option_that_brings_it(tmp_path):
    root = tmp_path / "images.npz"
    root.write_bytes(b"")
    refuse("images.npz --imports", open_source, str(root), "train")
