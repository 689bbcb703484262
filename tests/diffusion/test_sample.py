"""sample.py on tiny runs that nobody trained: pixels, and latents with a VAE."""

import contextlib
import json
import os
import signal

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from moh_vision import load_run
from moh_vision.common.io import only_one, sha256_of, write_tensors
from moh_vision.data.latents import latents_path
from moh_vision.data.sources import Digits
from moh_vision.diffusion import FlowMatchingLoss, MoHDiTPipeline, sample
from moh_vision.diffusion import scores as scores_of_samples
from moh_vision.diffusion.config import PROTOCOLS, SampleConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.latents.vae import LatentSpace, load_vae
from moh_vision.diffusion.loading import open_guide
from moh_vision.diffusion.scores import ClassifierScores
from moh_vision.engine.checkpoint import export_weights
from moh_vision.evaluation.fidelity import (
    Extracted,
    Extractor,
    TimmExtractor,
    make_extractor,
    score,
)
from moh_vision.evaluation.fidelity.__main__ import main as fidelity_command
from moh_vision.evaluation.fidelity.images import SourceImages
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weight_files import read_safetensors
from moh_vision.models.weights import find_weights
from tests.support import refusals
from tests.support.processes import Command, hold, on_two_ranks
from tests.support.refusals import assert_says, one_line
from tests.support.sampling import (
    JUDGE,
    JUDGE_SIZES,
    by_pipeline,
    call,
    classifier_in,
    exported,
    refused,
    run_of,
)
from tests.support.tiny_vae import coarse_vae, save_tiny_vae


def vae_in(folder, channels=4):
    save_tiny_vae(folder, seed=5, latent_channels=channels)
    return folder


def recorded(folder, scaling_factor=0.7):
    """As train_dit.py records the VAE of a run."""
    return dict(
        vars(LatentSpace.of(load_vae(str(folder)), str(folder))), scaling_factor=scaling_factor
    )


def drawn(run, *more):
    """Images uint8 [N, h, w, channels] and their labels."""
    call(run, "--out", run / "drawn.npz", "--overwrite", *more)
    with np.load(run / "drawn.npz") as archive:
        return archive["arr_0"], archive["arr_1"]


def interrupted(run, *more):
    """The command ends after its first batch."""
    add = ImageParts.add

    def stop(self, *batch):
        add(self, *batch)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ImageParts, "add", stop)
        call(run, *more)


@pytest.mark.parametrize(
    "sampler, weak", [("ddpm", None), ("ddim", "heads:0.5"), ("dpm-solver++", "weak")]
)
def test_a_saved_pipeline_draws_the_same_images(tmp_path, capsys, sampler, weak):
    run = run_of(tmp_path, 3, heads=(0, 2))
    guide = {}
    more = []
    if weak:
        guide = dict(guide=weak, guide_scale=1.5)
        if weak == "weak":
            weak = run_of(tmp_path / "weak", 3, heads=(0, 1))
            guide["guide"] = find_weights(weak).build()
        more = ["--guide", weak, "--guide-scale", "1.5"]
    images, _ = drawn(run, "--sampler", sampler, "--save-pipeline", tmp_path / "pipe", *more)
    said = capsys.readouterr().out
    assert (f", guidance 2, 1.5 away from {weak}, balanced" in said) == bool(weak)
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    assert pipe.labels == {"a": 0, "b": 1, "c": 2} and pipe.config.label_drop == 0.1
    assert images.std() > 10
    assert np.abs(by_pipeline(pipe, [0, 1, 2], **guide) - images[:3]).max() <= 0.51


def test_only_the_pipeline(tmp_path, capsys, monkeypatch):
    sample.main(
        f"--checkpoint {run_of(tmp_path, 1)} --num-images 0 --save-pipeline {tmp_path}/pipe".split()
    )
    weights = f"{tmp_path}/ema.safetensors"
    folder = str(tmp_path / "pipe")
    said = capsys.readouterr().out
    assert said == f"loading {tmp_path}\npipeline: {folder}, weights of {weights}\n"
    with one_line(f"weights model {weights} EMA folder model.safetensors"):
        load_run(weights, "model")
    monkeypatch.setattr(
        "diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    pipe = DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    assert type(pipe) is MoHDiTPipeline and pipe.scheduler.config.clip_sample and pipe.vae is None
    assert type(pipe.scheduler).__name__ == "DDPMScheduler"
    assert pipe([0], num_inference_steps=2).images[0].mode == "L"


def test_latents_are_decoded_by_the_runs_vae_and_guided_as_asked(tmp_path, capsys):
    """With the scaling of the training, not clipped; --vae names another decoder."""
    folder = vae_in(tmp_path / "vae")
    run = run_of(tmp_path, 4, vae=recorded(folder))
    images, _ = drawn(run, "--save-pipeline", tmp_path / "pipe")
    assert images.shape == (5, 8, 8, 3) and images.std() > 1
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    assert pipe.vae.config.scaling_factor == 0.7 and not pipe.scheduler.config.clip_sample
    assert np.abs(by_pipeline(pipe, [0, 1, 2]) - images[:3]).max() <= 0.51
    assert not np.array_equal(drawn(run, "--vae", save_tiny_vae(tmp_path / "other"))[0], images)

    every, _ = drawn(run, "--guide-channels", "all")
    assert np.array_equal(drawn(run, "--guide-channels", "4")[0], every)
    assert not np.array_equal(images, every)
    words = "guidance 2 between 0.2 and 0.5 of the timesteps"
    assert words not in capsys.readouterr().out
    assert not np.array_equal(drawn(run, "--cfg-interval", "0.2", "0.5")[0], images)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, facts",
    [
        ("--guide {0}/weak --guide-scale 2", "--guide {0}/weak file folder"),
        ("--num-images 0 --save-pipeline x --out y", "num_images 0 --out --grid"),
        ("--grid {0}/g.png --head-load {0}/g.png", "--grid {0}/g.png two outputs"),
        ("--out {0}", "--out {0} exists --overwrite"),
        ("--out /proc/x.npz", "--out /proc/x.npz written directory"),
        ("--score {0} --score-file {0}", "--score-file {0} folder file"),
    ],
)
def test_mistakes(tmp_path, capsys, argv, facts):
    run = run_of(tmp_path, 1)
    error = refused(capsys, run, *argv.format(tmp_path).split())
    assert_says(error, facts.format(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["ema.safetensors"]


def test_weak_models_that_do_not_fit(tmp_path):
    space = vars(LatentSpace("some", "1" * 64, 1.0, None, 2, 4))
    model = find_weights(run_of(tmp_path / "run", 4, vae=space)).build()
    flow = dict(learn_sigma=False, prediction=FlowMatchingLoss.prediction.tree())
    other = dict(space, sha256="2" * 64)
    for more, facts in (
        (dict(routing=flow), "path linear ddpm"),
        (dict(vae=other), f"VAE {other['sha256']} {space['sha256']}"),
    ):
        weak = run_of(tmp_path / "weak", 4, **more)
        with one_line(f"--guide {weak} {facts}"):
            open_guide("--guide", str(weak), model, space)


def test_images_that_nobody_keeps_are_not_drawn(tmp_path, capsys):
    for more in ([], ["--save-pipeline", "pipe"]):
        error = refusals.refused(capsys, lambda argv: call(tmp_path, *argv), *more)
        assert_says(error, "num_images 5 --out --grid --denoising --head-load --score")


def test_mistakes_with_vaes(tmp_path, capsys):
    known = recorded(vae_in(tmp_path / "vae"))
    three = vae_in(tmp_path / "three", channels=3)
    coarse = tmp_path / "coarse"
    coarse_vae().save_pretrained(coarse)
    run = run_of(tmp_path / "a", 4, vae=known)
    pixels = run_of(tmp_path / "b", 3, pixels=True)
    lost = run_of(tmp_path / "c", 4, vae=dict(known, name=str(tmp_path / "gone")))
    other = run_of(tmp_path / "d", 4, vae=dict(known, sha256="0" * 64))
    unlabelled = run_of(tmp_path / "e", 3, label_drop=0)
    sample.main(f"--checkpoint {run} --num-images 0 --save-pipeline {tmp_path}/pipe".split())
    of_run = f"{tmp_path}/vae sha256 {known['sha256'][:12]}"
    for checkpoint, argv, facts in (
        (run, ("--vae", tmp_path / "none"), f"vae {tmp_path}/none folder"),
        (run, ("--vae", three), "VAE 3 channels transformer 4"),
        (run, ("--vae", coarse), f"vae {coarse} {of_run} downsampling 4 2"),
        (tmp_path / "pipe", ("--vae", coarse), f"vae {coarse} {tmp_path}/pipe downsampling 4 2"),
        (pixels, ("--vae", three), f"--vae {three} {pixels} pixels"),
        (lost, (), f"vae {tmp_path}/gone folder"),
        (other, (), f"VAE {tmp_path}/vae sha256 {'0' * 12} --vae"),
        (unlabelled, (), "--cfg-scale 2 label_drop above 0"),
    ):
        assert_says(refused(capsys, checkpoint, *argv), facts)


# ---------------------------------------------------------------- many images


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on pixels, and the images and labels of `call`."""
    run = run_of(tmp_path_factory.mktemp("whole"), 3)
    return run, *drawn(run)


def test_an_interrupted_run_goes_on_and_ends_with_the_same_images(whole, tmp_path, capsys):
    run, images, labels = whole
    out = tmp_path / "a.npz"
    interrupted(run, "--out", out)
    assert not out.exists()
    capsys.readouterr()
    call(run, "--out", out)
    assert "1 of 2 batches of this process are there already" in capsys.readouterr().out
    with np.load(out) as again:
        assert np.array_equal(again["arr_0"], images) and np.array_equal(again["arr_1"], labels)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]  # nothing is left behind
    assert images.dtype == np.uint8 and images.shape == (5, 4, 4, 3)
    settings = [
        [],
        ["--seed", "1"],
        ["--classes", "a"],
        ["--classes", "b", "a"],
        ["--head-budget", "1"],
    ]
    for more in settings:  # none takes up the images of another
        interrupted(run, "--out", tmp_path / "other.npz", *more)
    assert len(list(tmp_path.glob(".samples-*"))) == len(settings)


def test_images_that_began_on_operators_that_are_gone_are_refused(
    tmp_path, monkeypatch, capsys, new_process
):
    """An interrupted command leaves its path and table in force."""
    run = run_of(tmp_path, 3)
    monkeypatch.setenv("MOH_VISION_KERNELS", "off")
    interrupted(run, "--out", tmp_path / "a.npz")
    (record,) = tmp_path.glob(".samples-*/attention.json")
    record.write_text(record.read_text().replace('"torch"', '"cpp"'))
    error = refused(capsys, run, "--out", tmp_path / "a.npz")
    assert_says(error, f"{record.parent} attention.path 'cpp' 'torch'")


@pytest.mark.parametrize(
    "heads, weak", [((0, 1), []), ((0, 2), "--guide heads:0.5 --guide-scale 1.5".split())]
)
def test_a_long_drawing_measures_first_and_goes_on_with_what_it_found(
    tmp_path, capsys, skipping_takes, long_drawing, heads, weak
):
    """Of the weak model's pass, too: where all heads of the model run, the only one that skips."""
    run = run_of(tmp_path, 3, heads=heads)
    skipping_takes(2.0)  # all heads run
    short, _ = drawn(run, *weak)
    assert "attention measured" not in capsys.readouterr().out
    long_drawing()
    interrupted(run, *weak, "--overwrite", "--out", tmp_path / "drawn.npz")
    assert capsys.readouterr().out.count("attention measured in ") == 1
    (record,) = tmp_path.glob(".samples-*/attention.json")
    assert json.loads(record.read_text())["table"]["rows"]
    assert np.array_equal(drawn(run, *weak)[0], short)
    assert "attention measured" not in capsys.readouterr().out


def test_head_usage_is_of_all_images_after_an_interruption(tmp_path):
    """By class and by timestep; also if the interrupted command did not count: its batches are drawn again."""
    run = run_of(tmp_path, 3)
    loads = []
    file = tmp_path / "load.json"
    for first in (None, "--head-load", "--grid"):
        if first:
            interrupted(run, first, tmp_path / "a.png")
        call(run, "--head-load", file, "--overwrite")
        loads.append(HeadLoad.read(file))
    assert len(loads) == 3 and all(torch.equal(load.sums, loads[0].sums) for load in loads)
    load = loads[0]
    share = torch.cat(load.share(), dim=1)
    assert share[:, 0].tolist() == [1] * 4  # the shared head
    assert 0 < share[:, 1].min()  # the routed one
    by_class, by_time = (load.runs(by)[0] for by in ("class", "timestep"))
    assert torch.equal(by_class.sum(0), by_time.sum(0))  # the same tokens, told apart otherwise
    tokens = by_class[:, -1]
    assert load.groups["class"][-1] == "none"
    assert tokens[-1] == tokens[:-1].sum() > 0  # half of them without a class
    assert load.groups["timestep"][-1] == "0" and len(by_time) == 4
    assert load.of["model"].startswith("moh_dit")


def test_the_same_command_twice_at_a_time_is_refused(tmp_path, capsys, no_pauses):
    """Or the first to end would remove the samples of the other."""
    run = run_of(tmp_path, 3)
    out = ["--out", tmp_path / "a.npz"]
    interrupted(run, *out)
    (folder,) = tmp_path.glob(".samples-*")
    other = hold(only_one, folder, "another")
    no_pauses()
    try:
        error = refused(capsys, run, *out)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert_says(error, f"samples {folder} process {other} writing")
    call(run, *out)
    assert not list(tmp_path.glob(".samples-*"))


def test_samples_that_are_not_finite_are_refused(tmp_path, capsys):
    """NaN would become black images, and be scored."""
    run = run_of(tmp_path, 3)
    found = find_weights(run)
    model = found.build()
    with torch.no_grad():
        model.y_embedder.embedding_table.weight[1] = (
            3e38  # of one class; finite, but its products are not
        )
    export_weights(model, run / "ema.safetensors", found.metadata)
    with pytest.raises(SystemExit) as stop:
        call(run, "--out", tmp_path / "a.npz")
    assert stop.value.code == 1 and not (tmp_path / "a.npz").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert_says(error, "sample.py: error: step 1 of 4 1 of 3 images NaN infinity")


def test_image_i_and_its_label_depend_on_the_seed_and_i(whole):
    """Whatever the number of images, and at another batch size up to rounding."""
    run, five, labels = whole
    assert labels.tolist() == [0, 1, 2, 0, 1]
    assert np.array_equal(drawn(run, "--num-images", "6")[0][:3], five[:3])
    assert np.abs(drawn(run, "--batch-size", "5")[0].astype(int) - five).max() <= 1
    few, many = (
        drawn(run, "--labels", "random", "--num-images", n, "--steps", "1")[1] for n in (20, 30)
    )
    assert np.array_equal(few, many[:20])
    assert set(few) == {0, 1, 2}
    assert few.tolist() != (np.arange(20) % 3).tolist()


def test_bfloat16_is_close(whole, forget_precision):
    run, images, _ = whole
    forget_precision()
    near, _ = drawn(run, "--mixed-precision", "bf16")
    assert not np.array_equal(near, images) and np.abs(near.astype(int) - images).mean() < 12


def test_a_sharded_run_is_sampled_and_its_weights_are_named(whole, tmp_path):
    """Without a file of the whole weights, as FSDP leaves it."""
    run, images, _ = whole
    weights, metadata = read_safetensors(run / "ema.safetensors")
    for half in range(2):
        rows = {
            name: tensor.chunk(2)[half]
            for name, tensor in weights.items()
            if len(tensor.chunk(2)) > half
        }
        write_tensors(tmp_path / f"ema-0000{half}.safetensors", rows, metadata)
    assert np.array_equal(drawn(tmp_path)[0], images)


def call_on_a_rank(rank, run, *more):
    with open(run / f"said.{rank}", "w") as file, contextlib.redirect_stdout(file):
        call(run, *more)


def test_two_processes_draw_the_images_of_one(tmp_path):
    run = run_of(tmp_path, 3)
    eleven = ["--num-images", "11", "--overwrite", "--out", run / "drawn.npz", "--head-load"]
    one, labels = drawn(run, *eleven, run / "one.json")
    on_two_ranks(call_on_a_rank, run, *eleven, run / "two.json")
    said = [(run / f"said.{rank}").read_text() for rank in range(2)]
    assert "11 images, ddpm 4 steps" in said[0] and said[1] == ""
    with np.load(run / "drawn.npz") as two:
        assert np.array_equal(labels, two["arr_1"])
        # Rounding differs with the number of threads.
        assert np.abs(one.astype(int) - two["arr_0"]).max() <= 1
    one, two = (HeadLoad.read(run / f"{name}.json") for name in ("one", "two"))
    assert one.active() == two.active()
    assert (one.sums - two.sums).abs().max() <= 0.01 * one.sums.max()


@pytest.mark.slow
def test_killed_and_gone_on_with_two_processes(tmp_path):
    """SIGKILL while sampling; the rest by two processes: the bytes of an undisturbed run of one."""
    run = run_of(tmp_path, 3)
    log = tmp_path / "log"
    more = "--num-images 400 --batch-size 4 --steps 50 --cfg-scale 2 --out".split()

    def start(name):
        return Command(sample.main, ["--checkpoint", run, *more, tmp_path / name], log)

    assert start("whole.npz").wait(240) == 0
    killed = start("a.npz")
    assert killed.until(lambda: len(list(tmp_path.glob(".samples-*/*.npy"))) >= 5, 240)
    killed.kill()
    assert 5 <= len(list(tmp_path.glob(".samples-*/*.npy"))) < 100
    assert not (tmp_path / "a.npz").exists()
    on_two_ranks(call_on_a_rank, run, *more, tmp_path / "a.npz")
    assert "batches of this process are there already" in (tmp_path / "said.0").read_text()
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not list(tmp_path.glob(".*"))


def enlarged(image):
    """As in a grid."""
    return np.asarray(Image.fromarray(image).resize((48, 48), Image.Resampling.BICUBIC))


def test_grids_have_one_class_a_row(tmp_path, capsys):
    """All that were drawn; or those asked for, in turn, by name or number, in their order."""
    run = run_of(tmp_path, 3)
    grid = tmp_path / "g.png"

    def size(*more):
        """Rows and columns of the grid, the labels that were drawn, and what was said."""
        _, labels = drawn(run, "--grid", grid, *more)
        with Image.open(grid) as picture:
            width = picture.width - 2
            height = picture.height - 2
        assert 0 < width % 50  # names stand beside the images
        assert height % 50 == 0
        return height // 50, width // 50, labels, capsys.readouterr().out

    rows, columns, labels, _ = size("--labels", "random")
    counts = np.bincount(labels, minlength=3)
    assert len(set(counts)) > 1  # or this would show nothing
    assert (rows, columns) == ((counts > 0).sum(), counts[counts > 0].min())
    rows, columns, labels, said = size("--classes", "c", "0")
    assert (rows, columns) == (2, 2)
    assert labels.tolist() == [2, 0, 2, 0, 2]
    assert "grid, one class a row: " in said
    with Image.open(grid) as picture, np.load(run / "drawn.npz") as archive:
        pixels = np.asarray(picture)[:, -(2 * 50 + 2) :]
        images = archive["arr_0"]
    for (row, column), number in {(0, 0): 0, (0, 1): 2, (1, 0): 1, (1, 1): 3}.items():
        cell = pixels[2 + 50 * row :, 2 + 50 * column :][:48, :48]
        assert (cell == enlarged(images[number])).all()
    _, labels = drawn(run, *"--classes c 0 --num-images 50 --labels random --steps 1".split())
    assert set(labels.tolist()) == {0, 2}
    said = size("--num-images", "1")[-1]
    assert f"grid, one class a row (1 of 3 classes; --classes chooses): {grid}" in said
    for classes, facts in (
        ("3", "--classes 3 a b c 0 2"),
        ("a 0", "--classes 0 (a) twice"),
        ("a b c a a a", "classes 6 5 images"),
    ):
        assert_says(refused(capsys, run, "--classes", *classes.split()), facts)


def test_denoising(tmp_path, hours_pass, capsys):
    """A strip ends with the images and begins with noise; of latents too, in a GIF, and where the images are there already."""
    run = run_of(tmp_path, 3)
    more = "--num-images 12 --batch-size 10 --steps 20 --out".split() + [tmp_path / "drawn.npz"]
    interrupted(run, *more)
    images, _ = drawn(run, *more, "--denoising", tmp_path / "strip.png")
    with Image.open(tmp_path / "strip.png") as strip:
        pixels = np.asarray(strip)[-(8 * 50 + 2) :, -(8 * 50 + 2) :]
        above = np.asarray(strip)[: -(8 * 50 + 2), -(8 * 50 + 2) :]
    assert pixels.shape == (8 * 50 + 2, 8 * 50 + 2, 3)
    for j in range(8):
        assert (above[:, 50 * j :][:, :50] < 128).any()  # a timestep above each column
    for i, image in enumerate(images[:8]):
        first, last = (pixels[2 + 50 * i :, 2 + 50 * j :][:48, :48] for j in (0, 7))
        assert (last == enlarged(image)).all()
        assert np.abs(first.astype(int) - last).mean() > 10
    latent = run_of(tmp_path / "latent", 4, vae=recorded(vae_in(tmp_path / "vae")))
    hours_pass()
    call(latent, "--denoising", tmp_path / "b.gif", "--steps", "30")
    out = capsys.readouterr().out
    assert f"loading {latent}\n5 images, ddpm 30 steps" in out
    # Lines, as this is no terminal.
    assert "sampling: 1 of 60 steps, " in out
    assert "sampling: 60 of 60 steps, 00:00 left\n" in out
    with Image.open(tmp_path / "b.gif") as gif:
        assert 20 < gif.n_frames <= 25  # Pillow leaves out frames that change nothing
        assert gif.size == (3 * 50 + 2, 52)  # the three images of the first batch


# ---------------------------------------------------------------- scores


def noise_file(path, *shape):
    np.savez(path, arr_0=np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8))
    return path


def test_scores_against_images_with_a_run_as_extractor(tmp_path, capsys):
    run = run_of(tmp_path, 3)
    judge = classifier_in(tmp_path / "cls")
    reference, _ = drawn(run, "--seed", "7", "--num-images", "40")
    ref = (run / "drawn.npz").rename(tmp_path / "ref.npz")
    argv = ["--num-images", "30", "--extractor", judge, "--score", ref, "--score-file"]
    images, _ = drawn(run, *argv, tmp_path / "s.json")
    out = capsys.readouterr().out
    scores = json.loads((tmp_path / "s.json").read_text())
    network = TimmExtractor(find_weights(str(judge), wing="classification").build(), "x")
    generated, real = (torch.from_numpy(x).permute(0, 3, 1, 2) for x in (images, reference))
    want = score(generated, real, extractor=network)
    assert scores["fd"] == pytest.approx(want["fd"], rel=1e-6)
    assert scores["precision"] == want["precision"]
    assert scores["label"] == f"FD-moh_vit_tiny_patch16_224 of {judge}/model.safetensors"
    # The numbers come first.
    assert out.index(f"{want['fd']:.4f}") < out.index("sampling: sampler ddpm, steps 4, ")
    sha = sha256_of(run / "ema.safetensors")
    assert "None" not in out and f"weights_sha256 {sha[:12]}\n" in out
    assert (scores["sampling"]["steps"], scores["sampling"]["weights_sha256"]) == (4, sha)
    assert scores["weights_sha256"] == network.weights_sha256
    assert scores["num_generated"] == 30 and scores["reference"] == str(ref)
    more = ["--score-split", "train", "--inception-weights", "w.pth", "--allow-biased", "true"]
    there = (run / "drawn.npz").rename(tmp_path / "a b.npz")
    error = refused(capsys, run, *argv, tmp_path / "t.json", *more, "--out", there)
    fidelity = f"fidelity '{there}' {ref} --reference-split train --extractor {judge} --inception-weights w.pth"
    assert_says(error, f"--out {there} exists --overwrite")
    # A command that can be typed is held as it is.
    assert f"python -m moh_vision.evaluation.{fidelity} --allow-biased " in error
    error = refused(capsys, run, *argv, tmp_path / "t.json", "--num-images", "8")
    assert error.count("allow_biased") == 1

    capsys.readouterr()
    argv = [there, ref, "--extractor", judge, "--out", tmp_path / "c.json"]
    assert fidelity_command([*map(str, argv)]) == 0
    text = capsys.readouterr().out
    width = 22 + len(format(want["fd"], ".4f"))
    assert scores["label"] in text
    assert f"\nFD{want['fd']:>{width}.4f}\n" in text  # the long name does not push the number
    argv = [str(there), str(ref), "--extractor", str(tmp_path)]
    assert fidelity_command(argv) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_head_loads_that_fail_cost_no_scores_and_no_samples(tmp_path, monkeypatch, capsys):
    run = run_of(tmp_path, 3)
    judge = classifier_in(tmp_path / "cls")
    reference = noise_file(tmp_path / "ref.npz", 12, 4, 4, 3)
    argv = ["--num-images", "12", "--extractor", judge, "--score", reference]
    argv += ["--score-file", tmp_path / "s.json", "--head-load", tmp_path / "h.json"]
    save = HeadLoad.save
    monkeypatch.setattr(HeadLoad, "save", lambda *_: open(tmp_path))
    with pytest.raises(IsADirectoryError):
        call(run, *argv)
    assert json.loads((tmp_path / "s.json").read_text())["num_generated"] == 12
    monkeypatch.setattr(HeadLoad, "save", save)
    call(run, *argv, "--overwrite")
    assert "4 of 4 batches of this process are there already" in capsys.readouterr().out
    assert (tmp_path / "h.json").exists()


@pytest.mark.parametrize("more", [{}, dict(dynamic_img_size=True)])
def test_a_transnext_run_judges_images_at_its_own_size(tmp_path, more):
    sizes = dict(
        embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4), depths=(1, 1, 1, 1), in_chans=3
    )
    model = exported(tmp_path, "transnext_micro", ["x", "y"], img_size=32, **sizes, **more).eval()
    network = make_extractor(str(tmp_path))
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (
        torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std")
    )
    with torch.no_grad():
        want = model.forward_head(model.forward_features((x / 255 - mean) / std), pre_logits=True)
        torch.testing.assert_close(network(x).pooled, want)


@pytest.mark.parametrize("samples, channels", [(3, 1), (1, 3)])
def test_a_classifier_judges_samples_of_other_channels(tmp_path, samples, channels):
    """Scores beside digits, which are grey."""
    classes = [str(i) for i in range(10)]
    parts = ImageParts(tmp_path, 30, 30, {})
    exported(tmp_path, JUDGE, classes, img_size=8, patch_size=4, in_chans=channels, **JUDGE_SIZES)
    parts.add(0, torch.randint(0, 256, (30, samples, 8, 8), dtype=torch.uint8))
    judge = ClassifierScores(SourceImages(Digits("val"), "digits"), str(tmp_path), classes)
    scores, text = judge(parts, torch.arange(30) % 10, "cpu")
    # Nobody trained the judge.
    assert text.endswith("misses most of the real images: a weak judge, whose numbers say little")
    assert (scores["num_generated"], scores["num_reference"]) == (30, 355)
    assert scores["frechet_distance"] > 0


class ChannelMeans(Extractor):
    """3 features, taken for the published Inception, as ADM's references ask."""

    name = "means"
    published = True
    weights_sha256 = "0" * 64

    def forward(self, images):
        return Extracted(images.float().mean((2, 3)))


def adm_file(path):
    """Statistics as in ADM's references, of 3 features."""
    np.savez(path, mu=np.full(3, 127.0), sigma=100 * np.eye(3))
    return path


def test_the_protocol_of_published_fids(tmp_path, monkeypatch, capsys):
    """Smaller here; what it sets and the reference are printed and stored with the scores."""
    monkeypatch.setitem(PROTOCOLS, "adm", dict(PROTOCOLS["adm"], num_images=30, steps=4))
    monkeypatch.setattr(scores_of_samples, "make_extractor", lambda *_: ChannelMeans())
    folder = vae_in(tmp_path / "vae")
    run = run_of(tmp_path, 4, vae=recorded(folder))
    reference = adm_file(tmp_path / "VIRTUAL.npz")
    adm = f"--checkpoint {run} --protocol adm --steps 4 --cfg-scale 1.5".split()
    images = str(tmp_path / "a.npz")
    sample.main(
        [*adm, "--out", images, "--score", str(reference), "--score-file", str(tmp_path / "s.json")]
    )
    scores = json.loads((tmp_path / "s.json").read_text())
    labels = np.load(images)["arr_1"]
    sha = sha256_of(reference)
    assert len(labels) == 30 and labels.tolist() != [i % 3 for i in range(30)]
    assert scores["protocol"] == "adm"
    assert scores["fid"] > 0
    assert scores["num_generated"] == 30
    assert scores["reference"] == str(reference)
    assert scores["reference_sha256"] == sha
    assert "torch" in scores["versions"]
    set_by_it = dict(
        labels="random",
        sampler="ddpm",
        steps=4,
        cfg_scale=1.5,
        cfg_interval=[0, 1],
        guide_channels=3,
    )
    not_set_by_it = dict(ema=True, vae=str(folder), batch_size=100, num_images=30)
    assert scores["sampling"].items() >= {**set_by_it, **not_set_by_it}.items()
    out = capsys.readouterr().out
    assert "protocol: adm\nsampling: sampler ddpm, steps 4, cfg_scale 1.5, guide_channels 3" in out
    assert "versions: moh_vision" in out
    assert f"{reference} (sha256 {sha[:12]})" in out
    assert ", random labels, " in out
    error = refusals.refused(capsys, sample.main, *adm, "--score", images)
    assert_says(error, f"--score {images} protocol adm ADM .npz mu sigma")
    (run / "ema.safetensors").rename(run / "model.safetensors")
    error = refusals.refused(capsys, sample.main, *adm, "--grid", str(tmp_path / "never.png"))
    assert_says(error, f"protocol adm EMA {run}/model.safetensors none")


def test_what_contradicts_a_protocol_is_refused_by_name():
    config = SampleConfig(checkpoint="run", out="x", protocol="adm")
    assert (config.num_images, config.labels) == (50_000, "random")
    rows = [
        ("num_images", 100, 50_000),
        ("labels", "balanced", "random"),
        ("classes", ["7"], "all"),
        ("cache", "taylorseer:5", "none"),
    ]
    for name, value, allowed in rows:
        with one_line(f"{name} {value} protocol adm {allowed}"):
            SampleConfig(checkpoint="run", out="x", protocol="adm", **{name: value})


def test_labels_are_random_against_adms_statistics_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scores_of_samples, "make_extractor", lambda *_: ChannelMeans())
    run = run_of(tmp_path, 3)
    adm = adm_file(tmp_path / "adm.npz")
    images = noise_file(tmp_path / "n.npz", 9, 4, 4, 3)
    for reference, more, drawn_labels in (
        (adm, "", "random"),
        (images, "", "balanced"),
        (adm, "--labels=balanced", "balanced"),
    ):
        scored = f"--num-images 30 --steps 2 --cfg-scale 1 --score {reference} --score-file {run}/s.json {more}"
        _, labels = drawn(run, *scored.split())
        assert (labels.tolist() != [i % 3 for i in range(30)]) == (drawn_labels == "random")
        sampling = json.loads((run / "s.json").read_text())["sampling"]
        assert sampling["labels"] == drawn_labels
        assert f", {drawn_labels} labels, " in capsys.readouterr().out


def test_what_cannot_be_scored_is_refused_before_sampling(tmp_path, capsys):
    """More references: tests/evaluation/test_fidelity.py."""
    run = run_of(tmp_path / "run", 3)
    judge = classifier_in(tmp_path / "cls")
    (tmp_path / "classes/train/cat").mkdir(parents=True)
    (tmp_path / "latents").mkdir()
    latents_path(tmp_path / "latents", "val").write_text("{}")
    noise_file(tmp_path / "grey.npz", 20, 4, 4, 1)
    noise_file(tmp_path / "few.npz", 5, 4, 4, 3)
    for argv, facts in {
        f"{{}}/grey.npz --extractor {judge}": "generated colour {}/grey.npz grey",
        f"{{}}/few.npz --extractor {judge}": "{}/few.npz 5 reference 8 features allow_biased",
        "{}/classes": "--score {}/classes split val train",
        "{}/latents": "--score {}/latents latents train_dit.py images",
        "{}/few.npz --score-split val": "--score {}/few.npz data set split (val)",
        "digits --extractor {}/run --inception-weights x": "inception_weights x run extractor data set",
        "digits --extractor {}/run --allow-biased true": "allow_biased True run extractor data set",
        "{}/few.npz --extractor {}/run --inception-weights x": "inception_weights x extractor {}/run inception",
    }.items():
        argv = argv.replace("{}", str(tmp_path)).split()
        error = refused(capsys, run, "--num-images", 30, "--score", *argv)
        assert_says(error, facts.replace("{}", str(tmp_path)))
        assert [p.name for p in run.iterdir()] == ["ema.safetensors"]


def test_overwriting_a_folder_leaves_what_others_put_there(tmp_path, capsys):
    run = run_of(tmp_path / "run", 3)
    out = tmp_path / "out"
    out.mkdir()
    photo = out / "holiday.png"
    photo.write_bytes(b"a user's own")
    call(run, "--out", out, "--overwrite", "true")
    assert len(list(out.glob("0*.png"))) == 5
    said = capsys.readouterr().out
    assert_says(said, f"{out} holiday.png sample.py write")
    call(run, "--out", out, "--overwrite", "true", "--num-images", "2")
    assert {file.name for file in out.glob("*.png")} == {"000000.png", "000001.png", "holiday.png"}
    assert photo.read_bytes() == b"a user's own"
    # A name that a sample would get, and nobody says that it is one.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "000001.png").write_bytes(b"a user's own")
    error = refused(capsys, run, "--out", mine, "--overwrite", "true")
    assert_says(error, f"--out {mine} 000001.png sample.py write folder")
    assert [file.name for file in mine.iterdir()] == ["000001.png"]


def test_a_judge_of_the_classes_in_another_order_says_the_same(tmp_path):
    classes = [str(i) for i in range(10)]
    parts = ImageParts(tmp_path, 30, 30, {})
    parts.add(0, torch.randint(0, 256, (30, 1, 8, 8), dtype=torch.uint8))
    sizes = dict(img_size=8, patch_size=4, in_chans=1, **JUDGE_SIZES)
    (tmp_path / "one").mkdir()
    model = exported(tmp_path / "one", JUDGE, classes, **sizes)
    about = read_safetensors(tmp_path / "one" / "model.safetensors")[1]
    with torch.no_grad():
        model.head.weight.copy_(model.head.weight.flip(0))
        model.head.bias.copy_(model.head.bias.flip(0))
    (tmp_path / "other").mkdir()
    turned = dict(about, classes=classes[::-1])
    export_weights(model, tmp_path / "other" / "model.safetensors", turned)
    found = []
    for folder in ("one", "other"):
        reference = SourceImages(Digits("val"), "digits")
        judge = ClassifierScores(reference, str(tmp_path / folder), classes)
        found.append(judge(parts, torch.arange(30) % 10, "cpu")[0])
    assert 0 < found[0]["recognised_real"] < 1
    for name in ("recognised", "recognised_real"):
        assert found[0][name] == found[1][name]
