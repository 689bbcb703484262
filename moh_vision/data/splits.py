"""`data.root` to the splits behind it."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

from moh_vision.data.folder import ImageFolder, split_folder
from moh_vision.data.hub import PREFIX, HubDataset
from moh_vision.data.latents.cache import is_latent_cache
from moh_vision.data.sources import Digits, Shards


def open_source(root: str, split: str, index_dir: Optional[str] = None):
    """The labelled images of one split: len(), image(i) -> PIL, labels, classes, channels, img_size, shard_sizes.

    Args:
        root: "digits", "hfds/NAME", a folder with train/CLASS/... and val/CLASS/..., or one of webdataset shards.
        split: "train" or "val".
        index_dir: see `Shards`.

    Raises:
        ValueError, FileNotFoundError: naming data.root, and what is missing there.
    """
    if root == "digits":
        return Digits(split)
    if root.startswith(PREFIX):
        return HubDataset(root, split)
    if not Path(root).is_dir():
        raise FileNotFoundError(
            f"data.root {root}: no such folder (give a folder of {split}-*.tar shards, a folder with "
            f"{split}/CLASS/*.jpg, hfds/NAME, or digits)"
        )
    if is_latent_cache(root, split):
        raise ValueError(f"data.root {root}: latents, which train_dit.py reads; images are needed here")
    if split_folder(root, split) is not None:
        return ImageFolder(root, split)
    if not any(Path(root).glob(f"{split}-*.tar")):
        raise FileNotFoundError(f"data.root {root}: neither {split}-*.tar shards nor a folder {split} in it")
    return Shards(root, split, index_dir)


def check_same_classes(expected: List[str], owner: str, val, root: str) -> None:
    """Raise ValueError, naming a class, unless `val` has the classes that `owner` ("train", or a checkpoint) has.

    Shards without classes.txt number their classes up to the largest label; there, val may lack the last ones.
    """
    numbers = [str(c) for c in range(len(expected))]
    if isinstance(val, Shards) and expected == numbers and val.classes == numbers[: len(val.classes)]:
        val.classes = list(expected)
    if val.classes == expected:
        return
    counts = f"data.root {root}: {len(expected)} classes in {owner}, {len(val.classes)} in val"
    for have, classes, lack, others in ((owner, expected, "val", val.classes), ("val", val.classes, owner, expected)):
        odd = sorted(set(classes) - set(others))
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise ValueError(f"{counts}; {have} has class {odd[0]!r}{more}, which {lack} has not")
    raise ValueError(f"{counts}, in another order")
