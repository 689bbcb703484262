"""Samples of a diffusion step: images, stored latents, or images that a VAE encodes in the step."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.batches import LabelledImages, image_transform
from moh_vision.data.sources import BadSample, Sample, Source
from moh_vision.diffusion.latents.vae import sample_posterior


def cropped(augment: str, img_size: int, channels: int) -> Callable:
    """Return a transform: PIL image -> center crop (ADM) [channels, img_size, img_size] in -1 .. 1."""
    half = [0.5] * channels
    return image_transform(augment, img_size, channels, half, half, fit="crop")


class NoisedImages(LabelledImages):
    """`LabelledImages` with random timesteps and noise; dropped labels become `num_classes`.

    Args:
        source: of images.
        transform: PIL image -> tensor.
        seed: of augmentation, timesteps and noise, with a sample's position.
        draw: numpy generator -> timestep; picklable, for the processes of a loader.
        label_drop: share of labels that are dropped.
        noise_shape: [C, h, w].
        flip: take latents of the mirror image every other time.
    """

    def __init__(
        self,
        source: Source,
        transform: Callable,
        seed: int,
        draw: Callable[[np.random.Generator], float],
        label_drop: float,
        noise_shape: tuple[int, int, int],
        flip: bool = False,
    ):
        super().__init__(source, transform, seed)
        self.draw = draw
        self.label_drop = label_drop
        self.noise_shape = noise_shape
        self.flip = flip

    def item(self, position: int, samples: Iterator[Sample | BadSample]) -> dict:
        item = super().item(position, samples)
        if "images" not in item:
            return item
        # A stream of its own: other draws in the augmentation leave these as they are.
        rng = np.random.Generator(
            np.random.PCG64(derive_seed(self.seed, position, Stream.DIFFUSION))
        )
        item["timesteps"] = self.draw(rng)
        if rng.random() < self.label_drop:
            item["labels"] = len(self.source.classes)
        item["noise"] = torch.from_numpy(rng.standard_normal(self.noise_shape, dtype=np.float32))
        return item


def posterior_draw(seed: int, position: int, shape: tuple[int, int, int]) -> tuple[bool, Tensor]:
    """Return (whether to mirror the image, noise [C, h, w] of the posterior) of a position."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, position, Stream.POSTERIOR)))
    return bool(rng.random() < 0.5), torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


class NoisedLatents(NoisedImages):
    """`NoisedImages` of a `LatentCache`, whose images are scaled draws from stored posteriors, float32."""

    def item(self, position: int, samples: Iterator[Sample | BadSample]) -> dict:
        item = super().item(position, samples)
        if "images" in item:
            mirrored, noise = posterior_draw(self.seed, position, self.noise_shape)
            moments = item["images"][int(mirrored and self.flip)]  # [2C, h, w]
            item["images"] = sample_posterior(moments, noise, self.source.space)
        return item


class ImagesToEncode(NoisedImages):
    """`NoisedImages` for a VAE, with posterior_noise [C, h, w]."""

    def item(self, position: int, samples: Iterator[Sample | BadSample]) -> dict:
        item = super().item(position, samples)
        if "images" in item:
            mirrored, noise = posterior_draw(self.seed, position, self.noise_shape)
            item["posterior_noise"] = noise
            if mirrored and self.flip:
                item["images"] = item["images"].flip(-1)
        return item
