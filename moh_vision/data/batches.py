"""Transforms, data sets and loaders that turn labelled images into batches.

Every random number depends on (seed, position) alone.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
    get_worker_info,
)
from torchvision.transforms import InterpolationMode, v2

from moh_vision.common.io import memory_limit
from moh_vision.common.seeds import derive_seed
from moh_vision.data.decode import BadSamples, UnreadableImage, center_crop
from moh_vision.data.order import PositionSampler
from moh_vision.data.sources import BadSample, Sample, Source
from moh_vision.data.workers import leave_signals_to_the_parent

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

    Args:
        augment: "none"; "affine": +-10 degrees, +-10 % shift and scale; "crop_flip": crop after padding by an eighth,
            and mirror; "flip": mirror.
        img_size: side of the result in pixels.
        channels: 1 (grey) or 3.
        mean, std: of each channel, for pixels in 0 .. 1.
        fit: how images of another shape become square: "squash" resizes both sides, "crop" is `center_crop`.
    """
    steps: list[Callable] = []
    if channels == 1:
        steps.append(v2.Grayscale(channels))
    else:
        steps.append(v2.RGB())
    if fit == "crop":
        steps.append(partial(center_crop, size=img_size))
    else:
        # A no-op for an image of this size.
        steps.append(v2.Resize((img_size, img_size), interpolation=InterpolationMode.BICUBIC))
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
    """Data set that maps (position, sample index) to dict(images, labels, position, bad).

    Augmentation depends on (seed, position) alone. A sample that cannot be decoded is replaced by the next sample of the
    source and its label. Without `replace_unreadable`, as in validation, the item then has neither images nor labels.
    `bad` holds a `BadSample` for each sample that could not be decoded.
    """

    def __init__(
        self, source: Source, transform: Callable, seed: int, replace_unreadable: bool = True
    ):
        self.source = source
        self.transform = transform
        self.seed = seed
        self.replace_unreadable = replace_unreadable

    def __getitem__(self, item: tuple[int, int]) -> dict:
        position, index = item
        return self.item(position, self._samples_from(index))

    def _samples_from(self, index: int) -> Iterator[Sample | BadSample]:
        """Yield the samples from `index` on, without end: after the last one comes the first."""
        for count in itertools.count(index):
            number = count % len(self.source)
            try:
                sample = self.source.sample(number)
            except UnreadableImage as error:
                sample = BadSample(number, str(error))
            yield sample

    def item(self, position: int, samples: Iterator[Sample | BadSample]) -> dict:
        """Return the item of a position, made from the first of `samples` that can be decoded."""
        bad = []
        tries = MAX_BAD_IN_A_ROW if self.replace_unreadable else 1
        for sample in itertools.islice(samples, tries):
            if isinstance(sample, BadSample):
                bad.append(sample)
                continue
            try:
                image = self.source.decode(sample)
            except UnreadableImage as error:
                bad.append(BadSample(sample.name, str(error)))
                continue
            self._seed(position)
            return dict(
                images=self.transform(image), labels=sample.label, position=position, bad=bad
            )
        return dict(position=position, bad=bad)

    def _seed(self, position: int) -> None:
        """Seed the generators that transforms use: torch's on the CPU and, for timm, those of Python and numpy."""
        # No state is restored, because the training loop seeds torch again after it has fetched a batch.
        # torch.manual_seed would also seed every accelerator, which costs 100 us a sample.
        seed = derive_seed(self.seed, position)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


@dataclass(eq=False)
class StreamDataset(IterableDataset):
    """Iterable data set of the micro-batches of one rank, from images whose source is a `ShardStream`.

    It makes whole micro-batches in the workers of a DataLoader with `batch_size=None`. A sample's augmentation, noise
    and timestep depend on the seed and its position, as in the exact order.
    """

    images: LabelledImages
    sampler: PositionSampler
    collate: Callable[[list[dict]], dict]

    def __iter__(self) -> Iterator[dict]:
        info = get_worker_info()
        if info:
            worker = info.id
            workers = info.num_workers
        else:  # a DataLoader without workers: the training process reads
            worker = 0
            workers = 1
        images = self.images
        parts = self.sampler.world * workers
        samples = images.source.samples(images.seed, self.sampler.start, parts)
        # A DataLoader takes batches from its workers in turn, so each worker makes every `workers`-th one.
        for positions in itertools.islice(self.sampler.positions(), worker, None, workers):
            yield self.collate([images.item(position, samples) for position in positions])


class Loader:
    """Loads batches dict(images, labels, ...); unreadable samples are counted, and in training replaced.

    Args:
        images: the data set whose items the batches are made of.
        bad: counts unreadable samples; None: no sample may be unreadable.
        workers: number of processes that read; 0: this process reads.
        prepare: maps every batch, in this process, before it is yielded.
        options: further arguments of torch's DataLoader.
    """

    def __init__(
        self,
        images: LabelledImages,
        bad: BadSamples | None,
        workers: int,
        prepare: Callable[[dict], dict] | None = None,
        **options,
    ):
        self.bad = bad or BadSamples(len(images.source))
        self.refuses_gaps = images.replace_unreadable
        self.prepare = prepare
        self.loader = DataLoader(
            num_workers=workers, worker_init_fn=leave_signals_to_the_parent, **options
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict]:
        for batch in self.loader:
            bad = batch.pop("bad")
            lost = batch.pop("lost")
            self.bad.check(bad)
            if lost and self.refuses_gaps:
                problem = bad[-1].problem
                raise UnreadableImage(f"{problem} (and {MAX_BAD_IN_A_ROW - 1} images before it)")
            if not batch:  # no image of the batch could be read
                continue
            if self.prepare:
                batch = self.prepare(batch)
            yield batch


def collate(items: list[dict], mixing: Callable | None = None) -> dict:
    """Join items of a data set to one batch, and mix it if `mixing` is given; runs in the loader's processes."""
    position = items[0]["position"]
    bad = [entry for item in items for entry in item["bad"]]
    readable = [
        {k: v for k, v in item.items() if k not in ("position", "bad")}
        for item in items
        if "images" in item
    ]
    batch = default_collate(readable) if readable else {}
    lost = len(items) - len(readable)
    if mixing and not lost:  # `Loader` refuses a training batch with lost items
        batch["images"], batch["labels"] = mixing(batch["images"], batch["labels"], position)
    return dict(batch, bad=bad, lost=lost)


def check_images_fit(key: str, side: int | None, channels: int, count: int) -> None:
    """Raise ValueError, naming `key`, if `count` images of `side` x `side` pixels exceed this machine's memory."""
    size = 4 * count * channels * (side or 0) ** 2
    memory = memory_limit(torch.device("cpu"))
    if size > memory:
        needed = f"{size / 2**30:,.0f}"
        available = f"{memory / 2**30:,.0f}"
        raise ValueError(
            f"{key} {side}: a batch of {count} such images takes {needed} GiB, this machine has {available}"
        )


def training_loader(
    images: LabelledImages,
    sampler: PositionSampler,
    workers: int,
    bad: BadSamples | None = None,
    mixing: Callable | None = None,
    prepare: Callable[[dict], dict] | None = None,
) -> Loader:
    """Return a loader of the micro-batches of one rank, in order.

    Args:
        images: the data set. Samples of a `ShardStream` come as they arrive; the sampler gives only their positions.
        sampler: says which positions and samples each micro-batch has.
        workers: number of processes that read; 0: this process reads.
        bad: counts unreadable samples; None: no sample may be unreadable.
        mixing: a `BatchMixing`, which `collate` applies in the workers.
        prepare: maps every batch, in this process; for example, it moves the batch to the device.
    """
    joined = partial(collate, mixing=mixing)
    if images.source.exact_order:
        order = dict(dataset=images, batch_sampler=sampler, collate_fn=joined)
    else:
        order = dict(dataset=StreamDataset(images, sampler, joined), batch_size=None)
    # torch refuses a prefetch_factor without workers.
    ahead = dict(pin_memory=torch.cuda.is_available(), prefetch_factor=4 if workers else None)
    return Loader(images, bad, workers, prepare, **order, **ahead)


def evaluation_loader(
    images: LabelledImages, slices: list[list[int]], workers: int, bad: BadSamples | None = None
) -> Loader:
    """Return a loader whose batches have the sample indices `slices`; the transform must not be random."""
    # A position only seeds the transform, so the index can serve as position.
    sampler = [[(i, i) for i in indices] for indices in slices]
    return Loader(images, bad, workers, dataset=images, batch_sampler=sampler, collate_fn=collate)


def evenly_spread(total: int, count: int) -> list[list[int]]:
    """Return the indices of `count` samples, or of all if `total` is less, evenly spread and in batches of 64."""
    count = min(count, total)
    return [
        [i * total // count for i in range(start, min(start + 64, count))]
        for start in range(0, count, 64)
    ]


def calibration_halves(
    images: LabelledImages,
    count: int,
    workers: int,
    bad: BadSamples,
) -> tuple[list[dict], ...]:
    """Load two disjoint sets of `count` samples, both evenly spread over a data set; return the batches of each."""
    total = len(images.source)
    if 2 * count > total:
        raise ValueError(
            f"--images {count}: twice as many are needed, the training split has {total} images"
        )
    indices = [index for batch in evenly_spread(total, 2 * count) for index in batch]
    halves = [
        [half[start : start + 64] for start in range(0, count, 64)]
        for half in (indices[::2], indices[1::2])
    ]
    return tuple(list(evaluation_loader(images, slices, workers, bad)) for slices in halves)
