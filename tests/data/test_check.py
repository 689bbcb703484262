"""python -m moh_vision check: what it says of a data set is what training does with it."""

import re
import shutil

import pytest
from pictures import convert, encoded, gradient, kinds, write_folder
from small_runs import SMALL

from moh_vision.classification import train as train_cls
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.splits import open_source


def first_of(out, row):
    """What a row says: (number, the first of them)."""
    found = re.search(rf"^  {row}: (\d+), the first (.*)$", out, re.MULTILINE)
    return int(found[1]), found[2]


def odd_folder(root):
    write_folder(root, train=2, val=2, size=(40, 40))
    cat, dog = root / "train" / "cat", root / "train" / "dog"
    for name, data in kinds().items():
        (cat / name).write_bytes(data)
    photo = encoded(gradient(64, 64), "JPEG")
    (dog / "torn.jpg").write_bytes(photo[: len(photo) // 2])
    (dog / "empty.png").write_bytes(b"")
    return root


@pytest.fixture
def check(run_command):
    """check(ROOT, workers): exit code and output."""

    def run(root, workers=0):
        code, out, _ = run_command("check", root, "--workers", workers)
        return code, out

    return run


def test_a_folder(tmp_path, check):
    root = odd_folder(tmp_path / "d")
    train = root / "train"
    source = open_source(str(root), "train")
    for name in ("notes.txt", ".hidden.png", "film.gif"):
        (train / "dog" / name).write_text("x")
    unreadable = []
    for index in range(len(source)):
        try:
            source.image(index)
        except UnreadableImage as error:
            unreadable.append(str(error))
    code, out = check(root)
    assert code == 1 and "train: 15 images of 2 classes, 4 to 11 each; shorter side 8 to 40 pixels, median 8\n" in out
    assert "val: 4 images of 2 classes, 2 each; shorter side 40 pixels, median 40\ntrain: 2 of 15" in out
    assert first_of(out, "files that are no images, passed over") == (2, "dog/film.gif")
    assert f"  unreadable: {len(unreadable)}\n" in out
    assert len(unreadable) == 2 and all(f"    {problem}\n" in out for problem in unreadable)
    assert out.endswith("training stops, or leaves them out with --data.max_bad_fraction 0.134\n")

    for name in ("torn.jpg", "empty.png"):
        (train / "dog" / name).unlink()
    code, out = check(root)
    assert code == 0 and out.endswith("\nnothing that training would refuse\n")
    for name in ("Cat", "owl"):
        (train / name).mkdir()
    (train / "dog" / "0.png").rename(train / "Cat" / "0.png")
    code, out = check(root)
    *_, empty, classes = out.splitlines()
    assert code == 1 and first_of(out, "classes without images") == (1, "owl")
    assert empty == "train: training refuses class folders without images"
    with pytest.raises(ValueError, match="a class folder without images"):
        open_source(str(root), "train")
    shutil.rmtree(root / "val")
    code, out = check(root)
    assert code == 1 and out.endswith("\nclassifiers refuse this: only train, where train and val are needed\n")
    assert classes.startswith("classifiers refuse this: ") and "train has class 'Cat' and 1 more, which val" in classes


@pytest.mark.parametrize("val, hint", [(3, False), (4, True)])
def test_more_images_for_validation_than_for_training(tmp_path, capsys, check, val, hint):
    """It is taken, and said: by the check, and by training."""
    root = str(write_folder(tmp_path / "d", train=3, val=val, size=(40, 40)))
    words = "more for validation than for training: are train and val exchanged?"
    code, out = check(root)
    assert code == 0 and (f"\n{words}\nnothing that training would refuse\n" in out) is hint
    train_cls.main([*SMALL["cls"].split(), "--data.root", root, "--dry-run", "--output", str(tmp_path / "run")])
    assert (f"6 training images of 2 classes, {2 * val} for validation ({words}); " in capsys.readouterr().out) is hint


def test_shards_and_a_folder_of_classes(tmp_path, check):
    root = odd_folder(tmp_path / "d")
    assert convert(root, tmp_path / "s", "--max-bad-fraction 0.2") == 0
    with open(tmp_path / "s" / "classes.txt", "a") as file:
        file.write("owl\n")
    code, out = check(tmp_path / "s", workers=1)
    assert code == 0 and "train: 13 images of 3 classes, 0 to 11 each; " in out
    assert first_of(out, "classes without images") == (1, "owl")
    (root / "val" / "dog" / "torn.jpg").write_bytes((root / "train" / "dog" / "torn.jpg").read_bytes())
    root = (root / "val").rename(tmp_path / "my photos")
    code, out = check(root)
    assert code == 1
    assert f"{root} (neither train nor val is in it: its folders are taken as classes): 5 images of 2 classes" in out
    more = "--val-fraction 0.1 --max-bad-fraction 0.2 divides them and leaves out what cannot be read\n"
    assert f"--in '{root}' --out DIR {more}" in out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["{}/none"], "{}/none: no such folder; a folder of classes or of shards is checked"),
        (["{}"], ": {} holds no class folders"),
        (["{}", "--workers", "-1"], "--workers -1: expected 0 or more"),
    ],
)
def test_mistakes(tmp_path, refused, argv, words):
    assert words.replace("{}", str(tmp_path)) in refused("check", *(word.format(tmp_path) for word in argv))
