"""Name what is on images: the five likeliest classes of each.

python -m moh_vision predict --checkpoint RUN IMAGE_OR_FOLDER ... --output classes.json

RUN is a run of a classifier, a folder that moh_vision.commands.publish or timm has saved, or weights with --model.NAME as validate.py
takes them; other options of validate.py are taken too, after the images. An image that cannot be read is named on stderr;
the others go on, and the exit code is 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Iterator, List, Optional, Sequence, Tuple

import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import nn

from moh_vision.classification.config import OpenedClsConfig
from moh_vision.classification.validate import open_classifier
from moh_vision.data.batches import BadSamples, LabelledImages, evaluation_batches
from moh_vision.data.decode import UnreadableImage, decode_image
from moh_vision.data.imagenet import unnamed_classes, validation_transform
from moh_vision.data.order import rank_slice
from moh_vision.data.walk import IMAGES, refuse_special, walk
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import Parser, exit_code, refuse_output, say
from moh_vision.engine.io import write_csv
from moh_vision.engine.logging import write_json
from moh_vision.engine.run import make_accelerator

IDLE = ("data.root", "data.max_bad_fraction")  # what validation reads and this does not


class Files:
    """Image files as a source, see `data.splits.open_source`; the label of a sample is its number."""

    def __init__(self, files: Sequence[str]):
        self.files, self.labels = files, range(len(files))

    def __len__(self) -> int:
        return len(self.files)

    def image(self, index: int) -> Image.Image:
        try:
            data = Path(self.files[index]).read_bytes()
        except OSError as error:
            raise UnreadableImage(f"{self.files[index]}: {error.strerror}") from None
        return decode_image(data, self.files[index])


class NamedBadSamples(BadSamples):
    """Names every image that cannot be read on stderr, and never stops."""

    def __init__(self, total: int):
        super().__init__(total, max_fraction=1.0)

    def check(self, bad: List[Tuple[int, str]]) -> None:
        for _, message in bad:
            print(message, file=sys.stderr, flush=True)
        super().check(bad)


def image_files(paths: Sequence[str]) -> List[str]:
    """Return the files of `paths`: files as they are, and of folders the images in them and below, sorted."""
    files = []
    for path in paths:
        if os.path.isdir(path):
            found = [(e, p) for e, p in walk(Path(path), path.rstrip("/"), hidden=False) if p.lower().endswith(IMAGES)]
            if not found:
                raise ValueError(f"{path}: a folder without images ({', '.join(IMAGES)})")
            for entry, _ in found:
                refuse_special(entry)
            files += sorted(p for _, p in found)
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise FileNotFoundError(f"{path}: {'not a file or folder' if os.path.exists(path) else 'no such file'}")
    return files


def class_names(classes: Optional[Sequence[str]], count: int) -> List[str]:
    """Return the names of a classifier's `count` classes, with words for ImageNet's synsets.

    1,000 classes without names are ImageNet's.
    """
    if classes is None:
        classes = unnamed_classes(count)
    if len(classes) != count:
        raise ValueError(f"--checkpoint has {len(classes)} names of classes and {count} outputs")
    words = ImageNetInfo().label_descriptions(as_dict=True)
    return [words.get(name, name) for name in classes]


@torch.no_grad()
def predict(model: nn.Module, batches, accelerator, most: int = 5) -> Iterator[Tuple[int, List[Tuple[int, float]]]]:
    """Yield (number of the image, [(class, probability)] of its `most` likeliest classes) for each image.

    `batches` are dicts with images [B, C, h, w] and, as labels, the numbers [B] of the images.
    """
    for batch in batches:
        with accelerator.autocast():
            logits = model(batch["images"].to(accelerator.device))  # [B, classes]
        found = logits.float().softmax(-1).topk(min(most, logits.shape[-1]))
        rows = zip(found.indices.tolist(), found.values.tolist())
        yield from ((number, list(zip(*row))) for number, row in zip(batch["labels"].tolist(), rows))


def write_predictions(path: str, found: Sequence[Tuple[str, List[Tuple[str, float]]]], about: dict) -> None:
    """Write (image, [(class, probability)]) to .json, with `about`, or to .csv, one row a class."""
    if path.endswith(".json"):
        pairs = [dict(image=file, classes=[list(pair) for pair in likeliest]) for file, likeliest in found]
        return write_json(Path(path), dict(about, images=pairs))
    rows = ((file, rank, *pair) for file, likeliest in found for rank, pair in enumerate(likeliest, 1))
    write_csv(Path(path), [("image", "rank", "class", "probability"), *rows])


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command; return the exit code: 0, or 2 for a user's mistake and for images that cannot be read."""
    parser = Parser("python -m moh_vision predict", __doc__)
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="RUN",
        help="run, its checkpoint, folder of timm, or weights for --model.NAME",
    )
    add("images", nargs="+", metavar="IMAGE_OR_FOLDER", help="image files, and folders of them")
    add("--top", type=int, default=5, metavar="N", help="classes of each image (5)")
    add("--output", metavar="FILE", help=".json or .csv with what is printed; must not exist")

    def work() -> None:
        options, rest = parser.parse_known_args(argv)
        refuse_output("--output", options.output)
        if options.top < 1:
            raise ValueError(f"--top {options.top}: expected 1 or more")
        if options.output and not options.output.endswith((".json", ".csv")):
            raise ValueError(f"--output {options.output}: expected a name that ends in .json or .csv")
        files = image_files(options.images)
        config = parse_config(OpenedClsConfig, ["--checkpoint", options.checkpoint, *rest], "predict")
        for key in sorted(config.given.intersection(IDLE)):
            raise ValueError(f"{key} has no effect: only the images that are named are read")
        model, about = open_classifier(config, len(files))
        print(f"weights of {about['weights']}", file=sys.stderr, flush=True)  # beside the rows
        names = class_names(about["classes"], model.num_classes)
        accelerator, d = make_accelerator(config.mixed_precision, config.tf32), config.data
        unreadable, slices = NamedBadSamples(len(files)), rank_slice(len(files), 0, 1, d.eval_batch_size)
        images = LabelledImages(Files(files), validation_transform(model.pretrained_cfg), seed=0, replace=False)
        batches = evaluation_batches(images, slices, d.workers if len(slices) > 1 else 0, unreadable)
        found = []
        for number, likeliest in predict(model.to(accelerator.device), batches, accelerator, options.top):
            found.append((files[number], [(names[c], probability) for c, probability in likeliest]))
            read = say(f"{files[number]}: {' | '.join(f'{100 * p:.2f} % {name}' for name, p in found[-1][1])}")
            if not (read or options.output):
                return
        if options.output:
            about = dict(weights=about["weights"], model=about["name"], img_size=about["img_size"])
            write_predictions(options.output, found, about)
        if unreadable.seen:
            raise ValueError(f"{len(unreadable.seen)} of {len(files)} images could not be read")

    return exit_code("predict", work)


if __name__ == "__main__":
    raise SystemExit(main())
