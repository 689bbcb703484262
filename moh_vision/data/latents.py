"""Folders of stored latents, as a source of images that only says what they are: `diffusion` reads them."""

from collections.abc import Collection
from pathlib import Path
from typing import Self

from moh_vision.data.sources import ImageSource


def latents_path(folder: Path, split: str) -> Path:
    """Return the path of the record that every folder of stored latents has; see `python -m moh_vision latents`."""
    return folder / f"{split}.meta.json"


class StoredLatents(ImageSource):
    """Latents where images are asked for, which is refused; `diffusion.latents.stored.LatentCache` reads them."""

    takes = "a folder of latents for train_dit.py"
    holds = "latents"

    @classmethod
    def opens(cls, root: str) -> bool:
        return bool(cls.splits(root))

    @classmethod
    def splits(cls, root: str) -> Collection[str]:
        return [split for split in ("train", "val") if latents_path(Path(root), split).is_file()]

    @classmethod
    def open(cls, root: str, split: str, key: str) -> Self:
        cls.refuse_missing(root, split, key)
        raise ValueError(f"{key} {root}: latents, which train_dit.py reads; images are needed here")
