"""The record of a run's data, data.json, and the changes of data that a resumed run refuses."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.data.division import content_hash
from moh_vision.data.folder import UndividedFolder
from moh_vision.data.splits import DataRecord, in_short, open_source, open_splits, outline
from moh_vision.data.stream import ShardStream
from moh_vision.diffusion.latents.stored import LatentCache
from tests.support.pictures import convert, write_folder
from tests.support.refusals import assert_says, one_line, refuse, refused
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


# Case -> (changes a folder; facts of the error: what is gone, what is new, what to do).
CHANGES = {
    "a class renamed": (
        lambda root: renamed(root, "ant"),
        "gone dog (6)",
        "ant (6)",
        "--init-from",
    ),
    "a class added": (
        added,
        "gone none",
        "eel (6)",
        "--init-from",
    ),
    "an image added": (
        lambda root: shutil.copy(root / "val" / "cat" / "0.png", root / "val" / "cat" / "9.png"),
        "gone cat (4)",
        "cat (5)",
        "--allow-change data.root",
    ),
    "an image renamed": (
        lambda root: (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "z.png"),
        "other files",
        "",
        "--allow-change data.root",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_has_changed_is_refused_by_name(tmp_path, change):
    root = write_folder(tmp_path / "data")
    run = tmp_path / "run"
    run.mkdir()
    change_folder, gone, new, to_do = CHANGES[change]
    record(root).save(run)
    record(root).check(run, pytest.fail)
    change_folder(root)
    with one_line(f"data.root {root} {run} {to_do}") as refusal:
        record(root).check(run, pytest.fail)
    before, _, after = str(refusal.value).partition(" new")
    assert_says(before, gone)
    assert_says(after, new)
    said = []
    if "--allow-change" in to_do:
        record(root, "data.root").check(run, said.append)
        assert len(said) == 1 and said[0].endswith("accepted")
    else:
        refuse(f"{gone} {new} {to_do}", record(root, "data.root").check, run, said.append)


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
    facts = f"data.root {root} gone 0 new ant (8)"
    refuse(facts, outline().check, tmp_path, pytest.fail)
    (root / "classes.txt").unlink()
    first, *_ = sorted(root.glob("*.tar"))
    (root / f".{first.name}.index.npy").unlink()
    first.rename(first.with_name("train-999999.tar"))
    refuse(f"data.root {root} files", outline().check, tmp_path, pytest.fail)


def test_a_record_that_cannot_be_read_and_one_that_is_not_there(tmp_path):
    record("digits").check(tmp_path, pytest.fail)
    record("digits").save(tmp_path)
    saved = json.loads((tmp_path / "data.json").read_text())
    assert saved["val"]["classes"][:2] == ["0", "1"] and saved["val"]["samples"][:2] == [35, 36]
    facts = f"{tmp_path}/data.json record --fresh"
    for damaged in (
        "",
        "[]",
        "{}",
        '{"train": 1, "val": {}}',
        '{"train": {"classes": 3}, "val": {}}',
    ):
        (tmp_path / "data.json").write_text(damaged)
        refuse(facts, record("digits").check, tmp_path, pytest.fail)


def test_processes_that_see_other_data_are_refused(tmp_path, monkeypatch):
    here, there = (write_folder(tmp_path / name) for name in "ab")
    renamed(there)
    of_another = record(there).splits

    def gather(of_this_process):
        return [*of_this_process, *of_this_process, of_another]

    monkeypatch.setattr("moh_vision.data.splits.gather_object", gather)
    refuse(f"data.root {here} train process 2 0 gone dog new cow", record, here)


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
    assert_says(said[0], f"data.root {root} train 6 of 12 {first} alpha")
    assert_says(said[1], f"val 1 of 8 {root}/val/cat/2.png")
    (root / "val" / "cat" / "0.png").unlink()
    for options, count in (("", 0), ("--size 8", 2)):
        assert convert(root, tmp_path / f"shards{count}", options) == 0
        assert capsys.readouterr().out.count("transparent pixels") == count


def write_classes(root, counts, first=0):
    """Write root/CLASS/i.ppm, i from `first` on, for each class with its number of images; return `root`.

    Every image has other pixels, and the same bytes with any version of Pillow.
    """
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(first, first + count):
            (root / name / f"{i}.ppm").write_bytes(pixels_of(f"{name} {i}"))
    return root


def pixels_of(text):
    """Return an image file of 8 x 4 pixels that follow from a text."""
    digest = hashlib.sha256(text.encode()).digest()
    return b"P6 8 4 255\n" + digest * 3


def parts_of(root, val_fraction):
    """Divide a folder; return {path: "train" or "val"}."""
    sources = dict(zip(("train", "val"), open_splits(str(root), val_fraction=val_fraction)))
    return {source.path(i): split for split, source in sources.items() for i in range(len(source))}


@pytest.mark.parametrize("in_train", [False, True], ids=["classes in the root", "classes in train"])
def test_a_folder_without_validation_images_is_divided(tmp_path, in_train):
    """The images are divided as `shards --val-fraction` does it; all images are "train" at the fraction 0."""
    root = tmp_path / "data"
    folder = root / "train" if in_train else root
    write_classes(folder, {"ant": 40, "bee": 2, "cat": 1})
    train, val = open_splits(str(root), val_fraction=0.25)
    files = [{source.path(i) for i in range(len(source))} for source in (train, val)]
    assert not files[0] & files[1] and len(files[0] | files[1]) == 43
    assert train.classes == val.classes == ["ant", "bee", "cat"]
    assert np.bincount(train.labels, minlength=3).min() >= 1
    assert 4 <= len(val) <= 18
    assert train.remarks == val.remarks
    assert train.remarks[0] == f"{len(val)} of the 43 images in {folder} are for validation alone"
    assert convert(folder, tmp_path / "shards", "--val-fraction 0.25") == 0
    in_shards = set((tmp_path / "shards" / "val.files.txt").read_text().splitlines())
    assert in_shards == files[1]
    assert open_source(str(tmp_path / "shards"), "val").classes == train.classes
    assert len(open_source(str(root), "train", val_fraction=0)) == 43


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("count", [2, 5, 15])
def test_new_files_move_no_others(tmp_path, count, fraction):
    classes = {f"c{number:02d}": count for number in range(60)}
    before = parts_of(write_classes(tmp_path, classes), fraction)
    # A class whose images would all be for validation keeps one, which moves when there is another to train on.
    whole = UndividedFolder(tmp_path)
    hashes = {whole.path(i): content_hash(whole, i) for i in range(len(whole))}
    kept = [
        path for path, part in before.items() if part == "train" and hashes[path] < fraction * 2**64
    ]
    assert len(kept) <= 60 * fraction**count * 3
    after = parts_of(write_classes(tmp_path, classes, first=count), fraction)
    moved = [path for path in before if after[path] != before[path]]
    assert set(moved) <= set(kept)
    share = list(after.values()).count("val") / len(after)
    assert share == pytest.approx(fraction, abs=4 * (fraction / len(after)) ** 0.5)
    larger = parts_of(tmp_path, 2 * fraction)
    assert all(larger[path] == "val" for path, part in after.items() if part == "val")


def test_copies_stay_together(tmp_path):
    """Also under other names and in other classes; and a file that is renamed stays in its part."""
    write_classes(tmp_path, {"ant": 30, "bee": 30})
    before = parts_of(tmp_path, 0.3)
    for number in range(30):
        shutil.copy(tmp_path / "ant" / f"{number}.ppm", tmp_path / "ant" / f"copy of {number}.ppm")
        shutil.copy(tmp_path / "ant" / f"{number}.ppm", tmp_path / "bee" / f"ant {number}.ppm")
        (tmp_path / "bee" / f"{number}.ppm").rename(tmp_path / "bee" / f"{number} renamed.ppm")
    after = parts_of(tmp_path, 0.3)
    assert len(after) == 120 and set(after.values()) == {"train", "val"}
    for number in range(30):
        part = before[f"ant/{number}.ppm"]
        assert after[f"ant/{number}.ppm"] == after[f"ant/copy of {number}.ppm"] == part
        assert after[f"bee/ant {number}.ppm"] == part
        assert after[f"bee/{number} renamed.ppm"] == before[f"bee/{number}.ppm"]


def test_every_class_is_trained_on_and_a_line_names_those_without_validation(tmp_path):
    write_classes(tmp_path, {"ant": 60, "bee": 3, "cat": 1})
    train, val = open_splits(str(tmp_path), val_fraction=0.97)
    assert np.bincount(train.labels, minlength=3)[1:].tolist() == [1, 1]
    without = sorted({"ant", "bee", "cat"}.difference(val.classes[c] for c in val.labels))
    assert "cat" in without
    _, *lines = val.remarks
    assert lines == [
        f"{len(without)} of 3 classes have no image for validation: {', '.join(without)}",
        "all images of bee, cat would be for validation: one of a class is trained on, until it has others",
    ]


def test_a_file_that_cannot_be_read_does_not_stop_the_division(tmp_path):
    """The run itself reports it, or leaves it out, when it comes to it."""
    write_classes(tmp_path, {"ant": 30, "bee": 30})
    before = parts_of(tmp_path, 0.3)
    (tmp_path / "ant" / "gone.ppm").symlink_to(tmp_path / "nothing")
    after = parts_of(tmp_path, 0.3)
    assert after.keys() - before.keys() == {"ant/gone.ppm"}
    assert before.items() <= after.items()


def test_images_are_divided_at_any_depth(tmp_path):
    """One class may have all of its images in further folders."""
    write_classes(tmp_path, {"ant": 10, "bee/2025": 10, "bee/2026/june": 10})
    train, val = open_splits(str(tmp_path), val_fraction=0.3)
    assert train.classes == val.classes == ["ant", "bee"]
    counts = [np.bincount(source.labels, minlength=2) for source in (train, val)]
    assert sum(counts).tolist() == [10, 20]
    assert len(open_source(str(tmp_path), "train", val_fraction=0)) == 30
    (tmp_path / "cow" / "2026").mkdir(parents=True)
    facts = f"{tmp_path}/cow images .jpg .png {tmp_path}/CLASS/*.jpg"
    refuse(facts, open_splits, str(tmp_path), val_fraction=0.3)


NOT_TAKEN = "data.root digits hfds/NAME train/CLASS train-*.tar classes --val-fraction"
UNDIVIDED = {
    "no fraction": (("ant", "bee"), 3, None, "data.root split val train data.val_fraction"),
    "names of splits": (("Training", "Test"), 3, 0.5, NOT_TAKEN),
    "classes below": (("a/ant", "b/bee"), 3, 0.5, NOT_TAKEN),
    "small share": (("ant", "bee"), 1, 1e-9, "none 2 val_fraction 1e-09 train val"),
    "one image a class": (("ant", "bee"), 1, 0.99999, "none 2 val_fraction 0.99999 train val"),
}


@pytest.mark.parametrize("case", UNDIVIDED)
def test_folders_that_cannot_be_divided_are_refused(tmp_path, case):
    names, each, fraction, facts = UNDIVIDED[case]
    root = str(write_classes(tmp_path / "data", dict.fromkeys(names, each)))
    refuse(f"{root} {facts}", open_splits, root, val_fraction=fraction)


ALREADY_DIVIDED = {
    "a folder": lambda path: str(write_folder(path, train=6, val=4)),
    "shards": lambda path: str(write_both_splits(path)),
    "digits": lambda path: "digits",
}


@pytest.mark.parametrize("case", ALREADY_DIVIDED)
def test_validation_images_are_left_as_they_are(tmp_path, case, capsys):
    """The fraction of a configuration is for data without a val; on the command line it is refused elsewhere."""
    root = ALREADY_DIVIDED[case](tmp_path / "data")
    expected = [len(source) for source in open_splits(root)]
    assert [len(source) for source in open_splits(root, val_fraction=0.5)] == expected
    argv = ["--config", "quickstart/cls", "--data.root", root, "--data.img_size", "8", "--dry-run"]
    said = refused(capsys, train_cls.main, *argv, "--data.val_fraction", "0.5")
    assert_says(said, f"data.val_fraction 0.5 data.root {root} split val")


def write_both_splits(root):
    for split in ("train", "val"):
        write_shards(root, split=split)
    return root


def as_shards(folder, out, monkeypatch):
    assert convert(folder, out, "--samples-per-shard 15") == 0
    return str(out)


def of_the_hub(folder, out, monkeypatch):
    datasets = pytest.importorskip("datasets")
    source = open_source(str(folder), "train")
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=source.classes)
    )
    images = [dict(bytes=source.read(i), path=None) for i in range(len(source))]
    cells = dict(image=images, label=source.labels)
    table = datasets.Dataset.from_dict(cells, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: dict(train=table))
    return "hfds/anna/pets"


# Case -> a function that returns what data.root names the same images without validation by.
TRAIN_ALONE = {"shards": as_shards, "the hub": of_the_hub}


@pytest.mark.parametrize("case", TRAIN_ALONE)
def test_an_image_is_on_the_same_side_whatever_holds_it(tmp_path, monkeypatch, case):
    """So a run on a folder may be compared with one on shards of it. Small and large files are divided alike."""
    folder = write_classes(tmp_path / "data", {"ant": 40, "bee": 30})
    for number in range(12):  # larger than the bytes that are hashed
        pixels = np.random.default_rng(number).integers(0, 256, (100, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "bee" / f"{number}.bmp")
    root = TRAIN_ALONE[case](folder, tmp_path / "out", monkeypatch)
    refuse(f"data.root {root} val train data.val_fraction", open_splits, root)
    expected = open_splits(str(folder), val_fraction=0.3)
    parts = open_splits(root, val_fraction=0.3)
    for part, of_folder in zip(parts, expected):
        assert sorted(of_part(part)) == sorted(of_part(of_folder))
        assert part.classes == of_folder.classes and part.remarks[-1].startswith(
            f"{len(parts[1])} of"
        )
    _, val = parts
    assert of_part(open_source(root, "val", val_fraction=0.3)) == of_part(val)
    assert val.sizes().tolist() == [len(val.read(i)) for i in range(len(val))]
    records = [
        DataRecord(root, (), train=one, val=other).splits
        for one, other in (
            parts,
            open_splits(root, val_fraction=0.3),
            open_splits(root, val_fraction=0.2),
        )
    ]
    assert records[0] == records[1] and records[0] != records[2]


def of_part(source):
    """List the bytes and the label of each sample."""
    return [(source.read(i), int(source.labels[i])) for i in range(len(source))]


def test_shards_stay_shards_where_they_are_divided(tmp_path):
    """The order takes a few shards at a time; the parts keep this."""
    root = str(write_shards(tmp_path / "data", count=40, per_shard=10))
    train, val = open_splits(root, val_fraction=0.3)
    assert len(train.shard_sizes) == len(val.shard_sizes) == 4
    assert [a + b for a, b in zip(train.shard_sizes, val.shard_sizes)] == [10] * 4
    starts = np.cumsum([0, *val.shard_sizes])
    for number, size in enumerate(val.shard_sizes):
        for index in range(starts[number], starts[number] + size):
            assert f"train-{number:06d}.tar" in val.where(index)


def test_the_parts_of_a_folder_stay_what_they_were(tmp_path):
    """Runs that were begun on a divided folder go on."""
    write_classes(tmp_path, {"ant": 40, "bee": 25, "cat": 1})
    digests = [
        outline(source, source.listing())["sha256"][:16]
        for source in open_splits(str(tmp_path), val_fraction=0.3)
    ]
    assert digests == ["a3c925d5f6f7dfec", "3133061671631395"]


def test_a_stream_is_not_divided(tmp_path):
    root = str(write_shards(tmp_path / "data"))
    stream = ShardStream([], ["0", "1", "2"], 23, "data")
    facts = f"data.root {root} split val data.exact_order false"
    refuse(facts, open_splits, root, stream)
    refuse(f"{facts} data.val_fraction 0.1 stream", open_splits, root, stream, 0.1)


def test_a_run_is_not_scored_on_what_it_was_trained_on(tmp_path, capsys):
    """Another share would move images of the run from one part to the other."""
    root = write_classes(tmp_path / "data", {"ant": 40, "bee": 40})
    run = str(tmp_path / "run")
    options = "--data.img_size 8 --model.depth 1 --max-steps 1 --optim.warmup_steps 0 --optim.batch_size 8"
    argv = ["--config", "quickstart/cls", "--data.root", str(root), *options.split()]
    train_cls.main([*argv, "--output", run, "--data.val_fraction", "0.3"])
    said = refused(capsys, validate.main, "--checkpoint", run, "--data.val_fraction", "0.4")
    assert_says(said, f"data.val_fraction 0.4 {run} 0.3")
    validate.main(["--checkpoint", run, "--data.val_fraction", "0.2"])
    assert f"of the 80 images in {root} are for validation alone" in capsys.readouterr().out
