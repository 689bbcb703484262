"""Blocks for masked language models: RoBERTa's full sentences, dynamic masking (Liu et al. 2019)."""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from moh_vision.engine.seeds import Stream, derive_seed
from moh_vision.language.data.tokens import Tokens
from moh_vision.language.data.translation import IGNORE, padded
from moh_vision.language.data.vocabulary import BOS, MASK, PAD, SPECIALS, UNK, Vocabulary

EVALUATION_SEED = 0  # runs of any seed are evaluated with the same masks


def mask_tokens(
    ids: np.ndarray, seed: int, position: int, vocabulary_size: int, prob: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    """Hide tokens [T] as BERT does (Devlin et al. 2019): each with `prob`, at least one, but no pad, bos and eos. 80 %
    become the mask, 10 % a random token, 10 % stay. Returns inputs [T] and labels [T], -100 where not chosen.
    """
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, position, Stream.MASKS)))
    draw, kind = rng.random(len(ids)), rng.random(len(ids))
    anything = rng.integers(len(SPECIALS), vocabulary_size, len(ids))
    text = ids >= UNK
    chosen = text & (draw < prob)
    if text.any() and not chosen.any():
        chosen = text & (draw == draw[text].min())
    inputs = np.where(chosen & (kind < 0.8), MASK, ids)
    inputs = np.where(chosen & (kind >= 0.8) & (kind < 0.9), anything, inputs)
    return inputs, np.where(chosen, ids, IGNORE)


class MaskedBlocks(Dataset):
    """Items (position, block number) -> (inputs, labels), int64.

    Joined lines are cut into bos and `block - 1` tokens, the last block may be shorter: paragraphs of WikiText are often
    longer than a block. RoBERTa's blocks of 512 hold whole sentences.
    """

    def __init__(self, tokens: Tokens, block: int, vocabulary: Vocabulary, seed: int, prob: float = 0.15):
        if vocabulary.specials <= MASK:
            raise ValueError("a masked language model needs a vocabulary with <mask>; this one was made without")
        assert block >= 3
        self.tokens, self.stores, self.room = tokens, [tokens], block - 1
        self.seed, self.prob = seed, prob
        self.vocabulary_size = len(vocabulary)

    def __len__(self) -> int:
        # A last block of one eos would have nothing to predict.
        return -(-(len(self.tokens.ids) - 1) // self.room)

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        position, number = item
        own = self.tokens.ids[number * self.room : (number + 1) * self.room].astype(np.int64)
        ids = np.concatenate([[BOS], own])
        return mask_tokens(ids, self.seed, position, self.vocabulary_size, self.prob)

    @staticmethod
    def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
        """dict of int64 [B, T]: input_ids, attention_mask, labels."""
        inputs, labels = zip(*items)
        return dict(
            input_ids=padded(inputs, PAD),
            attention_mask=padded([np.ones_like(i) for i in inputs], 0),
            labels=padded(labels, IGNORE),
        )
