"""Data sets with the timestep and noise of each sample: images, stored latents, or images for a VAE."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.batches import LabelledImages, image_transform
from moh_vision.data.sources import BadSample, Sample, Source
from moh_vision.diffusion.latents.vae import sample_posterior


def cropped(augment: str, img_size: int, channels: int) -> Callable:
    """Return a transform from a PIL image to its center crop (ADM), [channels, img_size, img_size] in -1 .. 1."""
    half = [0.5] * channels
    return image_transform(augment, img_size, channels, half, half, fit="crop")


class NoisedImages(LabelledImages):
    """`LabelledImages` with a random timestep and noise for each image.

    Args:
        source: where images come from.
        transform: function from a PIL image to a tensor.
        seed: with a sample's position, determines its augmentation, timestep and noise.
        draw: function from a numpy generator to a timestep; picklable, for the loader's worker processes.
        label_drop: share of labels that are replaced by "no class", the number of classes.
        noise_shape: [C, h, w].
        flip: subclasses take the mirror image, or its latents, with probability 1/2.
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
        # A separate stream of random numbers: these draws do not change when the augmentation makes others.
        rng = np.random.Generator(
            np.random.PCG64(derive_seed(self.seed, position, Stream.DIFFUSION))
        )
        item["timesteps"] = self.draw(rng)
        if rng.random() < self.label_drop:
            item["labels"] = len(self.source.classes)
        item["noise"] = torch.from_numpy(rng.standard_normal(self.noise_shape, dtype=np.float32))
        return item


def posterior_draw(seed: int, position: int, shape: tuple[int, int, int]) -> tuple[bool, Tensor]:
    """Return whether to mirror the image at a position, and the noise [C, h, w] for its VAE posterior."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, position, Stream.POSTERIOR)))
    return bool(rng.random() < 0.5), torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


class NoisedLatents(NoisedImages):
    """`NoisedImages` of a `LatentCache`: "images" are scaled draws from the stored posteriors, [C, h, w] float32."""

    def item(self, position: int, samples: Iterator[Sample | BadSample]) -> dict:
        item = super().item(position, samples)
        if "images" in item:
            mirrored, noise = posterior_draw(self.seed, position, self.noise_shape)
            moments = item["images"][int(mirrored and self.flip)]  # [2C, h, w]
            item["images"] = sample_posterior(moments, noise, self.source.space)
        return item


class ImagesToEncode(NoisedImages):
    """`NoisedImages` that a VAE encodes later, with "posterior_noise" [C, h, w] to draw the latents with."""

    def item(self, position: int, samples: Iterator[Sample | BadSample]) -> dict:
        item = super().item(position, samples)
        if "images" in item:
            mirrored, noise = posterior_draw(self.seed, position, self.noise_shape)
            item["posterior_noise"] = noise
            if mirrored and self.flip:
                item["images"] = item["images"].flip(-1)
        return item
