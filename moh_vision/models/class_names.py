"""Names of the classes that weights were trained on, and their order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo
from timm.utils.misc import natural_key

from moh_vision.common.io import class_names, composed
from moh_vision.models.weight_files import read_metadata, read_settings


def listed(names: Any, where: str) -> list[str] | None:
    """Return class names in order, from a list or timm's mapping from index to name; None if there are none.

    Args:
        where: where the names were found, for messages.
    """
    if isinstance(names, dict):
        names = [names.get(str(c)) for c in range(len(names))]
    if not names:
        return None
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{where} is no list of names")
    return [composed(name) for name in names]


def saved_with(file: Path) -> list[str] | None:
    """Return the class names that a run, timm or our pipeline saved with a weights file, or those of a classes.txt.

    None: there are no names.
    """
    if file.suffix == ".safetensors":
        names = read_metadata(file).get("classes")
        if names:
            return listed(names, f"{file}: classes in its metadata")
    timm_config = file.parent / "config.json"
    names = listed(read_settings(timm_config).get("label_names"), f"{timm_config}: label_names")
    pipeline = file.parent.parent / "model_index.json"
    # diffusers' DiTPipeline names ImageNet's classes in its own words.
    if not names and "MoHDiTPipeline" in str(read_settings(pipeline).get("_class_name")):
        names = listed(read_settings(pipeline).get("id2label"), f"{pipeline}: id2label")
    listing = file.with_name("classes.txt")
    if not names and listing.is_file():
        names = class_names(listing)
    return names or None


def unnamed_classes(count: int) -> list[str]:
    """Return names for classes that have none: ImageNet's synsets for 1,000 classes, else the class numbers."""
    imagenet = ImageNetInfo()
    if count == imagenet.num_classes():
        return list(imagenet.label_names())
    return [str(c) for c in range(count)]


def indices_of(classes: Sequence[str], within: Sequence[str]) -> list[int] | None:
    """Return the index in `within` of each of `classes`; None unless both hold the same names, each once."""
    index = {name: c for c, name in enumerate(within)}
    if not len(index) == len(within) == len(classes) or set(index) != set(classes):
        return None
    return [index[name] for name in classes]


def assumed_order(source: str, classes: Sequence[str]) -> tuple[list[str], str]:
    """Return class names in the order assumed for weights that do not name their classes, and a line that says so.

    timm's training sorts class folders by the numbers in them and without regard to case. This package sorts them
    as text, as do torchvision and therefore most official code.

    Args:
        source: the weights: a file, a folder, or what `timm.create_model` takes.
        classes: class names of the data.
    """
    local = Path(source.removeprefix("local-dir:"))
    folder = local if local.is_dir() else local.parent
    if not local.exists() or "architecture" in read_settings(
        folder / "config.json"
    ):  # timm's weights
        ordered = sorted(classes, key=natural_key)
        rule = "timm's order (2 before 10, a before B)"
    else:
        ordered = list(classes)
        rule = "the order of the data"
    shown = ordered
    if len(ordered) > 5:
        shown = [*ordered[:4], "..."]
    said = f"{source} does not name its {len(classes)} classes, which are taken in {rule}: {', '.join(shown)}"
    if local.exists():
        said += "; a classes.txt beside the weights, one name a line, says otherwise"
    return ordered, said
