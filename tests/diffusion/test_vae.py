"""The VAE: loading, its fingerprint, and from posteriors to the input of a diffusion model."""

import dataclasses
import json
import shutil

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from refusals import one_line
from tiny_vae import save_tiny_vae, tiny_vae

from moh_vision.diffusion.latents.vae import (
    LatentSpace,
    decode,
    encode_moments,
    load_vae,
    sample_posterior,
    vae_fingerprint,
)

SPACE = LatentSpace("x", "", 0.5, None, 2, 4)


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
    assert LatentSpace.of(vae, "mine") == LatentSpace("mine", vae_fingerprint(vae), 0.18215, None, 2, 4)
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
    others = [tiny_vae(seed=1), tiny_vae(scaling_factor=0.2), tiny_vae(shift_factor=0.1), tiny_vae(act_fn="gelu")]
    others += [tiny_vae(latents_mean=[0.0] * 4, latents_std=[std] * 4) for std in (1.0, 2.0)]
    one_bit = tiny_vae()
    one_bit.decoder.conv_out.bias.data.view(torch.int32)[0] ^= 1
    sums = {expected, *(vae_fingerprint(vae) for vae in (*others, one_bit))}
    assert len(sums) == 8


def broken(saved, tmp_path, how):
    place = tmp_path / "vae"
    if how in ("no folder", "no config"):
        if how == "no config":
            place.mkdir()
        return place
    shutil.copytree(saved, place)
    config, weights = place / "config.json", place / "diffusion_pytorch_model.safetensors"
    if how == "other model":
        config.write_text(json.dumps(dict(json.loads(config.read_text()), _class_name="UNet2DModel")))
    if how == "torn config":
        config.write_text("{")
    if how == "no weights":
        weights.unlink()
    if how == "torn weights":
        weights.write_bytes(weights.read_bytes()[:900])
    if how == "other shapes":
        config.write_text(json.dumps(dict(json.loads(config.read_text()), latent_channels=8)))
    if how == "deeper":
        config.write_text(json.dumps(dict(json.loads(config.read_text()), layers_per_block=2)))
    if how == "pickle":
        weights.unlink()
        tiny_vae().save_pretrained(place, safe_serialization=False)
    return place


@pytest.mark.parametrize(
    "how, words",
    [
        ("no folder", "vae {0}: no such folder"),
        ("no config", "vae {0}: no config.json in the folder, nor in its subfolder vae"),
        ("torn config", "{0}/config.json: not a configuration that can be read"),
        ("other model", "vae {0}: holds a UNet2DModel, needed is an AutoencoderKL"),
        ("no weights", "vae {0}: .*no file named diffusion_pytorch_model.safetensors"),
        ("pickle", "vae {0}: .*no file named diffusion_pytorch_model.safetensors"),
        ("torn weights", "vae {0}: Unable to load weights"),
        ("other shapes", "vae {0}: .*(shape|lack)"),
        ("deeper", "vae {0}: its weights lack [0-9]+ tensors of the model, the first "),
    ],
)
def test_what_cannot_be_loaded_is_one_line(saved, tmp_path, capfd, how, words):
    place = broken(saved, tmp_path, how)
    with one_line(words.format(place), (ValueError, FileNotFoundError)):
        load_vae(str(place))
    assert capfd.readouterr().err == ""


def test_a_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_, **__):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with one_line("vae some/vae: no folder of that name here, and from the hub: the hub cannot be"):
        load_vae("some/vae")


def test_vaes_that_are_not_of_images(tmp_path):
    with pytest.raises(ValueError, match="encodes 4 channels"):
        load_vae(save_tiny_vae(tmp_path, in_channels=4))


def test_a_draw_is_that_of_diffusers():
    moments, noise = 40 * torch.randn(3, 8, 5, 5), torch.randn(3, 4, 5, 5)  # beyond both ends of the clamp
    posterior = DiagonalGaussianDistribution(moments)
    expected = posterior.mean + posterior.std * noise
    for shift in (None, 0.7):
        space = dataclasses.replace(SPACE, shift_factor=shift)
        drawn = sample_posterior(moments, noise, space)
        torch.testing.assert_close(drawn, (expected - (shift or 0)) * 0.5)
        assert torch.equal(sample_posterior(moments[1], noise[1], space), drawn[1])


def test_draws_have_the_posteriors_mean_and_variance():
    moments = torch.randn(8, 2, 2)
    drawn = sample_posterior(moments, torch.randn(40_000, 4, 2, 2), SPACE)
    mean, logvar = moments.chunk(2)
    torch.testing.assert_close(drawn.mean(0), 0.5 * mean, rtol=0, atol=0.02)
    torch.testing.assert_close(drawn.std(0), 0.5 * torch.exp(0.5 * logvar), rtol=0.03, atol=0)


@pytest.mark.parametrize("shift", [None, 0.7])
def test_decoding_undoes_the_scaling(shift):
    vae = tiny_vae(scaling_factor=0.3, shift_factor=shift)
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    moments = encode_moments(vae, images)
    latents = sample_posterior(moments, torch.zeros(2, 4, 8, 8), LatentSpace.of(vae, ""))
    decoded = decode(vae, latents)
    expected = vae.decode(vae.encode(images).latent_dist.mode()).sample
    torch.testing.assert_close(decoded, expected.clamp(-1, 1))
    assert not decoded.requires_grad and decoded.shape == images.shape
    assert decode(vae, 1e4 * latents).abs().max() <= 1


def test_sizes_that_the_vae_would_round():
    assert SPACE.side(256) == 128
    with pytest.raises(ValueError, match="size 255: not a multiple of 2, the downsampling of the VAE x"):
        SPACE.side(255)
