"""Images without classes: folders, shards and latents of them through the commands, train_dit.py and sample.py."""

import json
import re

import pytest
from PIL import Image
from safetensors.torch import load_file

from moh_vision.__main__ import main as command
from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.data.shards import Shards
from moh_vision.data.splits import open_source
from moh_vision.diffusion import MoHDiTPipeline, sample
from moh_vision.diffusion import train as train_dit
from tests.support.pictures import encoded, gradient
from tests.support.refusals import assert_says, one_line, refused
from tests.support.sampling import classifier_in
from tests.support.small_runs import arguments, entries
from tests.support.tiny_vae import save_tiny_vae

PREVIEWED = "--preview.every 2 --preview.cfg_scale 1 --preview.steps 2 --preview.images 12".split()


def plain_folder(root, train=24, val=16):
    for split, count in (("train", train), ("val", val)):
        (root / split).mkdir(parents=True)
        for i in range(count):
            (root / split / f"{i:02d}.png").write_bytes(encoded(gradient(8, 8).rotate(15 * i)))
    return root


def written(root, source):
    """data.root of such a source, made of the plain folder."""
    if source == "folder":
        return root
    if source == "images alone":
        return root / "train"
    out = root.parent / "out"
    folders = ["--data" if source == "latents" else "--in", str(root), "--out", str(out)]
    if source == "latents":
        vae = str(save_tiny_vae(root.parent / "vae"))
        assert command(["latents", "--vae", vae, "--size", "16", *folders]) == 0
    else:
        assert command(["shards", "--samples-per-shard", "9", *folders]) == 0
    return out


@pytest.mark.parametrize("source", ["folder", "images alone", "shards", "stream", "latents"])
def test_a_model_trains_samples_and_is_scored(tmp_path, capsys, source):
    images = plain_folder(tmp_path / "images")
    root = written(images, source)
    run = tmp_path / "run"
    more = ["--data.root", root]
    if source != "latents":
        more += ["--data.img_size", "8", *PREVIEWED]
    if source == "stream":
        more += ["--data.exact_order", "false"]
    train_dit.main(arguments("dit", run, 2, 2, *more))
    assert f"{root}: 24 training images without classes; 2 steps of 8" in capsys.readouterr().out
    assert [e["step"] for e in entries(run) if "loss" in e] == [1, 2]
    table = load_file(run / "model.safetensors")["y_embedder.embedding_table.weight"]
    assert table.shape == (1, 32)
    if source == "latents":
        return
        return
    with Image.open(run / "previews" / "step_2.png") as grid:
        assert grid.width > 10 * 48  # ten images a row, no row of a class
    if source != "shards":
        return

    draw = ["--checkpoint", run, "--num-images", "30", "--steps", "2"]
    scores = tmp_path / "scores.json"
    reference = ["--score", images, "--score-split", "train", "--score-file", scores]
    reference += ["--extractor", classifier_in(tmp_path / "judge")]
    outputs = ["--grid", tmp_path / "grid.png", "--denoising", tmp_path / "d.png"]
    outputs += ["--head_load", tmp_path / "load.json", "--save_pipeline", tmp_path / "pipe"]
    sample.main([str(word) for word in (*draw, *reference, *outputs)])
    assert "grid of 30 images" in capsys.readouterr().out
    found = json.loads(scores.read_text())
    assert found["num_generated"] == 30 and found["num_reference"] == 24 and found["fd"] > 0
    assert '"none"' in (tmp_path / "load.json").read_text()

    grid = ["--grid", tmp_path / "more.png"]
    error = refused(capsys, sample.main, *draw, *grid, "--cfg-scale", 2)
    assert_says(error, "--cfg-scale 2 classes 1 guidance")
    error = refused(capsys, sample.main, *draw, *grid, "--classes", 0)
    assert_says(error, "--classes 0 without classes")
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    assert pipe([0, 0], 1.0, num_inference_steps=2, output_type="pt").images.shape == (2, 3, 8, 8)
    with one_line("class_labels 0 guidance_scale 4 guidance_scale=1"):
        pipe([0])


def test_guidance_while_training_is_refused(tmp_path, capsys):
    more = ["--data.root", plain_folder(tmp_path / "images"), "--data.img_size", "8"]
    for section in ("preview", "score"):
        guided = [f"--{section}.every", 2, f"--{section}.cfg_scale", 1.5]
        argv = arguments("dit", tmp_path / "run", 2, 2, *more, *guided)
        error = refused(capsys, train_dit.main, *argv)
        assert_says(error, f"{section}.cfg_scale 1.5 classes 1")


def test_classifiers_need_classes(tmp_path, capsys):
    images = plain_folder(tmp_path / "images")
    for root in (images, images / "train", written(images, "shards")):
        argv = arguments("cls", tmp_path / "run", 2, 2, "--data.root", root)
        error = refused(capsys, train_cls.main, *argv)
        assert_says(error, f"data.root {root} images without classes train_dit.py")
    for name, labels in (("plain", []), ("relabelled", ["--labels", "v2"])):
        checkpoint = classifier_in(tmp_path / name)
        argv = ["--checkpoint", checkpoint, "--data.root", images, *labels]
        error = refused(capsys, validate.main, *argv)
        assert_says(error, f"data.root {images} images without classes train_dit.py")


def test_shards_have_labels_or_none(tmp_path):
    root = written(plain_folder(tmp_path / "images"), "shards")
    source = open_source(str(root), "train")
    assert source.classes == []
    assert source.labels.tolist() == [0] * 24
    assert len(source.shard_sizes) == 3
    read = {source.read(i) for i in range(24)}
    assert read == {path.read_bytes() for path in (tmp_path / "images" / "train").iterdir()}
    (root / "classes.txt").write_text("cat\n")
    with one_line(f"{root}/train-000000.tar label {root}/classes.txt 1 classes") as refusal:
        Shards(str(root), "train")
    assert re.search("00000[0-9]+.png at byte [0-9]+", str(refusal.value))


def test_a_plain_folder_is_divided(tmp_path, run_command):
    images = plain_folder(tmp_path / "images") / "train"
    argv = ["shards", "--in", images, "--out", tmp_path / "out", "--val-fraction"]
    single = tmp_path / "single"
    single.mkdir()
    gradient().save(single / "0.png")
    refused = run_command(
        "shards", "--in", single, "--out", tmp_path / "no", "--val-fraction", "0.9999"
    )
    assert_says(refused.err, f"{single} none 1 val_fraction 0.9999")
    assert run_command(*argv, "0.3").code == 0
    counts = [len(open_source(str(tmp_path / "out"), split)) for split in ("train", "val")]
    assert sum(counts) == 24 and min(counts) > 0
