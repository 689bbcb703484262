"""VAEs in the layouts of released ones: how latents are scaled, and the way from images to images through every command."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
from safetensors.torch import load_file, save_file

from moh_vision.diffusion import MoHDiTPipeline, sample
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.inputs import open_inputs
from moh_vision.diffusion.latents.vae import (
    LatentSpace,
    decode,
    encode_moments,
    load_vae,
    sample_posterior,
)
from moh_vision.diffusion.objectives.noise import draw_step
from tests.support.pictures import write_folder
from tests.support.refusals import assert_says, one_line, refuse
from tests.support.small_runs import outcome
from tests.support.tiny_vae import layout, write_latents

CHANNELS = {"SD3": 16, "VA-VAE": 32, "FLUX.2": 128, "DC-AE": 32, "RAE": 64}
DOWNSAMPLING = {"SD3": 2, "VA-VAE": 16, "FLUX.2": 4, "DC-AE": 32, "RAE": 16}


def diffusers_input(vae, name, images):
    """The input that diffusers' pipelines make of the posterior's mean, and what they decode of it."""
    if name == "FLUX.2":
        pipe = SimpleNamespace(vae=vae, _patchify_latents=Flux2Pipeline._patchify_latents)
        x = Flux2Pipeline._encode_vae_image(pipe, images, None)
        std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps).view(1, -1, 1, 1)
        z = Flux2Pipeline._unpatchify_latents(x * std + vae.bn.running_mean.view(1, -1, 1, 1))
    elif name == "VA-VAE":
        statistics = (
            torch.tensor(vae.config.latents_mean),
            torch.tensor(vae.config.latents_std),
        )
        z = vae.encode(images).latent_dist.mode()[:, :, None]  # videos have frames
        x = LTXPipeline._normalize_latents(z, *statistics, vae.config.scaling_factor)
        z = LTXPipeline._denormalize_latents(x, *statistics, vae.config.scaling_factor)[:, :, 0]
        x = x[:, :, 0]
    elif name == "SD3":
        latents = vae.encode(images).latent_dist.mode()
        x = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        z = x / vae.config.scaling_factor + vae.config.shift_factor
    elif name == "RAE":  # scales by itself; its images are from 0 to 1
        x = vae.encode((images + 1) / 2).latent
        return x, (2 * vae.decode(x).sample - 1).clamp(-1, 1)
    else:
        x = vae.encode(images).latent * vae.config.scaling_factor
        z = x / vae.config.scaling_factor
    return x, vae.decode(z).sample.clamp(-1, 1)


@torch.no_grad()
@pytest.mark.parametrize("name", CHANNELS)
def test_latents_are_scaled_as_in_the_pipelines_of_diffusers(name):
    vae = layout(name).double()
    images = torch.rand(2, 3, 64, 64).double() * 2 - 1
    space = LatentSpace.of(vae, name)
    assert (space.latent_channels, space.downsampling) == (CHANNELS[name], DOWNSAMPLING[name])
    moments = encode_moments(vae, images)
    side = space.side(64)
    assert moments.shape == (2, space.moment_channels, side, side)
    latents = sample_posterior(moments, torch.zeros(2, space.latent_channels, side, side), space)
    expected, decoded = diffusers_input(vae, name, images)
    torch.testing.assert_close(latents, expected.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(decode(vae, expected), decoded.float(), rtol=1e-6, atol=1e-6)
    assert decode(vae, 1e4 * expected).abs().max() <= 1 and not latents.requires_grad
    torch.testing.assert_close(space.scale(space.unscale(latents)), latents, rtol=1e-6, atol=1e-6)
    assert json.loads(json.dumps(vars(space))) == vars(space)  # manifests and runs hold it as JSON


# ---------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images") / "images", train=4, size=(64, 64))


ARGV = (
    "--model.name moh_dit_small_patch2_75 --model.depth 2 --model.embed_dim 32 --model.num_heads 4 --model.head_budget 0.75 "
    "--model.patch_size 1 --optim.batch_size 4 --log-every 1 --data.workers 0 --data.augment flip --ema.decay 0.9"
).split()


@pytest.fixture(scope="module")
def stored(images, tmp_path_factory):
    """stored(name): (folder of a VAE, folder of its latents); who changes them copies them."""

    @functools.cache
    def write(name):
        folder = tmp_path_factory.mktemp(name)
        vae, cache = str(folder / "vae"), str(folder / "cache")
        layout(name).save_pretrained(vae)
        options = f"--vae {vae} --out {cache} --size 64 --workers 0 --dtype float32".split()
        assert write_latents([*options, "--data", str(images)]) == 0
        return vae, cache

    return write


@pytest.mark.parametrize("name", ["VA-VAE", "FLUX.2", "DC-AE", "RAE"])
def test_stored_latents_are_those_that_are_made_in_every_step(name, images, stored):
    vae, cache = stored(name)
    cached = open_inputs(cache, "none", None, "none")
    online = open_inputs(str(images), vae, 64, "none")
    assert cached.space == online.space == LatentSpace.of(layout(name), vae)
    for inputs in (cached, online):
        assert (inputs.img_size, inputs.channels) == (64 // DOWNSAMPLING[name], CHANNELS[name])
    numbers = np.load(f"{cache}/train.numbers.npy").tolist()  # shards are shuffled
    # At one position of a run, with equal noise.
    items = [online.dataset(0, draw_step, 0.0)[0, n] for n in numbers]
    batch = {
        key: torch.stack([item[key] for item in items]) for key in ("images", "posterior_noise")
    }
    latents = torch.stack([cached.dataset(0, draw_step, 0.0)[0, n]["images"] for n in range(8)])
    torch.testing.assert_close(latents, online.encode(batch)["images"], rtol=1e-5, atol=1e-5)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("VA-VAE", "FLUX.2", "DC-AE")]


@pytest.mark.parametrize("name", ["RAE", *SLOW])
def test_from_images_to_images(name, images, stored, tmp_path, capsys):
    vae, cache = stored(name)
    run = tmp_path / "run"
    pipe_folder = tmp_path / "pipe"
    argv = ["--data.root", images, "--vae", vae, "--data.img_size", 64, "--output", run]
    train_dit.main([*ARGV, *map(str, argv), "--dry-run"])
    assert "its encoder runs in every step" in capsys.readouterr().out
    train = [*ARGV, "--data.root", cache, "--output", str(run)]
    train += "--max-steps 2 --save-every 1".split()
    train_dit.main(train)
    whole = outcome(run)
    shutil.rmtree(run / "checkpoints" / "step_2")
    train_dit.main(train)
    assert "at step 1" in capsys.readouterr().out and outcome(run) == whole

    few = "--num-images 2 --batch-size 2 --sampler ddim --steps 2 --cfg-scale 1.5".split()
    of_run = ["--checkpoint", run, "--out", tmp_path / "a.npz", "--save-pipeline", pipe_folder]
    of_pipeline = ["--checkpoint", pipe_folder, "--out", tmp_path / "b.npz", "--vae", vae]
    sample.main([*few, *map(str, of_run)])
    sample.main([*few, *map(str, of_pipeline)])
    drawn = [np.load(tmp_path / f"{letter}.npz")["arr_0"] for letter in "ab"]
    assert drawn[0].shape == (2, 64, 64, 3) and drawn[0].std() > 1 and (drawn[1] == drawn[0]).all()
    capsys.readouterr()
    pipe = MoHDiTPipeline.from_pretrained(pipe_folder)
    assert "Expected types" not in capsys.readouterr().err
    assert LatentSpace.of(pipe.vae, vae) == LatentSpace.of(layout(name), vae)


def test_the_encoder_of_an_rae_is_enough_to_store_latents(images, stored, tmp_path, capsys):
    whole, cache = map(Path, stored("RAE"))
    vae = shutil.copytree(whole, tmp_path / "vae")
    weights = vae / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if not k.startswith("decoder.")}, weights)
    argv = ["--vae", vae, "--data", images, *"--size 64 --workers 0 --dtype float32 --out".split()]
    assert write_latents([*argv, tmp_path / "again"]) == 0
    record = json.loads((cache / "train.meta.json").read_text())
    again = json.loads((tmp_path / "again" / "train.meta.json").read_text())
    assert again["shards"] == record["shards"]
    assert dict(again["vae"], name=str(whole)) == record["vae"]
    with one_line(f"vae {vae} lack 23 decoder.decoder_embed.bias"):
        load_vae(str(vae))
    assert write_latents([*argv, tmp_path / "small", "--size", 32]) == 2
    assert_says(capsys.readouterr().err, f"--size 32 VAE {vae} 64 pixels")


# ---------------------------------------------------------------- refusals


SPACE = dict(
    name="x", sha256="", scaling_factor=1.0, shift_factor=None, downsampling=2, latent_channels=4
)


@pytest.mark.parametrize(
    "changes, facts",
    [
        pytest.param(
            dict(latents_mean=[0.0] * 4),
            "latents_std None list 4 channels",
            id="means alone",
        ),
        pytest.param(
            dict(latents_std=[1.0] * 4),
            "latents_mean None list 4 channels",
            id="deviations alone",
        ),
        pytest.param(
            dict(latents_mean=[0.0] * 3, latents_std=[1.0] * 4),
            "latents_mean 3 list 4 channels",
            id="three means of four channels",
        ),
        pytest.param(
            dict(latents_mean=[0.0] * 4, latents_std=[1.0, 1.0, 0.0, 1.0]),
            "latents_std 0 number above",
            id="a deviation of 0",
        ),
        pytest.param(
            dict(latents_mean=[0.0] * 4, latents_std=[1.0, -2.0, 1.0, 1.0]),
            "latents_std -2 number above 0",
            id="a deviation below 0",
        ),
        pytest.param(
            dict(latents_mean=[0.0, "a", 0, 0], latents_std=[1.0] * 4),
            "latents_mean 'a' finite number",
            id="a mean that is no number",
        ),
        pytest.param(
            dict(latents_mean=0.0, latents_std=1.0),
            "latents_mean 0.0 list 4 channels",
            id="numbers in place of lists",
        ),
        pytest.param(
            dict(latents_mean=[0.0] * 4, latents_std=[1.0] * 4, shift_factor=0.1),
            "shift_factor 0.1 latents_mean one",
            id="a shift beside means",
        ),
        pytest.param(
            dict(scaling_factor=None),
            "scaling_factor None finite number",
            id="no scaling factor",
        ),
        pytest.param(
            dict(scaling_factor=0),
            "scaling_factor 0 number above",
            id="a scaling factor of 0",
        ),
    ],
)
def test_statistics_that_cannot_be(changes, facts):
    refuse(facts, lambda: LatentSpace(**SPACE | changes))


def test_the_first_difference_of_two_vaes_is_named():
    space = LatentSpace(**SPACE, latents_mean=[0.0] * 4, latents_std=[1.0, 1.0, 1.0, 2.0])
    other = dataclasses.replace(space, latents_std=[1.0, 1.0, 1.0, 3.0])
    assert other.difference(space) == "latents_std of channel 3 is 3.0 here, 2.0 there"
    plain = dataclasses.replace(space, latents_mean=None, latents_std=None)
    assert plain.difference(space) == "latents_mean is None here, 4 numbers there"
    assert space.difference(space) == ""
