"""Windows of running text for causal language models (Baevski and Auli 2019)."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from moh_vision.language.data.tokens import refuse_ids
from moh_vision.language.data.translation import IGNORE, padded
from moh_vision.language.data.vocabulary import EOS, PAD


class CausalWindows(Dataset):
    """Items (position, window number) -> (inputs [W], labels [W]), int64; the position has no effect.

    Labels are a piece of `tokens`, inputs the piece one token earlier, with eos before the first. Windows advance by
    `stride` and label only what no earlier one labels. Training takes stride = width, as fairseq's break mode "none";
    evaluation "512/480" width 512 and stride 32: tokens after the first 480 have 480 to 511 before them.
    """

    def __init__(self, tokens, width: int, stride: int | None = None, eos: int | None = EOS, size: int | None = None):
        self.tokens, self.stores, self.width = tokens, [tokens], width
        self.stride = width if stride is None else stride
        self.eos, self.size = eos, size
        if not 1 <= self.stride <= width:
            raise ValueError(f"a stride of {stride} for a context of {width}: allowed are 1 to {width}")
        if eos is not None and size is not None and not 0 <= eos < size:
            raise ValueError(
                f"{tokens.name}: eos is token {eos}, but the vocabulary has {size} tokens, 0 to {size - 1}"
            )
        if len(tokens.ids) < width:
            raise ValueError(f"{tokens.name}: {len(tokens.ids)} tokens, fewer than a block of {width}")

    def __len__(self) -> int:
        return 1 - (self.width - len(self.tokens.ids)) // self.stride

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        _, number = item
        first = min(number * self.stride, len(self.tokens.ids) - self.width)
        piece = self.tokens.ids[max(0, first - 1) : first + self.width].astype(np.int64)
        if self.size is not None and not 0 <= piece.min() <= piece.max() < self.size:
            refuse_ids(f"{self.tokens.name}, token {first}", int(piece.min()), int(piece.max()), self.size)
        if not first:
            before = piece[:1] if self.eos is None else [self.eos]
            piece = np.concatenate([before, piece])
        labels = piece[1:].copy()
        if not first and self.eos is None:
            labels[0] = IGNORE
        if number:
            done = (number - 1) * self.stride + self.width  # tokens that earlier windows label
            labels[: done - first] = IGNORE
        return piece[:-1], labels

    @staticmethod
    def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
        """dict of int64 [B, W]: input_ids, labels."""
        inputs, labels = zip(*items)
        return dict(input_ids=padded(inputs, PAD), labels=padded(labels, IGNORE))
