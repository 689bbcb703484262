"""What a diffusion run trains on: pixels, stored latents, or images that a VAE encodes."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moh_vision.data.batches import BadSamples, evaluation_loader, evenly_spread
from moh_vision.data.decode import AS_STORED, Decoding
from moh_vision.data.sources import Source, first_size
from moh_vision.data.splits import holds_latents, open_source
from moh_vision.diffusion.batches import ImagesToEncode, NoisedImages, NoisedLatents, cropped
from moh_vision.diffusion.latents.stored import LatentCache
from moh_vision.diffusion.latents.vae import (
    LatentSpace,
    NotAtHand,
    decode,
    encode_moments,
    image_channels,
    load_vae,
    sample_posterior,
)
from moh_vision.models.counts import count_macs, count_parameters

IMG_SIZE_WITH_VAE = 256


def open_inputs(
    root: str,
    vae: str,
    img_size: int | None,
    augment: str,
    device: str | torch.device = "cpu",
    stream: Source | None = None,
    split: str = "train",
    decoding: Decoding = AS_STORED,
):
    """Open images or stored latents, and the VAE if images are to be encoded.

    Args:
        root: as data.root.
        vae: name or folder of a VAE; "none": train on pixels. With stored latents, see `CachedInputs`.
        img_size: side of the images in pixels; None: the source's own, or 256 with a VAE.
        augment: as data.augment.
        device: where the VAE goes.
        stream: the images, if they were opened before as a stream; None: open `split` of `root`.
        split: "train" or "val".
        decoding: how image files become pixels; stored latents must have been made so.
    """
    cached = holds_latents(root)
    if (cached or vae != "none") and augment not in ("none", "flip"):
        raise ValueError(f"data.augment {augment}: with latents it is none or flip")
    if cached:
        cache = LatentCache(root, split)
        cache.refuse_other_decoding(decoding, f"data.root {root}")
        cache.check_sums()
        return CachedInputs(cache, root, vae, img_size, augment)
    source = stream or open_source(root, split)
    source.decoding = decoding
    if vae != "none":
        return EncodedInputs(source, vae, img_size or IMG_SIZE_WITH_VAE, augment, device)
    if img_size is None and source.img_size is None:
        problem = f"data.img_size is needed for {root}: images are cropped to it"
        if not stream:
            problem += first_size(source)
        raise ValueError(problem)
    return PixelInputs(source, img_size or source.img_size, augment)


class PixelInputs:
    """Diffusion on center-cropped pixels in -1 .. 1; also the interface of all inputs.

    `img_size` and `channels` are those of the model's input. `colours` is the number of channels of a batch's
    images before `encode`, and None for stored latents.
    """

    noised: type[NoisedImages] = NoisedImages
    space: LatentSpace | None = None
    vae: nn.Module | None = None

    def __init__(self, source: Source, img_size: int, augment: str):
        self.source = source
        self.channels = source.channels
        self.img_size = img_size
        self.augment = augment
        self.colours: int | None = source.channels
        self.transform: Callable = cropped(augment, img_size, source.channels)

    def dataset(self, seed: int, draw: Callable, label_drop: float) -> NoisedImages:
        """Return the data set for `training_loader`; see `NoisedImages` for the arguments."""
        shape = (self.channels, self.img_size, self.img_size)
        return self.noised(
            self.source, self.transform, seed, draw, label_drop, shape, self.augment == "flip"
        )

    def encode(self, batch: dict, autocast=None) -> dict:
        """Return the arguments of `DiffusionTask.forward` for a batch that is on the device."""
        return batch

    def encoded_on_cpu(self, batch: dict, accelerator) -> dict:
        """Encode a batch on the accelerator's device, and return it on the CPU."""
        batch = self.encode(send_to_device(batch, accelerator.device), accelerator.autocast())
        return send_to_device(batch, "cpu")

    def calibration_batches(
        self, objective: nn.Module, count: int, bad: BadSamples, accelerator
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield (noisy images [B, C, h, w], timesteps [B], labels [B]) of `count` evenly spread samples, on the CPU.

        The seed is 0, so sample i always has the same timestep and noise. No label is dropped.
        """
        slices = evenly_spread(len(self.source), count)
        images = self.dataset(seed=0, draw=objective.draw, label_drop=0.0)
        for batch in evaluation_loader(images, slices, workers=0, bad=bad):
            batch = self.encoded_on_cpu(batch, accelerator)
            noisy = objective.add_noise(batch["images"], batch["noise"], batch["timesteps"])
            yield noisy, batch["timesteps"], batch["labels"]

    def decoder(self, device) -> Callable[[Tensor], Tensor] | None:
        """Return a function from samples [B, C, h, w] to images in [-1, 1]; None if samples are images."""
        return None


class CachedInputs(PixelInputs):
    """Diffusion on stored latents.

    Args:
        source: the stored latents.
        root: the folder of the latents, for messages.
        vae: name or folder of a VAE that is to decode samples, and must equal the VAE of the latents; it is loaded
            at once if it is on this machine. "none": load the VAE of the latents when samples are to be decoded.
        img_size: None, or the side of the images that were encoded.
        augment: "none" or "flip".
    """

    noised = NoisedLatents

    def __init__(
        self, source: LatentCache, root: str, vae: str, img_size: int | None, augment: str
    ):
        super().__init__(source, source.img_size, augment)
        self.colours = None
        self.space = source.space
        self.transform = nn.Identity()
        if img_size not in (None, source.size):
            raise ValueError(
                f"data.img_size {img_size}: the latents in {root} are of images of {source.size} pixels"
            )
        self.root = root
        self.named = vae
        self.vae = None
        if vae != "none":
            # Do not ask the hub before something is to be decoded.
            with contextlib.suppress(NotAtHand):
                self._take_vae(vae, fetch=False)

    def _take_vae(self, name: str, fetch: bool) -> None:
        """Load the VAE; ValueError if it is not the one that made the latents."""
        vae = load_vae(name, fetch)
        space = LatentSpace.of(vae, name)
        if space.sha256 != self.space.sha256:
            problem = (
                f"vae {space}: the latents in {self.root} were made with another one, {self.space}"
            )
            different = space.difference(self.space)
            if different:
                problem += f": {different}"
            raise ValueError(problem)
        self.vae = vae
        self.space = space

    def describe_vae(self) -> str:
        """Return a line about the VAE for `--dry-run`."""
        size = ""
        if self.vae is not None:
            size = f"{count_parameters(self.vae):,} parameters, "
        return f"VAE:          {self.space}: {size}frozen, no part of the model; latents are stored: it does not count"

    def decoder(self, device) -> Callable[[Tensor], Tensor]:
        # Try the VAE of the latents from local files, then the VAE that was named, from the hub too.
        candidates = [(self.space.name, False)]
        if self.named != "none":
            candidates.append((self.named, True))
        for name, fetch in candidates:
            if self.vae is None:
                try:
                    self._take_vae(name, fetch)
                except (ValueError, FileNotFoundError) as error:
                    reason = error
        if self.vae is None:
            raise ValueError(
                f"preview.every and score.every need the VAE of the latents: --vae {self.space.name} or a folder; "
                f"or set both to 0 ({reason})"
            )
        return partial(decode, self.vae.to(device))


class EncodedInputs(PixelInputs):
    """Diffusion on latents that a VAE encodes in every step; the VAE is no part of the model.

    Args:
        source: where images come from.
        vae: name or folder of the VAE.
        img_size: side of the images in pixels.
        augment: "none" or "flip".
        device: where the VAE goes.
    """

    noised = ImagesToEncode

    def __init__(self, source: Source, vae: str, img_size: int, augment: str, device):
        self.vae = load_vae(vae).to(device)
        self.space = LatentSpace.of(self.vae, vae)
        self.pixels = img_size
        super().__init__(source, self.space.side(img_size, "data.img_size"), augment)
        self.channels = self.space.latent_channels
        self.colours = image_channels(self.vae)
        self.transform = cropped("none", img_size, self.colours)

    def describe_vae(self) -> str:
        """Return lines about the VAE for `--dry-run`."""
        costs = ""
        # Only an AutoencoderRAE has an img_size; its encoder, a model of transformers, needs more than images.
        if self.space.img_size is None:
            images = torch.zeros(1, self.colours, self.pixels, self.pixels)
            costs = f": {count_macs(self.vae.encoder, images).dense:,} MACs an image"
        return (
            f"VAE:          {self.space}: {count_parameters(self.vae):,} parameters, frozen, no part of the model\n"
            f"              its encoder runs in every step{costs}, which stored latents spare"
        )

    def decoder(self, device) -> Callable[[Tensor], Tensor]:
        return partial(decode, self.vae)

    def encode(self, batch: dict, autocast=None) -> dict:
        """Encode images [B, 3, H, W] into latents [B, C, h, w], float32, drawn with posterior_noise."""
        noise = batch["posterior_noise"]
        with torch.no_grad(), autocast or contextlib.nullcontext():
            moments = encode_moments(self.vae, batch["images"])
        task_batch = {key: value for key, value in batch.items() if key != "posterior_noise"}
        return dict(task_batch, images=sample_posterior(moments, noise, self.space))
