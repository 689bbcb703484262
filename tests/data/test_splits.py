"""The record of a run's data, data.json, and the changes of data that a resumed run refuses."""

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from moh_vision.classification import train as train_cls
from moh_vision.data.splits import DataRecord, in_short, open_source, open_splits
from moh_vision.diffusion.latents.stored import LatentCache
from tests.support.pictures import convert, gradient, write_folder
from tests.support.refusals import refuse
from tests.support.shards import write_shards


def record(root, *allowed):
    """Return the record of a data set; `allowed` are the keys of --allow-change."""
    train, val = open_splits(str(root))
    return DataRecord(str(root), allowed, train=train, val=val)


def renamed(root, name="cow"):
    for split in ("train", "val"):
        (root / split / "dog").rename(root / split / name)


def added(root):
    for split in ("train", "val"):
        shutil.copytree(root / split / "dog", root / split / "eel")


# Case -> (changes a folder, what the error says).
CHANGES = {
    "a class renamed": (
        lambda root: renamed(root, "ant"),
        r"gone: dog \(6\); new: ant \(6\). .* --init-from",
    ),
    "a class added": (
        added,
        r"gone: none; new: eel \(6\). Bring them back, or start .* --init-from",
    ),
    "an image added": (
        lambda root: shutil.copy(root / "val" / "cat" / "0.png", root / "val" / "cat" / "9.png"),
        r"gone: cat \(4\); new: cat \(5\). Bring them back, or accept .* --allow-change data.root",
    ),
    "an image renamed": (
        lambda root: (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "z.png"),
        "other files, or .* --allow-change data.root",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_has_changed_is_refused_by_name(tmp_path, change):
    root = write_folder(tmp_path / "data")
    run = tmp_path / "run"
    run.mkdir()
    change_folder, words = CHANGES[change]
    record(root).save(run)
    record(root).check(run, pytest.fail)
    change_folder(root)
    message = f"data.root {root}.*not the data that {run} began with: .*{words}"
    refuse(message, record(root).check, run, pytest.fail)
    said = []
    if "--allow-change" in words:
        record(root, "data.root").check(run, said.append)
        assert len(said) == 1 and said[0].endswith("accepted")
    else:
        refuse(words, record(root, "data.root").check, run, said.append)


def test_more_images_for_validation_than_for_training_are_taken_and_said(tmp_path):
    for val, said in (
        (3, ""),
        (4, " (more for validation than for training: are train and val exchanged?)"),
    ):
        root = str(write_folder(tmp_path / str(val), train=3, val=val))
        train, held_out = open_splits(root)
        words = f"{root}: 6 training images of 2 classes, {2 * val} for validation{said}; 3 steps of 4 are 2 epochs"
        assert in_short(root, train, 3, 4, held_out) == words


def test_shards_that_were_written_again_are_refused(tmp_path):
    root = write_shards(tmp_path / "data", classes=3)

    def outline():
        return DataRecord(str(root), (), train=open_source(str(root), "train"))

    outline().save(tmp_path)
    for path in root.glob("*.tar"):  # other modification times, as of a copy, are no change
        os.utime(path, (0, 0))
    for index in root.glob(".*.index.npy"):
        index.unlink()
    outline().check(tmp_path, pytest.fail)
    (root / "classes.txt").write_text("ant\nbee\ncat\n")
    refuse(r"gone: 0 \(8\), .*; new: ant \(8\)", outline().check, tmp_path, pytest.fail)
    (root / "classes.txt").unlink()
    first, *_ = sorted(root.glob("*.tar"))
    (root / f".{first.name}.index.npy").unlink()
    first.rename(first.with_name("train-999999.tar"))
    refuse("other files", outline().check, tmp_path, pytest.fail)


def test_a_record_that_cannot_be_read_and_one_that_is_not_there(tmp_path):
    record("digits").check(tmp_path, pytest.fail)
    record("digits").save(tmp_path)
    saved = json.loads((tmp_path / "data.json").read_text())
    assert saved["val"]["classes"][:2] == ["0", "1"] and saved["val"]["samples"][:2] == [35, 36]
    words = "data.json: not a record of data that can be read .* --fresh"
    for damaged in (
        "",
        "[]",
        "{}",
        '{"train": 1, "val": {}}',
        '{"train": {"classes": 3}, "val": {}}',
    ):
        (tmp_path / "data.json").write_text(damaged)
        refuse(words, record("digits").check, tmp_path, pytest.fail)


def test_processes_that_see_other_data_are_refused(tmp_path, monkeypatch):
    here, there = (write_folder(tmp_path / name) for name in "ab")
    renamed(there)
    of_another = record(there).splits

    def gather(of_this_process):
        return [*of_this_process, *of_this_process, of_another]

    monkeypatch.setattr("moh_vision.data.splits.gather_object", gather)
    refuse("train: process 2 sees other data than process 0: .*gone: dog", record, here)


def test_latents_of_another_vae_are_other_data():
    latents = LatentCache.__new__(LatentCache)
    shards = {"train-000000.npy": dict(sha256="1")}
    latents.__dict__.update(labels=np.arange(2), classes=["a", "b"], record=dict(shards=shards))
    one = DataRecord("x", (), train=latents).splits
    shards["train-000000.npy"]["sha256"] = "2"
    assert one != DataRecord("x", (), train=latents).splits


def test_transparent_pixels_are_said(tmp_path, capsys):
    """Decoding drops alpha, so transparent pixels show the colour under them, and a line warns of that.

    An alpha channel that is opaque, as in screenshots, is not reported.
    """
    root = write_folder(tmp_path / "set")
    for file in (root / "train").glob("*/*.png"):
        image = Image.open(file).convert("RGBA")
        if file.parent.name == "dog":
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        image.save(file)
    palette = Image.open(root / "val" / "cat" / "2.png").convert("P")
    palette.save(root / "val" / "cat" / "2.png", transparency=int(np.asarray(palette)[0, 0]))
    (root / "val" / "cat" / "0.png").write_bytes(b"no image")
    given = (
        f"--data.root {root} --data.img_size 8 --dry-run --model.depth 1 --output {tmp_path}/run"
    )
    train_cls.main(["--config", "quickstart/cls", *given.split()])
    said = [line for line in capsys.readouterr().out.splitlines() if "transparent pixels" in line]
    first = root / "train" / "dog" / "0.png"
    words = "images that were looked at have transparent pixels"
    assert said[0].startswith(
        f"data.root {root}, train: 6 of 12 {words} (first {first}): alpha is dropped"
    )
    assert f"val: 1 of 8 {words} (first {root}/val/cat/2.png)" in said[1]
    (root / "val" / "cat" / "0.png").unlink()
    for options, count in (("", 0), ("--size 8", 2)):
        assert convert(root, tmp_path / f"shards{count}", options) == 0
        assert capsys.readouterr().out.count("transparent pixels") == count


def write_classes(root, counts):
    """Write root/CLASS/i.png for each class with its number of images; return `root`."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            gradient(4 + i, 4).save(root / name / f"{i}.png")
    return root


@pytest.mark.parametrize("in_train", [False, True], ids=["classes in the root", "classes in train"])
def test_a_folder_without_validation_images_is_divided(tmp_path, in_train):
    """Each class is divided, as `shards --val-fraction` does it; all images are "train" at the fraction 0."""
    root = tmp_path / "data"
    folder = root / "train" if in_train else root
    write_classes(folder, {"ant": 40, "bee": 2, "cat": 1})
    train, val = open_splits(str(root), val_fraction=0.25)
    files = [{source.path(i) for i in range(len(source))} for source in (train, val)]
    assert not files[0] & files[1] and len(files[0] | files[1]) == 43
    assert train.classes == val.classes == ["ant", "bee", "cat"]
    ants, *bees_and_cats = np.bincount(val.labels, minlength=3).tolist()
    assert 4 <= ants <= 16 and bees_and_cats == [1, 0]
    line = f"{len(val)} of the 43 images in {folder} are for validation alone"
    assert train.remarks == val.remarks == [line]
    (folder / "cat" / "0.png").unlink()
    (folder / "cat").rmdir()
    assert convert(folder, tmp_path / "shards", "--val-fraction 0.25") == 0
    in_shards = set((tmp_path / "shards" / "val.files.txt").read_text().splitlines())
    assert in_shards == files[1]
    assert len(open_source(str(root), "train", val_fraction=0)) == 42


def test_images_for_validation_are_left_as_they_are(tmp_path):
    root = write_folder(tmp_path / "data", train=6, val=4)
    train, val = open_splits(str(root), val_fraction=0.5)
    assert (len(train), len(val), train.remarks) == (12, 8, [])


UNDIVIDED = {
    "no fraction": (("ant", "bee"), 3, None, "if its folders are classes, put them into"),
    "names of splits": (("Training", "Test"), 3, 0.5, "if its folders are classes, put them into"),
    "classes below": (("a/ant", "b/bee"), 3, 0.5, "if its folders are classes, put them into"),
    "one image a class": (("ant", "bee"), 1, 0.5, "no class has two images"),
}


@pytest.mark.parametrize("case", UNDIVIDED)
def test_folders_that_cannot_be_divided_are_refused(tmp_path, case):
    names, each, fraction, words = UNDIVIDED[case]
    root = str(write_classes(tmp_path / "data", dict.fromkeys(names, each)))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_splits(root, val_fraction=fraction)
