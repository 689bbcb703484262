"""Wrong folders and labels are refused at once, in one message that names the path and what is allowed."""

import functools
import os
import shutil
import tarfile

import numpy as np
import pytest

from moh_vision.data.batches import LabelledImages, image_transform, training_loader
from moh_vision.data.order import PositionSampler
from moh_vision.data.splits import open_source
from tests.support.pictures import convert, write_folder
from tests.support.refusals import assert_says, refuse
from tests.support.shards import write_shards
from tests.support.small_runs import arguments, script


def test_class_names_that_are_too_few_or_no_text(tmp_path):
    write_shards(tmp_path, count=5, classes=5)
    for names, facts in (
        (
            b"a\nb\nc\nd\n",
            f"{tmp_path}/train-000000.tar 0004.png label 4 {tmp_path}/classes.txt",
        ),
        (b"\xff\xfe\n", f"{tmp_path}/classes.txt UTF-8 0xff"),
    ):
        (tmp_path / "classes.txt").write_bytes(names)
        not_opened(tmp_path, facts)


def not_opened(root, facts, error=ValueError):
    """Expect that opening the training split of `root` fails with a message that says `facts`."""
    refuse(facts, open_source, str(root), "train", error=error)


def test_empty_folders(tmp_path, capsys):
    root = tmp_path / "data"
    root.mkdir()
    (root / ".hidden.jpg").touch()
    not_opened(root, f"data.root {root} train-*.tar shards folder train")
    (root / "train").mkdir()
    not_opened(root, f"{root}/train no images .jpg {root}/train/CLASS/*.jpg")
    (root / "train" / "cat").mkdir()
    not_opened(root, f"{root}/train/cat no images .jpg {root}/train/CLASS/*.jpg")
    assert convert(root, tmp_path / "out") == 2
    assert_says(capsys.readouterr().err, f"{root}/train/cat no images .jpg")
    root = write_folder(tmp_path / "one")
    for file in (root / "train" / "dog").iterdir():
        file.unlink()
    not_opened(root, f"{root}/train/dog no images .jpg")
    empty = tmp_path / "shards"
    empty.mkdir()
    tarfile.open(empty / "train-000000.tar", "w").close()
    not_opened(empty, f"{empty} no samples")


# Script -> the files of its run that are damaged.
# Script -> the files of its run that the test damages.
RECORDS = {
    "cls": ["config.yaml", "metrics.jsonl", "attention.json", "data.json", "environment.jsonl"],
    "clm": ["config.yaml", "metrics.jsonl", "data.json", "tokenizer.json"],
}
# What replaces the content of a file.
CONTENTS = {
    "nothing": b"",
    "null": b"null\n",
    "a list": b"[1]\n",
    "a text": b'"step"\n',
    "other keys": b'{"loss": 3}\n',
    "a step in letters": b'{"step": "one"}\n',
    "another validation": b'{"step": 1, "validation": {"x": 1}}\n',
    "broken UTF-8": b'\xff\xfe{"step": 1}\n',
    "zeros": bytes(40),
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    "script_name, name",
    [(script_name, name) for script_name in RECORDS for name in RECORDS[script_name]],
)
def test_damaged_records_of_a_run_are_named(trained, tmp_path, capsys, script_name, name, content):
    """Training resumes if only a log line is lost; otherwise one line names the damaged file."""
    run = shutil.copytree(trained(script_name, 2), tmp_path / "run")
    (run / name).write_bytes(CONTENTS[content])
    command = functools.partial(script(script_name).main, arguments(script_name, run, 3, 100))
    capsys.readouterr()
    try:
        command()
    except SystemExit as stop:
        error = capsys.readouterr().err
        assert stop.code == 2 and error.count("\n") == 1, error
        assert f"{run / name}" in error or f"{run} holds a run with another" in error, error


def test_a_pipe_among_the_files_is_refused_without_waiting(tmp_path, capsys):
    """Opening a pipe would block until somebody writes to it."""
    folder = write_folder(tmp_path / "folder")
    shards = write_shards(tmp_path / "shards")
    os.mkfifo(folder / "train" / "cat" / "9.png")
    os.mkfifo(shards / "train-000009.tar")
    assert convert(folder, tmp_path / "out") == 2
    assert_says(capsys.readouterr().err, f"{folder}/train/cat/9.png file pipe")
    not_opened(folder, f"{folder}/train/cat/9.png file pipe")
    not_opened(shards, f"{shards}/train-000009.tar file pipe")


def test_a_link_to_a_folder_above_is_named(tmp_path):
    root = write_folder(tmp_path / "data")
    os.symlink(root / "train" / "cat", root / "train" / "cat" / "again")
    not_opened(root, f"{root}/train/cat/again link above")


def test_links_are_followed_and_a_dangling_one_is_a_bad_image(tmp_path):
    root = write_folder(tmp_path / "data", train=2)
    os.symlink(root / "train" / "dog", root / "train" / "cat" / "more")
    os.symlink(tmp_path / "nowhere.png", root / "train" / "dog" / "9.png")
    source = open_source(str(root), "train")
    assert np.bincount(source.labels).tolist() == [2 + 3, 3]
    refuse(f"{root}/train/dog/9.png No file", source.image, len(source) - 1)


@pytest.mark.parametrize("workers", [0, 3])
def test_fewer_images_than_a_batch_and_fewer_shards_than_workers(tmp_path, workers):
    source = open_source(str(write_shards(tmp_path / "d", count=3, per_shard=3)), "train")
    images = LabelledImages(source, image_transform("none", 4, 3, [0.5] * 3, [0.5] * 3), 0)
    order_options = dict(
        group=8, seed=0, batch_size=7, accumulation=1, rank=0, world=1, start=0, stop=3
    )
    order = PositionSampler(source.shard_sizes, **order_options)
    batches = training_loader(images, order, workers)
    seen = np.concatenate([batch["labels"].numpy() for batch in batches])
    # A batch of 7 spans several epochs of 3 images, one of each class.
    assert len(seen) == 21 and np.bincount(seen).tolist() == [7, 7, 7]
