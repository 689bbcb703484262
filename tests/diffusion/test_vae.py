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

SPACE = LatentSpace("x", "", 0.5, None, 2, 4)
WEIGHTS = "diffusion_pytorch_model.safetensors"


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
    variants = [
        tiny_vae(seed=1),
        tiny_vae(scaling_factor=0.2),
        tiny_vae(shift_factor=0.1),
        tiny_vae(act_fn="gelu"),
        tiny_vae(latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        tiny_vae(latents_mean=[0.0] * 4, latents_std=[2.0] * 4),
    ]
    one_bit = tiny_vae()
    one_bit.decoder.conv_out.bias.data.view(torch.int32)[0] ^= 1
    sums = {expected, *(vae_fingerprint(vae) for vae in (*variants, one_bit))}
    assert len(sums) == 8


def changed_config(**changes):
    """spoil(folder): change the configuration in a folder."""

    def spoil(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def remove_config(folder):
    (folder / "config.json").unlink()


def tear_config(folder):
    (folder / "config.json").write_text("{")


def remove_weights(folder):
    (folder / WEIGHTS).unlink()


def truncate_weights(folder):
    os.truncate(folder / WEIGHTS, 900)


def pickle_weights(folder):
    remove_weights(folder)
    tiny_vae().save_pretrained(folder, safe_serialization=False)


def encode_four_channels(folder):
    save_tiny_vae(folder, in_channels=4)


@pytest.mark.parametrize(
    "spoil, expected, facts",
    [
        pytest.param(shutil.rmtree, FileNotFoundError, "vae {0} folder", id="no folder"),
        pytest.param(
            remove_config, FileNotFoundError, "vae {0} config.json", id="no configuration"
        ),
        pytest.param(tear_config, ValueError, "{0}/config.json", id="a torn configuration"),
        pytest.param(
            changed_config(_class_name="UNet2DModel"),
            ValueError,
            "vae {0} UNet2DModel AutoencoderKL AutoencoderKLFlux2 AutoencoderDC AutoencoderRAE",
            id="another model",
        ),
        pytest.param(remove_weights, ValueError, f"vae {{0}} {WEIGHTS}", id="no weights"),
        pytest.param(pickle_weights, ValueError, f"vae {{0}} {WEIGHTS}", id="pickled weights"),
        pytest.param(truncate_weights, ValueError, f"vae {{0}} {{0}}/{WEIGHTS}", id="torn weights"),
        pytest.param(
            changed_config(latent_channels=8),
            ValueError,
            "vae {0} decoder.conv_in.weight 8 4",
            id="more latent channels",
        ),
        pytest.param(
            changed_config(latents_mean=[0.0] * 4),
            ValueError,
            "vae {0} latents_std None 4",
            id="means without deviations",
        ),
        pytest.param(
            changed_config(layers_per_block=2),
            ValueError,
            "vae {0} lack 32 decoder.up_blocks.0.resnets.2.conv1.bias",
            id="more layers",
        ),
        pytest.param(
            encode_four_channels, ValueError, "vae {0} 4 channels 3 1 grey", id="four channels"
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_line(saved, tmp_path, capfd, spoil, expected, facts):
    folder = shutil.copytree(saved, tmp_path / "vae")
    spoil(folder)
    capfd.readouterr()
    refuse(facts.format(folder), load_vae, str(folder), error=expected)
    assert capfd.readouterr().err == ""


def test_a_draw_is_that_of_diffusers():
    moments = 40 * torch.randn(3, 8, 5, 5)  # beyond both ends of the clamp
    noise = torch.randn(3, 4, 5, 5)
    posterior = DiagonalGaussianDistribution(moments)
    expected = posterior.mean + posterior.std * noise
    for shift in (None, 0.7):
        space = dataclasses.replace(SPACE, shift_factor=shift)
        drawn = sample_posterior(moments, noise, space)
        torch.testing.assert_close(drawn, (expected - (shift or 0)) * 0.5)
        assert torch.equal(sample_posterior(moments[1], noise[1], space), drawn[1])
