"""The VAE of latent diffusion: diffusers' AutoencoderKL, and what is done with it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from moh_vision.engine.commands import reason_of

DEFAULT_VAE = "stabilityai/sd-vae-ft-ema"
# Entries of the configuration that change what encoding and decoding compute; others are names and memory settings.
SIGNIFICANT = (
    "in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels", "layers_per_block",
    "act_fn", "latent_channels", "norm_num_groups", "scaling_factor", "shift_factor", "use_quant_conv",
    "use_post_quant_conv", "mid_block_add_attention",
)  # fmt: skip


@dataclass(frozen=True)
class LatentSpace:
    """What identifies the latents of a VAE, and what turns a posterior into the input of a diffusion model.

    Args:
        name: of the VAE, as it was given.
        sha256: see `vae_fingerprint`.
        scaling_factor, shift_factor: latents are (draw - shift_factor) * scaling_factor; None: no shift.
        downsampling: pixels to the side of a latent.
        latent_channels: C.
    """

    name: str
    sha256: str
    scaling_factor: float
    shift_factor: Optional[float]
    downsampling: int
    latent_channels: int

    @classmethod
    def of(cls, vae, name: str) -> LatentSpace:
        """That of an AutoencoderKL."""
        config = vae.config
        return cls(
            name=name,
            sha256=vae_fingerprint(vae),
            scaling_factor=float(config.scaling_factor),
            shift_factor=None if config.shift_factor is None else float(config.shift_factor),
            downsampling=2 ** (len(config.block_out_channels) - 1),
            latent_channels=config.latent_channels,
        )

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256[:12]})"

    def side(self, img_size: int, key: str = "size") -> int:
        """Side of the latents of square images.

        Raises:
            ValueError: naming `key`, if the VAE would round it.
        """
        if img_size % self.downsampling:
            raise ValueError(
                f"{key} {img_size}: not a multiple of {self.downsampling}, the downsampling of the VAE {self.name}"
            )
        return img_size // self.downsampling


def load_vae(name: str):
    """A diffusers AutoencoderKL in float32 and eval mode, without gradients.

    Args:
        name: of a model on the Hugging Face hub, or a local folder; a pipeline with the VAE in `vae/` does too. Weights
            are read from safetensors only.

    Raises:
        ValueError, FileNotFoundError: one line that names the VAE: no such folder, no configuration in it, another kind
            of model, missing weights, a hub that cannot be reached.
    """
    from diffusers import AutoencoderKL
    from diffusers.utils import logging

    subfolder, config = _find(name)
    kind = config.get("_class_name", "AutoencoderKL")
    if kind != "AutoencoderKL":
        raise ValueError(f"vae {name}: holds a {kind}, needed is an AutoencoderKL")
    shown = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # what it would say of weights that are missing is said below
    try:
        vae, found = AutoencoderKL.from_pretrained(
            name, subfolder=subfolder, torch_dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # a damaged configuration or file fails anywhere
        raise ValueError(f"vae {name}: {reason_of(error)}") from None
    finally:
        logging.set_verbosity(shown)
    if found["missing_keys"] or found["mismatched_keys"]:
        missing = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
        raise ValueError(f"vae {name}: its weights lack {len(missing)} tensors of the model, the first {missing[0]}")
    if vae.config.in_channels not in (1, 3) or vae.config.out_channels != vae.config.in_channels:
        raise ValueError(f"vae {name}: encodes {vae.config.in_channels} channels; images have 3, or 1 if grey")
    check_scaling(vae, f"vae {name}")
    return vae.requires_grad_(False).eval()


def check_scaling(vae, name: str) -> None:
    """Raise ValueError for a VAE whose latents are scaled by more than scaling_factor and shift_factor."""
    if vae.config.get("latents_mean") is not None or vae.config.get("latents_std") is not None:
        raise ValueError(f"{name}: normalises latents by latents_mean and latents_std, which is not supported")


def _find(name: str):
    """(subfolder or None, configuration) of a VAE."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    folder = Path(name)
    if folder.is_dir():
        for subfolder in (None, "vae"):
            file = folder / (subfolder or "") / "config.json"
            if file.is_file():
                try:
                    return subfolder, dict(json.loads(file.read_text()))
                except (ValueError, TypeError, RecursionError) as error:
                    raise ValueError(f"{file}: not a configuration that can be read ({error})") from None
        raise FileNotFoundError(f"vae {name}: no config.json in the folder, nor in its subfolder vae")
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1 or folder.exists():
        raise FileNotFoundError(f"vae {name}: no such folder")
    for subfolder in (None, "vae"):
        try:
            return subfolder, json.loads(Path(hf_hub_download(name, "config.json", subfolder=subfolder)).read_text())
        except LocalEntryNotFoundError:
            reason = "the hub cannot be reached, and it is not in the local cache"
            break
        except EntryNotFoundError:
            reason = "that repository has no config.json, nor vae/config.json"
        except (OSError, ValueError) as error:  # no such repository, no permission, no possible name
            reason = reason_of(error)
            break
    raise ValueError(f"vae {name}: no folder of that name here, and from the hub: {reason}")


def vae_fingerprint(vae) -> str:
    """sha256 (hexadecimal) over the significant configuration and all weights in the order of their names.

    The same weights give the same sum, whatever file or folder they were read from.
    """
    config = {key: vae.config[key] for key in SIGNIFICANT}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=list).encode())
    for name, tensor in sorted(vae.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@torch.no_grad()
def encode_moments(vae, images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in -1 .. 1 -> mean and log variance of their posteriors [B, 2C, h, w], float32."""
    return vae.encode(images).latent_dist.parameters.float()


def sample_posterior(moments: Tensor, noise: Tensor, space: LatentSpace) -> Tensor:
    """A draw from posteriors, scaled for diffusion.

    Args:
        moments: [..., 2C, h, w], as from `encode_moments`.
        noise: [..., C, h, w], standard normal.
        space: of the VAE.

    Returns:
        latents [..., C, h, w].
    """
    mean, logvar = moments.chunk(2, dim=-3)
    draw = mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise  # clamped as diffusers does
    return (draw - (space.shift_factor or 0.0)) * space.scaling_factor


@torch.no_grad()
def decode(vae, latents: Tensor) -> Tensor:
    """Latents [B, C, h, w] as a diffusion model makes them -> images [B, 3, H, W] in -1 .. 1."""
    unscaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return vae.decode(unscaled.to(vae.dtype)).sample.float().clamp(-1, 1)
