"""Which output is which class: by names where there are names, else in an order that is said."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.utils.misc import natural_key

from moh_vision.__main__ import main as command
from moh_vision.classification import train as train_cls
from moh_vision.classification.validate import main as validate
from tests.support.refusals import assert_says, refused
from tests.support.small_runs import arguments, logged

NUMBERS = [str(c) for c in range(12)]
VIT = dict(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3)
DATA = ["--data.img_size", "8", "--data.workers", "0", "--data.augment", "none"]


def folder_of(root, names):
    """ROOT/{train,val}/NAME/0.png, a picture of its own for each class; also return the pictures by name."""
    rng = np.random.default_rng(0)
    pictures = {}
    for name in sorted(names):
        pictures[name] = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        for split in ("train", "val"):
            (root / split / name).mkdir(parents=True)
            Image.fromarray(pictures[name]).save(root / split / name / "0.png")
    return root, pictures


def knowing(pictures, order):
    """A dense ViT of timm whose c-th output knows the picture of the c-th name in `order`."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=len(order), **VIT).eval()
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    images = torch.tensor(np.stack([pictures[name] for name in order])).permute(0, 3, 1, 2)
    with torch.no_grad():
        features = model.forward_features((images / 255 - mean) / std)
        known = model.forward_head(features, pre_logits=True)  # [classes, 24]
        model.head.weight.copy_(2 * known)  # the class of the nearest features
        model.head.bias.copy_(-known.square().sum(1))
    return model


def saved_by_timm(model, folder, names=None):
    timm.models.save_for_hf(
        model, folder, model_config=dict(label_names=names), model_args=VIT, safe_serialization=True
    )
    return folder


def top1(checkpoint, root, tmp_path, *more):
    file = tmp_path / f"scores{len(list(tmp_path.iterdir()))}.json"
    validate(
        [
            "--checkpoint",
            str(checkpoint),
            "--data.root",
            str(root),
            *DATA,
            "--score-file",
            str(file),
        ]
        + list(more)
    )
    return json.loads(file.read_text())["top1"]


@pytest.mark.parametrize("names", [NUMBERS, ["Zebra", "apple"]], ids=["numbers", "capitals"])
def test_a_folder_of_timm_without_names_has_timms_order(names, tmp_path, capsys):
    root, pictures = folder_of(tmp_path / "data", names)
    order = sorted(names, key=natural_key)
    assert order != sorted(names)
    dense = saved_by_timm(knowing(pictures, order), tmp_path / "dense")
    assert top1(dense, root, tmp_path) == 100
    said = capsys.readouterr().out
    assert (
        f"{dense} does not name its {len(names)} classes, which are taken in timm's order" in said
    )
    assert f"{order[0]}, {order[1]}" in said


def test_names_decide_in_whatever_order_they_are(tmp_path, capsys):
    root, pictures = folder_of(tmp_path / "data", ["ant", "bee", "cat"])
    order = ["cat", "ant", "bee"]
    dense = saved_by_timm(knowing(pictures, order), tmp_path / "dense", order)
    assert top1(dense, root, tmp_path) == 100
    assert "does not name" not in capsys.readouterr().out
    # A plain file of weights: the order of the data is assumed, and it is said how to give names.
    named = ["--model.name", "moh_vit", "--model.kwargs.base", "vit_tiny_patch16_224"]
    named += ["--model.router", "dense", "--model.kwargs.patch_size", "4"]
    for key in ("embed_dim", "depth", "num_heads"):
        named += [f"--model.{key}", str(VIT[key])]
    (tmp_path / "plain").mkdir()
    file = tmp_path / "plain" / "w.pth"
    torch.save(knowing(pictures, order).state_dict(), file)
    assert top1(file, root, tmp_path, *named) == 0
    assert "taken in the order of the data: ant, bee, cat; a classes.txt" in capsys.readouterr().out
    (tmp_path / "plain" / "classes.txt").write_text("cat\nant\nbee\n")
    assert top1(file, root, tmp_path, *named) == 100
    # Two classes of one name cannot be told apart.
    twice = saved_by_timm(knowing(pictures, order), tmp_path / "twice", ["bee", "ant", "bee"])
    two, _ = folder_of(tmp_path / "two", ["ant", "bee"])
    error = refused(capsys, validate, "--checkpoint", twice, "--data.root", two, *DATA)
    assert_says(error, f"data.root {two} --checkpoint {twice} two classes bee")


def test_a_new_run_takes_the_head_in_the_order_of_its_data(tmp_path, capsys):
    root, pictures = folder_of(tmp_path / "data", NUMBERS)
    torch.manual_seed(0)
    for name, names in (("unnamed", None), ("named", list(reversed(NUMBERS)))):
        order = names or NUMBERS
        dense = saved_by_timm(knowing(pictures, order), tmp_path / name, names)
        run = tmp_path / f"{name}-run"
        argv = f"--data.root {root} {' '.join(DATA)} --output {run} --max-steps 1 --optim.lr 1e-9"
        argv += f" --model.pretrained {dense} --model.name pretrained --optim.batch_size 4"
        train_cls.main(argv.split())
        said = capsys.readouterr().out
        assert ("the head is put into the order of the data" in said) == bool(names)
        assert ("taken in timm's order" in said) == (not names)
        assert json.loads((run / "results.json").read_text())["top1"] == 100
    # A teacher's outputs likewise.
    run = tmp_path / "student"
    argv = ["--data.root", root, *DATA, "--distill.teacher", f"local-dir:{tmp_path}/named"]
    train_cls.main(arguments("cls", run, 1, 1, *argv))
    loss = logged(run)[0]["kd_loss"]
    train_cls.main(
        arguments("cls", tmp_path / "other", 1, 1, *argv[:-1], f"local-dir:{tmp_path}/unnamed")
    )
    assert logged(tmp_path / "other")[0]["kd_loss"] == pytest.approx(loss, abs=1e-5)
    assert_says(capsys.readouterr().out, f"{tmp_path}/unnamed 12 classes")


def test_predict_says_whose_names_it_prints(tmp_path, capsys):
    root, pictures = folder_of(tmp_path / "data", ["ant", "bee"])
    dense = saved_by_timm(knowing(pictures, ["ant", "bee"]), tmp_path / "dense")
    assert command(["predict", str(dense), str(root / "val" / "ant" / "0.png"), *DATA[2:4]]) == 0
    assert_says(capsys.readouterr().err, f"{dense} 2 classes numbers")
