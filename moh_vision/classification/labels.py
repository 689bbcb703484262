"""Other labels and other images for ImageNet's classes: ReaL, V2, A, R and Sketch, by timm's label maps."""

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from timm.data import ImageNetInfo
from timm.data.real_labels import RealLabelsImagenet
from torch import nn

from moh_vision.classification.task import ClassificationTask
from moh_vision.data.sources import ImageSource, Subset
from moh_vision.data.splits import has_splits, match_classes, open_source, with_classes

Labels = Literal["real", "v2", "a", "r", "sketch"]
IMAGENET = ImageNetInfo().label_names()  # the 1,000 synsets, sorted: IMAGENET[c] is class c


class Relabelled(Subset):
    """Samples of a source with other labels.

    Args:
        source, indices: see `Subset`.
        labels: class numbers [n] or, where several are right, [n, L]; an image with fewer than L repeats the first.
        columns: which of ImageNet's 1,000 classes a classifier chooses from; they are columns of its logits.
    """

    def __init__(
        self, source: ImageSource, indices: Sequence[int], labels: np.ndarray, columns: list[int]
    ):
        super().__init__(source, indices)
        self.labels = labels
        self.columns = columns
        self.classes = [IMAGENET[c] for c in columns]


class SomeClasses(ClassificationTask):
    """A classifier in eval mode that chooses only among the classes `columns`."""

    def __init__(self, model: nn.Module, columns: list[int]):
        super().__init__(model, balance_weight=0.0)
        self.columns = columns

    def forward(self, images):
        logits, stats = super().forward(images)
        return logits[:, self.columns], stats


def open_labelled(root: str, labels: Labels) -> Relabelled:
    """Open the images of a label set: the val split of `root`, or all images of a folder without splits.

    "real" (Beyer et al. 2020) finds an image's labels by its file name, and leaves out images without labels. The other
    sets take an image's label from the name of its class folder: a synset or, in V2, a class number. "a" and "r" have
    200 classes; a classifier chooses among these alone.
    """
    split = "train"  # all images of a folder that has no splits
    if has_splits(root):
        split = "val"
    source = open_source(root, split)
    columns = list(range(len(IMAGENET)))
    if labels == "real":
        right_classes = _real_labels(root, source)
        indices = [index for index, right in enumerate(right_classes) if right]
        if not indices:
            raise ValueError(
                f"data.root {root}: none of its {len(source)} images has a label in ReaL"
            )
        most = max(map(len, right_classes))
        rows = []
        for index in indices:
            right = right_classes[index]
            rows.append(right + right[:1] * (most - len(right)))
        return Relabelled(source, indices, np.array(rows, np.int64), columns)
    if labels in ("a", "r"):
        listing = pkgutil.get_data("timm.data", f"_info/imagenet_{labels}_indices.txt")
        columns = [int(column) for column in listing.split()]
    classes = imagenet_names(with_classes(root, source).classes)
    # V2's folders are called by class numbers and were sorted as texts (0, 1, 10, 100, ...), so sort their synsets.
    # ranks: class number in the folder -> rank among the sorted names.
    ranks = np.argsort(np.argsort(classes))
    images = Relabelled(source, range(len(source)), ranks[source.labels], columns)
    expected = images.classes
    images.classes = sorted(classes)
    match_classes(expected, f"--labels {labels}", images, f"data.root {root}")
    return images


def imagenet_names(classes: Sequence[str]) -> list[str]:
    """Return class names; if all are numbers from 0 to 999, return ImageNet's synsets of these numbers."""
    numbered = all(name.isdecimal() and int(name) < len(IMAGENET) for name in classes)
    if not numbered:
        return list(classes)
    return [IMAGENET[int(name)] for name in classes]


def refuse_other_classifier(
    model: nn.Module, classes: Sequence[str] | None, named: str, labels: Labels
) -> None:
    """Raise ValueError unless a model has ImageNet's 1,000 classes; `classes` None: its classes have no names."""
    if model.num_classes != len(IMAGENET) or imagenet_names(classes or IMAGENET) != IMAGENET:
        found = f"{model.num_classes} classes"
        if classes:
            found += f", the first {classes[0]!r}"
        raise ValueError(
            f"--labels {labels} needs a classifier of ImageNet's 1,000 classes; {named} has {found}"
        )


def _real_labels(root: str, source) -> list[list[int]]:
    """Return all right classes of each image; some have none."""
    of_file = RealLabelsImagenet(range(50_000)).real_labels
    files = source.file_names()
    if files is None:
        raise ValueError(
            f"data.root {root}: --labels real needs the names of the files: class folders, or shards with the "
            "val.files.txt that python -m moh_vision shards writes"
        )
    names = [Path(name).stem + ".JPEG" for name in files]
    strange = next((name for name in names if name not in of_file), None)
    if strange is not None:
        raise ValueError(
            f"data.root {root}: {strange}: --labels real needs the files of ImageNet's validation split, "
            "ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG"
        )
    return [of_file[name] for name in names]


def image_names(source: ImageSource) -> list[str]:
    """Return the file of each sample or, if unknown, where the sample is in the source."""
    return source.file_names() or [source.where(index) for index in range(len(source))]
