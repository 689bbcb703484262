"""Pairs of encoded sentences: selection for training, and batches."""

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.language.data.batches import IGNORE, padded
from moh_vision.language.data.tokens import Tokens
from moh_vision.language.data.vocabulary import BOS, PAD


class ParallelTokens(Dataset):
    """Data set of pairs (source ids, target ids), int64, each with eos. Pairs with an empty side are left out.

    Limits count tokens without eos, as when corpora are cleaned after BPE.

    Args:
        source, target: stores of one text in two languages.
        max_length: leave out pairs with more tokens on a side; None: no limit.
        max_ratio: leave out pairs in which one side has more than this many times the tokens of the other, 1.5 in the
            papers for IWSLT and EN-FR; None: no limit.
        share: use this share of the remaining pairs. The draw does not depend on the run's seed, and a larger share
            includes every smaller one (MAE section 5.2: subsets of 5 to 100 %).

    Attributes:
        lines: index of each pair's line in the text.
        lengths: [n, 2] tokens of source and target, with eos.
        left_out: reason -> number of pairs.
    """

    def __init__(
        self,
        source: Tokens,
        target: Tokens,
        max_length: int | None = None,
        max_ratio: float | None = None,
        share: float = 1.0,
    ):
        assert len(source) == len(target)
        self.source = source
        self.target = target
        self.stores = [source, target]
        lengths = np.stack([source.lengths, target.lengths], axis=1)  # with eos
        shorter = lengths.min(1) - 1
        longer = lengths.max(1) - 1
        if max_length is None:
            max_length = np.inf
        if not max_ratio:
            max_ratio = np.inf
        faults = {
            "empty": shorter < 1,
            "too long": longer > max_length,
            "ratio": longer > np.maximum(shorter, 1) * max_ratio,
        }
        good = np.ones(len(lengths), bool)
        self.left_out = {}
        for reason, fault in faults.items():
            self.left_out[reason] = int((fault & good).sum())
            good &= ~fault
        self.lines = np.flatnonzero(good)
        if share < 1:
            rng = np.random.Generator(np.random.PCG64(derive_seed(Stream.SUBSET)))
            drawn = rng.permutation(self.lines)[: max(1, round(share * len(self.lines)))]
            self.left_out["subset"] = len(self.lines) - len(drawn)
            self.lines = np.sort(drawn)
        if not len(self.lines):
            names = f"{source.name} and {target.name}"
            keys = f"data.max_length {max_length:g}, data.max_ratio {max_ratio:g}"
            raise ValueError(
                f"{names}: {self.summary()}; with {keys} none is left, expected 1 or more"
            )
        self.lengths = lengths[self.lines]

    def __len__(self) -> int:
        return len(self.lines)

    def summary(self) -> str:
        """Return one line: how many pairs are used, and why the remaining ones are left out."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items() if count)
        text = f"{len(self.lines)} of {len(self.source)} pairs"
        if reasons:
            text += f" (left out: {reasons})"
        return text

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        line = self.lines[index]
        return self.source[line], self.target[line]

    @staticmethod
    def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
        """Return a dict of int64 tensors: input_ids x1..xm eos and attention_mask [B, S], decoder_input_ids bos y1..yn
        and labels y1..yn eos [B, T]. Padding is on the right, ids with PAD and labels with -100."""
        sources, targets = zip(*items)
        return dict(
            input_ids=padded(sources, PAD),
            attention_mask=padded([np.ones_like(s) for s in sources], 0),
            decoder_input_ids=padded([np.concatenate([[BOS], t[:-1]]) for t in targets], PAD),
            labels=padded(targets, IGNORE),
        )
