"""Name what is on images: five likeliest classes each.

python -m moh_vision predict RUN IMAGE_OR_FOLDER ... --output classes.json

RUN comes first: a classifier's run, a folder saved by publish or timm, or weights with --model.NAME; then images,
or whole data sets as data.root names them, and other options of validate.py. An unreadable image is named on
stderr; the others go on, and the exit code is 2.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import torch
from timm.data import ImageNetInfo

from moh_vision.classification.labels import image_names
from moh_vision.common.progress import say
from moh_vision.data import folder
from moh_vision.data.batches import BadSamples, LabelledImages, evaluation_loader
from moh_vision.data.first_look import lost_of
from moh_vision.data.folder import IMAGES, left_out_line
from moh_vision.data.imagenet import validation_transform
from moh_vision.data.order import rank_slice
from moh_vision.data.sources import ImageSource, Joined, ListedFiles
from moh_vision.data.splits import open_source, splits_of
from moh_vision.engine.logging import write_json
from moh_vision.models.class_names import unnamed_classes
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights, wing_of

REST = "RUN"
ENDINGS = (".json",)
IDLE = (
    "data.root",
    "data.val_fraction",
    "data.max_bad_fraction",
)  # keys of validate.py that have no effect here
Likeliest = list[tuple[int, float]]  # (class, probability), the likeliest first


class NamedBadSamples(BadSamples):
    """Name unreadable images on stderr, and go on however many there are."""

    def check(self, bad: list[tuple[int, str]]) -> None:
        for _, message in bad:
            print(message, file=sys.stderr, flush=True)
        super().check(bad)


def open_images(path: str) -> list[ImageSource]:
    """Open an image file, all images below a folder, or else all splits of a data set."""
    is_folder = os.path.isdir(path)
    if is_folder:
        images, left_out = folder.image_files(Path(path))
        if images:
            if left_out:
                print(left_out_line(path, left_out), file=sys.stderr, flush=True)
            return [ListedFiles([os.path.join(path, name) for name in images])]
    splits = splits_of(path)
    if splits:
        return [open_source(path, split, "predict") for split in sorted(splits)]
    if is_folder:
        raise ValueError(f"{path}: a folder without images ({', '.join(IMAGES)}) or shards")
    if os.path.isfile(path):
        return [ListedFiles([path])]
    if os.path.exists(path):
        raise FileNotFoundError(f"{path}: not a file or folder")
    raise FileNotFoundError(f"{path}: no such file")


def class_names(classes: Sequence[str] | None, count: int) -> list[str]:
    """Return the names of a classifier's `count` classes. ImageNet's synsets are replaced by words.

    If the classifier does not name its classes, 1,000 classes are taken for ImageNet's.
    """
    if classes is None:
        classes = unnamed_classes(count)
    if len(classes) != count:
        raise ValueError(f"--checkpoint has {len(classes)} names of classes and {count} outputs")
    words = ImageNetInfo().label_descriptions(as_dict=True)
    return [words.get(name, name) for name in classes]


@torch.no_grad()
def predict(
    model: torch.nn.Module, batches, accelerator, most: int = 5
) -> Iterator[tuple[int, Likeliest]]:
    """Yield the label of each image, which is its index, and its `most` likeliest classes.

    Probabilities are NaN where a logit is NaN or infinite.
    """
    for batch in batches:
        with accelerator.autocast():
            logits = model(batch["images"].to(accelerator.device)).float()  # [B, classes]
        # A logit of minus infinity would leave the probabilities of the other classes finite.
        known = logits.isfinite().all(-1, keepdim=True)
        probabilities = logits.softmax(-1).where(known, math.nan)
        likeliest = probabilities.topk(min(most, logits.shape[-1]))
        rows = zip(batch["labels"].tolist(), likeliest.indices.tolist(), likeliest.values.tolist())
        for number, classes, values in rows:
            yield number, list(zip(classes, values))


def options(add) -> None:
    add(
        "run",
        metavar="RUN",
        help="run, its checkpoint, folder of timm, or weights for --model.NAME; it comes first",
    )
    add(
        "images",
        nargs="+",
        metavar="IMAGE_OR_FOLDER",
        help="image files, folders of them, and data sets, as data.root names them",
    )
    add("--top", type=int, default=5, metavar="N", help="classes of each image (5)")
    add("--output", metavar="FILE", help="a new .json with what is printed")


def work(options) -> None:
    if options.top < 1:
        raise ValueError(f"--top {options.top}: expected 1 or more")
    sources = [source for path in options.images for source in open_images(path)]
    names_of_images = [name for source in sources for name in image_names(source)]
    found = find_weights(options.run, key="RUN")
    wing = wing_of(found, options.rest)
    if wing != "classification":
        raise ValueError(f"{options.run} is a {wing} model; expected a classifier")
    opened = open_weights(found, options.rest, command="predict")
    for key in sorted(opened.config.given.intersection(IDLE)):
        value = attrgetter(key)(opened.config)
        raise ValueError(f"{key} {value} has no effect: only the images that are named are read")
    accelerator = opened.accelerator
    metadata = opened.metadata
    model = opened.model.to(accelerator.device)
    names = class_names(metadata["classes"], model.num_classes)
    if metadata["classes"] is None:
        meant = "called by their numbers"
        if len(names) == 1000:
            meant = "ImageNet's, in order of their synsets"
        unnamed = f"{options.run} does not name its {len(names)} classes, which are {meant}"
        print(unnamed, file=sys.stderr, flush=True)
    # On stderr, so that stdout has nothing but the rows.
    print(f"weights of {metadata['weights']}", file=sys.stderr, flush=True)
    unreadable = NamedBadSamples(len(names_of_images), max_fraction=1.0)
    batch_size = opened.config.data.eval_batch_size
    slices = rank_slice(len(names_of_images), rank=0, world=1, batch_size=batch_size)
    transform = validation_transform(model.pretrained_cfg)
    for source in sources:
        source.decoding = opened.decoding
    joined = Joined(sources)
    joined.decoding = opened.decoding
    for line in lost_of(joined):
        print(line, file=sys.stderr, flush=True)
    images = LabelledImages(joined, transform, seed=0, replace_unreadable=False)
    workers = 0  # for a single batch it does not pay to start worker processes
    if len(slices) > 1:
        workers = opened.config.data.workers
    batches = evaluation_loader(images, slices, workers, unreadable)
    predictions = []
    for number, likeliest in predict(model, batches, accelerator, options.top):
        if math.isnan(likeliest[0][1]):
            raise ValueError(
                f"{names_of_images[number]}: the classifier's logits are NaN or infinite; weights of {metadata['weights']}"
            )
        classes = [(names[index], probability) for index, probability in likeliest]
        predictions.append(dict(image=names_of_images[number], classes=classes))
        shown = " | ".join(f"{100 * probability:.2f} % {name}" for name, probability in classes)
        is_read = say(f"{names_of_images[number]}: {shown}")
        # Stop if nobody reads stdout any more, as after `| head`, and no file is to be written.
        if not is_read and not options.output:
            return
    if options.output:
        record = dict(
            weights=metadata["weights"],
            model=metadata["architecture"],
            img_size=metadata["img_size"],
            images=predictions,
        )
        write_json(Path(options.output), record)
    if unreadable.seen:
        raise ValueError(
            f"{len(unreadable.seen)} of {len(names_of_images)} images could not be read"
        )
