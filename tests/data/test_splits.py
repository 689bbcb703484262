import json
import os
import sys

import numpy as np
import pytest
from pictures import encoded, gradient, kinds, write_folder
from PIL import Image

from moh_vision.data.decode import UnreadableImage
from moh_vision.data.splits import check_same_classes, open_source


def test_image_folder(tmp_path):
    root = str(write_folder(tmp_path / "d", classes=("dog", "cat", "owl"), train=3))
    train, val = open_source(root, "train"), open_source(root, "val")
    assert train.classes == val.classes == ["cat", "dog", "owl"] and (len(train), len(val)) == (9, 12)
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] and train.shard_sizes == (9,)
    first = Image.open(tmp_path / "d" / "train" / "dog" / "0.png")
    assert np.array_equal(np.asarray(train.image(3)), np.asarray(first))


def test_files_of_every_kind_deep_folders_and_strange_names(tmp_path):
    write_folder(tmp_path, classes=("a",), train=1)
    deep = tmp_path / "train" / "a" / "x" / "y"
    deep.mkdir(parents=True)
    for name, data in kinds().items():
        (deep / name).write_bytes(data)
    (deep / os.fsdecode(b"\xff name.PNG")).write_bytes(encoded(gradient()))
    (deep / "notes.txt").write_text("no image")
    (deep / "._rgb.png").write_text("left behind by a Mac")
    source = open_source(str(tmp_path), "train")
    assert len(source) == 1 + len(kinds()) + 1
    assert all(source.image(i).size == (12, 8) for i in range(len(source)))


def test_validation_may_be_called_so(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "val").rename(tmp_path / "validation")
    assert len(open_source(str(tmp_path), "val")) == 8


def test_mistakes_name_the_folder(tmp_path):
    root = write_folder(tmp_path / "d")
    for file in (root / "val" / "dog").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="val/dog: a class folder without images"):
        open_source(str(root), "val")
    (root / "val" / "dog").rmdir()
    train, val = open_source(str(root), "train"), open_source(str(root), "val")
    with pytest.raises(ValueError, match="2 classes in train, 1 in val; train has class 'dog', which val has not"):
        check_same_classes(train.classes, "train", val, str(root))
    (root / "val" / "fox").mkdir()
    (root / "val" / "fox" / "1.png").write_bytes(encoded(gradient()))
    with pytest.raises(ValueError, match="train has class 'dog', which val has not"):
        check_same_classes(train.classes, "train", open_source(str(root), "val"), str(root))
    with pytest.raises(ValueError, match="val has class 'fox', which train has not"):
        check_same_classes(["cat"], "train", open_source(str(root), "val"), str(root))
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="empty/train holds no class folders"):
        open_source(str(tmp_path / "empty"), "train")
    with pytest.raises(FileNotFoundError, match="neither val-\\*.tar shards nor a folder val in it"):
        open_source(str(tmp_path / "empty"), "val")


def test_a_file_that_vanishes_is_named(tmp_path):
    source = open_source(str(write_folder(tmp_path)), "train")
    (tmp_path / "train" / "cat" / "2.png").unlink()
    with pytest.raises(UnreadableImage, match="train/cat/2.png: No such file"):
        source.image(2)


def test_without_the_datasets_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hfds/some/name needs the package datasets: pip install 'moh_vision\[hub\]'"):
        open_source("hfds/some/name", "train")


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """A local folder as the hub stores data sets: parquet files with an image and a class label."""
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = {"img": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    columns = [("img", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())]
    schema = pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    (tmp_path / "d").mkdir()
    for split, count in (("train", 5), ("validation", 3)):
        images = [encoded(gradient())] * count
        if split == "train":
            images[4] = b"broken"
        rows = dict(img=[dict(bytes=data, path=None) for data in images], label=[i % 2 for i in range(count)])
        file = tmp_path / "d" / f"{split}-00000-of-00001.parquet"
        parquet.write_table(pa.Table.from_pydict(rows, schema), file)
    return f"hfds/{tmp_path / 'd'}"


def test_hugging_face_datasets(parquet):
    train, val = open_source(parquet, "train"), open_source(parquet, "val")
    assert (train.classes, train.labels.tolist(), len(val)) == (["cat", "dog"], [0, 1, 0, 1, 0], 3)
    assert np.array_equal(np.asarray(val.image(2)), np.asarray(gradient()))
    with pytest.raises(UnreadableImage, match="split train, row 4: cannot identify"):
        train.image(4)
    with pytest.raises(ValueError, match="data.root hfds//no/where: "):
        open_source("hfds//no/where", "train")
