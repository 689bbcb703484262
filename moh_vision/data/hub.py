"""Labelled images from the Hugging Face hub, or a local folder in one of its layouts, through `datasets`."""

from __future__ import annotations

from typing import Iterator, Sequence

import numpy as np
from PIL import Image

from moh_vision.data.decode import UnreadableImage, decode_image

PREFIX = "hfds/"
SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test")}


def hub_split(root: str, names: Sequence[str]):
    """(table, its name) of the first of the splits `names` that there is.

    Args:
        root: hfds/NAME or hfds/NAME:CONFIG, what datasets.load_dataset takes: a name on the hub, or a local folder.

    Raises:
        ValueError: naming data.root, and what is missing.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(f"data.root {root} needs the package datasets: pip install 'moh_vision[hub]'") from None
    name, _, config = root.removeprefix(PREFIX).partition(":")
    try:
        splits = datasets.load_dataset(name, config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data.root {root}: {error}") from None
    split = next((s for s in names if s in splits), None)
    if split is None:
        raise ValueError(f"data.root {root}: no split {' or '.join(names)}; it has {', '.join(splits)}")
    return splits[split], f"{root}, split {split}"


class HubDataset:
    """`hfds/NAME` or `hfds/NAME:CONFIG`: a data set with one image column and one class-label column.

    Args:
        root: see `hub_split`.
        split: "train", or "val" (validation, val, valid or test: the first that there is).

    Raises:
        ValueError: naming data.root, and what is missing.
    """

    channels = 3
    img_size = None

    def __init__(self, root: str, split: str):
        self.root = root
        table, self.table_name = hub_split(root, SPLITS[split])
        import datasets

        image = self._column(table, datasets.Image, "image")
        label = self._column(table, datasets.ClassLabel, "class-label")
        self.name = root.removeprefix(PREFIX).rstrip("/").rpartition("/")[2]
        self.classes = list(table.features[label].names)
        self.labels = np.array(table[label], dtype=np.int64)
        self.shard_sizes = (len(self.labels),)
        unlabelled = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.classes)))
        if len(unlabelled):
            row = unlabelled[0]
            raise ValueError(
                f"data.root {self.table_name}: row {row} has label {self.labels[row]}, "
                f"allowed are 0 to {len(self.classes) - 1}"
            )
        # Bytes, not images: decoding is ours, so that every source treats files alike.
        self.column = image
        self.rows = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        where = f"{self.table_name}, row {index}"
        cell = self.rows[index][self.column]
        data = cell["bytes"]
        if data is None:  # the table holds paths
            where = f"{where} ({cell['path']})"
            try:
                with open(cell["path"], "rb") as file:
                    data = file.read()
            except OSError as error:
                raise UnreadableImage(f"{where}: {error.strerror}") from None
        return decode_image(data, where)

    def listing(self) -> Iterator[bytes]:
        """Nothing: rows have no names, so the labels in their order tell two listings apart."""
        yield from ()

    def identities(self) -> Iterator[bytes]:
        """For each sample what tells it from a changed one: the fingerprint that `datasets` gives the table."""
        yield from (f"{self.rows._fingerprint} {row}".encode() for row in range(len(self)))

    def _column(self, table, kind, what: str) -> str:
        names = [name for name, feature in table.features.items() if isinstance(feature, kind)]
        if len(names) != 1:
            raise ValueError(
                f"data.root {self.root}: one {what} column is needed, there are {len(names)} among {', '.join(table.features)}"
            )
        return names[0]
