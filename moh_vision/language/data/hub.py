"""Text from the Hugging Face hub, or a folder laid out like it, by `datasets`."""

from __future__ import annotations

from typing import Iterator, Optional

from moh_vision.data.hub import hub_split


class HubText:
    """Texts of one split, read as by `lines.TextFile`: the column text, or `language` of the column
    translation. `name` is for messages.
    """

    def __init__(self, table, name: str, language: Optional[str] = None):
        self.table, self.language = table, language
        self.name = f"{name}, {language}" if language else name

    def __iter__(self) -> Iterator[str]:
        """The texts, on one line each."""
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


def hub_column(root: str, names: tuple, column: str):
    """As `hub_split`; raises ValueError too if the table has no such column."""
    table, name = hub_split(root, names)
    if column not in table.column_names:
        raise ValueError(f"data.root {name}: no column {column}; it has {', '.join(table.column_names)}")
    return table, name
