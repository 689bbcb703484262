"""train_cls.py on folders of images, with the ImageNet recipe made small."""

import json
import math
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from moh_vision.classification import scores, validate
from moh_vision.classification import train as train_cls
from moh_vision.engine import training_loop
from moh_vision.engine.checkpoint import export_weights
from moh_vision.models.creation import create
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weight_files import read_safetensors
from tests.support import refusals
from tests.support.pictures import encoded, gradient, image_files, write_folder
from tests.support.refusals import assert_says
from tests.support.small_runs import checkpoint_steps, entries, results, same

MODEL = (
    "--model.name moh_vit_tiny_patch16_224 --model.patch_size 4 --model.embed_dim 24 --model.depth 2 --model.num_heads 3 "
    "--data.img_size 8 --data.workers 0"
).split()
TINY = [*MODEL, *"--optim.batch_size 8 --log-every 1".split()]
RECIPE = (
    "--data.augment imagenet --data.auto_augment rand-m9-mstd0.5-inc1 --data.erase_prob 0.25 --data.repeats 3 "
    "--mix.mixup 0.8 --mix.cutmix 1 --label_smoothing 0.1"
).split()


def train(root, run, *more):
    train_cls.main([*TINY, "--data.root", str(root), "--output", str(run), *more])
    return entries(run)


def refused(capsys, *argv, given=TINY, script=train_cls):
    error = refusals.refused(capsys, script.main, *given, *argv)
    name = "train_cls.py" if script is train_cls else "validate.py"
    assert error.startswith(f"{name}: error: ")
    return error


not_validated = partial(refused, given=(), script=validate)


def mixed_folder(root):
    """Two classes, files of every kind, and one truncated file in each split."""
    write_folder(root, train=6, val=4)
    for split in ("train", "val"):
        for name, data in image_files().items():
            (root / split / "cat" / name).write_bytes(data)
        photo = encoded(gradient(64, 64), "JPEG")
        (root / split / "dog" / "torn.jpg").write_bytes(photo[: len(photo) // 2])
    return root  # train: 12 + 9 + 1, val: 8 + 9 + 1


def test_a_folder_with_files_of_every_kind(tmp_path, capsys):
    root = mixed_folder(tmp_path / "d")
    run = tmp_path / "run"
    recipe = [
        *RECIPE,
        *"--max-steps 9 --data.max_bad_fraction 0.1 --eval-every 5 --data.repeats 1".split(),
    ]
    lines = train(root, run, *recipe)
    out = capsys.readouterr().out.splitlines()
    # The same image is unreadable in every epoch: it is said once, and again at the end.
    said = [line for line in out if "images unreadable so far" in line]
    what = f"1 of 22 images unreadable so far, data.max_bad_fraction 0.1 allows 2; the first: {root}/train/dog/torn.jpg: "
    assert re.match(r"epoch \d: ", said[0]) and said[-1].startswith(f"9 steps: {what}")
    assert len(said) == 2 and what in said[0]
    steps = [e for e in lines if "loss" in e]
    validations = [e["validation"] for e in lines if "validation" in e]
    assert [e["step"] for e in steps] == list(range(1, 10))
    assert all(math.isfinite(e["loss"]) for e in steps)
    assert steps[-1]["unreadable"] == 1
    assert len(validations) == 2
    for found in validations:
        assert (found["images"], found["unreadable"]) == (17, 1)
        assert found["images_per_s"] > 0 and found["peak_memory_mib"] > 100
        assert found["active_heads"] == [2, 3]
        assert found["active_share"] == pytest.approx(5 / 6, abs=1e-4)
    found = results(run)
    confusion = json.loads((run / "confusion.json").read_text())
    assert confusion["classes"] == ["cat", "dog"]
    assert sum(images for *_, images in confusion["counts"]) == 17
    assert sum(images for label, _, images in confusion["counts"] if label == 0) == 13  # of cats
    right = sum(images for label, guess, images in confusion["counts"] if label == guess)
    assert found["top1"] == pytest.approx(100 * right / 17)
    (cat, cats), (dog, dogs) = found["top1_by_class"]
    assert (cat, dog) == ("cat", "dog") and 13 * cats + 4 * dogs == pytest.approx(100 * right)
    validated = f"loss {found['loss']:.4f}, 17 images"

    capsys.readouterr()
    validate.main(["--checkpoint", str(run), "--head-load", str(tmp_path / "load.json")])
    of_run = HeadLoad.read(run / "head_load.json")
    again = HeadLoad.read(tmp_path / "load.json")
    assert torch.equal(of_run.sums, again.sums)
    assert of_run.groups == {"class": ["cat", "dog"]}
    assert of_run.of["step"] == 9
    assert of_run.active() == found["active_heads"]
    validate.main(["--checkpoint", str(run)])
    out = capsys.readouterr().out
    assert f"top-1 {found['top1']:.2f} %" in out and validated in out
    assert "active heads per layer: 2, 3 (83.3 % of all)" in out
    assert f"  cat  {cats:6.2f} %\n  dog  {dogs:6.2f} %" in out
    for more, words in ((["--data.img_size", "12"], "12 px"), (["--data.crop_pct", "0.5"], "8 px")):
        validate.main(["--checkpoint", str(run / "model.safetensors"), *more])
        out = capsys.readouterr().out
        assert words in out and f"loss {found['loss']:.4f}" not in out
    error = not_validated(capsys, "--checkpoint", run, "--model.kwargs.qk_norm", "true")
    facts = f"model.kwargs --checkpoint {run} moh_vit_tiny_patch16_224"
    assert_says(error, f"{facts} model.head_budget model.mlp_budget")

    torch.save(dict(model=load_file(run / "model.safetensors")), run / "model.pth")
    validate.main(["--config", str(run / "config.yaml"), "--checkpoint", str(run / "model.pth")])
    assert validated in capsys.readouterr().out

    for split in ("train", "val"):
        (root / split / "dog").rename(root / split / "fox")
    error = not_validated(capsys, "--checkpoint", run, "--data.root", root)
    assert_says(error, f"data.root {root} 2 classes --checkpoint {run} val dog")
    assert error.rstrip().endswith(str(run))  # the class is only there


def test_the_best_weights_are_kept(tmp_path, monkeypatch, capsys):
    """Each validation comes before the save of its step; a resumed run goes on with the score in the file's metadata."""
    root = write_folder(tmp_path / "d", train=4, val=2)
    run = tmp_path / "run"
    there = []
    script = [90, 50, 30, 40, 45, 60]
    full = {90}
    validate = train_cls.validate
    export = training_loop.export_weights

    def scripted(*args):
        there.append(checkpoint_steps(run))
        scores, *more = validate(*args)
        return dict(scores, top1=float(script.pop(0))), *more

    def export_unless_full(model, file, about, write):
        if about["best_top1"] in full:
            raise OSError(28, "No space left on device")
        export(model, file, about, write)

    monkeypatch.setattr(train_cls, "validate", scripted)
    monkeypatch.setattr(training_loop, "export_weights", export_unless_full)
    every = "--eval-every 1 --save-every 1 --keep-checkpoints 9 --save_in_background false --max-steps".split()
    train(root, run, *every, "4")
    said = capsys.readouterr().out
    assert there == [[], [1], [1, 2], [1, 2, 3, 4]]
    assert_says(said, f"{run}/best.safetensors written [Errno 28]")
    assert f"best of the validations: top-1 50.00 % after 2 steps, {run}/best.safetensors" in said
    assert (results(run)["best_top1"], results(run)["best_step"], results(run)["top1"]) == (
        50,
        2,
        40,
    )
    kept, about = read_safetensors(run / "best.safetensors")
    assert same(kept, read_safetensors(run / "checkpoints" / "step_2" / "model.safetensors")[0])
    assert (about["best_top1"], about["step"], about["classes"]) == (50, 2, ["cat", "dog"])

    train(root, run, *every, "5")
    assert not script[1:] and results(run)["best_step"] == 2
    train(root, run, *every, "6")
    assert results(run)["best_step"] == 6 and same(
        run / "best.safetensors", run / "model.safetensors"
    )
    (run / "best.safetensors").write_bytes(b"torn")
    error = refused(capsys, "--data.root", root, "--output", run, *every, "6")
    assert_says(error, f"{run}/best.safetensors readable .safetensors")


def test_classes_without_images_and_many_classes_on_the_console():
    confusion = torch.tensor([[0, 0, 3], [0, 1, 1], [2, 1, 2]])  # class, predicted, images
    found = scores.class_accuracy(confusion, ["ant", "bee", "cow"])
    assert found == [("ant", 75), ("bee", None), ("cow", 0)]
    table = scores.class_table(found).splitlines()
    assert table[1:] == ["  ant   75.00 %", "  bee  no images", "  cow    0.00 %"]
    many = scores.class_table(found, most=2)
    assert many == "top-1 by class: 0.00 % (cow) to 75.00 % (ant)"


def test_the_schedule_is_timms(tmp_path, capsys):
    """Warm-up from warmup_lr, then the cosine of the whole length from step 0; then min_lr."""
    root = write_folder(tmp_path / "d", train=16)  # 32 images: an epoch is 4 steps
    lines = train(
        root, tmp_path / "run", "--optim.lr", "0.1", "--optim.warmup_lr", "0.01", "--optim.min_lr", "0.02",
        "--optim.epochs", "3", "--optim.warmup_epochs", "1", "--optim.cooldown_epochs", "0.5",
    )  # fmt: skip
    warmup = [0.01 + 0.09 * t / 4 for t in range(4)]
    cosine = [0.02 + 0.04 * (1 + math.cos(math.pi * t / 12)) for t in range(4, 12)]
    assert [e["lr"] for e in lines if "lr" in e] == pytest.approx([*warmup, *cosine, 0.02, 0.02])
    assert "the warm-up takes" not in capsys.readouterr().out
    train(root, tmp_path / "short", "--max-steps", "5", "--optim.warmup_steps", "2")
    assert (
        "the warm-up takes 2 steps, the run has 5: the learning rate ends at"
        in capsys.readouterr().out
    )


def test_an_unreadable_image_of_the_validation_is_one_line(tmp_path, capsys):
    """Of training: tests/reliability/test_bad_images.py."""
    root = mixed_folder(tmp_path / "d")
    (root / "train" / "dog" / "torn.jpg").unlink()
    argv = ["--data.root", root, "--max-steps", 1, "--output", tmp_path / "run"]
    facts = f"{root}/val/dog/torn.jpg 1 data.max_bad_fraction 0 18 0.056"
    assert_says(refused(capsys, *argv), facts)


def test_mistakes(tmp_path, capsys):
    root = write_folder(tmp_path / "d")
    run = tmp_path / "run"
    argv = ["--data.root", root, "--output", run]
    error = refused(
        capsys, *argv, "--optim.batch_size", 6, "--optim.accumulation", 2, "--mix.cutmix", 1
    )
    assert_says(error, "optim.batch_size 6 accumulation 2 processes 1 3 mixup cutmix even")
    error = not_validated(capsys, "--checkpoint", "moh_vit", "--data.root", root, given=MODEL)
    assert_says(error, "--checkpoint moh_vit pretrained weights")
    (root / "train" / "loop").symlink_to("loop")
    assert_says(refused(capsys, *argv), f"{root}/train/loop links")
    assert not run.exists()


def test_weights_that_lack_a_part_are_not_validated(tmp_path, capsys):
    data = ["--data.root", write_folder(tmp_path / "d")]
    kwargs = dict(patch_size=4, embed_dim=24, depth=2, num_heads=3, img_size=8, num_classes=7)
    model = create("moh_vit_tiny_patch16_224", "classification", **kwargs)
    export_weights(model, tmp_path / "other.safetensors", {})
    error = not_validated(
        capsys, *data, "--checkpoint", tmp_path / "other.safetensors", given=MODEL
    )
    facts = f"{tmp_path}/other.safetensors moh_vit_tiny_patch16_224 head.weight [7, 24] [2, 24]"
    assert_says(error, facts)
    torch.save(model.state_dict(), tmp_path / "other.pt")  # says neither its model
    other = tmp_path / "other.pt"
    facts = f"{other} cls_token [1, 1, 24] [1, 1, 384] model.name moh_vit_small_patch16_224"
    error = not_validated(capsys, *data, "--checkpoint", other)
    assert_says(error, f"--checkpoint {facts} --model.name")
    run = [*data, "--data.img_size", 32, "--output", tmp_path / "run"]
    error = refused(capsys, *run, "--init-from", other, given=[])
    assert_says(error, f"init_from {facts} --model.name")
    assert not (tmp_path / "run").exists()


def test_channels_last_changes_nothing_but_the_layout(tmp_path):
    root = write_folder(tmp_path / "d")
    one = train(root, tmp_path / "a", "--max-steps", "2")[1]["loss"]
    two = train(root, tmp_path / "b", "--max-steps", "2", "--channels-last")[1]["loss"]
    assert one == pytest.approx(two, abs=1e-4)


def test_head_loads_that_cannot_be_written_cost_neither_the_run_nor_its_results(
    tmp_path, capsys, monkeypatch
):
    def fail(*_):
        assert (tmp_path / "run" / "results.json").exists()
        raise OSError("no room")

    monkeypatch.setattr(train_cls.HeadLoad, "save", fail)
    train(write_folder(tmp_path / "d", train=4, val=2), tmp_path / "run", "--max-steps", "1")
    assert_says(capsys.readouterr().out, f"{tmp_path}/run/head_load.json written no room")
