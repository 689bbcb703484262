"""Open the splits of `data.root`, match their classes, and record which data a run was trained on."""

import hashlib
import json
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object

from moh_vision.common.errors import some_of
from moh_vision.common.io import write_whole
from moh_vision.data.folder import (
    IMAGES,
    ImageFolder,
    split_folders,
    subfolders,
    undivided_folder,
)
from moh_vision.data.hub import PREFIX, HubDataset
from moh_vision.data.shards import Shards
from moh_vision.data.sources import Digits, ImageSource, NoSplit, Source

RECORD = "data.json"
ONLY_FOLDERS = "data.val_fraction is for folders of image files without a val"


def latents_path(folder: Path, split: str) -> Path:
    """Return the path of the record that every folder of stored latents has; see `python -m moh_vision latents`."""
    return folder / f"{split}.meta.json"


def is_latent_cache(root: str, split: str = "train") -> bool:
    """Return whether `root` is a folder with latents of that split."""
    return latents_path(Path(root), split).is_file()


def has_split(root: str, split: str) -> bool:
    """Return whether the folder `root` has a subfolder or shards of a split."""
    return split in split_folders(root) or any(Path(root).glob(f"{split}-*.tar"))


def open_source(
    root: str, split: str, key: str = "data.root", val_fraction: float | None = None
) -> ImageSource:
    """Open the images of a split.

    Args:
        root: "digits", "hfds/NAME[?label=COLUMN]", a folder with train/CLASS/... and val/CLASS/..., or a folder of
            webdataset shards. Images without classes are in train/ and val/ or, if there is only "train", in `root`.
        split: "train" or "val".
        key: the option that named `root`, for messages.
        val_fraction: share of the images that is "val" where a folder has no validation images, see
            `ImageFolder.divide`; 0: all are "train"; None: a folder of classes in no split is refused.
    """
    if val_fraction and undivided_folder(root):
        return _whole_folder(root).divide(val_fraction)[split]
    if val_fraction == 0 and split == "train" and undivided_folder(root):
        return _whole_folder(root)
    try:
        return _open_split(root, split, key)
    except NoSplit as error:
        if val_fraction:
            raise NoSplit(f"{error}; {ONLY_FOLDERS}") from None
        raise


def _whole_folder(root: str) -> ImageFolder:
    """Return all images of a folder that `undivided_folder` knows."""
    return ImageFolder(undivided_folder(root), Path(root).name)


def refuse_idle_fraction(data, given: Collection[str]) -> None:
    """Raise ValueError if the command line gives data.val_fraction, but nothing is divided.

    The fraction of a configuration is for folders without validation images, and has no effect on other data.

    Args:
        data: an `EvalDataConfig`.
        given: the options of the command line.
    """
    if "data.val_fraction" not in given or not data.val_fraction:
        return
    root = data.root
    if root == "digits" or root.startswith(PREFIX) or has_split(root, "val"):
        problem = f"data.val_fraction {data.val_fraction:g} has no effect with data.root {root}"
        raise ValueError(f"{problem}: {ONLY_FOLDERS}")


def _open_split(root: str, split: str, key: str) -> ImageSource:
    """Open a split; raise NoSplit if the data set lacks it. Arguments are those of `open_source`."""
    if root == "digits":
        return Digits(split)
    if root.startswith(PREFIX):
        return HubDataset(root, split, key)
    if not Path(root).is_dir():
        raise FileNotFoundError(
            f"{key} {root}: no such folder (give a folder of {split}-*.tar shards, a folder with "
            f"{split}/CLASS/*.jpg, hfds/NAME, or digits; URLs of shards go into data.stream)"
        )
    if is_latent_cache(root, split):
        raise ValueError(f"{key} {root}: latents, which train_dit.py reads; images are needed here")
    folder = split_folders(root).get(split)
    if folder:
        return ImageFolder(folder, Path(root).name)
    if has_split(root, split):
        return Shards(root, split)
    classes = subfolders(root)
    if split == "train" and not classes:
        if any(path.suffix.lower() in IMAGES for path in Path(root).glob("[!.]*")):
            return ImageFolder(root, Path(root).name)
    missing = f"neither {split}-*.tar shards nor a folder {split} in it that is a split"
    problem = f"{key} {root}: {missing}"
    if classes:
        divided = f"python -m moh_vision shards --in {shlex.quote(root)} --out DIR --val-fraction 0.1 divides them"
        problem += f"; if its folders are classes, put them into train and val, or {divided}"
    raise NoSplit(problem)


def open_splits(
    root: str, train: Source | None = None, val_fraction: float | None = None
) -> tuple[Source, ImageSource]:
    """Open the training split, unless it is given, and the validation split, which must have the same classes.

    `val_fraction` is that of `open_source`, and divides no stream.
    """
    if train is not None:
        train = with_classes(root, train)
        val = open_source(root, "val")
    elif val_fraction and undivided_folder(root):
        parts = with_classes(root, _whole_folder(root)).divide(val_fraction)  # once for both
        train = parts["train"]
        val = parts["val"]
    else:
        train = with_classes(root, open_source(root, "train", val_fraction=val_fraction))
        val = open_source(root, "val", val_fraction=val_fraction)
    match_classes(train.classes, "train", val, f"data.root {root}")
    return train, val


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


def refuse_other_classes(expected: list[str], owner: str, classes: list[str], named: str) -> None:
    """Raise ValueError, naming a class, unless `classes` (of val) are those `expected` (of `owner`).

    Their order may differ if each name occurs once.
    """
    if expected == classes:
        return
    odd = sorted(set(expected) ^ set(classes))
    all_once = len(set(expected)) == len(expected) == len(classes)
    if not odd and all_once:
        return
    if odd:
        only_in = owner if odd[0] in expected else "val"
        problem = f"class {odd[0]!r} is only in {only_in}"
    else:
        twice = next(name for name in classes if max(expected.count(name), classes.count(name)) > 1)
        problem = f"two classes are called {twice!r}"
    raise ValueError(
        f"{named}: {len(expected)} classes in {owner}, {len(classes)} in val; {problem}"
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
    if isinstance(source, ImageSource):
        labels = source.labels
    else:  # the labels of a stream come with its samples
        labels = np.empty(0, np.int64)
    digest = hashlib.sha256(labels.tobytes())
    for data in listing:
        digest.update(data)
    names = source.classes or ["none"]
    counts = np.bincount(labels, minlength=len(names)).tolist()
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
