"""Every reader of images takes data.colour_space and data.value_range.

A folder of pictures of a Display P3 camera and of a sensor of 12 bits, read with these keys, is the folder of the same
pictures in 8 bits of sRGB.
"""

import argparse
import json
import types

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import train_cls
import train_dit
import validate
from moh_vision.__main__ import main as command
from moh_vision.data.decode import Decoding, decode_image
from moh_vision.data.stream import open_stream
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.inputs import open_inputs
from moh_vision.diffusion.latents.stored import LatentCache
from moh_vision.diffusion.sample import Drawing
from moh_vision.evaluation.fidelity.images import open_images, open_set
from tests.support.pictures import encoded, gradient, png16, rgb_profile
from tests.support.refusals import assert_says, refuse, refused
from tests.support.tiny_vae import save_tiny_vae

DECODING = Decoding("srgb", (0, 4095))
OF_RUNS = "--data.colour_space srgb --data.value_range 0 4095"
OF_COMMANDS = "--colour-space srgb --value-range 0 4095"
SMALL = (
    "--data.img_size 8 --model.patch_size 4 --model.depth 1 --model.embed_dim 32 --model.num_heads 2 "
    "--data.workers 0 --max_steps 2 --optim.batch_size 4"
)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The folders "stored" and "right", with the same pictures."""
    root = tmp_path_factory.mktemp("roots")
    for split, count in (("train", 4), ("val", 3)):
        for number in range(count):
            turned = np.roll(np.asarray(gradient(16, 12)), number, 1)
            camera = encoded(Image.fromarray(turned // 2 + 60), icc_profile=rgb_profile("p3"))
            sensor = png16(
                np.linspace(0, 4000 - 99 * number, 192).astype(np.uint16).reshape(12, 16)
            )
            for name, data in (("camera", camera), ("sensor", sensor)):
                right = encoded(decode_image(data, name, DECODING).convert("RGB"))
                for folder, content in (("stored", data), ("right", right)):
                    file = root / folder / split / name / f"{number}.png"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
    return root


def train(module, config, root, output, options=""):
    """Train two steps; return the weights and, of a classifier, its results."""
    given = f"--config quickstart/{config} --data.root {root} --output {output} {SMALL} {options}"
    module.main(given.split())
    results = output / "results.json"
    loss = json.loads(results.read_text())["loss"] if results.exists() else None
    return load_file(output / "model.safetensors"), loss


@pytest.fixture(scope="module")
def runs(roots, tmp_path_factory):
    """Classifiers of "stored" and "right"."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("stored", OF_RUNS), ("right", "")):
        train(train_cls, "cls", roots / name, folder / name, options)
    return folder


def same_weights(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_training(roots, runs, tmp_path):
    one, other = (load_file(runs / name / "model.safetensors") for name in ("stored", "right"))
    assert same_weights(one, other)
    losses = [
        json.loads((runs / n / "results.json").read_text())["loss"] for n in ("stored", "right")
    ]
    assert losses[0] == losses[1]
    one, _ = train(
        train_dit, "dit", roots / "stored", tmp_path / "1", f"{OF_RUNS} --preview.every 0"
    )
    other, _ = train(train_dit, "dit", roots / "right", tmp_path / "2", "--preview.every 0")
    assert same_weights(one, other)


def test_a_resumed_run_keeps_its_decoding(roots, runs, capsys):
    given = f"--config quickstart/cls --data.root {roots}/stored --output {runs}/stored {SMALL}"
    said = refused(capsys, train_cls.main, *given.split())
    assert_says(said, f"--output {runs}/stored data.colour_space srgb keep --allow-change --fresh")


def scored(capsys, checkpoint, root, *more):
    validate.main(["--checkpoint", str(checkpoint), "--data.root", str(root), *more])
    out = capsys.readouterr().out
    return out, out.partition("top-1 ")[2].partition(", peak")[0].rpartition(",")[0]


def named(capsys, run, folder, *more):
    assert command(["predict", str(run), str(folder), *more]) == 0
    said = capsys.readouterr()
    return said.out.replace(str(folder), ""), said.err


def test_what_opens_a_classifier_reads_as_its_training(roots, runs, tmp_path, capsys):
    """Validation and predictions of a run, of its weights alone, and of what publish made of it."""
    weights = tmp_path / "alone.safetensors"
    weights.write_bytes((runs / "stored" / "ema.safetensors").read_bytes())
    assert command(["publish", str(runs / "stored"), "--output", str(tmp_path / "public")]) == 0
    config = json.loads((tmp_path / "public" / "config.json").read_text())
    assert config["decoding"] == dict(colour_space="srgb", value_range=[0, 4095])
    card = (tmp_path / "public" / "README.md").read_text()
    assert "colour_space srgb and values from 0 (black) to 4095 (white)" in card
    capsys.readouterr()
    right = named(capsys, runs / "right", roots / "right" / "val")[0]
    for checkpoint in (runs / "stored", weights, tmp_path / "public"):
        shown, said = named(capsys, checkpoint, roots / "stored" / "val")
        assert shown == right and "looked at" not in said
        said, score = scored(capsys, checkpoint, roots / "stored")
        assert score == scored(capsys, runs / "right", roots / "right")[1]
        assert "looked at" not in said
    # Options go before.
    keep = ("--data.colour_space", "keep")
    shown, said = named(capsys, runs / "stored", roots / "stored" / "val", *keep)
    assert shown != right
    assert_says(said, "3 of 6 colour profile sRGB")
    said, _ = scored(capsys, runs / "stored", roots / "stored", *keep)
    assert_says(said, f"data.root {roots}/stored val 3 of 6")


def test_shards(roots, tmp_path, capsys):
    for name, options in (("stored", OF_COMMANDS), ("right", "")):
        given = f"shards --in {roots / name} --out {tmp_path / name} --size 8 --workers 1 {options}"
        assert command(given.split()) == 0
    one, other = ((tmp_path / n / "train-000000.tar").read_bytes() for n in ("stored", "right"))
    assert one == other
    assert "images that were looked at" not in capsys.readouterr().out
    given = f"--in {roots}/stored --out {tmp_path}/new --workers 1"
    unchanged = refused(capsys, command, "shards", *f"{given} {OF_COMMANDS}".split())
    assert_says(unchanged, "--colour-space srgb --size unchanged")
    # Files in shards keep their profiles: also a stream reads them with the keys.
    assert command(["shards", *given.split()]) == 0
    data = types.SimpleNamespace(
        root=str(tmp_path / "new"), stream=None, samples=None, exact_order=False, workers=0,
        colour_space="srgb", value_range=(0, 4095),
    )  # fmt: skip
    stream = open_stream(data, [], types.SimpleNamespace(num_processes=1, is_main_process=False))
    pixels = {np.asarray(stream.decode(s).convert("RGB")).tobytes() for s in stream._samples_in(stream.urls[0], 0)}  # fmt: skip
    files = (roots / "right" / "train").rglob("*.png")
    assert pixels == {np.asarray(Image.open(file)).tobytes() for file in files}
    other = refused(capsys, command, "shards", *f"--in {roots}/stored --out {tmp_path}/stored --size 8".split())  # fmt: skip
    assert_says(other, f"--out {tmp_path}/stored --colour-space srgb keep")


def test_latents(roots, tmp_path, capsys):
    vae = save_tiny_vae(tmp_path / "vae")
    for name, options in (("stored", OF_COMMANDS), ("right", "")):
        given = f"latents --vae {vae} --data {roots / name} --out {tmp_path / name} --size 8 --workers 0 {options}"
        assert command(given.split()) == 0
    assert "looked at" not in capsys.readouterr().out
    one, other = (LatentCache(str(tmp_path / name), "train") for name in ("stored", "right"))
    assert len(one) == len(other) == 8
    assert all((one.read(i) == other.read(i)).all() for i in range(8))
    assert one.decoding == DECODING and other.decoding == Decoding()
    # A run on latents says how their images were read, and refuses another wish.
    assert open_inputs(str(tmp_path / "stored"), "none", None, "none").source.decoding == DECODING
    wish = Decoding("srgb")
    open_inputs(str(tmp_path / "stored"), "none", None, "none", decoding=wish)
    facts = f"data.colour_space srgb data.root {tmp_path}/right colour_space keep"
    refuse(facts, open_inputs, str(tmp_path / "right"), "none", None, "none", decoding=wish)


def test_scores(roots, capsys):
    for folder in ("train", "val"):
        one = open_images(roots / "stored" / folder, "generated", DECODING)
        other = open_images(roots / "right" / folder, "generated")
        assert (one.read(0, one.count) == other.read(0, other.count)).all()
        assert not one.remarks and one.channels == 3
    sets = [
        open_set("GENERATED", str(roots / name), "val", "val", decoding)
        for name, decoding in (("stored", DECODING), ("right", Decoding()))
    ]
    for images in sets:
        images.size = 8
        assert not images.remarks
    assert (sets[0].read(0, 6) == sets[1].read(0, 6)).all()
    noted = open_images(roots / "stored" / "val", "generated").remarks
    assert [line for line in noted if "--colour-space" in line] == []
    assert_says(noted[0], "3 of 6 colour profile")


@pytest.mark.parametrize(
    "trained, options, expected",
    [
        ({}, {}, Decoding()),
        (dict(colour_space="srgb", value_range=[0, 4095]), {}, DECODING),
        (dict(colour_space="srgb"), dict(score_colour_space="keep"), Decoding()),
        ({}, dict(score_colour_space="srgb", score_value_range=(0, 4095)), DECODING),
    ],
    ids=["pipeline", "run", "option-before-run", "options"],
)
def test_a_reference_is_read_as_the_training(trained, options, expected):
    config = SampleConfig(checkpoint="RUN", score="digits", **options)
    drawing = argparse.Namespace(config=config, trained_on=trained)
    assert Drawing.decoding_of_reference(drawing) == expected
