"""Samples of a diffusion step: images, stored latents, or images that a VAE encodes in the step."""

from __future__ import annotations

from typing import Callable, Iterator, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from moh_vision.data.batches import LabelledImages, image_transform
from moh_vision.diffusion.latents.stored import LatentCache
from moh_vision.diffusion.latents.vae import LatentSpace, sample_posterior
from moh_vision.engine.seeds import Stream, derive_seed


class NoisedImages(LabelledImages):
    """`LabelledImages` with random timesteps and noise; dropped labels become `num_classes`.

    `draw` of an objective must be picklable. `noise_shape` is [C, h, w]; None: as the images.
    """

    def __init__(
        self,
        source,
        transform: Callable,
        seed: int,
        draw: Callable[[np.random.Generator], float],
        label_drop: float,
        noise_shape: Optional[Tuple[int, int, int]] = None,
    ):
        super().__init__(source, transform, seed)
        self.draw, self.label_drop, self.noise_shape = draw, label_drop, noise_shape

    def item(self, position: int, numbers: Iterator) -> dict:
        sample = super().item(position, numbers)
        if "images" not in sample:
            return sample
        # An own stream: other draws in the augmentation leave these as they are.
        rng = np.random.Generator(np.random.PCG64(derive_seed(self.seed, position, Stream.DIFFUSION)))
        sample["timesteps"] = self.draw(rng)
        if rng.random() < self.label_drop:
            sample["labels"] = len(self.source.classes)
        shape = self.noise_shape or tuple(sample["images"].shape)
        sample["noise"] = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        return sample


def posterior_draw(seed: int, position: int, shape: Tuple[int, int, int]) -> Tuple[bool, Tensor]:
    """Return (whether to mirror the image, noise [C, h, w] of the posterior) of a position."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, position, Stream.POSTERIOR)))
    return bool(rng.random() < 0.5), torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


class NoisedLatents(NoisedImages):
    """`NoisedImages` whose images are scaled draws from stored posteriors, float32.

    `flip`: take the posterior of the mirror image every other time.
    """

    def __init__(self, source: LatentCache, seed: int, draw: Callable, label_drop: float, flip: bool):
        shape = (source.channels, source.img_size, source.img_size)
        super().__init__(source, _as_it_is, seed, draw, label_drop, shape)
        self.flip = flip

    def read(self, number: int) -> Tensor:
        return self.source.moments(number)

    def item(self, position: int, numbers: Iterator) -> dict:
        sample = super().item(position, numbers)
        if "images" in sample:
            mirrored, noise = posterior_draw(self.seed, position, self.noise_shape)
            moments = sample["images"][int(mirrored and self.flip)]  # [2C, h, w]
            sample["images"] = sample_posterior(moments, noise, self.source.space)
        return sample


class ImagesToEncode(NoisedImages):
    """Images [channels, H, W] in -1 .. 1 for a VAE, and posterior_noise [C, h, w]."""

    def __init__(
        self,
        source,
        img_size: int,
        channels: int,
        space: LatentSpace,
        seed: int,
        draw: Callable,
        label_drop: float,
        flip: bool,
    ):
        half = [0.5] * channels
        transform = image_transform("none", img_size, channels, half, half, fit="crop")
        side = space.side(img_size)
        super().__init__(source, transform, seed, draw, label_drop, (space.latent_channels, side, side))
        self.flip = flip

    def item(self, position: int, numbers: Iterator) -> dict:
        sample = super().item(position, numbers)
        if "images" in sample:
            mirrored, sample["posterior_noise"] = posterior_draw(self.seed, position, self.noise_shape)
            if mirrored and self.flip:
                sample["images"] = sample["images"].flip(-1)
        return sample


def _as_it_is(moments: Tensor) -> Tensor:
    return moments
