"""From labelled images to the tensors of a step. Every random number depends on (seed, position) alone."""

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import InterpolationMode, v2

from moh_vision.data.decode import BadSamples, UnreadableImage, center_crop
from moh_vision.data.order import StepBatches
from moh_vision.data.stream import ShardStream, StreamedBatches
from moh_vision.data.workers import leave_signals_to_the_parent
from moh_vision.engine.seeds import derive_seed

MAX_BAD_IN_A_ROW = 100


def image_transform(
    augment: str,
    img_size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    fit: str = "squash",
) -> Callable:
    """Return a transform: PIL image -> normalised float tensor [channels, img_size, img_size].

    `augment` is "none"; "affine": +-10 degrees, +-10 % shift and scale; "crop_flip": crop after padding by an eighth, and
    mirror; "flip": mirror. `fit` is for images of another shape: "squash" resizes both sides, "crop" is `center_crop`.
    """
    steps: list[Callable] = [v2.Grayscale(channels) if channels == 1 else v2.RGB()]
    if fit == "crop":
        steps.append(partial(center_crop, size=img_size))
    else:
        steps.append(
            v2.Resize((img_size, img_size), interpolation=InterpolationMode.BICUBIC)
        )  # nothing if it fits
    if augment == "affine":
        ranges = dict(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1))
        steps.append(v2.RandomAffine(**ranges, interpolation=InterpolationMode.BILINEAR))
    if augment == "crop_flip":
        steps.append(v2.RandomCrop(img_size, padding=max(1, img_size // 8)))
    if augment in ("crop_flip", "flip"):
        steps.append(v2.RandomHorizontalFlip())
    steps += [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(list(mean), list(std), inplace=True),
    ]
    return v2.Compose(steps)


class LabelledImages(Dataset):
    """Items (position, sample number) -> dict(images, labels, position, bad); augmentation follows from (seed, position).

    A sample that cannot be decoded is replaced by the next one of the source, with its label; without `replace`, for
    validation, it is left out. `bad` lists (sample number, message) of those passed over.
    """

    def __init__(self, source, transform: Callable, seed: int, replace: bool = True):
        self.source, self.transform, self.seed, self.replace = source, transform, seed, replace

    def __getitem__(self, item: tuple[int, int]) -> dict:
        position, index = item
        return self.item(position, (number % len(self.source) for number in itertools.count(index)))

    def item(self, position: int, numbers: Iterator) -> dict:
        """Return the first of some samples that can be decoded; `numbers` are what the source calls samples."""
        bad = []
        for number in itertools.islice(numbers, MAX_BAD_IN_A_ROW if self.replace else 1):
            try:
                image = self.read(number)
            except UnreadableImage as error:
                bad.append((number, str(error)))
                continue
            self._seed(position)
            return dict(
                images=self.transform(image),
                labels=self.source.labels[number],
                position=position,
                bad=bad,
            )
        return dict(position=position, bad=bad)

    def read(self, number: int):
        """Return what `transform` takes of a sample; raise UnreadableImage."""
        return self.source.image(number)

    def _seed(self, position: int) -> None:
        """Seed what transforms draw from: torch's CPU generator, and for timm's Python's and numpy's."""
        # The training loop seeds torch again after it has fetched a batch, so nothing is restored;
        # torch.manual_seed, which also visits every accelerator, would cost 100 us a sample.
        seed = derive_seed(self.seed, position)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


class Batches:
    """Batches dict(images, labels, ...) of a DataLoader; unreadable samples are counted, and in training replaced."""

    def __init__(self, images: LabelledImages, bad: BadSamples | None, workers: int, **options):
        self.bad, self.complete = bad or BadSamples(len(images.source)), images.replace
        self.loader = DataLoader(
            num_workers=workers, worker_init_fn=leave_signals_to_the_parent, **options
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            bad, lost = batch.pop("bad"), batch.pop("lost")
            self.bad.check(bad)
            if lost and self.complete:
                raise UnreadableImage(f"{bad[-1][1]} (and {MAX_BAD_IN_A_ROW - 1} images before it)")
            if batch:  # else nothing of it could be read
                yield batch


def collate(items: list[dict], mixing: Callable | None = None) -> dict:
    """Join items of a data set to one batch, mixed; runs in the loader's processes."""
    position = items[0]["position"]
    bad = [entry for item in items for entry in item["bad"]]
    whole = [
        {k: v for k, v in item.items() if k not in ("position", "bad")}
        for item in items
        if "images" in item
    ]
    batch = default_collate(whole) if whole else {}
    if mixing and len(whole) == len(items):
        batch["images"], batch["labels"] = mixing(batch["images"], batch["labels"], position)
    return dict(batch, bad=bad, lost=len(items) - len(whole))


def check_images_fit(key: str, side: int | None, channels: int, count: int) -> None:
    """Raise ValueError, naming the key of the side, if so many images are larger than the memory of this machine."""
    size = 4 * count * channels * (side or 0) ** 2
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        needed, there = (f"{n / 2**30:,.0f}" for n in (size, memory))
        raise ValueError(
            f"{key} {side}: a batch of {count} such images takes {needed} GiB, this machine has {there}"
        )


def training_batches(
    dataset: LabelledImages,
    batches: StepBatches,
    workers: int,
    bad: BadSamples | None = None,
    mixing: Callable | None = None,
) -> Iterable[dict]:
    """Yield the micro-batches of one rank, in order, mixed by a `BatchMixing`; without `bad` none may be unreadable."""
    joined = partial(collate, mixing=mixing)
    if isinstance(dataset.source, ShardStream):
        order = dict(dataset=StreamedBatches(dataset, batches, joined), batch_size=None)
    else:
        order = dict(dataset=dataset, batch_sampler=batches, collate_fn=joined)
    ahead = dict(pin_memory=torch.cuda.is_available(), prefetch_factor=4 if workers else None)
    return iter(Batches(dataset, bad, workers, **order, **ahead))


def evaluation_batches(
    dataset: LabelledImages, slices: list[list[int]], workers: int, bad: BadSamples | None = None
) -> Batches:
    """Return batches of the given sample numbers, for a transform without randomness."""
    sampler = [[(i, i) for i in numbers] for numbers in slices]
    return Batches(
        dataset, bad, workers, dataset=dataset, batch_sampler=sampler, collate_fn=collate
    )


def evenly_spread(total: int, count: int) -> list[list[int]]:
    """Return numbers of `count` of `total` samples, or of all, evenly spread, in batches of 64."""
    count = min(count, total)
    return [
        [i * total // count for i in range(start, min(start + 64, count))]
        for start in range(0, count, 64)
    ]


def calibration_halves(
    dataset: LabelledImages,
    count: int,
    workers: int,
    bad: BadSamples,
) -> tuple[list[dict], ...]:
    """Return batches of `count` samples, evenly spread over a data set, and of as many between them, all in memory."""
    total = len(dataset.source)
    if 2 * count > total:
        raise ValueError(
            f"--images {count}: twice as many are needed, the training split has {total} images"
        )
    numbers = sum(evenly_spread(total, 2 * count), [])
    halves = [
        [half[start : start + 64] for start in range(0, count, 64)]
        for half in (numbers[::2], numbers[1::2])
    ]
    return tuple(list(evaluation_batches(dataset, slices, workers, bad)) for slices in halves)
