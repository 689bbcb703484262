"""The VAE: loading, its fingerprint, and from posteriors to the input of a diffusion model."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from moh_vision.diffusion.latents.vae import (
    LatentSpace,
    load_vae,
    sample_posterior,
    vae_fingerprint,
)
from tests.support.refusals import refuse
from tests.support.tiny_vae import save_tiny_vae, tiny_vae

SPACE, WEIGHTS = LatentSpace("x", "", 0.5, None, 2, 4), "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vae")


@pytest.fixture(scope="module")
def saved(folder):
    return save_tiny_vae(folder / "vae")


def test_loaded_ready_for_use(saved):
    vae = load_vae(saved)
    assert not vae.training and not any(p.requires_grad for p in vae.parameters())
    assert {p.dtype for p in vae.parameters()} == {torch.float32}
    assert LatentSpace.of(vae, "mine") == LatentSpace(
        "mine", vae_fingerprint(vae), 0.18215, None, 2, 4
    )
    for name, tensor in tiny_vae().state_dict().items():
        assert torch.equal(vae.state_dict()[name], tensor)


def zeroed(vae):
    for parameter in vae.parameters():
        torch.nn.init.zeros_(parameter)
    return vae


def test_the_fingerprint_is_of_weights_and_configuration_not_of_files(saved, folder, tmp_path):
    expected = vae_fingerprint(tiny_vae())
    assert vae_fingerprint(load_vae(str(folder))) == expected  # a pipeline, with the VAE in vae/
    tiny_vae().save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert vae_fingerprint(load_vae(str(tmp_path / "parts"))) == expected
    assert vae_fingerprint(load_vae(save_tiny_vae(tmp_path / "size", sample_size=64))) == expected
    # Stored latents and runs name their VAE by it, so it is the same for ever.
    assert vae_fingerprint(zeroed(tiny_vae())).startswith("4931d58dd0f28d98")
    others = [
        tiny_vae(seed=1),
        tiny_vae(scaling_factor=0.2),
        tiny_vae(shift_factor=0.1),
        tiny_vae(act_fn="gelu"),
    ]
    others += [tiny_vae(latents_mean=[0.0] * 4, latents_std=[std] * 4) for std in (1.0, 2.0)]
    one_bit = tiny_vae()
    one_bit.decoder.conv_out.bias.data.view(torch.int32)[0] ^= 1
    sums = {expected, *(vae_fingerprint(vae) for vae in (*others, one_bit))}
    assert len(sums) == 8


def config(**changes):
    """Change the configuration in a folder."""

    def change(place):
        file = place / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def pickled(place):
    (place / WEIGHTS).unlink()
    tiny_vae().save_pretrained(place, safe_serialization=False)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (shutil.rmtree, "vae {0}: no such folder"),
        (
            lambda place: (place / "config.json").unlink(),
            "vae {0}: no config.json in the folder, nor in its subfolder",
        ),
        (
            lambda place: (place / "config.json").write_text("{"),
            "{0}/config.json: not a configuration that can be",
        ),
        (
            config(_class_name="UNet2DModel"),
            "vae {0}: holds a UNet2DModel, needed is an AutoencoderKL",
        ),
        (lambda place: (place / WEIGHTS).unlink(), f"vae {{0}}: .*no file named {WEIGHTS}"),
        (pickled, f"vae {{0}}: .*no file named {WEIGHTS}"),
        (lambda place: os.truncate(place / WEIGHTS, 900), "vae {0}: Unable to load weights"),
        (config(latent_channels=8), "vae {0}: .*(shape|lack)"),
        (
            config(latents_mean=[0.0] * 4),
            "vae {0}: latents_std: None, expected a list with one for each of 4 channels",
        ),
        (
            config(layers_per_block=2),
            "vae {0}: its weights lack [0-9]+ tensors of the model, the first ",
        ),
        (lambda place: save_tiny_vae(place, in_channels=4), "vae {0}: encodes 4 channels"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(saved, tmp_path, capfd, spoil, words):
    place = shutil.copytree(saved, tmp_path / "vae")
    spoil(place)
    capfd.readouterr()
    refuse(words.format(place), load_vae, str(place), error=(ValueError, FileNotFoundError))
    assert capfd.readouterr().err == ""


def test_a_draw_is_that_of_diffusers():
    moments, noise = (
        40 * torch.randn(3, 8, 5, 5),
        torch.randn(3, 4, 5, 5),
    )  # beyond both ends of the clamp
    posterior = DiagonalGaussianDistribution(moments)
    expected = posterior.mean + posterior.std * noise
    for shift in (None, 0.7):
        space = dataclasses.replace(SPACE, shift_factor=shift)
        drawn = sample_posterior(moments, noise, space)
        torch.testing.assert_close(drawn, (expected - (shift or 0)) * 0.5)
        assert torch.equal(sample_posterior(moments[1], noise[1], space), drawn[1])
