"""From labelled images to the tensors of a step. Every random number depends on (seed, position) alone."""

from __future__ import annotations

from typing import Callable, Iterable, List, Sequence, Tuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from moh_vision.data.order import StepBatches, derive_seed


def image_transform(
    augment: str, img_size: int, channels: int, mean: Sequence[float], std: Sequence[float]
) -> Callable:
    """PIL image -> normalised float tensor [channels, img_size, img_size].

    Args:
        augment: "none"; "affine": +-10 degrees, +-10 % shift and scale; "crop_flip": crop after padding by an eighth,
            and mirror; "flip": mirror.
    """
    steps: List[Callable] = [v2.Grayscale(channels) if channels == 1 else v2.RGB()]
    steps.append(v2.Resize((img_size, img_size), interpolation=InterpolationMode.BICUBIC))  # nothing if it fits
    if augment == "affine":
        steps.append(
            v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1), interpolation=InterpolationMode.BILINEAR)
        )
    if augment == "crop_flip":
        steps.append(v2.RandomCrop(img_size, padding=max(1, img_size // 8)))
    if augment in ("crop_flip", "flip"):
        steps.append(v2.RandomHorizontalFlip())
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
    return v2.Compose(steps)


class LabelledImages(Dataset):
    """Items (position, sample number) -> dict(images, labels); the augmentation is drawn from (seed, position)."""

    def __init__(self, source, transform: Callable, seed: int):
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, item: Tuple[int, int]) -> dict:
        position, index = item
        # The transforms draw from torch's CPU generator. The training loop seeds it again after it has fetched a batch,
        # so nothing is restored; torch.manual_seed, which also visits every accelerator, would cost 100 us a sample.
        torch.default_generator.manual_seed(derive_seed(self.seed, position))
        image = self.transform(self.source.image(index))
        return dict(images=image, labels=int(self.source.labels[index]))


class NoisedImages(LabelledImages):
    """As `LabelledImages`, with what a diffusion step draws: timesteps, noise, and labels dropped to `num_classes`."""

    def __init__(self, source, transform: Callable, seed: int, num_timesteps: int, label_drop: float):
        super().__init__(source, transform, seed)
        self.num_timesteps, self.label_drop = num_timesteps, label_drop

    def __getitem__(self, item: Tuple[int, int]) -> dict:
        sample = super().__getitem__(item)
        # Another stream than the augmentation's, so that more draws there do not move these.
        rng = np.random.Generator(np.random.PCG64(derive_seed(self.seed, item[0], 1)))
        sample["timesteps"] = int(rng.integers(self.num_timesteps))
        if rng.random() < self.label_drop:
            sample["labels"] = len(self.source.classes)
        sample["noise"] = torch.from_numpy(rng.standard_normal(tuple(sample["images"].shape), dtype=np.float32))
        return sample


def training_batches(dataset: Dataset, batches: StepBatches, workers: int) -> Iterable[dict]:
    """Iterator over the micro-batches of one rank, in order."""
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=False,
        prefetch_factor=4 if workers else None,
    )
    return iter(loader)


def evaluation_batches(dataset: LabelledImages, slices: List[List[int]], workers: int) -> DataLoader:
    """Batches of the given sample numbers, for a transform without randomness."""
    return DataLoader(dataset, batch_sampler=[[(i, i) for i in numbers] for numbers in slices], num_workers=workers)
