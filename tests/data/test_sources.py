import hashlib
import io
import os
import tarfile

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from moh_vision.data.batches import LabelledImages, image_transform, training_batches
from moh_vision.data.order import StepBatches
from moh_vision.data.shards import Shards
from moh_vision.data.sources import Digits
from moh_vision.data.splits import open_source


def write_shards(folder, count=23, per_shard=10, classes=3, split="train", extension="png"):
    folder.mkdir(exist_ok=True)
    with webdataset.ShardWriter(str(folder / f"{split}-%06d.tar"), maxcount=per_shard, verbose=0) as sink:
        for i in range(count):
            image = Image.new("RGB", (6, 4), (i, 0, 255 - i))
            sink.write({"__key__": f"{i:04d}", extension: image, "cls": i % classes})
    return folder


def append(path, name, data):
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def test_digits_split_is_fixed_and_complete():
    train, test = Digits("train"), Digits("val")
    assert (len(train), len(test)) == (1442, 355)
    assert np.bincount(test.labels).tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert train.pixels.max() == 255 and train.pixels.min() == 0
    assert hashlib.sha256(test.pixels.tobytes() + test.labels.tobytes()).hexdigest()[:16] == "c828ed8d66d49993"
    seen = {p.tobytes() for p in train.pixels}
    assert sum(p.tobytes() in seen for p in test.pixels) == 0


def test_shards_written_by_webdataset_are_read_at_random(tmp_path):
    source = Shards(str(write_shards(tmp_path / "d")), "train")
    assert (len(source), source.shard_sizes, source.classes) == (23, (10, 10, 3), ["0", "1", "2"])
    for i in (22, 0, 13, 9, 10):
        assert source.image(i).getpixel((0, 0)) == (i, 0, 255 - i)
        assert source.labels[i] == i % 3


def test_index_is_kept_and_a_changed_shard_refused(tmp_path):
    folder = write_shards(tmp_path / "d")
    Shards(str(folder), "train")
    index = folder / ".train-000001.tar.index.npy"
    before = index.stat().st_mtime_ns
    Shards(str(folder), "train")
    assert index.stat().st_mtime_ns == before
    os.utime(folder / "train-000001.tar")
    with pytest.raises(ValueError, match=f"{folder}/train-000001.tar was changed since the index {index} was made"):
        Shards(str(folder), "train")
    index.unlink()
    assert len(Shards(str(folder), "train")) == 23
    (folder / "train-000001.tar").unlink()
    with pytest.raises(ValueError, match=f"the shard of the index {index} is gone"):
        Shards(str(folder), "train")
    index.unlink()
    (folder / "train-000002.tar").rename(folder / "train-000007.tar")
    (folder / ".train-000002.tar.index.npy").unlink()
    assert Shards(str(folder), "train").shard_sizes == (10, 3)


def test_read_only_folder_puts_the_index_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    folder = write_shards(tmp_path / "d")
    folder.chmod(0o555)
    try:
        Shards(str(folder), "train")
        (kept,) = (tmp_path / "cache" / "index").iterdir()
        assert not list(folder.glob(".*")) and len(list(kept.iterdir())) == 3
        before = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
        assert len(Shards(str(folder), "train")) == 23
        assert {file: file.stat().st_mtime_ns for file in kept.iterdir()} == before
        os.utime(folder / "train-000001.tar")
        with pytest.raises(
            ValueError, match=f"was changed since the index {kept}/.train-000001.tar.index.npy was made"
        ):
            Shards(str(folder), "train")
    finally:
        folder.chmod(0o755)


def test_two_read_only_folders_of_one_name_have_their_own_index(tmp_path, monkeypatch):
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    for count, parent in ((4, "a"), (7, "b")):
        (tmp_path / parent).mkdir()
        folder = write_shards(tmp_path / parent / "ds", count=count)
        folder.chmod(0o555)
        assert len(Shards(str(folder), "train")) == count
        folder.chmod(0o755)


def test_more_shards_than_files_may_be_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    source = Shards(str(write_shards(tmp_path / "d", count=40, per_shard=1)), "train")
    for i in (*range(40), 0, 39):
        assert source.image(i).getpixel((0, 0))[0] == i
    assert len(os.listdir("/proc/self/fd")) <= before + 16


def test_class_names(tmp_path):
    folder = write_shards(tmp_path / "d")
    (folder / "classes.txt").write_text("cat\ndog\nowl\n")
    assert Shards(str(folder), "train").classes == ["cat", "dog", "owl"]
    (folder / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(ValueError, match="train-000000.tar: label 2, but .*classes.txt names 2 classes"):
        Shards(str(folder), "train")


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("9999.cls", b"0", "sample 9999 has no image"),
        ("9999.png", b"x", "sample 9999 has no .cls"),
        ("9999.cls", b"-1", "9999.cls holds '-1', expected a class number"),
        ("9999.cls", b"cat", "9999.cls holds 'cat', expected a class number"),
    ],
)
def test_bad_members_are_named(tmp_path, name, data, words):
    folder = write_shards(tmp_path / "d", count=4)
    append(folder / "train-000000.tar", name, data)
    with pytest.raises(ValueError, match=f"train-000000.tar: .*{words}"):
        Shards(str(folder), "train")


def test_bad_image_names_shard_and_place(tmp_path):
    folder = write_shards(tmp_path / "d", count=4)
    append(folder / "train-000000.tar", "9999.png", b"not an image")
    append(folder / "train-000000.tar", "9999.cls", b"0")
    with pytest.raises(ValueError, match="train-000000.tar, 9999.png at byte [0-9]+: cannot identify"):
        Shards(str(folder), "train").image(4)


def test_missing_folder_and_shards(tmp_path):
    with pytest.raises(FileNotFoundError, match="data.root /no/where: no such folder"):
        open_source("/no/where", "train")
    with pytest.raises(FileNotFoundError, match="neither val-\\*.tar shards nor a folder val in it"):
        open_source(str(write_shards(tmp_path / "d")), "val")
    (tmp_path / "d" / "val-000000.tar").write_bytes(b"torn" * 300)
    with pytest.raises(ValueError, match="val-000000.tar: not a readable tar"):
        open_source(str(tmp_path / "d"), "val")


@pytest.mark.parametrize("augment", ["none", "affine", "crop_flip", "flip"])
def test_augmentation_depends_on_seed_and_position_alone(augment):
    transform = image_transform(augment, 8, 1, (0.5,), (0.5,))
    data = LabelledImages(Digits("train"), transform, seed=4)
    torch.manual_seed(1)
    first = data[(77, 3)]["images"]
    torch.manual_seed(2)
    again = data[(77, 3)]["images"]
    assert torch.equal(first, again) and first.shape == (1, 8, 8) and first.abs().max() <= 1
    others = torch.stack([data[(p, 3)]["images"] for p in range(20)])
    assert (len(others.unique(dim=0)) == 1) == (augment == "none")


def test_order_does_not_depend_on_workers(tmp_path):
    source = Shards(str(write_shards(tmp_path / "d")), "train")
    data = LabelledImages(source, image_transform("crop_flip", 4, 3, (0.5,) * 3, (0.5,) * 3), seed=0)

    def run(workers):
        batches = StepBatches(
            source.shard_sizes, group=2, seed=0, batch_size=6, accumulation=1, rank=0, world=1, start=2, stop=9
        )
        return torch.stack([b["images"] for b in training_batches(data, batches, workers)])

    alone = run(0)
    assert alone.shape == (7, 6, 3, 4, 4) and torch.equal(run(2), alone)


def test_cifar10(cifar10, tmp_path, monkeypatch):
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path))
    source = Shards(cifar10, "val")
    assert len(source) == 10_000 and np.bincount(source.labels).tolist() == [1000] * 10
    assert source.classes[3] == "cat" and source.image(9_999).size == (32, 32)
