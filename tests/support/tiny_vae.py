"""VAEs with a few thousand random weights, and the command that writes latents."""

import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLFlux2, AutoencoderRAE

from moh_vision.__main__ import main


def tiny_vae(seed=0, **changes):
    """Return a VAE with 4 latent channels that downsamples by 2."""
    torch.manual_seed(seed)
    blocks = dict(
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2
    )
    sizes = dict(
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=32,
    )
    return AutoencoderKL(**{**blocks, **sizes, **changes}).eval()


def coarse_vae(seed=0):
    """Return a VAE with the channels of `tiny_vae` that downsamples by 4."""
    blocks = dict(
        down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3
    )
    return tiny_vae(seed, **blocks, block_out_channels=(8, 8, 8))


def save_tiny_vae(folder, seed=0, **changes) -> str:
    tiny_vae(seed, **changes).save_pretrained(folder)
    return str(folder)


def layout(name, seed=0):
    """Return a VAE with the class, latent channels and latent scaling of a released one, but fewer layers."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(128, generator=generator)
    var = torch.rand(128, generator=generator) + 0.5
    if name == "SD3":
        return tiny_vae(seed, latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609)
    if name == "VA-VAE":  # 32 channels, downsampling 16
        blocks = dict(
            down_block_types=["DownEncoderBlock2D"] * 5, up_block_types=["UpDecoderBlock2D"] * 5
        )
        statistics = dict(
            latents_mean=mean[:32].tolist(),
            latents_std=var[:32].sqrt().tolist(),
            scaling_factor=1.0,
        )
        return tiny_vae(
            seed, **blocks, block_out_channels=(8,) * 5, latent_channels=32, **statistics
        )
    if name == "FLUX.2":  # 32 channels; 2 x 2 pixels are normalised together, as 128 channels
        blocks = dict(
            down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2
        )
        vae = AutoencoderKLFlux2(
            **blocks, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4
        )
        vae.bn.running_mean.copy_(mean)
        vae.bn.running_var.copy_(var)
        return vae.eval()
    # Latents are the tokens of a frozen encoder, with statistics for each position; downsampling 16, of 64 pixels only.
    if name == "RAE":
        sizes = dict(
            encoder_hidden_size=64,
            encoder_num_hidden_layers=1,
            encoder_patch_size=16,
            encoder_input_size=64,
        )
        sizes.update(
            decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=2
        )
        statistics = dict(
            latents_mean=mean[:64].view(64, 1, 1).expand(64, 4, 4),
            latents_std=torch.rand(64, 4, 4) + 0.5,
        )
        return AutoencoderRAE(
            encoder_type="mae", **sizes, decoder_intermediate_size=32, **statistics
        ).eval()
    assert name == "DC-AE"  # no posterior, downsampling 32
    arguments = {}
    for part in ("encoder", "decoder"):
        arguments[f"{part}_block_types"] = ["ResBlock"] * 5 + ["EfficientViTBlock"]
        arguments[f"{part}_block_out_channels"] = (8,) * 5 + (32,)
        arguments[f"{part}_layers_per_block"] = (1,) * 6
    return AutoencoderDC(**arguments, attention_head_dim=8, scaling_factor=0.41407).eval()


def write_latents(argv) -> int:
    """Run `python -m moh_vision latents` and return its exit code."""
    return main(["latents", *map(str, argv)])


@torch.no_grad()
def no_longer_zero(model, scale):
    """Add noise to the parameters and return the model: the output of a new DiT is 0, and its blocks are the identity."""
    for p in model.parameters():
        if p.requires_grad:
            p.add_(scale * torch.randn_like(p))
    return model
