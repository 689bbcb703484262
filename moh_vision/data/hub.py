"""Images from the Hugging Face hub, or a local folder in one of its layouts, through `datasets`."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl

import numpy as np
from huggingface_hub.utils import HFValidationError, validate_repo_id

from moh_vision.common.io import composed
from moh_vision.data.sources import MAX_CLASSES, ImageSource, NoSplit, file_size, read_file

PREFIX = "hfds/"
SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test")}
COLUMNS = ("image", "label")  # what hfds/NAME?image=COLUMN&label=COLUMN chooses
NO_LABEL = "none"


def hub_split(root: str, names: Sequence[str], key: str = "data.root"):
    """Open the first of the splits `names` that a data set has; return its table and what messages call it.

    Args:
        root: hfds/NAME or hfds/NAME:CONFIG, what datasets.load_dataset takes: a name on the hub, or a local folder.
        names: of splits, in order of preference.
        key: the option that named `root`, for messages.
    """
    splits = _all_splits(root, f"{key} {root}")
    split = next((s for s in names if s in splits), None)
    if split is None:
        raise NoSplit(f"{key} {root}: no split {' or '.join(names)}; it has {', '.join(splits)}")
    return splits[split], f"{root}, split {split}"


def _all_splits(root: str, named: str):
    """Return the tables of all splits of a data set, by their names; messages call it `named`."""
    import datasets

    name, _, config = root.removeprefix(PREFIX).partition(":")
    try:
        return datasets.load_dataset(name, config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{named}: {error}") from None


def hub_name(root: str) -> str | None:
    """Return OWNER/NAME or NAME of the data set on the hub that a root means; None for a local folder or another root."""
    if not root.startswith(PREFIX):
        return None
    path, _, _ = root.removeprefix(PREFIX).partition("?")
    name, _, _ = path.partition(":")
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    if Path(name).exists():  # which `datasets` prefers to the hub's
        return None
    return name


class HubDataset(ImageSource):
    """Images of `hfds/NAME[:CONFIG][?label=COLUMN&image=COLUMN]`; for "val" and "train" see `SPLITS`.

    A column that is not chosen must be the only one of its type, images or class labels. Without a column of class
    labels, or with "label=none", the images have no classes. A chosen label column may also hold whole numbers (then
    the classes are the numbers from 0 to the largest) or texts (then these are the classes' names).
    """

    takes = "hfds/NAME of the hub"

    @classmethod
    def opens(cls, root: str) -> bool:
        return root.startswith(PREFIX)

    @classmethod
    def splits(cls, root: str) -> Collection[str]:
        there = _all_splits(root.partition("?")[0], root)
        return [split for split, names in SPLITS.items() if not there.keys().isdisjoint(names)]

    @classmethod
    def open(cls, root: str, split: str, key: str) -> Self:
        return cls(root, split, key)  # which raises NoSplit

    def __init__(self, root: str, split: str, key: str = "data.root"):
        self.root = root
        self.named = f"{key} {root}"  # the beginning of messages
        table_path, _, chosen = root.partition("?")
        self.chosen = self._chosen(chosen)
        table, self.table_name = hub_split(table_path, SPLITS[split], key)
        import datasets

        # Bytes, not images: decoding is ours, so that every source treats files alike.
        self.column = self._column(table, "image", datasets.Image, "image")
        as_bytes = datasets.Image(decode=False)
        self.rows = table.select_columns([self.column]).cast_column(self.column, as_bytes)
        self.name = table_path.removeprefix(PREFIX).rstrip("/").rpartition("/")[2]
        label = self._column(table, "label", datasets.ClassLabel, "class-label")
        if label is None:
            self.classes = []
            self.labels = np.zeros(len(table), np.int64)
        else:
            self._take_labels(table, label, datasets)

    def _chosen(self, text: str) -> dict[str, str]:
        """Parse "label=COLUMN&image=COLUMN"."""
        pairs = parse_qsl(text, keep_blank_values=True)
        for key, column in pairs:
            if key not in COLUMNS or not column:
                raise ValueError(
                    f"{self.named}: {key}={column}; expected ?label=COLUMN, ?image=COLUMN or both joined by &"
                )
        if text and not pairs:
            raise ValueError(f"{self.named}: ?{text}; expected ?label=COLUMN")
        return dict(pairs)

    def _column(self, table, key: str, feature_class, title: str) -> str | None:
        """Return the chosen column or, if none was chosen, the only one of a feature class; None for no labels.

        Args:
            table: a split, as `datasets` gives it.
            key: "image" or "label", of COLUMNS.
            feature_class: of `datasets`; the column has it if none was chosen.
            title: what messages call such a column.
        """
        columns = ", ".join(table.features)
        column = self.chosen.get(key)
        if key == "label" and column == NO_LABEL:
            return None
        if column is not None:
            if column not in table.features:
                raise ValueError(f"{self.named}: no column {column}; there are {columns}")
            return column
        names = [
            name for name, feature in table.features.items() if isinstance(feature, feature_class)
        ]
        if len(names) == 1:
            return names[0]
        sign = "&" if self.chosen else "?"
        choose = f"{self.root}{sign}{key}=COLUMN chooses one"
        if key == "label" and not names:
            self.remarks = [
                f"{self.root}: no {title} column among {columns}, so that the images are without classes; {choose}"
            ]
            return None
        raise ValueError(f"{self.named}: {len(names)} {title} columns among {columns}; {choose}")

    def _take_labels(self, table, column: str, datasets) -> None:
        """Read class numbers and names from a column of class labels, whole numbers or texts."""
        feature = table.features[column]
        values = table[column][:]
        dtype = getattr(feature, "dtype", type(feature).__name__)
        if isinstance(feature, datasets.ClassLabel):
            self.classes = [composed(name) for name in feature.names]
            self.labels = np.array(values, np.int64)
        elif dtype in ("string", "large_string") and None not in values:
            names = [composed(name.strip()) for name in values]
            self.classes = sorted(set(names))
            number = {name: c for c, name in enumerate(self.classes)}
            self.labels = np.array([number[name] for name in names], np.int64)
        elif str(dtype).startswith(("int", "uint")) and None not in values:
            self.labels = np.array(values, np.int64)
            most = int(self.labels.max())
            if most >= MAX_CLASSES:  # the column holds ids, perhaps
                raise ValueError(
                    f"{self.named}: column {column} holds {most}; expected labels of 0 to {MAX_CLASSES - 1}"
                )
            self.classes = [str(c) for c in range(most + 1)]
            self.numbered = True
        else:
            raise ValueError(
                f"{self.named}: column {column} is of {dtype}, or has rows without a label; expected class labels, "
                "whole numbers or texts in every row"
            )
        self.check_labels(self.table_name)

    def read(self, index: int) -> bytes:
        cell = self.rows[index][self.column]
        if cell["bytes"] is None:  # some tables hold paths
            return read_file(cell["path"], self.where(index))
        return cell["bytes"]

    def where(self, index: int) -> str:
        cell = self.rows[index][self.column]
        row = f"{self.table_name}, row {index}"
        if cell["bytes"] is None:
            row += f" ({cell['path']})"
        return row

    def sizes(self) -> np.ndarray:
        import pyarrow.compute

        column = self.rows.with_format("arrow")[:][self.column]  # of cells {bytes, path}
        lengths = pyarrow.compute.binary_length(pyarrow.compute.struct_field(column, "bytes"))
        sizes = lengths.fill_null(0).to_numpy().astype(np.int64)
        for index in np.flatnonzero(sizes == 0).tolist():  # the cell holds a path
            sizes[index] = file_size(self.rows[index][self.column]["path"])
        return sizes

    def identities(self) -> Iterator[bytes]:
        yield self.rows._fingerprint.encode()  # `datasets` gives one to each table
