"""Load and use VAEs of latent diffusion, which are image autoencoders of diffusers."""

import inspect
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh_vision.common.errors import reason_of
from moh_vision.models.frozen import digest_of

DEFAULT_VAE = "stabilityai/sd-vae-ft-ema"
# Classes of diffusers that can be loaded.
VAES = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderDC", "AutoencoderRAE")
# Entries of a VAE's configuration that do not change what it computes here.
IGNORED = {"sample_size", "force_upcast"}
STATISTICS = ("latents_mean", "latents_std")


@dataclass(frozen=True)
class LatentSpace:
    """Identifies the latents of a VAE, and scales them for a diffusion model.

    As in diffusers' pipelines, a draw from the posterior is scaled to (draw - shift_factor) * scaling_factor or, if
    the VAE has statistics, to (draw - latents_mean) * scaling_factor / latents_std.

    Attributes:
        name: name or folder of the VAE.
        sha256: see `vae_fingerprint`.
        scaling_factor: 1 for an AutoencoderRAE, which scales its latents itself.
        shift_factor: None or 0 if there are statistics.
        downsampling: pixels per side of a latent.
        latent_channels: C.
        latents_mean, latents_std: statistics, C numbers each.
        deterministic: the VAE has no posterior, and encodes an image to one latent.
        img_size: the only side of images that the VAE takes; None: any.
    """

    name: str
    sha256: str
    scaling_factor: float
    shift_factor: float | None
    downsampling: int
    latent_channels: int
    latents_mean: list[float] | None = None
    latents_std: list[float] | None = None
    deterministic: bool = False
    img_size: int | None = None

    def __post_init__(self):
        _refuse_no_number("scaling_factor", self.scaling_factor, above_zero=True)
        if self.shift_factor is not None:
            _refuse_no_number("shift_factor", self.shift_factor)
        if self.latents_mean is None and self.latents_std is None:
            return
        for key, numbers in zip(STATISTICS, (self.latents_mean, self.latents_std)):
            expected = f"expected a list with one for each of {self.latent_channels} channels"
            if not isinstance(numbers, list):
                raise ValueError(f"{key}: {numbers!r}, {expected}")
            if len(numbers) != self.latent_channels:
                raise ValueError(f"{key}: {len(numbers)} numbers, {expected}")
            for number in numbers:
                _refuse_no_number(key, number, above_zero=key == "latents_std")
        if self.shift_factor:
            raise ValueError(
                f"shift_factor {self.shift_factor:g} and latents_mean: expected one of the two"
            )

    @classmethod
    def of(cls, vae, name: str | None = None) -> Self:
        """Return the latent space of a diffusers VAE; without `name`, name and sha256 are "" and no weights are read."""
        config = vae.config
        known = dict(name="", sha256="")
        if name is not None:
            known = dict(name=name, sha256=vae_fingerprint(vae))
        if _is_rae(vae):
            return cls(
                **known,
                scaling_factor=1.0,
                shift_factor=None,
                downsampling=config.patch_size,
                latent_channels=config.encoder_hidden_size,
                deterministic=True,
                img_size=vae.decoder_image_size,
            )
        patch = _patch(vae)
        widths = config.get("block_out_channels") or config.encoder_block_out_channels
        if hasattr(vae, "bn"):  # the VAE of FLUX.2 keeps its statistics in a batch norm
            mean = vae.bn.running_mean.tolist()
            std = torch.sqrt(vae.bn.running_var.double() + config.batch_norm_eps).tolist()
        else:
            mean, std = (_as_list(config.get(key)) for key in STATISTICS)
        return cls(
            **known,
            scaling_factor=config.get("scaling_factor", 1.0),
            shift_factor=config.get("shift_factor"),
            downsampling=patch * 2 ** (len(widths) - 1),
            latent_channels=patch**2 * config.latent_channels,
            latents_mean=mean,
            latents_std=std,
            deterministic=type(vae).__name__ == "AutoencoderDC",
        )

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256[:12]})"

    @property
    def moment_channels(self) -> int:
        """Channels of what `encode_moments` returns: C for the mean and, unless deterministic, C for the log variance."""
        if self.deterministic:
            return self.latent_channels
        return 2 * self.latent_channels

    def difference(self, other: Self) -> str:
        """Return in words the first difference in how latents are made or scaled; "" if there is none."""
        for key in ("downsampling", "scaling_factor", "shift_factor", *STATISTICS):
            # 0 and None are the same shift.
            here = getattr(self, key) or None
            there = getattr(other, key) or None
            if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
                for channel, (number, other_number) in enumerate(zip(here, there)):
                    if number != other_number:
                        return f"{key} of channel {channel} is {number} here, {other_number} there"
            elif here != there:
                return f"{key} is {_counted(here)} here, {_counted(there)} there"
        return ""

    def side(self, img_size: int, key: str = "size") -> int:
        """Return the side of the latents of square images; ValueError, which names `key`, for images that do not fit."""
        if self.img_size and img_size != self.img_size:
            raise ValueError(
                f"{key} {img_size}: the VAE {self.name} takes images of {self.img_size} pixels"
            )
        if img_size % self.downsampling:
            raise ValueError(
                f"{key} {img_size}: not a multiple of {self.downsampling}, the downsampling of the VAE {self.name}"
            )
        return img_size // self.downsampling

    def scale(self, draw: Tensor) -> Tensor:
        """Scale latents [..., C, h, w] of the VAE for a diffusion model."""
        shift, factor = self._terms(draw)
        return (draw - shift) * factor

    def unscale(self, latents: Tensor) -> Tensor:
        """Scale latents [..., C, h, w] of a diffusion model back for the VAE: the inverse of `scale`."""
        shift, factor = self._terms(latents)
        return latents / factor + shift

    def _terms(self, like: Tensor):
        """Return the shift and the factor of the scaling, as numbers or as tensors [C, 1, 1] with the type of `like`."""
        if self.latents_mean is None:
            return self.shift_factor or 0.0, self.scaling_factor
        mean, std = (
            torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, 1, 1)  # [C, 1, 1]
            for numbers in (self.latents_mean, self.latents_std)
        )
        return mean, self.scaling_factor / std


def _as_list(numbers):
    """Return statistics as a list if they are a tuple, so that they are equal after a round trip through JSON."""
    if isinstance(numbers, tuple):
        return list(numbers)
    return numbers


def _counted(value) -> str:
    """Return a value as text; of a list, only the length."""
    if isinstance(value, list):
        return f"{len(value)} numbers"
    return str(value)


def _refuse_no_number(key: str, number, above_zero: bool = False) -> None:
    """Raise ValueError unless `number` is a finite number and, with `above_zero`, positive."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number):
        raise ValueError(f"{key} {number!r}: expected a finite number")
    if above_zero and number <= 0:
        raise ValueError(f"{key} {number:g}: expected a number above 0")


def _patch(vae) -> int:
    """Return the side of the patches of latents that are folded into channels: 2 for FLUX.2, else 1."""
    if type(vae).__name__ == "AutoencoderKLFlux2":
        return vae.config.patch_size[0]
    return 1


def _is_rae(vae) -> bool:
    return type(vae).__name__ == "AutoencoderRAE"


def image_channels(vae) -> int:
    """Return the channels of the images that a VAE encodes, or that a model of pixels works on."""
    return vae.config.get("in_channels", 3)  # an AutoencoderRAE has no such entry, and encodes RGB


class NotAtHand(ValueError):
    """Raised for a VAE that is neither a folder nor in the local cache of the hub."""


def load_vae(name: str, fetch: bool = True, decodes: bool = True):
    """Load a VAE of diffusers from safetensors, in float32 and eval mode, with frozen weights.

    Args:
        name: name on the Hugging Face hub, or the folder of a VAE or of a pipeline with a subfolder `vae`.
        fetch: ask the hub for a VAE that is not on this machine; False: raise NotAtHand instead.
        decodes: whether the VAE is to decode. If not, an AutoencoderRAE is returned without its decoder, whose
            weights the file may lack.
    """
    # Look on this machine before asking the hub.
    try:
        return _load(name, local=True, decodes=decodes)
    except NotAtHand:
        if not fetch:
            raise
    return _load(name, local=False, decodes=decodes)


def _load(name: str, local: bool, decodes: bool):
    import diffusers
    from diffusers.utils import logging

    subfolder, config = _find(name, local)
    class_name = config.get("_class_name", "AutoencoderKL")
    known = [known for known in VAES if hasattr(diffusers, known)]
    if class_name not in known:
        raise ValueError(
            f"vae {name}: holds a {class_name}, needed is an {', '.join(known[:-1])} or {known[-1]}"
        )
    shown = logging.get_verbosity()
    # Silence diffusers' warning about missing weights: they raise an error below.
    logging.set_verbosity(logging.CRITICAL)
    try:
        vae, loading = getattr(diffusers, class_name).from_pretrained(
            name,
            subfolder=subfolder,
            torch_dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=local,
        )
    except Exception as error:  # a damaged configuration or file may raise any error
        problem = f"vae {name}: {reason_of(error)}"
        # Files may be missing from the cache that the hub has.
        if local and not Path(name).is_dir():
            raise NotAtHand(problem) from None
        raise ValueError(problem) from None
    finally:
        logging.set_verbosity(shown)
    mismatched = [key for key, *_ in loading["mismatched_keys"]]
    # Both have no order of their own: sorted, so that a message names the same tensor each time.
    missing = sorted([*loading["missing_keys"], *mismatched])
    if _is_rae(vae) and not decodes:
        vae.decoder = None
        missing = [key for key in missing if not key.startswith("decoder.")]
    if missing:
        raise ValueError(
            f"vae {name}: its weights lack {len(missing)} tensors of the model, the first {missing[0]}"
        )
    channels = image_channels(vae)
    if channels not in (1, 3) or vae.config.get("out_channels", channels) != channels:
        raise ValueError(f"vae {name}: encodes {channels} channels; images have 3, or 1 if grey")
    try:
        LatentSpace.of(vae)
    except ValueError as error:
        raise ValueError(f"vae {name}: {error}") from None
    return vae.requires_grad_(False).eval()


def fit_vae(vae, name: str, space: LatentSpace):
    """Return the VAE with the scaling factor of `space`, which a diffusion model was trained with.

    Raises:
        ValueError: if the VAE still differs from `space`.
    """
    if "scaling_factor" in vae.config and not _is_rae(vae):
        vae.register_to_config(scaling_factor=space.scaling_factor)
    different = LatentSpace.of(vae).difference(space)
    if different:
        raise ValueError(f"vae {name}: does not fit the latents of {space}: {different}")
    return vae


def _find(name: str, local: bool):
    """Return the subfolder (None or "vae") and the configuration of a VAE; `local`: do not ask the hub."""
    folder = Path(name)
    if folder.is_dir():
        return _find_in_folder(name)
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1 or folder.exists():
        raise FileNotFoundError(f"vae {name}: no such folder")
    return _find_on_hub(name, local)


def _find_in_folder(name: str) -> tuple[str | None, dict]:
    for subfolder in (None, "vae"):
        file = Path(name, subfolder or "", "config.json")
        if file.is_file():
            try:
                return subfolder, dict(json.loads(file.read_text()))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{file}: not a configuration that can be read ({error})"
                ) from None
    raise FileNotFoundError(f"vae {name}: no config.json in the folder, nor in its subfolder vae")


def _find_on_hub(name: str, local: bool) -> tuple[str | None, dict]:
    """Return subfolder and configuration from the hub, or with `local` from the hub's cache alone."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for subfolder in (None, "vae"):
        try:
            file = hf_hub_download(name, "config.json", subfolder=subfolder, local_files_only=local)
            return subfolder, json.loads(Path(file).read_text())
        except LocalEntryNotFoundError:
            if local:
                continue
            reason = "the hub cannot be reached, and it is not in the local cache"
            break
        except EntryNotFoundError:
            reason = "that repository has no config.json, nor vae/config.json"
        except (OSError, ValueError) as error:  # no such repository, no permission, invalid name
            reason = reason_of(error)
            break
    else:
        if local:
            raise NotAtHand(
                f"vae {name}: no folder of that name here, and not in the local cache of the hub"
            )
    raise ValueError(f"vae {name}: no folder of that name here, and from the hub: {reason}")


def vae_fingerprint(vae) -> str:
    """Return the SHA-256 of all weights and of the configuration entries that change results.

    The decoder of an AutoencoderRAE is left out, because such a VAE may be stored without it.
    """
    defaults = inspect.signature(type(vae).__init__).parameters
    shown = {k: json.dumps(v) for k, v in vae.config.items() if k in defaults.keys() - IGNORED}
    # Leave out entries with their default value: then entries that a later diffusers adds do not change the hash.
    changed = {k: v for k, v in shown.items() if v != json.dumps(defaults[k].default, default=str)}
    tensors = vae.state_dict()
    if _is_rae(vae):
        changed = {k: v for k, v in changed.items() if not k.startswith("decoder")}
        tensors = {k: v for k, v in tensors.items() if not k.startswith("decoder")}
    return digest_of(tensors, json.dumps([type(vae).__name__, changed], sort_keys=True))


def sha256_of(vae) -> str | None:
    """Return the hash of a VAE that is given as a module, as the dict of a `LatentSpace`, or as None."""
    if vae is None:
        return None
    if isinstance(vae, nn.Module):
        return vae_fingerprint(vae)
    return vae["sha256"]


@torch.no_grad()
def encode_moments(vae, images: Tensor) -> Tensor:
    """Encode images [B, 3, H, W] in -1 .. 1 to posteriors' mean and log variance [B, 2C, h, w], float32.

    A VAE without posteriors gives its latents [B, C, h, w].
    """
    if _is_rae(vae):  # it takes images in 0 .. 1
        images = (images + 1) / 2
    encoded = vae.encode(images)
    if "latent" in encoded:
        return encoded.latent.float()
    # pixel_unshuffle turns each channel into consecutive channels, so mean and log variance stay the two halves.
    return F.pixel_unshuffle(encoded.latent_dist.parameters.float(), _patch(vae))


def sample_posterior(moments: Tensor, noise: Tensor, space: LatentSpace) -> Tensor:
    """Return scaled latents [..., C, h, w], drawn from posteriors.

    Args:
        moments: as from `encode_moments`, [..., 2C, h, w]; [..., C, h, w] for a deterministic VAE, whose latents
            are only scaled.
        noise: standard normal, [..., C, h, w].
        space: the latent space of the VAE.
    """
    if space.deterministic:
        return space.scale(moments)
    mean, logvar = moments.chunk(2, dim=-3)
    return space.scale(mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * noise)  # as in diffusers


@torch.no_grad()
def decode(vae, latents: Tensor) -> Tensor:
    """Decode latents [B, C, h, w] of a diffusion model to images [B, 3, H, W] in -1 .. 1."""
    unscaled = F.pixel_shuffle(LatentSpace.of(vae).unscale(latents), _patch(vae))
    images = vae.decode(unscaled.to(vae.dtype)).sample.float()
    if _is_rae(vae):  # it gives images in 0 .. 1
        images = 2 * images - 1
    return images.clamp(-1, 1)
