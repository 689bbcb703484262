"""sample.py on tiny runs that nobody trained: pixels, and latents with a VAE."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import refusals
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image
from processes import on_two_ranks
from refusals import one_line
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_vae import coarse_vae, save_tiny_vae

from moh_vision import load_run
from moh_vision.attention import measure
from moh_vision.attention.executors import measured
from moh_vision.attention.kernels import build as building
from moh_vision.data.sources import Digits
from moh_vision.data.splits import latents_path
from moh_vision.diffusion import MoHDiTPipeline, sample
from moh_vision.diffusion import scores as scores_of_samples
from moh_vision.diffusion.config import PROTOCOLS, SampleConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.latents.vae import LatentSpace, load_vae
from moh_vision.diffusion.loading import open_guide
from moh_vision.diffusion.scores import ClassifierScores
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.io import sha256_of
from moh_vision.engine.seeds import derive_seed
from moh_vision.evaluation.fidelity import Extracted, Extractor, TimmExtractor, make_extractor, score
from moh_vision.evaluation.fidelity.__main__ import main as fidelity_command
from moh_vision.evaluation.fidelity.images import SourceImages
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weights import create, from_run

NAME, JUDGE = "moh_dit_small_patch2_75", "moh_vit_tiny_patch16_224"
JUDGE_SIZES = dict(embed_dim=8, depth=1, num_heads=2, head_budget=[(1, 1)])


def run_of(folder, channels, label_drop=0.1, pixels=False, heads=(1, 1), **more):
    torch.manual_seed(4)
    sizes = dict(img_size=4, embed_dim=16, depth=1, num_heads=2, head_budget=[heads])
    arguments = dict(sizes, in_chans=channels, num_classes=3)
    model = create(NAME, "diffusion", **arguments)
    with torch.no_grad():  # a new DiT is the zero function
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.2 * torch.randn_like(p))
    about = dict(
        architecture=NAME,
        arguments=arguments,
        classes=["a", "b", "c"],
        config=dict(kind="diffusion", label_drop=label_drop),
    )
    about["config"].update(vae="none" if pixels else "some")
    export_weights(model, folder / "ema.safetensors", {**about, **more})
    return folder


def vae_in(folder, channels=4):
    save_tiny_vae(folder, seed=5, latent_channels=channels)
    return folder


def recorded(folder, scaling_factor=0.7):
    """As train_dit.py records the VAE of a run."""
    return dict(vars(LatentSpace.of(load_vae(str(folder)), str(folder))), scaling_factor=scaling_factor)


def call(run, *more):
    argv = f"--checkpoint {run} --num-images 5 --batch-size 3 --steps 4 --cfg-scale 2".split()
    sample.main([*argv, *map(str, more)])


def refused(capsys, run, *more):
    return refusals.refused(capsys, lambda argv: call(run, *argv), "--grid", run / "never.png", *more)


@pytest.mark.parametrize("sampler, weak", [("ddpm", None), ("ddim", "heads:0.5"), ("dpm-solver++", "weak")])
def test_a_saved_pipeline_draws_the_same_images(tmp_path, capsys, sampler, weak):
    run, guide = run_of(tmp_path, 3, heads=(0, 2)), {}
    more = ["--sampler", sampler, "--out", tmp_path / "a.npz", "--save-pipeline", tmp_path / "pipe"]
    if weak:
        guide = dict(guide=weak, guide_scale=1.5)
        if weak == "weak":
            weak = run_of(tmp_path / "weak", 3, heads=(0, 1))
            guide["guide"], _ = from_run(str(weak), "diffusion")
        more += ["--guide", weak, "--guide-scale", "1.5"]
    call(run, *more)
    assert (f", guidance 2, 1.5 away from {weak}, balanced" in capsys.readouterr().out) == bool(weak)
    images = np.load(tmp_path / "a.npz")["arr_0"]
    assert images.std() > 10
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    assert pipe.labels == {"a": 0, "b": 1, "c": 2} and pipe.config.label_drop == 0.1
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(3)]
    drawn = pipe([0, 1, 2], 2.0, num_inference_steps=4, generator=generators, output_type="pil", **guide).images
    drawn = np.stack([np.array(i) for i in drawn]).astype(int)
    assert np.abs(drawn - images[:3]).max() <= 1


def test_only_the_pipeline(tmp_path, capsys, monkeypatch):
    sample.main(f"--checkpoint {run_of(tmp_path, 1)} --num-images 0 --save-pipeline {tmp_path}/pipe".split())
    weights = f"{tmp_path}/ema.safetensors"
    assert capsys.readouterr().out == f"loading {tmp_path}\npipeline: {tmp_path}/pipe, weights of {weights}\n"
    with one_line(f"weights model: {weights} holds the EMA; give its folder, or model.safetensors in it"):
        load_run(weights, "model")
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    assert type(pipe.scheduler).__name__ == "DDPMScheduler" and pipe.scheduler.config.clip_sample and pipe.vae is None
    assert pipe([0], num_inference_steps=2).images[0].mode == "L"
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = str(tmp_path / "pipe")
    found = DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    assert type(found) is MoHDiTPipeline
    assert "pipe exists; give another path" in refused(capsys, tmp_path, "--save-pipeline", tmp_path / "pipe")


def test_latents_are_decoded_by_the_runs_vae(tmp_path):
    """With the scaling of the training, not clipped; --vae names another decoder."""
    folder = vae_in(tmp_path / "vae")
    run = run_of(tmp_path, 4, vae=recorded(folder))
    call(run, "--out", tmp_path / "a.npz", "--save-pipeline", tmp_path / "pipe")
    images = np.load(tmp_path / "a.npz")["arr_0"]
    assert images.shape == (5, 8, 8, 3) and images.std() > 1
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    assert pipe.vae.config.scaling_factor == 0.7 and not pipe.scheduler.config.clip_sample
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(3)]
    drawn = pipe([0, 1, 2], 2.0, num_inference_steps=4, generator=generators, output_type="np").images
    assert np.abs(drawn * 255 - images[:3]).max() <= 0.51
    with torch.no_grad():
        other = AutoencoderKL.from_pretrained(folder)
        for p in other.decoder.parameters():
            p.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    call(run, "--out", tmp_path / "b.npz", "--vae", tmp_path / "other")
    assert not np.array_equal(np.load(tmp_path / "b.npz")["arr_0"], images)


def test_guidance_options(tmp_path, capsys):
    run = run_of(tmp_path, 4, vae=recorded(vae_in(tmp_path / "vae")))

    def images(name, *more):
        call(run, "--out", tmp_path / f"{name}.npz", *more)
        return np.load(tmp_path / f"{name}.npz")["arr_0"]

    three, every = images("three"), images("all", "--guide-channels", "all")
    assert np.array_equal(images("four", "--guide-channels", "4"), every) and not np.array_equal(three, every)
    assert np.array_equal(images("whole", "--cfg-interval", "0", "1"), three)
    assert "guidance 2 between 0.2 and 0.5 of the timesteps" not in capsys.readouterr().out
    part = images("part", "--cfg-interval", "0.2", "0.5")
    assert "guidance 2 between 0.2 and 0.5 of the timesteps" in capsys.readouterr().out
    assert np.array_equal(images("list", "--cfg-interval", "[0.2, 0.5]"), part) and not np.array_equal(part, three)


@pytest.mark.parametrize(
    "argv, words",
    [
        (
            "--cfg-interval 0.8 0.2",
            "cfg_interval (0.8, 0.2) is out of range: at least 0 and at most 1, the smaller one first",
        ),
        ("--cfg-interval 0 999", "cfg_interval (0.0, 999.0) is out of range"),
        ("--cfg-interval 0.5", "cfg_interval"),
        ("--cfg-interval 0.1 0.2 --cfg-scale 1", "needs cfg_scale other than 1"),
        ("--guide heads:0.5", "guide 'heads:0.5' needs guide_scale other than 1"),
        ("--guide-scale 2", "guide_scale 2.0 needs guide"),
        (
            "--guide heads:1 --guide-scale 2",
            "--guide heads:1: that is 2 heads, and the model runs 2: give a smaller share",
        ),
        ("--guide {}/weak --guide-scale 2", "--guide {0}/weak: no such file or folder"),
        ("--guide-channels 0", "guide_channels 0 is out of range: at least 1"),
        ("--guide-channels most", "guide_channels"),
        ("--num-images 0", "num_images 0 is out of range: at least 1"),
        ("--num-images 0 --save-pipeline x --out y", "num_images 0 leaves nothing for --out"),
        ("--sampler ddim --steps 600", "would begin at timestep 599 of 1000"),
        ("--sampler dpm", "dpm-solver++"),
        ("--out {}/x.zip", "x.zip' is out of range: a path that ends in"),
        ("--grid {0}/g.png --head-load {0}/g.png", "--grid {0}/g.png is given for two outputs"),
        ("--out {}", "--out {0} exists; give another path"),
        (
            "--out {}/ema.safetensors/images",
            "--out {0}/ema.safetensors/images cannot be written: {0}/ema.safetensors: Not a directory",
        ),
        ("--out /proc/x.npz", "--out /proc/x.npz cannot be written: /proc: No such file or directory"),
        ("--grid /proc/x.png", "--grid /proc/x.png cannot be written"),
        ("--score {0} --score-file {0}", "is a folder, expected a file"),
    ],
)
def test_mistakes(tmp_path, capsys, argv, words):
    assert words.replace("{0}", str(tmp_path)) in refused(capsys, run_of(tmp_path, 1), *argv.format(tmp_path).split())
    assert [p.name for p in tmp_path.iterdir()] == ["ema.safetensors"]


def test_weak_models_that_do_not_fit(tmp_path, capsys):
    space = vars(LatentSpace("some", "1" * 64, 1.0, None, 2, 4))
    run = run_of(tmp_path / "run", 4, vae=space)
    flow = dict(kind="diffusion", objective="flow", flow=dict(timesteps="uniform", shift=1.0))
    for channels, more, words in (
        (3, {}, "in_channels is 3"),
        (4, dict(config=flow), "objective is flow"),
        (4, dict(vae=dict(space, sha256="2" * 64)), "VAE is 2222"),
    ):
        with pytest.raises(
            ValueError, match=f"^--guide {tmp_path}/weak: its {words}.* of the model to guide is (4|n|1)"
        ):
            weak = run_of(tmp_path / "weak", channels, **more)
            open_guide("--guide", str(weak), from_run(str(run), "diffusion")[0], "noise", space)


@pytest.mark.parametrize("more", [[], ["--save-pipeline", "pipe"], ["--allow-biased"]])
def test_images_that_nobody_keeps_are_not_drawn(tmp_path, capsys, more):
    error = refusals.refused(capsys, lambda argv: call(tmp_path, *argv), *more)
    assert "num_images 5: nothing would be written; give --out, --grid," in error


def test_mistakes_with_vaes(tmp_path, capsys):
    for name in "abc":
        (tmp_path / name).mkdir()
    about = recorded(vae_in(tmp_path / "vae"))
    run = run_of(tmp_path / "a", 4, vae=about)
    assert f"vae {tmp_path}/none" in refused(capsys, run, "--vae", tmp_path / "none")
    three = vae_in(tmp_path / "three", channels=3)
    assert "the VAE has latents of 3 channels, the transformer works on 4" in refused(capsys, run, "--vae", three)
    error = refused(capsys, run_of(tmp_path / "c", 3, pixels=True), "--vae", three)
    assert f"--vae {three}: {tmp_path}/c was trained on pixels" in error
    coarse_vae().save_pretrained(tmp_path / "coarse")
    words = f"vae {tmp_path}/coarse: does not fit the latents of {tmp_path}/vae (sha256 {about['sha256'][:12]}): downsampling is 4 here, 2 there"
    assert words in refused(capsys, run, "--vae", tmp_path / "coarse")
    sample.main(f"--checkpoint {run} --num-images 0 --save-pipeline {tmp_path}/pipe".split())
    assert ": downsampling is 4 here, 2 there" in refused(capsys, tmp_path / "pipe", "--vae", tmp_path / "coarse")
    lost = run_of(tmp_path / "b", 4, vae=dict(about, name=str(tmp_path / "gone")))
    assert f"vae {tmp_path}/gone" in refused(capsys, lost)
    other = run_of(tmp_path / "b", 4, vae=dict(about, sha256="0" * 64))
    assert f"the VAE {tmp_path}/vae is not the one of the run (sha256 {'0' * 12})" in refused(capsys, other)
    plain = run_of(tmp_path / "c", 3, label_drop=0)
    assert "--cfg-scale 2 needs a run trained with label_drop above 0" in refused(capsys, plain)
    (tmp_path / "file.d").write_text("precious")
    error = refused(capsys, run_of(tmp_path / "c", 3), "--save-pipeline", tmp_path / "file.d", "--overwrite")
    assert "file.d is a file, expected a folder" in error
    assert (tmp_path / "file.d").read_text() == "precious"


# ---------------------------------------------------------------- many images


def drawn(path):
    with np.load(path) as archive:
        return archive["arr_0"], archive["arr_1"]


def test_an_interrupted_run_goes_on_and_ends_with_the_same_images(tmp_path, monkeypatch, capsys):
    run = run_of(tmp_path, 3)
    call(run, "--out", tmp_path / "whole.npz")
    add, done = ImageParts.add, []

    def add_one(self, number, *more):
        if done:
            raise KeyboardInterrupt
        done.append(number)
        add(self, number, *more)

    monkeypatch.setattr(ImageParts, "add", add_one)
    with pytest.raises(KeyboardInterrupt):
        call(run, "--out", tmp_path / "a.npz")
    monkeypatch.setattr(ImageParts, "add", add)
    assert not (tmp_path / "a.npz").exists()
    capsys.readouterr()
    call(run, "--out", tmp_path / "a.npz")
    assert "1 of 2 batches of this process are there already" in capsys.readouterr().out
    for ours, whole in zip(drawn(tmp_path / "a.npz"), drawn(tmp_path / "whole.npz")):
        assert np.array_equal(ours, whole)
    assert not list(tmp_path.glob(".*"))  # nothing is left behind
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["arr_0"].dtype == np.uint8 and archive["arr_0"].shape == (5, 4, 4, 3)


def test_images_that_began_on_operators_that_are_gone_are_refused(tmp_path, monkeypatch, capsys):
    run, add = run_of(tmp_path, 3), ImageParts.add
    monkeypatch.setenv("MOH_VISION_KERNELS", "off")
    monkeypatch.setattr(building, "_find", functools.cache(building._find.__wrapped__))
    monkeypatch.setattr(building, "_used", None)  # an interrupted command leaves it as it is
    monkeypatch.setattr(measured, "_table", None)

    def stop(self, number, *more):
        add(self, number, *more)
        raise KeyboardInterrupt

    monkeypatch.setattr(ImageParts, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        call(run, "--out", tmp_path / "a.npz")
    monkeypatch.setattr(ImageParts, "add", add)
    (record,) = tmp_path.glob(".samples-*/attention.json")
    began = json.loads(record.read_text())
    assert began["path"] == "torch"
    record.write_text(json.dumps(dict(began, path="cpp")))
    error = refused(capsys, run, "--out", tmp_path / "a.npz")
    assert f"{record.parent} was begun otherwise: attention.path: 'cpp' -> 'torch' (attention runs in plain" in error


def test_a_long_drawing_measures_first_and_goes_on_with_what_it_found(tmp_path, monkeypatch, capsys):
    run, add = run_of(tmp_path, 3, heads=(0, 1)), ImageParts.add
    monkeypatch.setenv("MOH_VISION_MEASURE", "auto")
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    call(run, "--out", tmp_path / "short.npz")
    assert "attention measured" not in capsys.readouterr().out

    def stop(self, number, *more):
        add(self, number, *more)
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "WORTH_MEASURING", 0)
    monkeypatch.setattr(measure, "timed", lambda call, left: (2.0, 0.0))  # all heads run
    monkeypatch.setattr(ImageParts, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        call(run, "--out", tmp_path / "long.npz")
    assert capsys.readouterr().out.count("attention measured in ") == 1
    (record,) = tmp_path.glob(".samples-*/attention.json")
    assert json.loads(record.read_text())["table"].keys() == {"device", "rows"}
    monkeypatch.setattr(ImageParts, "add", add)
    call(run, "--out", tmp_path / "long.npz")
    assert "attention measured" not in capsys.readouterr().out
    for ours, whole in zip(drawn(tmp_path / "long.npz"), drawn(tmp_path / "short.npz")):
        assert np.array_equal(ours, whole)


def test_head_usage_is_of_all_images_after_an_interruption(tmp_path, monkeypatch):
    """By class and by timestep; also if the interrupted command did not count: its batches are drawn again."""
    run, loads, add = run_of(tmp_path, 3), [], ImageParts.add

    def stop(self, number, *more):
        add(self, number, *more)
        raise KeyboardInterrupt

    for first in (None, ["--head-load"], ["--grid"]):
        if first:
            monkeypatch.setattr(ImageParts, "add", stop)
            with pytest.raises(KeyboardInterrupt):
                call(run, *first, tmp_path / "a.png")
            monkeypatch.setattr(ImageParts, "add", add)
        call(run, "--head-load", tmp_path / "load.json", "--overwrite")
        loads.append(HeadLoad.read(tmp_path / "load.json"))
    share = torch.cat(loads[0].share(), dim=1)
    assert share[:, 0].tolist() == [1] * 4 and 0 < share[:, 1].min()  # the shared head; the routed one
    assert len(loads) == 3 and all(torch.equal(load.sums, loads[0].sums) for load in loads)
    by_class, by_time = (sum(runs.sum(0) for runs in loads[0].runs(by)) for by in ("class", "timestep"))
    assert by_class.sum() > 0 and torch.equal(by_class, by_time)  # the same tokens, told apart otherwise


def test_head_load_is_a_file(tmp_path, capsys):
    """With guidance also without a class; the classes' tokens are those of all steps and images."""
    run = run_of(tmp_path, 3)
    call(run, "--head-load", tmp_path / "load.json", "--cfg-scale", "2")
    load = HeadLoad.read(tmp_path / "load.json")
    by_class, by_time = (load.runs(by)[0][:, -1] for by in ("class", "timestep"))  # tokens
    assert load.groups["class"][-1] == "none" and by_class[-1] == by_class[:-1].sum() == by_time.sum() / 2 > 0
    assert load.groups["timestep"][-1] == "0" and len(by_time) == 4 and load.of["model"].startswith("moh_dit")
    error = refused(capsys, run, "--head-load", tmp_path / "load.json")
    assert "load.json exists; give another path" in error


def test_the_same_command_twice_at_a_time_is_refused(tmp_path, monkeypatch, capsys):
    """Or the first to end would remove the samples of the other."""
    run, lock = run_of(tmp_path, 3), sample.only_one
    hold = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    hold, others = hold + "; print(flush=True); time.sleep(60)", []

    def after_another(folder, option):
        command = [sys.executable, "-c", hold, folder / ".lock"]
        others.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        others[0].stdout.readline()
        return lock(folder, option)

    monkeypatch.setattr("moh_vision.engine.io.PAUSE", 0)
    monkeypatch.setattr(sample, "only_one", after_another)
    try:
        error = refused(capsys, run, "--out", tmp_path / "a.npz")
    finally:
        others[0].kill()
        others[0].communicate()
    assert "error: samples in" in error and "another process is writing there" in error
    assert not list(tmp_path.glob(".samples-*/*.npy"))
    monkeypatch.setattr(sample, "only_one", lock)
    call(run, "--out", tmp_path / "a.npz")
    assert not list(tmp_path.glob(".samples-*"))


def test_other_settings_do_not_take_up_an_interrupted_run(tmp_path, monkeypatch):
    run = run_of(tmp_path, 3)
    monkeypatch.setattr(sample, "write_images", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    others = [[], ["--seed", "1"], ["--classes", "a"], ["--classes", "b", "a"], ["--head-budget", "1"]]
    for more in others:
        with pytest.raises(KeyboardInterrupt):
            call(run, "--out", tmp_path / "a.npz", *more)
    assert len(list(tmp_path.glob(".samples-*"))) == len(others)


def test_samples_that_are_not_finite_are_refused(tmp_path, capsys):
    """NaN would become black images, and be scored."""
    run = run_of(tmp_path, 3)
    with safe_open(run / "ema.safetensors", "pt") as file:
        about, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    state["y_embedder.embedding_table.weight"][1] = float("nan")  # of one class
    save_file(state, run / "ema.safetensors", about)
    with pytest.raises(SystemExit) as stop:
        call(run, "--out", tmp_path / "a.npz")
    error = capsys.readouterr().err
    assert stop.value.code == 1 and not (tmp_path / "a.npz").exists()
    assert error == "sample.py: error: step 1 of 4: 1 of 3 images hold NaN or infinity\n"


def test_image_i_depends_on_the_seed_and_i(tmp_path):
    """Whatever the number of images, and at another batch size up to rounding."""
    run = run_of(tmp_path, 3)
    call(run, "--out", tmp_path / "five.npz")
    five, labels = drawn(tmp_path / "five.npz")
    assert labels.tolist() == [0, 1, 2, 0, 1]
    call(run, "--out", tmp_path / "six.npz", "--num-images", "6")
    assert np.array_equal(drawn(tmp_path / "six.npz")[0][:3], five[:3])
    call(run, "--out", tmp_path / "other.npz", "--batch-size", "5")
    assert np.abs(drawn(tmp_path / "other.npz")[0].astype(int) - five).max() <= 1


def test_random_labels_are_functions_of_the_seed_and_the_number(tmp_path):
    run = run_of(tmp_path, 3)
    for n in (20, 30):
        call(run, "--out", tmp_path / f"{n}.npz", "--labels", "random", "--num-images", n, "--steps", "1")
    few, many = (drawn(tmp_path / f"{n}.npz")[1] for n in (20, 30))
    assert np.array_equal(few, many[:20]) and set(few) == {0, 1, 2} and few.tolist() != (np.arange(20) % 3).tolist()


def test_bfloat16_is_close(tmp_path):
    run = run_of(tmp_path, 3)
    call(run, "--out", tmp_path / "a.npz")
    AcceleratorState._reset_state(reset_partial_state=True)  # one process has one precision
    call(run, "--out", tmp_path / "b.npz", "--mixed-precision", "bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    (a, _), (b, _) = drawn(tmp_path / "a.npz"), drawn(tmp_path / "b.npz")
    assert not np.array_equal(a, b) and np.abs(a.astype(int) - b).mean() < 12


def call_on_a_rank(rank, run, *more):
    with open(run / f"said.{rank}", "w") as file, contextlib.redirect_stdout(file):
        call(run, *more)


def test_two_processes_draw_the_images_of_one(tmp_path):
    run = run_of(tmp_path, 3)
    call(run, "--out", tmp_path / "one.npz", "--num-images", "11", "--head-load", tmp_path / "one.json")
    more = ["--out", tmp_path / "two.npz", "--num-images", "11", "--head-load", tmp_path / "two.json"]
    on_two_ranks(call_on_a_rank, run, *more)
    said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
    assert "11 images, ddpm 4 steps" in said[0] and said[1] == ""
    (one, labels), (two, again) = drawn(tmp_path / "one.npz"), drawn(tmp_path / "two.npz")
    assert np.array_equal(labels, again) and np.abs(one.astype(int) - two).max() <= 1  # threads differ
    one, two = (HeadLoad.read(tmp_path / f"{name}.json") for name in ("one", "two"))
    assert one.active() == two.active() and (one.sums - two.sums).abs().max() <= 0.01 * one.sums.max()


@pytest.mark.slow
def test_killed_and_gone_on_with_two_processes(tmp_path):
    """SIGKILL while sampling; the rest by two processes: the bytes of an undisturbed run of one."""
    run, env = run_of(tmp_path, 3), dict(os.environ, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    argv = f"sample.py --checkpoint {run} --num-images 400 --batch-size 4 --steps 50 --cfg-scale 2 --out {tmp_path}/".split()

    def start(launcher, name):
        command = [sys.executable, *launcher, *argv[:-1], f"{argv[-1]}{name}"]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)

    whole = start([], "whole.npz")
    assert whole.wait(240) == 0
    killed, deadline = start([], "a.npz"), time.monotonic() + 240
    while len(list(tmp_path.glob(".samples-*/*.npy"))) < 5:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    there = len(list(tmp_path.glob(".samples-*/*.npy")))
    assert 5 <= there < 100 and not (tmp_path / "a.npz").exists()
    again = start("-m torch.distributed.run --nproc_per_node 2 --master_port 29672".split(), "a.npz")
    assert again.wait(240) == 0 and "batches of this process are there already" in again.stdout.read()
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_grid_of_random_labels_has_one_class_a_row(tmp_path):
    run = run_of(tmp_path, 3)
    call(run, "--labels", "random", "--grid", tmp_path / "g.png", "--out", tmp_path / "a.npz")
    counts = np.bincount(drawn(tmp_path / "a.npz")[1], minlength=3)
    assert len(set(counts)) > 1  # or this would show nothing
    with Image.open(tmp_path / "g.png") as grid:
        rows, columns = (counts > 0).sum(), counts[counts > 0].min()
        margin = grid.width - columns * 50 - 2
        assert grid.height == rows * 50 + 2 and 0 < margin < 50


def test_classes_that_are_asked_for(tmp_path, capsys):
    """In turn, by name or number; the grid has a row for each, in their order."""
    run = run_of(tmp_path, 3)
    call(run, "--classes", "c", "0", "--grid", tmp_path / "g.png", "--out", tmp_path / "a.npz")
    images, labels = drawn(tmp_path / "a.npz")
    assert labels.tolist() == [2, 0, 2, 0, 2] and "grid, one class a row: " in capsys.readouterr().out
    with Image.open(tmp_path / "g.png") as grid:
        assert grid.height == 2 * 50 + 2 and 2 * 50 + 2 < grid.width < 3 * 50
    more = "--classes c 0 --num-images 50 --labels random --steps 1 --out".split()
    call(run, *more, tmp_path / "r.npz")
    assert set(drawn(tmp_path / "r.npz")[1].tolist()) == {0, 2}
    call(run, "--num-images", "1", "--grid", tmp_path / "c.png")
    assert f"grid, one class a row (1 of 3 classes; --classes chooses): {tmp_path}/c.png" in capsys.readouterr().out
    for asked, words in (
        ("3", "--classes 3: no such class; there are 3, such as a, b, c, or 0 to 2"),
        ("a 0", "--classes 0: class 0 (a) is named twice"),
        ("a b c a a a", "classes names 6 classes, more than the 5 images"),
    ):
        assert words in refused(capsys, run, "--classes", *asked.split())


def test_denoising(tmp_path, monkeypatch, capsys):
    """A strip ends with the images and begins with noise; of latents too, in a GIF, and where the images are there already."""
    run = run_of(tmp_path, 3)
    more = ["--num-images", "12", "--batch-size", "10", "--steps", "20", "--out", tmp_path / "a.npz"]
    monkeypatch.setattr(sample, "write_images", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        call(run, *more)
    monkeypatch.undo()
    call(run, *more, "--denoising", tmp_path / "strip.png")
    images, _ = drawn(tmp_path / "a.npz")
    with Image.open(tmp_path / "strip.png") as strip:
        pixels = np.asarray(strip)[-(8 * 50 + 2) :, -(8 * 50 + 2) :]
        above = np.asarray(strip)[: -(8 * 50 + 2), -(8 * 50 + 2) :]
    assert pixels.shape == (8 * 50 + 2, 8 * 50 + 2, 3)
    assert all((above[:, 50 * j :][:, :50] < 128).any() for j in range(8))  # a timestep above each column
    cells = [[pixels[2 + 50 * i :, 2 + 50 * j :][:48, :48] for j in range(8)] for i in range(8)]
    for row, image in zip(cells, images):
        assert (row[-1] == np.asarray(Image.fromarray(image).resize((48, 48), Image.Resampling.BICUBIC))).all()
        assert np.abs(row[0].astype(int) - row[-1]).mean() > 10
    latent = tmp_path / "latent"
    latent.mkdir()
    run = run_of(latent, 4, vae=recorded(vae_in(tmp_path / "vae")))
    monkeypatch.setattr("moh_vision.engine.commands.LINE_EVERY", 0)
    call(run, "--denoising", tmp_path / "b.gif", "--steps", "30")
    assert f"loading {latent}\n5 images, ddpm 30 steps" in (out := capsys.readouterr().out)
    assert "sampling: 1 of 60 steps, " in out and "sampling: 60 of 60 steps, 00:00 left\n" in out  # no terminal
    with Image.open(tmp_path / "b.gif") as gif:
        assert 20 < gif.n_frames <= 25  # Pillow leaves out frames that change nothing
        assert gif.size == (3 * 50 + 2, 52)  # the three images of the first batch


# ---------------------------------------------------------------- scores


def classifier_in(folder):
    """A classification run that nobody trained, on other classes."""
    folder.mkdir()
    torch.manual_seed(6)
    exported(folder, JUDGE, ["x", "y"], img_size=4, patch_size=2, in_chans=3, **JUDGE_SIZES)
    return folder


def exported(folder, name, classes, **arguments):
    """A new classifier, saved as a run leaves it."""
    model = create(name, "classifier", num_classes=len(classes), **arguments)
    about = dict(architecture=name, classes=classes, config={})
    about["arguments"] = dict(arguments, num_classes=len(classes))
    export_weights(model, folder / "model.safetensors", about)
    return model


def test_scores_against_images_with_a_run_as_extractor(tmp_path, capsys):
    run, judge = run_of(tmp_path, 3), classifier_in(tmp_path / "cls")
    call(run, "--out", tmp_path / "ref.npz", "--seed", "7", "--num-images", "40")
    argv = ["--num-images", "30", "--extractor", judge, "--score", tmp_path / "ref.npz"]
    call(run, *argv, "--out", tmp_path / "a.npz", "--score-file", tmp_path / "s.json")
    out, scores = capsys.readouterr().out, json.loads((tmp_path / "s.json").read_text())
    images, reference = (torch.from_numpy(drawn(tmp_path / f"{n}.npz")[0]).permute(0, 3, 1, 2) for n in ("a", "ref"))
    network = TimmExtractor(from_run(str(judge), "classifier")[0], "x")
    want = score(images, reference, extractor=network)
    assert scores["fd"] == pytest.approx(want["fd"], rel=1e-6) and scores["precision"] == want["precision"]
    assert scores["label"] == f"FD-moh_vit_tiny_patch16_224 of {judge}/model.safetensors"
    assert out.index(f"{want['fd']:.4f}") < out.index("sampling: sampler ddpm, steps 4, ")  # the numbers come first
    assert "None" not in out and f"weights_sha256 {sha256_of(run / 'ema.safetensors')[:12]}\n" in out
    assert scores["sampling"]["steps"] == 4 and len(scores["sampling"]["weights_sha256"]) == 64
    assert scores["weights_sha256"] == network.weights_sha256
    assert scores["num_generated"] == 30 and scores["reference"] == str(tmp_path / "ref.npz")
    more = ["--score-split", "train", "--inception-weights", "w.pth", "--allow-biased", "true"]
    (tmp_path / "a.npz").rename(tmp_path / "a b.npz")
    error = refused(capsys, run, *argv, *more, "--out", tmp_path / "a b.npz", "--score-file", tmp_path / "t.json")
    fidelity = (
        f"fidelity '{tmp_path}/a b.npz' {tmp_path}/ref.npz --reference-split train --extractor {judge} "
        "--inception-weights w.pth --allow-biased scores what is there"
    )
    assert f"b.npz exists; give another path, or --overwrite true; python -m moh_vision.evaluation.{fidelity}" in error
    error = refused(capsys, run, *argv, "--num-images", "8", "--score-file", tmp_path / "t.json")
    assert error.count("allow_biased") == 1


def test_head_loads_that_fail_cost_no_scores_and_no_samples(tmp_path, monkeypatch, capsys):
    run, judge, save = run_of(tmp_path, 3), classifier_in(tmp_path / "cls"), HeadLoad.save
    call(run, "--out", tmp_path / "ref.npz", "--seed", "7", "--num-images", "12")
    argv = ["--num-images", "12", "--extractor", judge, "--score", tmp_path / "ref.npz", "--score-file"]
    argv += [tmp_path / "s.json", "--head-load", tmp_path / "h.json"]
    monkeypatch.setattr(HeadLoad, "save", lambda *_: open(tmp_path))
    with pytest.raises(IsADirectoryError):
        call(run, *argv)
    assert json.loads((tmp_path / "s.json").read_text())["num_generated"] == 12
    monkeypatch.setattr(HeadLoad, "save", save)
    call(run, *argv, "--overwrite")
    assert "4 of 4 batches of this process are there already" in capsys.readouterr().out
    assert (tmp_path / "h.json").exists()


def test_a_run_as_extractor_of_the_fidelity_command(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", arr_0=rng.integers(0, 255, (20, 4, 4, 3), dtype=np.uint8))
    a, b, run = tmp_path / "a.npz", tmp_path / "b.npz", classifier_in(tmp_path / "cls")
    assert fidelity_command([str(a), str(b), "--extractor", str(run)]) == 0
    model, _ = from_run(str(run), "classifier")
    want = score(a, b, extractor=TimmExtractor(model, f"moh_vit_tiny_patch16_224 of {run}/model.safetensors"))
    text, width = capsys.readouterr().out, 22 + len(format(want["fd"], ".4f"))
    assert f"FD-moh_vit_tiny_patch16_224 of {run}/model.safetensors" in text
    assert f"\nFD{want['fd']:>{width}.4f}\n" in text  # the long name does not push the number
    assert fidelity_command([str(a), str(b), "--extractor", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.slow
def test_the_fidelity_command_on_two_processes(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("a", 21), ("b", 30)):
        np.savez(tmp_path / f"{name}.npz", arr_0=rng.integers(0, 255, (count, 4, 4, 3), dtype=np.uint8))
    argv = ["a.npz", "b.npz", "--extractor", str(classifier_in(tmp_path / "cls")), "--batch-size", "4"]
    module, ranks = ["-m", "moh_vision.evaluation.fidelity"], ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    env, results = dict(os.environ, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)), []
    for launcher in ([], [*ranks, "--master_port", "29673"]):
        out = f"{len(results)}.json"
        command = [sys.executable, *launcher, *module, *argv, "--out", out]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0 and done.stdout.count("scores: ") == 1, done.stderr
        results.append(json.loads((tmp_path / out).read_text()))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert results[1][name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name


@pytest.mark.parametrize("more", [{}, dict(dynamic_img_size=True)])
def test_a_transnext_run_judges_images_at_its_own_size(tmp_path, more):
    sizes = dict(embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4), depths=(1, 1, 1, 1), in_chans=3)
    model = exported(tmp_path, "transnext_micro", ["x", "y"], img_size=32, **sizes, **more).eval()
    network, x = make_extractor(str(tmp_path)), torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        want = model.forward_head(model.forward_features((x / 255 - mean) / std), pre_logits=True)
        torch.testing.assert_close(network(x).pooled, want)


@pytest.mark.parametrize("samples, channels", [(3, 1), (1, 3)])
def test_a_classifier_judges_samples_of_other_channels(tmp_path, samples, channels):
    """Beside digits, which are grey."""
    classes, parts = [str(i) for i in range(10)], ImageParts(tmp_path, 30, 30, {})
    exported(tmp_path, JUDGE, classes, img_size=8, patch_size=4, in_chans=channels, **JUDGE_SIZES)
    parts.add(0, torch.randint(0, 256, (30, samples, 8, 8), dtype=torch.uint8))
    judge = ClassifierScores(SourceImages(Digits("val"), "digits"), str(tmp_path), classes)
    scores, text = judge(parts, torch.arange(30) % 10, "cpu")
    assert text.endswith("misses most of the real images: a weak judge, whose numbers say little")  # nobody trained it
    assert (scores["num_generated"], scores["num_reference"]) == (30, 355) and scores["frechet_distance"] > 0


class ChannelMeans(Extractor):
    """3 features, taken for the published Inception, as ADM's references ask."""

    name, published, weights_sha256 = "means", True, "0" * 64

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
    run, reference = run_of(tmp_path, 4, vae=recorded(folder)), adm_file(tmp_path / "VIRTUAL.npz")
    adm = f"--checkpoint {run} --protocol adm --steps 4 --cfg-scale 1.5".split()
    scored = [*adm, "--out", str(tmp_path / "a.npz"), "--score", str(reference)]
    sample.main([*scored, "--score-file", str(tmp_path / "s.json")])
    scores, labels = json.loads((tmp_path / "s.json").read_text()), drawn(tmp_path / "a.npz")[1]
    how, sha = scores["sampling"], sha256_of(reference)
    assert len(labels) == 30 and labels.tolist() != [i % 3 for i in range(30)]
    assert (scores["protocol"], scores["fid"] > 0, scores["num_generated"]) == ("adm", True, 30)
    assert (scores["reference"], scores["reference_sha256"]) == (str(reference), sha) and "torch" in scores["versions"]
    assert {
        name: how[name] for name in ("labels", "sampler", "steps", "cfg_scale", "cfg_interval", "guide_channels")
    } == dict(labels="random", sampler="ddpm", steps=4, cfg_scale=1.5, cfg_interval=[0, 1], guide_channels=3)
    assert (how["ema"], how["vae"], how["batch_size"], how["num_images"]) == (True, str(folder), 100, 30)
    out = capsys.readouterr().out
    assert "protocol: adm\nsampling: sampler ddpm, steps 4, cfg_scale 1.5, guide_channels 3" in out
    assert "versions: moh_vision" in out and f"{reference} (sha256 {sha[:12]})" in out and ", random labels, " in out
    images = str(tmp_path / "a.npz")
    error = refusals.refused(capsys, sample.main, *adm, "--score", images)
    assert f"--score {images}: protocol adm compares with ADM's statistics" in error
    (run / "ema.safetensors").rename(run / "model.safetensors")
    error = refusals.refused(capsys, sample.main, *adm, "--grid", str(tmp_path / "never.png"))
    assert "protocol adm samples with EMA weights, and" in error and "holds none" in error


@pytest.mark.parametrize(
    "more, words",
    [
        (dict(labels="balanced"), "labels balanced: protocol adm stands for random"),
        (dict(num_images=100), "num_images 100: protocol adm stands for 50000"),
        (dict(steps=50), "steps 50: protocol adm stands for 250"),
        (dict(sampler="ddim"), "sampler ddim: protocol adm stands for ddpm"),
        (dict(guide_channels="all"), "guide_channels all: protocol adm stands for 3"),
        (dict(cfg_interval=(0, 0.5)), r"cfg_interval \(0.0, 0.5\): protocol adm stands for \(0.0, 1.0\)"),
        (dict(mixed_precision="bf16"), "mixed_precision bf16: protocol adm stands for no"),
        (dict(weights="model"), "weights model: protocol adm stands for ema"),
        (dict(classes=["207"]), r"classes \['207'\]: protocol adm stands for all"),
        (dict(extractor="timm:vit"), "extractor timm:vit: protocol adm stands for inception"),
    ],
)
def test_what_contradicts_a_protocol_is_refused_by_name(more, words):
    config = SampleConfig(checkpoint="run", out="x", protocol="adm")
    assert (config.num_images, config.labels) == (50_000, "random")
    with one_line(words):
        SampleConfig(checkpoint="run", out="x", protocol="adm", **more)


def test_labels_are_random_against_adms_statistics_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scores_of_samples, "make_extractor", lambda *_: ChannelMeans())
    run, reference = run_of(tmp_path, 3), tmp_path / "images.npz"
    np.savez(reference, arr_0=np.random.default_rng(0).integers(0, 255, (9, 4, 4, 3), dtype=np.uint8))
    for name, more in ((adm_file(tmp_path / "adm.npz"), []), (reference, []), (tmp_path / "adm.npz", ["balanced"])):
        sample.main([*f"--checkpoint {run} --num-images 30 --steps 2 --score {name} --score-file {run}/s.json".split(),
                     *f"--out {run}/a.npz --overwrite".split(), *(f"--labels={kind}" for kind in more)])  # fmt: skip
        random = name != reference and not more
        assert (drawn(run / "a.npz")[1].tolist() != [i % 3 for i in range(30)]) == random
        kind = json.loads((run / "s.json").read_text())["sampling"]["labels"]
        assert kind == ("random" if random else "balanced") and f", {kind} labels, " in capsys.readouterr().out


def references(folder):
    """Paths that cannot be compared with, and what is said of them."""
    rng = np.random.default_rng(0)
    for name, shape in dict(pairs=(20, 4, 4, 2), grey=(20, 4, 4, 1), few=(5, 4, 4, 3)).items():
        np.savez(folder / f"{name}.npz", arr_0=rng.integers(0, 255, shape, dtype=np.uint8))
    np.savez(folder / "wide.npz", mu=np.zeros(9), sigma=np.eye(9))
    for name in ("sizes", "colours", "classes/train/cat"):
        (folder / name).mkdir(parents=True)
        for i in range(9):
            mode, size = "L" if (name, i) == ("colours", 8) else "RGB", (5, 4) if (name, i) == ("sizes", 8) else (4, 4)
            Image.new(mode, size).save(folder / name / f"{i}.png")
    (folder / "latents").mkdir()
    latents_path(folder / "latents", "val").write_text("{}")
    said = {
        "pairs.npz": "arr_0 is uint8 [20, 4, 4, 2]; expected uint8 [N, height, width, 3 or 1]",
        "grey.npz": "the generated images are in colour, those of {} grey; convert one of the sets",
        "few.npz": "5 reference images for 8 features",
        "wide.npz": "does not say which weights made it",
        "none.npz": "no such file",
        "sizes": "8.png has 5 x 4 pixels, 0.png has 4 x 4",
        "colours": "8.png: its mode is L, that of 0.png is RGB",
        "classes": "classes: neither val-*.tar shards nor a folder val in it",
        "latents": "latents: latents, which train_dit.py reads; images are needed here",
    }
    return {name: words.replace("{}", str(folder / name)) for name, words in said.items()}


def test_a_reference_that_cannot_be_used_is_refused_before_sampling(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    run, judge = run_of(tmp_path / "run", 3), classifier_in(tmp_path / "cls")
    for name, words in references(tmp_path).items():
        error = refused(capsys, run, "--num-images", 30, "--extractor", judge, "--score", tmp_path / name)
        assert words in error and name in error
        assert [p.name for p in run.iterdir()] == ["ema.safetensors"]
        # As the fidelity command has it.
        np.savez(tmp_path / "g.npz", arr_0=np.zeros((30, 4, 4, 3), np.uint8))
        assert fidelity_command([*map(str, (tmp_path / "g.npz", tmp_path / name, "--extractor", judge))]) == 2
        assert words in capsys.readouterr().err


def test_mistakes_in_scoring(tmp_path, capsys):
    run, some = run_of(tmp_path, 3), tmp_path / "some.npz"
    np.savez(some, arr_0=np.zeros((5, 4, 4, 3), np.uint8))
    for argv, words in {
        "--score-split val": "score_split 'val' needs score,",
        "--allow-biased true": "allow_biased True needs score,",
        f"--score {some} --score-split val": f"--score {some} is no data set, so a split (val) has no effect",
        f"--score digits --extractor {run} --inception-weights x": "inception_weights x has no effect with a run as extractor",
        f"--score digits --extractor {run} --allow-biased true": "allow_biased True has no effect with a run as extractor",
        f"--score {some} --extractor {run} --inception-weights x": "inception_weights x has no effect with extractor",
    }.items():
        assert words in refused(capsys, run, *argv.split())
    assert "extractor 'cls' needs score," in refused(capsys, run, "--extractor", "cls")
    assert "--score nowhere: no such file or folder" in refused(
        capsys, run, "--score", "nowhere", "--extractor", "timm:resnet10t"
    )
    assert "is not inception, timm:NAME" in refused(capsys, run, "--score", "digits", "--extractor", "vgg")
    error = refused(capsys, run, "--score", "digits", "--inception-weights", tmp_path / "none.pth")
    assert "none.pth: no such file" in error
