"""Sources of images: digits, shards with their index, and tables of the hub."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moh_vision.classification import train as cls
from moh_vision.common.io import hidden_path
from moh_vision.data.shards import Shards
from moh_vision.data.sources import Digits
from moh_vision.data.splits import open_source
from tests.support.pictures import convert, write_folder
from tests.support.refusals import assert_says, refuse, refused
from tests.support.shards import append, write_shards


def test_digits_split_is_fixed_and_complete():
    train = Digits("train")
    test = Digits("val")
    assert (len(train), len(test)) == (1442, 355)
    assert np.bincount(test.labels).tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert train.pixels.max() == 255 and train.pixels.min() == 0
    digest = hashlib.sha256(test.pixels.tobytes() + test.labels.tobytes()).hexdigest()
    assert digest.startswith("c828ed8d66d49993")
    of_train = {image.tobytes() for image in train.pixels}
    assert not any(image.tobytes() in of_train for image in test.pixels)


def test_shards_written_by_webdataset_are_read_at_random(tmp_path):
    source = Shards(str(write_shards(tmp_path / "d")), "train")
    assert (len(source), source.shard_sizes, source.classes) == (23, (10, 10, 3), ["0", "1", "2"])
    for i in (22, 0, 13, 9, 10):
        assert source.image(i).getpixel((0, 0)) == (i, 0, 255 - i)
        assert source.labels[i] == i % 3


def test_index_is_kept_and_a_changed_shard_refused(tmp_path):
    folder = write_shards(tmp_path / "d")
    index = folder / ".train-000001.tar.index.npy"
    # Another process may be writing the index at this moment; its file is not touched.
    temporary_of_another = hidden_path(index)
    temporary_of_another.write_bytes(b"another process writes here")
    Shards(str(folder), "train")
    assert temporary_of_another.read_bytes() == b"another process writes here"
    before = index.stat().st_mtime_ns
    Shards(str(folder), "train")
    assert index.stat().st_mtime_ns == before
    append(folder / "train-000001.tar", "0100.txt", bytes(20_000))
    refuse(f"{folder}/train-000001.tar changed index {index}", Shards, str(folder), "train")
    index.unlink()
    refuse(f"{folder}/train-000001.tar sample 0100 no image", Shards, str(folder), "train")


@pytest.fixture
def hashed(monkeypatch):
    """A list of the shards that have been hashed while they were opened."""
    files = []
    digest = hashlib.file_digest

    def noted(file, *rest):
        if file.name.endswith(".tar"):
            files.append(Path(file.name).name)
        return digest(file, *rest)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return files


def test_a_copy_of_shards_is_hashed_once_against_its_record(tmp_path, hashed):
    write_folder(tmp_path / "images")
    assert convert(tmp_path / "images", tmp_path / "d", "--samples-per-shard 5") == 0
    whole = Shards(str(tmp_path / "d"), "train")
    assert not hashed and not whole.remarks
    copy = shutil.copytree(tmp_path / "d", tmp_path / "copy", copy_function=shutil.copy)
    source = Shards(str(copy), "train")
    assert hashed == [path.name for path in source.paths] and len(hashed) == 3
    (line,) = source.remarks
    assert_says(line, f"{copy} 3 shards index sha256 train.shards.json")
    assert (source.labels == whole.labels).all() and list(source.listing()) == list(whole.listing())
    assert source.read(0) == whole.read(0)
    # The command latents resumes from a copy of its input because it compares these.
    assert list(source.identities()) == list(whole.identities())
    again = Shards(str(copy), "train")
    assert len(hashed) == 3 and not again.remarks
    # A shard of the same size with other bytes is no copy.
    data = bytearray((copy / "train-000001.tar").read_bytes())
    data[600] ^= 1
    (copy / "train-000001.tar").write_bytes(data)
    changed = copy / "train-000001.tar"
    index = copy / ".train-000001.tar.index.npy"
    refuse(f"{changed} {index} sha256 train.shards.json", Shards, str(copy), "train")


def test_a_copy_of_shards_without_a_record_is_indexed_anew(tmp_path, hashed, monkeypatch):
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    folder = write_shards(tmp_path / "d")
    whole = Shards(str(folder), "train")
    for name, mode in (("copy", 0o755), ("read-only", 0o555)):
        copy = shutil.copytree(folder, tmp_path / name, copy_function=shutil.copy)
        copy.chmod(mode)
        try:
            source = Shards(str(copy), "train")
            (line,) = source.remarks
            assert_says(line, f"{copy} 3 shards index anew")
            assert (source.labels == whole.labels).all() and source.read(3) == whole.read(3)
            assert not Shards(str(copy), "train").remarks
        finally:
            copy.chmod(0o755)
    assert not hashed


def test_read_only_folder_puts_the_index_into_the_cache(tmp_path, monkeypatch):
    """Folders of the same name at different paths have indices of their own."""
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    folder = write_shards(tmp_path / "a" / "d", count=23)
    other = write_shards(tmp_path / "b" / "d", count=7)
    for read_only in (folder, other):
        read_only.chmod(0o555)
    try:
        Shards(str(folder), "train")
        (kept,) = (tmp_path / "cache" / "index").iterdir()
        assert not list(folder.glob(".*")) and len(list(kept.iterdir())) == 3
        before = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
        assert len(Shards(str(other), "train")) == 7
        assert len(Shards(str(folder), "train")) == 23
        assert {file: file.stat().st_mtime_ns for file in kept.iterdir()} == before
        append(folder / "train-000001.tar", "0100.txt", bytes(20_000))
        index = kept / ".train-000001.tar.index.npy"
        refuse(f"{folder}/train-000001.tar changed index {index}", Shards, str(folder), "train")
    finally:
        for read_only in (folder, other):
            read_only.chmod(0o755)


def test_more_shards_than_files_may_be_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    source = Shards(str(write_shards(tmp_path / "d", count=40, per_shard=1)), "train")
    for i in (*range(40), 0, 39):
        assert source.image(i).getpixel((0, 0))[0] == i
    assert len(os.listdir("/proc/self/fd")) <= before + 16


@pytest.mark.parametrize("name, missing", [("9999.cls", "image"), ("9999.png", ".cls")])
def test_half_a_sample_is_named(tmp_path, name, missing):
    folder = write_shards(tmp_path / "d", count=4)
    append(folder / "train-000000.tar", name, b"0")
    refuse(f"{folder}/train-000000.tar sample 9999 no {missing}", Shards, str(folder), "train")


def test_a_table_of_the_hub_has_labels_in_every_row(monkeypatch):
    datasets = pytest.importorskip("datasets")
    names = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"])
    )
    images = [Image.new("RGB", (6, 4), (i, 0, 0)) for i in range(3)]

    def opened(labels, features=names):
        table = datasets.Dataset.from_dict(dict(image=images, label=labels), features=features)
        monkeypatch.setattr(datasets, "load_dataset", lambda name, config: dict(validation=table))
        return open_source("hfds/anna/pets", "val")

    source = opened([1, 0, 1])
    assert (source.name, source.classes, source.labels.tolist()) == (
        "pets",
        ["cat", "dog"],
        [1, 0, 1],
    )
    assert [source.image(i).getpixel((0, 0)) for i in range(3)] == [(i, 0, 0) for i in range(3)]
    assert list(source.identities()) == list(opened([1, 0, 1]).identities())
    assert list(source.identities()) != list(opened([1, 1, 1]).identities())
    refuse("hfds/anna/pets validation row 1 label 2 classes", opened, [0, -1, 1])


def test_columns_of_a_table_of_the_hub_are_chosen(monkeypatch):
    datasets = pytest.importorskip("datasets")
    picture = datasets.Image()
    label = datasets.ClassLabel(names=["cat", "dog"])
    columns = dict(
        image=(picture, [Image.new("RGB", (6, 4), (i, 0, 0)) for i in range(3)]),
        mask=(picture, [Image.new("L", (6, 4), 200) for _ in range(3)]),
        fine=(label, [1, 0, 1]),
        coarse=(datasets.ClassLabel(names=["pet"]), [0, 0, 0]),
        number=(datasets.Value("int64"), [2, 0, 2]),
        word=(datasets.Value("string"), ["owl", "ant", "owl"]),
        score=(datasets.Value("float32"), [0.0, 1.0, 1.0]),
        year=(datasets.Value("int32"), [2024, 2**30, 1]),
    )

    def opened(root, *names):
        features = datasets.Features({name: columns[name][0] for name in names})
        rows = {name: columns[name][1] for name in names}
        table = datasets.Dataset.from_dict(rows, features=features)
        monkeypatch.setattr(datasets, "load_dataset", lambda name, config: dict(train=table))
        return open_source(f"hfds/anna/pets{root}", "train")

    for column, classes, labels in (
        ("fine", ["cat", "dog"], [1, 0, 1]),
        ("coarse", ["pet"], [0, 0, 0]),
        ("number", ["0", "1", "2"], [2, 0, 2]),
        ("word", ["ant", "owl"], [1, 0, 1]),
        ("none", [], [0, 0, 0]),
    ):
        source = opened(f"?label={column}", "image", "fine", "coarse", "number", "word")
        assert (source.classes, source.labels.tolist()) == (classes, labels)
        assert source.name == "pets" and not source.remarks
    assert opened("?image=mask&label=fine", "image", "mask", "fine").image(0).mode == "L"
    bare = opened("", "image", "number")
    assert (bare.classes, bare.labels.tolist()) == ([], [0, 0, 0])
    facts = "class-label image number without classes hfds/anna/pets?label=COLUMN"
    assert_says(bare.remarks[0], facts)
    for root, names, facts in (
        ("", ("image", "fine", "coarse"), "2 class-label fine coarse hfds/anna/pets?label=COLUMN"),
        (
            "?label=fine",
            ("image", "mask", "fine"),
            "2 image mask hfds/anna/pets?label=fine&image=COLUMN",
        ),
        ("?label=breed", ("image", "fine"), "breed image fine"),
        ("?class=fine", ("image", "fine"), "class=fine ?label=COLUMN ?image=COLUMN"),
        ("?label", ("image", "fine"), "label= ?label=COLUMN ?image=COLUMN"),
        ("?label=score", ("image", "score"), "score float32 label numbers texts"),
        ("?label=year", ("image", "year"), "year 1073741824 0 999999"),
    ):
        refuse(f"data.root hfds/anna/pets{root} {facts}", opened, root, *names)


def test_a_package_that_the_hub_needs_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    model = ["--model.name", "moh_vit_tiny_patch16_224", "--output", tmp_path / "run"]
    said = refused(capsys, cls.main, "--data.root", "hfds/anna/pets", *model)
    assert_says(said, "datasets pip install moh_vision[hub]")
