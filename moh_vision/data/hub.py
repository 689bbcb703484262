"""Labelled images from the Hugging Face hub, or a local folder in one of its layouts, through `datasets`."""

from collections.abc import Iterator, Sequence

import numpy as np

from moh_vision.data.sources import ImageSource, read_file
from moh_vision.engine.io import composed

PREFIX = "hfds/"
SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test")}


def hub_split(root: str, names: Sequence[str]):
    """Return the table, and its name, of the first of the splits `names` that there is.

    `root` is hfds/NAME or hfds/NAME:CONFIG, what datasets.load_dataset takes: a name on the hub, or a local folder.
    """
    import datasets

    name, _, config = root.removeprefix(PREFIX).partition(":")
    try:
        splits = datasets.load_dataset(name, config or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"data.root {root}: {error}") from None
    split = next((s for s in names if s in splits), None)
    if split is None:
        raise ValueError(
            f"data.root {root}: no split {' or '.join(names)}; it has {', '.join(splits)}"
        )
    return splits[split], f"{root}, split {split}"


class HubDataset(ImageSource):
    """`hfds/NAME[:CONFIG]` with one image and one class-label column; "val" is the first of SPLITS that there is."""

    def __init__(self, root: str, split: str):
        self.root = root
        table, self.table_name = hub_split(root, SPLITS[split])
        import datasets

        image = self._column(table, datasets.Image, "image")
        label = self._column(table, datasets.ClassLabel, "class-label")
        self.name = root.removeprefix(PREFIX).rstrip("/").rpartition("/")[2]
        self.classes = [composed(name) for name in table.features[label].names]
        self.labels = np.array(table[label], dtype=np.int64)
        # Bytes, not images: decoding is ours, so that every source treats files alike.
        self.column = image
        self.rows = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        self.check_labels(self.table_name)

    def read(self, index: int) -> bytes:
        cell = self.rows[index][self.column]
        return (
            read_file(cell["path"], self.where(index)) if cell["bytes"] is None else cell["bytes"]
        )

    def where(self, index: int) -> str:
        cell = self.rows[index][self.column]  # some tables hold paths
        return f"{self.table_name}, row {index}" + (
            f" ({cell['path']})" if cell["bytes"] is None else ""
        )

    def identities(self) -> Iterator[bytes]:
        yield self.rows._fingerprint.encode()  # that `datasets` gives the table

    def _column(self, table, kind, title: str) -> str:
        names = [name for name, feature in table.features.items() if isinstance(feature, kind)]
        if len(names) != 1:
            there = f"{len(names)} {title} columns among {', '.join(table.features)}"
            raise ValueError(f"data.root {self.root}: {there}; expected one")
        return names[0]
