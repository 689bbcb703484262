"""Loaders of training images beside each other: ours from a folder, from shards and as a stream; timm's; webdataset's own.

    python benchmarks/loader.py                     # less than 4 minutes; 60 MB in a temporary folder

All read the same JPEGs: 1,000 crops of the two photographs that come with scikit-learn, 400 x 300 to 500 x 375 pixels, quality 90. All
apply timm's transform of the ImageNet recipe (random resized crop to 224 pixels, bicubic, mirror, normalised float tensor), make batches of
32 and shuffle. timm's prefetcher makes the floats in the process that trains, here on the CPU; it is timed with that.

Every round runs each loader once, in another order, with 1 and with 2 worker processes. The clock starts when the first batch is there, so
that the start of the workers does not count (the last column has it), and stops with the last but one: timm's prefetcher holds a batch
back until the next is there.
Reported are medians and quartiles of images per second, and of the time over that of the best loader that is not ours, round by round.
Results go to benchmarks/results/loader.json.
"""

import json
import random
import tempfile
import time
from functools import partial
from pathlib import Path

import timm
import torch
import webdataset
from PIL import Image
from sklearn.datasets import load_sample_images
from timing import (
    about_machine,
    cell,
    interleaved,
    markdown,
    new_report,
    parser_of,
    spread,
    write_report,
)
from timm.data import create_dataset, create_loader, create_transform

from moh_vision.__main__ import main as command
from moh_vision.data.batches import LabelledImages, training_loader
from moh_vision.data.imagenet import imagenet_train_transform
from moh_vision.data.order import PositionSampler
from moh_vision.data.splits import open_source
from moh_vision.data.stream import ShardStream

BATCH = 32
SIDE = 224  # pixels
CLASSES = 10
MEAN = timm.data.IMAGENET_DEFAULT_MEAN
STD = timm.data.IMAGENET_DEFAULT_STD
AUGMENTATION = dict(
    is_training=True, color_jitter=None, interpolation="bicubic", mean=MEAN, std=STD
)


def write_images(folder, count):
    """Write FOLDER/images/train/CLASS/*.jpg, and the same as shards in FOLDER/shards; return their mean size in KB."""
    rng = random.Random(0)
    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    sizes = []
    for number in range(count):
        photo = rng.choice(photos)
        width = rng.randint(400, 500)
        height = width * 3 // 4
        left = rng.randint(0, photo.width - width)
        top = rng.randint(0, photo.height - height)
        path = folder / "images" / "train" / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + width, top + height)).save(path, quality=90)
        sizes.append(path.stat().st_size)
    per_shard = max(1, count // 10)
    argv = ["shards", "--in", f"{folder}/images", "--out", f"{folder}/shards"]
    argv += ["--samples-per-shard", str(per_shard)]
    assert command(argv) == 0
    return round(sum(sizes) / count / 1000)


def loaders(folder):
    """Return {name: function of the number of workers that gives the batches}."""
    transform = imagenet_train_transform(SIDE, 3, MEAN, STD)
    shards = folder / "shards"
    urls = sorted(map(str, shards.glob("train-*.tar")))

    def ours(source, workers):
        order = dict(group=8, seed=0, batch_size=BATCH, accumulation=1, rank=0, world=1)
        sampler = PositionSampler(source.shard_sizes, **order, start=0, stop=len(source) // BATCH)
        loader = training_loader(LabelledImages(source, transform, 0), sampler, workers)
        return (batch["images"] for batch in loader)

    def folder_of_ours(workers):
        return ours(open_source(str(folder / "images"), "train"), workers)

    def shards_of_ours(workers):
        return ours(open_source(str(shards), "train"), workers)

    def stream_of_ours(workers):
        classes = (shards / "classes.txt").read_text().split()
        count = sum(open_source(str(shards), "train").shard_sizes)
        return ours(ShardStream(urls, classes, count, "shards"), workers)

    def timms(workers, **options):
        images = create_dataset("", root=str(folder / "images" / "train"), split="train")
        options.update(AUGMENTATION, device=torch.device("cpu"), num_workers=workers)
        loader = create_loader(images, SIDE, BATCH, **options)
        return (batch for batch, _ in loader)

    def webdatasets(workers):
        augment = create_transform(SIDE, **AUGMENTATION)
        images = webdataset.WebDataset(urls, shardshuffle=100, seed=0).shuffle(1000).decode("pil")
        images = images.to_tuple("jpg", "cls").map_tuple(augment).batched(BATCH)
        loader = webdataset.WebLoader(images, batch_size=None, num_workers=workers)
        return (batch for batch, _ in loader)

    return {
        "ours, folder": folder_of_ours,
        "ours, shards": shards_of_ours,
        "ours, stream": stream_of_ours,
        "timm": partial(timms, use_prefetcher=False),
        "timm, prefetcher": partial(timms, use_prefetcher=True),
        "webdataset": webdatasets,
    }


def timed_pass(make, stalls, clock=time.perf_counter):
    """Return the seconds of an image, from the first batch to the last but one; append those until the first to `stalls`."""
    times = [clock()]
    counts = [0]  # of images
    for images in make():
        assert images.shape[1:] == (3, SIDE, SIDE) and images.is_floating_point()
        times.append(clock())
        counts.append(len(images))
    stalls.append(times[1] - times[0])
    return (times[-2] - times[1]) / sum(counts[2:-1])


def judge(times, stalls, workers):
    """Return a dict for each loader with so many workers.

    It has images per second, the time over that of the best loader that is not ours, and seconds until the first batch.
    """
    by_name = {name: seconds for (name, count), seconds in times.items() if count == workers}
    medians = {name: seconds.median().item() for name, seconds in by_name.items()}
    best = min((name for name in by_name if not name.startswith("ours")), key=medians.get)
    rows = []
    for name, seconds in by_name.items():
        row = dict(
            loader=name,
            workers=workers,
            images_per_second=spread(1 / seconds, 1),
            time_to_best=spread(seconds / by_name[best]),
            seconds_to_first_batch=spread(torch.tensor(stalls[name, workers])),
            best=best,
        )
        rows.append(row)
    return rows


def table(report):
    """Make a table with a row for a loader.

    For each number of workers it has images per second, time over the best, and seconds until the first batch.
    """
    columns = ["loader"]
    for count in sorted({row["workers"] for row in report["rows"]}):
        workers = f"{count} workers" if count > 1 else f"{count} worker"
        columns += [f"images / s, {workers}", f"time over the best, {workers}"]
        columns.append(f"first batch, s, {workers}")
    lines = {}
    for row in sorted(report["rows"], key=lambda row: row["workers"]):
        line = lines.setdefault(row["loader"], [row["loader"]])
        ratio = row["time_to_best"]
        line.append(f"{row['images_per_second']['median']:.0f}")
        line.append(cell(ratio["median"], ratio["quartiles"]))
        line.append(f"{row['seconds_to_first_batch']['median']:.1f}")
    about = f"{about_machine(report)} {report['rounds']} rounds."
    return f"{about}\n\n{markdown(columns, list(lines.values()))}"


def main():
    parser = parser_of(__doc__, "loader")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=180, help="no round begins later")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.output.read_text())), end="")
        return

    report = new_report(images=args.images)
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        report["kilobytes"] = write_images(Path(folder), args.images)
        stalls = {}
        steps = {}
        for name, make in loaders(Path(folder)).items():
            for count in args.workers:
                stalls[name, count] = []
                steps[name, count] = partial(timed_pass, partial(make, count), stalls[name, count])
        times = interleaved(steps, (1, 99), args.seconds, warm_up=0, clock=lambda step: step())
    report["rounds"] = len(next(iter(times.values())))
    report["rows"] = [row for workers in args.workers for row in judge(times, stalls, workers)]
    write_report(args.output, report)
    print(table(report))


if __name__ == "__main__":
    main()
