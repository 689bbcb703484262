"""Folders and labels that make no sense: one message that names the path and what is allowed, and no waiting."""

import os
import tarfile

import numpy as np
import pytest
from pictures import convert, write_folder
from refusals import one_line
from test_sources import write_shards

from moh_vision.data.batches import LabelledImages, image_transform, training_batches
from moh_vision.data.order import StepBatches
from moh_vision.data.splits import check_same_classes, open_source


def test_class_names_that_are_no_text(tmp_path):
    write_shards(tmp_path, count=5, classes=5)
    (tmp_path / "classes.txt").write_bytes(b"\xff\xfe\n")
    with one_line("classes.txt: not UTF-8"):
        open_source(str(tmp_path), "train")


def test_other_classes_in_val(tmp_path):
    root = write_folder(tmp_path / "folder", classes=("cat", "dog", "owl"))
    (root / "val" / "owl").rename(tmp_path / "moved")
    train, val = (open_source(str(root), split) for split in ("train", "val"))
    with pytest.raises(ValueError, match=f"data.root {root}: 3 classes in train, 2 in val; train has class 'owl'"):
        check_same_classes(train.classes, "train", val, f"data.root {root}")
    shards = write_shards(tmp_path / "shards", classes=2)
    write_shards(shards, classes=4, split="val")
    train, val = (open_source(str(shards), split) for split in ("train", "val"))
    with one_line("2 classes in train, 4 in val; val has class '2' and 1 more, which train has not"):
        check_same_classes(train.classes, "train", val, f"data.root {shards}")


def test_empty_folders(tmp_path, capsys):
    root = tmp_path / "data"
    root.mkdir()
    with pytest.raises(FileNotFoundError, match=f"data.root {root}: neither train-\\*.tar shards nor a folder train"):
        open_source(str(root), "train")
    (root / "train").mkdir()
    with pytest.raises(ValueError, match=f"data.root {root}: {root}/train holds no class folders"):
        open_source(str(root), "train")
    (root / "train" / "cat").mkdir()
    with pytest.raises(ValueError, match=f"{root}/train/cat: a class folder without images .*.jpg"):
        open_source(str(root), "train")
    assert convert(root, tmp_path / "out") == 2
    assert f"{root}/train/cat: a class folder without images (.jpg" in capsys.readouterr().err
    root = write_folder(tmp_path / "one")
    for file in (root / "train" / "dog").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=f"{root}/train/dog: a class folder without images"):
        open_source(str(root), "train")
    empty = tmp_path / "shards"
    empty.mkdir()
    tarfile.open(empty / "train-000000.tar", "w").close()
    with pytest.raises(ValueError, match=f"{empty}.*hold no samples"):
        open_source(str(empty), "train")


@pytest.mark.parametrize("place", ["folder", "shards"])
def test_what_is_no_file_is_not_waited_for(tmp_path, capsys, place):
    if place == "folder":
        root = write_folder(tmp_path / "data")
        os.mkfifo(root / "train" / "cat" / "9.png")
        assert convert(root, tmp_path / "out") == 2
        assert "train/cat/9.png: not a file but a pipe" in capsys.readouterr().err
    else:
        root = write_shards(tmp_path / "data")
        os.mkfifo(root / "train-000009.tar")
    with pytest.raises(ValueError, match="9.(png|tar): not a file"):
        open_source(str(root), "train")


def test_a_link_to_a_folder_above_is_named(tmp_path, capsys):
    root = write_folder(tmp_path / "data")
    os.symlink(root / "train" / "cat", root / "train" / "cat" / "again")
    with pytest.raises(ValueError, match="cat/again: a link to a folder above it"):
        open_source(str(root), "train")
    assert convert(root, tmp_path / "out") == 2
    assert "cat/again: a link to a folder above it" in capsys.readouterr().err


def test_links_are_followed_and_a_dangling_one_is_a_bad_image(tmp_path):
    root = write_folder(tmp_path / "data", train=2)
    os.symlink(root / "train" / "dog", root / "train" / "cat" / "more")
    os.symlink(tmp_path / "nowhere.png", root / "train" / "dog" / "9.png")
    source = open_source(str(root), "train")
    assert np.bincount(source.labels).tolist() == [2 + 3, 3]
    with pytest.raises(ValueError, match="train/dog/9.png: No such file"):
        source.image(len(source) - 1)


@pytest.mark.parametrize("workers", [0, 3])
def test_fewer_images_than_a_batch_and_fewer_shards_than_workers(tmp_path, workers):
    source = open_source(str(write_shards(tmp_path / "d", count=3, per_shard=3)), "train")
    images = LabelledImages(source, image_transform("none", 4, 3, [0.5] * 3, [0.5] * 3), 0)
    how = dict(group=8, seed=0, batch_size=7, accumulation=1, rank=0, world=1, start=0, stop=3)
    order = StepBatches(source.shard_sizes, **how)
    seen = np.concatenate([batch["labels"].numpy() for batch in training_batches(images, order, workers)])
    assert len(seen) == 21 and np.bincount(seen).tolist() == [7, 7, 7]  # epochs follow each other inside a batch
