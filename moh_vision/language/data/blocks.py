"""Blocks of running text, for masked and causal language models."""

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.language.data.batches import IGNORE, padded
from moh_vision.language.data.tokens import Tokens
from moh_vision.language.data.vocabulary import BOS, MASK, PAD, SPECIALS, UNK, Vocabulary

EVALUATION_SEED = 0  # runs of any seed are evaluated with the same masks


def mask_tokens(
    ids: np.ndarray, seed: int, position: int, vocabulary_size: int, prob: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    """Hide tokens as BERT does (Devlin et al. 2019): 80 % of the chosen become the mask, 10 % a random token, 10 % stay.

    Args:
        ids: [T]. Pad, bos and eos are never chosen.
        seed: of the run.
        position: of the block in the run's order.
        vocabulary_size: above all ids.
        prob: probability with which each token is chosen; at least one token always is.

    Returns:
        inputs [T] and labels [T], -100 where not chosen.
    """
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, position, Stream.MASKS)))
    choice = rng.random(len(ids))  # which tokens are chosen
    change = rng.random(len(ids))  # what becomes of a chosen one
    random_ids = rng.integers(len(SPECIALS), vocabulary_size, len(ids))
    text = ids >= UNK
    chosen = text & (choice < prob)
    if text.any() and not chosen.any():
        chosen = text & (choice == choice[text].min())
    inputs = np.where(chosen & (change < 0.8), MASK, ids)
    inputs = np.where(chosen & (change >= 0.8) & (change < 0.9), random_ids, inputs)
    return inputs, np.where(chosen, ids, IGNORE)


class MaskedBlocks(Dataset):
    """Data set (position, block index) -> (inputs, labels), int64, with dynamic masking as in RoBERTa (Liu et al. 2019).

    A block is bos and the next `block - 1` tokens of all lines joined; the last block may be shorter. RoBERTa's blocks
    of 512 hold whole sentences instead, but paragraphs of WikiText are often longer than a block.

    Args:
        tokens: of the joined lines.
        block: tokens in a block, with bos.
        vocabulary: with <mask>.
        seed: of the masks.
        prob: see `mask_tokens`.
    """

    def __init__(
        self, tokens: Tokens, block: int, vocabulary: Vocabulary, seed: int, prob: float = 0.15
    ):
        if vocabulary.specials <= MASK:
            raise ValueError(
                f"data.tokenizer {vocabulary.where}: it has no <mask>, which a masked language model needs"
            )
        assert block >= 3
        self.tokens = tokens
        self.stores = [tokens]
        self.room = block - 1  # for tokens behind bos
        self.seed = seed
        self.prob = prob
        self.vocabulary_size = len(vocabulary)

    def __len__(self) -> int:
        # Leave out a last block of eos alone, which would have nothing to predict.
        return -(-(len(self.tokens.ids) - 1) // self.room)

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        position, block = item
        text = self.tokens.ids[block * self.room : (block + 1) * self.room].astype(np.int64)
        ids = np.concatenate([[BOS], text])
        return mask_tokens(ids, self.seed, position, self.vocabulary_size, self.prob)

    @staticmethod
    def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
        """Return a dict of int64 [B, T]: input_ids, attention_mask, labels."""
        mask = padded([np.ones_like(inputs) for inputs, _ in items], 0)
        return dict(CausalWindows.collate(items), attention_mask=mask)


class CausalWindows(Dataset):
    """Data set (position, window index) -> (inputs [W], labels [W]), int64 (Baevski and Auli 2019).

    The position has no effect. Labels are a piece of `tokens`, and inputs are the piece one token earlier, with eos
    before the first token. Windows advance by `stride` and label only tokens that no earlier window labels. Training
    takes stride = width, as fairseq's break mode "none". Evaluation "512/480" takes width 512 and stride 32, so that
    tokens after the first 480 have 480 to 511 tokens before them.
    """

    def __init__(self, tokens: Tokens, width: int, stride: int, vocabulary: Vocabulary):
        self.tokens = tokens
        self.stores = [tokens]
        self.width = width
        self.stride = stride
        self.eos = vocabulary.eos
        self.vocabulary_size = len(vocabulary)
        if len(tokens.ids) < width:
            raise ValueError(
                f"{tokens.name}: {len(tokens.ids)} tokens, fewer than a block of {width}"
            )

    def __len__(self) -> int:
        # 1 + (tokens behind the first window) / stride, rounded up.
        return 1 - (self.width - len(self.tokens.ids)) // self.stride

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        _, window = item
        first = min(window * self.stride, len(self.tokens.ids) - self.width)
        start = max(0, first - 1)
        piece = self.tokens.ids[start : first + self.width].astype(np.int64)
        # The file may be damaged, and an error on a GPU would not name it.
        if piece.max() >= self.vocabulary_size:
            raise ValueError(
                f"{self.tokens.name}, token {start + piece.argmax()}: token id {piece.max()}, but the "
                f"vocabulary has {self.vocabulary_size} tokens"
            )
        if first == 0:  # no token comes before the first one
            piece = np.concatenate([[self.eos], piece])
        labels = piece[1:].copy()
        if window > 0:
            # Earlier windows label the tokens before this one.
            done = (window - 1) * self.stride + self.width
            labels[: done - first] = IGNORE
        return piece[:-1], labels

    @staticmethod
    def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
        """Return a dict of int64 [B, W]: input_ids, labels."""
        inputs, labels = zip(*items)
        return dict(input_ids=padded(inputs, PAD), labels=padded(labels, IGNORE))
