"""The command predict, and validate.py with --predictions: classes and probabilities of single images."""

import csv
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_transform, resolve_model_data_config

from moh_vision import load_run, open_run
from moh_vision.__main__ import main
from moh_vision.classification import validate
from moh_vision.commands import predict
from moh_vision.data.sources import Digits
from tests.support.pictures import convert, write_folder
from tests.support.refusals import assert_says, refuse, refused, unread
from tests.support.small_runs import results


@pytest.fixture(scope="module")
def run(trained):
    return trained("cls", 2, "--optim.warmup_steps", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder: images/ has three images and a hidden one, other.png is a fourth, torn.png is cut off."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "images" / "deep").mkdir(parents=True)
    for name, digit in (
        ("images/b", 0),
        ("images/deep/a", 1),
        ("images/.hidden", 2),
        ("images/c", 3),
        ("other", 4),
    ):
        Image.fromarray(pixels(digit)).save(folder / f"{name}.png")
    (folder / "torn.png").write_bytes((folder / "other.png").read_bytes()[:60])
    (folder / "empty").mkdir()
    return folder


def pixels(digit):
    """Return an image of the digits data set, uint8 [8, 8]."""
    return np.rint(load_digits().images[digit] * (255 / 16)).astype(np.uint8)


def test_the_probabilities_are_the_models(run, folder, run_command):
    other = folder / "other.png"
    more = ["--output", folder / "classes.json"]
    images = [folder / "torn.png", folder / "images", other]
    code, said, errors = run_command("predict", run, *images, *more, "--data.eval_batch_size", "3")
    left_out, weights, torn, count = errors.splitlines()
    assert left_out == f"left out of {folder}/images: 1 hidden (.hidden.png)"
    assert code == 2 and weights == f"weights of {run}/ema.safetensors"
    assert torn.startswith(f"{folder}/torn.png: ")
    assert count == "predict: error: 1 of 5 images could not be read"
    model = load_run(run)
    images = torch.stack([torch.tensor(pixels(i)) for i in (0, 3, 1, 4)])[:, None] / 255
    mean, std = (model.pretrained_cfg[key][0] for key in ("mean", "std"))
    with torch.no_grad():
        expected = model((images - mean) / std).softmax(-1).sort(descending=True)
    written = json.loads((folder / "classes.json").read_text())
    assert written["weights"] == str(run / "ema.safetensors") and written["img_size"] == 8
    names = [
        f"{folder}/images/b.png",
        f"{folder}/images/c.png",
        f"{folder}/images/deep/a.png",
        f"{folder}/other.png",
    ]
    assert [image["image"] for image in written["images"]] == names
    for line, image, classes, values in zip(
        said.splitlines(), written["images"], expected.indices, expected.values
    ):
        assert [name for name, _ in image["classes"]] == [str(c) for c in classes[:5].tolist()]
        torch.testing.assert_close(torch.tensor([p for _, p in image["classes"]]), values[:5])
        assert line.startswith(f"{image['image']}: {100 * values[0]:.2f} % {classes[0]} | ")


def as_timm(model, image):
    """Return probabilities [10] of an image that timm prepares by the model's pretrained_cfg."""
    transform = create_transform(**resolve_model_data_config(model))
    with torch.no_grad():
        return model(transform(image)[None]).softmax(-1)[0]


def test_a_published_run_and_load_run_are_the_run(run, folder, capsys, run_command):
    odd = folder / "odd.png"
    published = folder / "published"
    Image.effect_noise((13, 20), 90).save(odd)
    assert run_command("publish", run, "--output", published).code == 0
    first = run_command("predict", run, odd).out
    assert run_command("predict", published, odd).out == first
    model = load_run(run)
    probabilities = as_timm(model, Image.open(odd))
    best = probabilities.argmax()
    name = model.pretrained_cfg["label_names"][best]
    assert f"{odd}: {100 * probabilities[best]:.2f} % {name} | " in first
    # A published folder has no configuration that names its data.
    error = refused(capsys, validate.main, "--checkpoint", published)
    assert_says(error, f"--data.root {published} configuration")
    validate.main(["--checkpoint", str(published), "--data.root", "digits"])
    assert f"top-1 {results(run)['top1']:.2f} %" in capsys.readouterr().out


def test_a_plain_vit_that_timm_saved(folder, capsys, run_command, hours_pass):
    torch.manual_seed(0)
    sizes = dict(
        img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3, in_chans=1, num_classes=10
    )
    vit = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    for parameter in vit.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    prepared = dict(input_size=(1, 8, 8), crop_pct=0.6, crop_mode="center", mean=(0.2,), std=(0.3,))
    vit.pretrained_cfg = dict(vit.pretrained_cfg, **prepared)
    timm.models.save_for_hf(vit, folder / "vit", safe_serialization=True)
    image = folder / "other.png"
    given = ["--checkpoint", str(folder / "vit"), "--data.eval_batch_size", "100"]
    values, classes = as_timm(vit, Image.open(image)).sort(descending=True)
    shown = f"{image}: {100 * values[0]:.2f} % {classes[0]} | {100 * values[1]:.2f} % {classes[1]}"
    assert shown in run_command("predict", folder / "vit", image).out
    hours_pass()
    digits = Digits("val")
    predicted = [as_timm(vit, digits.image(i)).argmax().item() for i in range(len(digits))]
    top1 = 100 * np.mean(np.array(predicted) == digits.labels)
    validate.main([*given, "--data.root", "digits"])
    shown = capsys.readouterr().out
    assert f"(vit_tiny_patch16_224, 8 px, digits, val): top-1 {top1:.2f} %" in shown
    assert "3 (100.0 % of all)" in shown and "validation: 1 of 4 steps, " in shown
    animals = write_folder(folder / "animals", train=0)
    error = refused(capsys, validate.main, *given, "--data.root", animals)
    assert_says(error, f"--checkpoint {folder}/vit 10 classes data.root {animals} 2")
    opened = open_run(folder / "vit")
    assert opened.metadata["architecture"] == "vit_tiny_patch16_224"
    assert opened.model.pretrained_cfg["crop_pct"] == 0.6
    config = json.loads((folder / "vit" / "config.json").read_text())
    config["architecture"] = "vit_tiny_patch16_224"
    config["model_args"] = dict(checkpoint_path="elsewhere.pt")
    # Text of a config.json -> what the error says of it.
    damaged = {
        json.dumps(config): "config.json classifier checkpoint_path",
        '{"architecture": "vit"}': "config.json classifier",
        '{"model_type": "llama"}': "text llama train_cls.py",
        "{": "config.json double quotes",
    }
    for text, facts in damaged.items():
        (folder / "empty" / "config.json").write_text(text)
        error = refused(
            capsys, validate.main, "--checkpoint", folder / "empty", "--data.root", "digits"
        )
        assert_says(error, f"{folder}/empty {facts}")


def test_every_image_with_its_prediction(run, tmp_path, capsys, run_command):
    """--predictions lists the classes that predict finds, for a folder with a torn image and for shards of the folder."""
    root = tmp_path / "d"
    shards = tmp_path / "s"
    for digit in range(20):
        # U+2028 is no line break in a list of files.
        file = root / "val" / str(digit % 10) / f"image\u2028{digit}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(digit + 50)).save(file)
    assert convert(root, shards) == 0
    file.write_bytes(file.read_bytes()[:60])
    run_command("predict", run, root, "--top", "10", "--output", tmp_path / "p.json")
    images = json.loads((tmp_path / "p.json").read_text())["images"]
    found = {image["image"]: dict(image["classes"]) for image in images}

    def rows(source, *argv):
        """Validate a data set; return the path and the rows of its list of predictions."""
        file = tmp_path / f"{source.name}.csv"
        argv = ["--checkpoint", run, "--data.root", source, "--predictions", file, *argv]
        validate.main([str(a) for a in [*argv, "--data.eval_batch_size", 7]])
        return file, list(csv.DictReader(file.open()))

    file, listed = rows(root, "--data.max_bad_fraction", 0.1, "--data.workers", 1)
    assert [row["image"] for row in listed] == sorted(found) and len(listed) == 19
    for row in listed:
        probabilities = found[row["image"]]
        assert row["class"] == row["image"].split("/")[-2]
        assert row["predicted"] == max(probabilities, key=probabilities.get)
        for key in ("class", "predicted"):
            assert float(row[f"probability_of_{key}"]) == pytest.approx(
                probabilities[row[key]], abs=2e-6
            )
    wrong = sum(row["class"] != row["predicted"] for row in listed)
    assert 0 < wrong and f"predictions: {file}, {wrong} of 19 are wrong" in capsys.readouterr().out
    named = {f"{root}/val/{row['image']}": row["predicted"] for row in rows(shards)[1]}
    assert len(named) == 20 and all(named[row["image"]] == row["predicted"] for row in listed)
    # Names that are not UTF-8 are escaped, and without names of files the list has those of members.
    (shards / "val.files.txt").write_bytes(b"\xff.png\n" * 20)
    shards.with_suffix(".csv").unlink()
    assert rows(shards)[1][0]["image"] == r"\xff.png"
    (shards / "val.files.txt").unlink()
    shards.with_suffix(".csv").unlink()
    assert rows(shards)[1][0]["image"].startswith(f"{shards}/val-000000.tar, 000000")
    for name, facts in ((file, "exists"), (tmp_path / "a.txt", ".csv")):
        error = refused(capsys, validate.main, "--checkpoint", run, "--predictions", name)
        assert_says(error, f"predictions {name} {facts}")


def test_names_of_imagenet():
    assert predict.class_names(["n01440764", "sea"], 2) == ["tench, Tinca tinca", "sea"]
    assert predict.class_names(None, 1000)[1] == "goldfish, Carassius auratus"
    assert predict.class_names(None, 3) == ["0", "1", "2"]
    refuse("--checkpoint 1 names 2 outputs", lambda: predict.class_names(["sea"], 2))


def test_files_are_written_although_standard_output_is_closed(
    run, folder, tmp_path, monkeypatch, capfd
):
    names = {"--predictions": "p.csv", "--head-load": "load.json", "--score-file": "s.json"}
    options = []
    for option, name in names.items():
        options += [option, str(tmp_path / name)]
    with unread(monkeypatch):
        validate.main(["--checkpoint", str(run), *options])
    assert all((tmp_path / name).is_file() for name in names.values())
    argv = ["predict", str(run), *[str(folder / "other.png")] * 3, "--data.eval_batch_size", "1"]
    with unread(monkeypatch):
        assert main([*argv, "--output", str(tmp_path / "classes.json")]) == 0
    assert len(json.loads((tmp_path / "classes.json").read_text())["images"]) == 3
    # Without a file to write, the command ends before it reads this image.
    argv[3] = str(folder / "torn.png")
    with unread(monkeypatch):
        assert main([*argv, "--data.workers", "0"]) == 0
    assert set(capfd.readouterr().err.splitlines()) == {f"weights of {run / 'ema.safetensors'}"}
