"""A VAE of a few thousand random weights; it downsamples by 2."""

import torch
from diffusers import AutoencoderKL


def tiny_vae(seed=0, **changes):
    torch.manual_seed(seed)
    blocks = dict(down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
    sizes = dict(block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=4, sample_size=32)
    return AutoencoderKL(**{**blocks, **sizes, **changes}).eval()


def save_tiny_vae(folder, seed=0, **changes) -> str:
    tiny_vae(seed, **changes).save_pretrained(folder)
    return str(folder)
