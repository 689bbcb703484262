"""The same picture in train and val: found in every kind of source, and said with two names."""

import shutil
from functools import partial

import numpy as np
import pytest
from PIL import Image

from moh_vision.classification import train as train_cls
from moh_vision.data import copies
from moh_vision.data.splits import open_splits
from tests.support.pictures import convert, encoded, write_folder
from tests.support.refusals import assert_says
from tests.support.small_runs import arguments


def as_folder(root, _):
    return str(root)


def as_shards(root, _):
    assert convert(root, root.parent / "shards") == 0
    return str(root.parent / "shards")


def as_hub(root, monkeypatch, paths=False):
    """Return the name of a data set of the hub that holds the bytes of the files, or their paths."""
    datasets = pytest.importorskip("datasets")
    tables = {}
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"])
    )
    for split, name in (("train", "train"), ("val", "validation")):
        files = sorted((root / split).glob("*/*.png"))
        cells = [dict(bytes=file.read_bytes(), path=None) for file in files]
        if paths:
            cells = [dict(bytes=None, path=str(file)) for file in files]
        labels = [["cat", "dog"].index(file.parent.name) for file in files]
        tables[name] = datasets.Dataset.from_dict(
            dict(image=cells, label=labels), features=features
        )
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: tables)
    return "hfds/anna/pets"


SOURCES = {
    "a folder": as_folder,
    "shards": as_shards,
    "the hub": as_hub,
    "paths of the hub": partial(as_hub, paths=True),
}


def said_of(root):
    said = []
    copies.warn_of_copies(f"data.root {root}", *open_splits(root), said.append)
    return said


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_picture_in_both_splits_is_said(source, tmp_path, monkeypatch):
    """Under another name and in another class too; a picture of the same size in bytes is another one."""
    folder = write_folder(tmp_path / "data")
    assert said_of(SOURCES[source](folder, monkeypatch)) == []
    shutil.rmtree(tmp_path / "shards", ignore_errors=True)
    shutil.copy(folder / "train" / "cat" / "3.png", folder / "val" / "cat" / "new.png")
    shutil.copy(folder / "train" / "dog" / "5.png", folder / "val" / "cat" / "5.png")
    root = SOURCES[source](folder, monkeypatch)
    train, val = open_splits(root)
    pairs, looked_at = copies.copies(train, val)
    assert (len(pairs), looked_at) == (2, 10)
    for of_val, of_train in pairs:
        assert val.read(of_val) == train.read(of_train)
    (line,) = said_of(root)
    facts = f"data.root {root} 2 of 10 validation {val.where(pairs[0][0])}"
    assert_says(line, f"{facts} {train.where(pairs[0][1])}")


def test_a_run_and_shards_say_it(tmp_path, capsys):
    """`val` is a copy of `train`."""
    folder = write_folder(tmp_path / "data")
    shutil.rmtree(folder / "val")
    shutil.copytree(folder / "train", folder / "val")
    argv = arguments("cls", tmp_path / "run", 1, 1, "--data.root", folder, "--data.img_size", 8)
    train_cls.main([*argv, "--dry-run"])
    facts = f"{folder} 12 of 12 validation {folder}/val/cat/0.png"
    assert_says(capsys.readouterr().out, f"data.root {facts}")
    assert convert(folder, tmp_path / "shards") == 0
    assert_says(capsys.readouterr().out, f"--in {facts}")


def test_images_of_other_sizes_are_not_read(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "data", train=30, val=8)
    for number in range(25):
        pixels = np.random.default_rng(number).integers(0, 255, (50 + number, 50, 3), np.uint8)
        file = folder / "train" / "cat" / f"large {number}.png"
        file.write_bytes(encoded(Image.fromarray(pixels)))
    train, val = open_splits(str(folder))
    read = []
    read_of = train.read
    monkeypatch.setattr(train, "read", lambda index: read.append(index) or read_of(index))
    assert copies.copies(train, val) == ([], 16)
    assert len(read) <= 60 and not any("large" in train.path(index) for index in read)


class Numbers:
    """A split of files of 8 bytes, the numbers of `values`; `read_from` has the indices that were read."""

    def __init__(self, values):
        self.values = values
        self.read_from = []

    def __len__(self):
        return len(self.values)

    def sizes(self):
        return np.full(len(self.values), 8)

    def read(self, index):
        self.read_from.append(index)
        return self.values[index].to_bytes(8, "big")


def test_of_large_splits_some_images_are_read_evenly_spread():
    train = Numbers(range(50_000))
    val = Numbers(range(0, 50_000, 10))
    pairs, looked_at = copies.copies(train, val)
    assert looked_at == len(val.read_from) == copies.LOOKED_AT
    assert len(train.read_from) == copies.MOST_READ
    for split in (train, val):
        assert (split.read_from[0], split.read_from[-1]) == (0, len(split) - 1)
        assert max(np.diff(split.read_from)) - min(np.diff(split.read_from)) <= 1
    assert (0, 0) in pairs and all(val.values[i] == train.values[j] for i, j in pairs)


def test_a_picture_that_cannot_be_read_is_no_copy(tmp_path):
    folder = write_folder(tmp_path / "data")
    for split in ("train", "val"):
        (folder / split / "cat" / "0.png").write_bytes(b"")
        (folder / split / "dog" / "gone.png").symlink_to(folder / "nothing")
    assert said_of(str(folder)) == []
