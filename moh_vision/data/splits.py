"""Open the splits of `data.root`, match their classes, and record which data a run was trained on."""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object

from moh_vision.common.cli import near_folder
from moh_vision.common.errors import some_of
from moh_vision.common.io import write_whole
from moh_vision.data.division import divide
from moh_vision.data.folder import ImageFolder, UndividedFolder
from moh_vision.data.hub import HubDataset
from moh_vision.data.latents import StoredLatents
from moh_vision.data.shards import Shards
from moh_vision.data.sources import Digits, ImageSource, NoSplit, Source

RECORD = "data.json"
# What data.root may name. The first class that opens a root and has the split reads it, so the order counts: a folder may
# hold the folder of one split and the shards of another.
SOURCES: dict[str, type[ImageSource]] = dict(
    digits=Digits,
    hub=HubDataset,
    latents=StoredLatents,
    folder=ImageFolder,
    shards=Shards,
    undivided_folder=UndividedFolder,
)


def classes_that_open(root: str) -> list[type[ImageSource]]:
    """Return the classes of SOURCES that open `root`, in order."""
    return [source_class for source_class in SOURCES.values() if source_class.opens(root)]


def splits_of(root: str) -> set[str]:
    """Return which of "train" and "val" a data set has."""
    return {split for found in classes_that_open(root) for split in found.splits(root)}


def has_splits(root: str) -> bool:
    """Return whether `root` is a data set, and not a folder of images that are in no split."""
    return any(found.has_splits for found in classes_that_open(root))


def holds_latents(root: str) -> bool:
    """Return whether `root` is a data set of stored latents."""
    return any(found.holds == "latents" for found in classes_that_open(root))


def open_source(
    root: str, split: str, key: str = "data.root", val_fraction: float | None = None
) -> ImageSource:
    """Open the images of a split.

    Args:
        root: what a class of SOURCES takes.
        split: "train" or "val".
        key: the option that named `root`, for messages.
        val_fraction: share of the training images that is "val" where a data set has no validation images, see
            `division.divide`; None: all are "train".
    """
    if val_fraction and "val" not in splits_of(root):
        return _divided(root, _open_split(root, "train", key), val_fraction)[split]
    return _open_split(root, split, key)


def _divided(root: str, source: ImageSource, val_fraction: float) -> dict[str, ImageSource]:
    return divide(source, val_fraction, str(source.folder or root))


def _open_split(root: str, split: str, key: str) -> ImageSource:
    """Open a split; raise NoSplit if the data set lacks it. Arguments are those of `open_source`."""
    first_problem: ValueError | None = None
    for source_class in classes_that_open(root):
        try:
            return source_class.open(root, split, key)
        except NoSplit as error:
            first_problem = first_problem or error
    if first_problem:
        raise first_problem
    taken = "; ".join(source_class.takes for source_class in SOURCES.values())
    if not os.path.exists(root):
        problem = f"{key} {root}: no such file or folder"
        near = near_folder(root)
        if near:
            problem += f", did you mean {near}?"
        raise FileNotFoundError(f"{problem}; taken are {taken}")
    problem = f"{key} {root}: not taken; taken are {taken}; a source of your own is known with --imports FILE"
    if os.path.isdir(root):
        divided = (
            f"python -m moh_vision shards --in {shlex.quote(root)} --out DIR --val-fraction 0.1"
        )
        problem += f". If its folders are classes, {divided} divides them"
    raise ValueError(problem)


def refuse_idle_fraction(data, given: Collection[str]) -> None:
    """Raise ValueError if the command line gives data.val_fraction, but nothing is divided.

    The fraction of a configuration is for data without validation images, and has no effect on other data.

    Args:
        data: an `EvalDataConfig`.
        given: the options of the command line.
    """
    if "data.val_fraction" not in given or not data.val_fraction:
        return
    if "val" in splits_of(data.root):
        problem = (
            f"data.val_fraction {data.val_fraction:g} has no effect with data.root {data.root}"
        )
        raise ValueError(f"{problem}, which has a split val")


def open_splits(
    root: str, train: Source | None = None, val_fraction: float | None = None
) -> tuple[Source, ImageSource]:
    """Open the training split, unless it is given, and the validation split, which must have the same classes.

    `val_fraction` is that of `open_source`; a stream, given as `train`, is not divided.
    """
    if train is None and val_fraction and "val" not in splits_of(root):
        whole = with_classes(root, open_source(root, "train"))
        parts = _divided(root, whole, val_fraction)  # once for both
        train = parts["train"]
        val = parts["val"]
    else:
        if train is None:
            train = open_source(root, "train")
        train = with_classes(root, train)
        val = _open_val(root, train, val_fraction)
    match_classes(train.classes, "train", val, f"data.root {root}")
    return train, val


def _open_val(root: str, train: Source, val_fraction: float | None) -> ImageSource:
    try:
        return open_source(root, "val")
    except NoSplit as error:
        remedy = "data.val_fraction 0.1 keeps about a tenth of the images for validation"
        if not train.exact_order:
            remedy = "it is needed with data.exact_order false"
            if val_fraction:
                remedy += f", because data.val_fraction {val_fraction:g} divides no stream"
        raise NoSplit(f"{error}; {remedy}") from None


def with_classes(root: str, source: Source) -> Source:
    """Return `source`; raise ValueError if it has no classes, which a classifier needs."""
    if not source.classes:
        remarks = "".join(f" ({remark})" for remark in source.remarks)
        raise ValueError(
            f"data.root {root}: images without classes, which train_dit.py takes; classifiers need them{remarks}"
        )
    return source


def match_classes(expected: list[str], owner: str, val: ImageSource, named: str) -> None:
    """Renumber the classes of `val` in place so that they have the order of `expected`, the classes of `owner`.

    Raise ValueError, naming a class, unless both have the same classes. The classes of a `numbered` source, such as
    shards without classes.txt, end at its largest label; so if both are numbered, `val` may lack the last classes.

    Args:
        expected: names of classes.
        owner: what has these classes, for messages: "train", or a checkpoint.
        val: the source that is changed.
        named: the beginning of messages.
    """
    numbers = [str(c) for c in range(len(expected))]
    both_numbered = val.numbered and expected == numbers
    if both_numbered and val.classes and val.classes == numbers[: len(val.classes)]:
        val.classes = list(expected)
    if val.classes == expected:
        return
    refuse_other_classes(expected, owner, val.classes, named)
    number = {name: c for c, name in enumerate(expected)}
    renumbered = np.array([number[name] for name in val.classes], np.int64)  # by the old number
    val.labels = renumbered[val.labels]
    val.classes = list(expected)


def refuse_other_classes(
    expected: list[str], owner: str, classes: list[str], named: str, holder: str = "val"
) -> None:
    """Raise ValueError, naming a class, unless `classes` (of `holder`) are those `expected` (of `owner`).

    Their order may differ if each name occurs once.
    """
    if expected == classes:
        return
    odd = sorted(set(expected) ^ set(classes))
    all_once = len(set(expected)) == len(expected) == len(classes)
    if not odd and all_once:
        return
    if odd:
        only_in = owner if odd[0] in expected else holder
        problem = f"class {odd[0]!r} is only in {only_in}"
    else:
        twice = next(name for name in classes if max(expected.count(name), classes.count(name)) > 1)
        problem = f"two classes are called {twice!r}"
    raise ValueError(
        f"{named}: {len(expected)} classes in {owner}, {len(classes)} in {holder}; {problem}"
    )


def in_short(
    root: str, train: Source, steps: int, batch_size: int, val: ImageSource | None = None
) -> str:
    """Describe in one line the images of a run and its number of epochs; the sources' remarks follow as further lines.

    Args:
        root: as data.root.
        train, val: the splits; val None: no validation.
        steps, batch_size: of the run.
    """
    images = f"{len(train)} training images {of_classes(train)}"
    remarks = [*train.remarks]
    if val is not None:
        images += f", {len(val)} for validation"
        if len(val) > len(train):
            images += " (more for validation than for training: are train and val exchanged?)"
        remarks += val.remarks
    epochs = f"{steps} steps of {batch_size} are {steps * batch_size / len(train):.3g} epochs"
    first = f"{root}: {images}; {epochs}"
    return "\n".join([first, *dict.fromkeys(remarks)])


def of_classes(source: Source) -> str:
    """Return the number of a source's classes in words, such as "of 2 classes"."""
    count = len(source.classes)
    if count == 0:
        return "without classes"
    if count == 1:
        return "of 1 class"
    return f"of {count} classes"


class DataRecord:
    """The outlines of a run's splits, kept in RUN/data.json: classes, their numbers of samples, sha256 of the listing.

    The listing decides which sample has which index and label, so a resumed run and all processes must find the same
    listing. If `allowed` holds "data.root", other files are accepted; other classes never are.
    """

    def __init__(self, root: str, allowed: Collection[str], **splits):
        self.root = root
        self.allowed = allowed
        self.splits = {name: outline(source, source.listing()) for name, source in splits.items()}
        # A collective: every rank compares all others with rank 0, so all raise the same error.
        first, *seen_by_ranks = gather_object([self.splits])
        for rank, seen in enumerate(seen_by_ranks, 1):
            for split in seen:
                if seen[split] == first[split]:
                    continue
                changes = _changes(first[split], seen[split])
                differs = f"process {rank} sees other data than process 0: {changes}"
                raise ValueError(f"data.root {root}, {split}: {differs}")

    def check(self, run: Path, say: Callable[[str], None]) -> None:
        """Compare with the record in a run's folder: `say` each allowed change, raise ValueError for another."""
        file = run / RECORD
        if not file.exists():  # the run was killed before it wrote its record
            return
        try:
            recorded = json.loads(file.read_text("utf-8"))
            changed = {
                split: _changes(recorded[split], now)
                for split, now in self.splits.items()
                if recorded[split] != now
            }
            same_classes = all(
                recorded[split]["classes"] == self.splits[split]["classes"] for split in changed
            )
        except Exception as error:  # a damaged record may lack a key or hold another type
            raise ValueError(
                f"{file}: not a record of data that can be read ({error!r}); --fresh moves the run aside and starts over"
            ) from None
        for split, changes in changed.items():
            problem = (
                f"data.root {self.root}, {split}: not the data that {run} began with: {changes}"
            )
            if same_classes and "data.root" in self.allowed:
                say(f"{problem}; accepted")
                continue
            if same_classes:
                remedy = "accept the change: --allow-change data.root"
            else:
                remedy = f"start a run of these classes: --output NEW --init-from {shlex.quote(str(run))}"
            raise ValueError(f"{problem}. Bring them back, or {remedy}")

    def save(self, run: Path) -> None:
        """Write the record into a run's folder."""
        write_whole(run / RECORD, json.dumps(self.splits) + "\n")


def outline(source: Source, listing: Iterable[bytes]) -> dict:
    """Summarise the samples of a source: each class with its number of samples, and a sha256 of labels and `listing`."""
    digest = hashlib.sha256(source.labels.tobytes())
    for data in listing:
        digest.update(data)
    names = source.classes or ["none"]
    counts = np.bincount(source.labels, minlength=len(names)).tolist()
    return dict(classes=names, samples=counts, sha256=digest.hexdigest())


def _changes(old: dict, new: dict) -> str:
    """Describe how two outlines of a split differ: name the classes, with their numbers of samples, of only one."""
    before = _counted_classes(old)
    now = _counted_classes(new)
    if before == now:
        return "other files, or the classes in another order"
    gone = some_of(sorted(before - now), 6) or "none"
    more = some_of(sorted(now - before), 6) or "none"
    return f"classes (samples) gone: {gone}; new: {more}"


def _counted_classes(outlined: dict) -> set[str]:
    """Return the classes of an outline, each as "NAME (SAMPLES)"."""
    return {f"{name} ({n})" for name, n in zip(outlined["classes"], outlined["samples"])}
