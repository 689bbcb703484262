"""Text from the Hugging Face hub, or a local folder in one of its layouts, through `datasets`."""

from __future__ import annotations

from typing import Iterator, Optional

from moh_vision.data.hub import PREFIX


class HubText:
    """A column of texts, as `lines.TextFile`.

    Args:
        table: of one split.
        name: of the data set and split, for messages.
        language: of the column translation; None: the column text.
    """

    def __init__(self, table, name: str, language: Optional[str] = None):
        self.table, self.language = table, language
        self.name = f"{name}, {language}" if language else name

    def __iter__(self) -> Iterator[str]:
        """The texts, on one line each.

        Raises:
            ValueError: naming data set and row.
        """
        row = 0
        for row, cell in enumerate(self.table, 1):
            text = cell["translation"].get(self.language) if self.language else cell["text"]
            if not isinstance(text, str) or "\0" in text:
                raise ValueError(f"{self.name}, row {row}: {'a NUL character' if text else 'no text'}")
            yield " ".join(text.splitlines()).strip()
        if not row:
            raise ValueError(f"{self.name}: no rows")

    def fingerprint(self) -> str:
        """The one that `datasets` gives the table, with the column."""
        return f"{self.table._fingerprint} {self.language or 'text'}"


def hub_table(root: str, names: tuple, column: str):
    """(table, its name) of the first of the splits `names` that there is; datasets.load_dataset reads it.

    Args:
        root: hfds/NAME or hfds/NAME:CONFIG.
        column: that it must have.

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
    if column not in splits[split].column_names:
        raise ValueError(
            f"data.root {root}, split {split}: no column {column}; it has {', '.join(splits[split].column_names)}"
        )
    return splits[split], f"{root}, split {split}"
