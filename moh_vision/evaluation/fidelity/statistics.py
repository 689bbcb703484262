"""Statistics of images: moments of features, class probabilities, optional features."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

ROWS = 512  # features that are gathered before they enter the second moments
SPLIT = 5000  # images per split of the inception score, in file order, as in ADM's evaluator


class Moments:
    """Mean and covariance of features, in float64, batch by batch.

    Args:
        dim: F, number of features.
    """

    def __init__(self, dim: int):
        self.dim, self.count = dim, 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64)  # sum of (x - mean)(x - mean)^T
        self._waiting: List[Tensor] = []

    def add(self, features: Tensor) -> None:
        """features [B, F]."""
        self._waiting.append(features.detach().to("cpu", torch.float64))
        if sum(map(len, self._waiting)) >= ROWS:
            self._flush()

    def merge(self, other: Moments) -> None:
        """Add what another has seen (Chan, Golub, LeVeque 1979)."""
        self._flush()
        other._flush()
        self._merge(other.count, other.mean, other.scatter)

    def result(self) -> Tuple[Tensor, Tensor]:
        """Mean [F] and unbiased covariance [F, F]."""
        self._flush()
        return self.mean, self.scatter / max(self.count - 1, 1)

    def _flush(self) -> None:
        if self._waiting:
            x = torch.cat(self._waiting)  # [ROWS or more, F]
            self._waiting = []
            mean = x.mean(0)
            x = x - mean
            self._merge(len(x), mean, x.T @ x)

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        if count == 0:
            return
        total, delta = self.count + count, mean - self.mean
        self.scatter += scatter + torch.outer(delta, delta) * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count = total


class ClassScore:
    """Inception score of logits, batch by batch, in ordered splits of `SPLIT` images."""

    def __init__(self, classes: int):
        self.classes = classes
        self.splits: Dict[int, list] = {}  # number -> [images, sum of p log p, sum of p [classes]]

    def add(self, logits: Tensor, first: int) -> None:
        """logits [B, classes] of images first, first + 1, ..."""
        logits = logits.detach().to("cpu", torch.float64)
        log_p = logits.log_softmax(1)
        p = log_p.exp()
        numbers = torch.arange(first, first + len(p)) // SPLIT
        for number in numbers.unique().tolist():
            rows = numbers == number
            self._add(number, int(rows.sum()), (p * log_p)[rows].sum().item(), p[rows].sum(0))

    def merge(self, other: ClassScore) -> None:
        for number, (count, entropy, sums) in other.splits.items():
            self._add(number, count, entropy, sums)

    def _add(self, number: int, count: int, entropy: float, sums: Tensor) -> None:
        split = self.splits.setdefault(number, [0, 0.0, torch.zeros(self.classes, dtype=torch.float64)])
        split[0] += count
        split[1] += entropy
        split[2] += sums

    @property
    def short(self) -> Optional[str]:
        """Return a note on a last split that is smaller than the others, or None."""
        number = max(self.splits)
        count = self.splits[number][0]
        if not number or count == SPLIT:
            return None
        return f"the last of its {number + 1} splits has {count} of {SPLIT} images; the fewer, the lower is its score"

    def result(self) -> tuple[float, float]:
        """Mean and standard deviation over splits of exp(E KL(p(y|x) || p(y))), Salimans 2016."""
        scores = []
        for count, entropy, sums in self.splits.values():
            q = sums / count
            scores.append(np.exp(entropy / count - torch.special.xlogy(q, q).sum().item()))
        return float(np.mean(scores)), float(np.std(scores))


class SetStatistics:
    """All that the scores need of one set of images.

    Args:
        keep_features: keep them for precision, recall and KID: N x F x 4 bytes (50,000 x 2048: 410 MB).
    """

    def __init__(self, keep_features: bool):
        self.keep_features = keep_features
        self.size: Optional[Tuple[int, int]] = None  # height and width of the images
        self.pooled: Optional[Moments] = None
        self.spatial: Optional[Moments] = None
        self.classes: Optional[ClassScore] = None
        self.features: Dict[int, Tensor] = {}  # number of the first image -> [B, F]

    @property
    def count(self) -> int:
        if self.pooled is None:
            return 0
        return self.pooled.count + sum(map(len, self.pooled._waiting))

    def add(
        self, first: int, pooled: Tensor, spatial: Optional[Tensor] = None, logits: Optional[Tensor] = None
    ) -> None:
        """Features [B, F], [B, F'] or None, and [B, classes] or None, of images first, first + 1, ...

        Raises:
            ValueError: for features that are not finite.
        """
        for what, x in (("features", pooled), ("spatial features", spatial), ("logits", logits)):
            if x is not None and not torch.isfinite(x).all():
                row = first + int((~torch.isfinite(x)).any(1).nonzero()[0])
                raise ValueError(
                    f"the {what} of image {row} are not finite numbers; the extractor or its weights are broken"
                )
        if self.pooled is None:
            self.pooled = Moments(pooled.shape[1])
            self.spatial = None if spatial is None else Moments(spatial.shape[1])
            self.classes = None if logits is None else ClassScore(logits.shape[1])
        self.pooled.add(pooled)
        if spatial is not None:
            self.spatial.add(spatial)
        if logits is not None:
            self.classes.add(logits, first)
        if self.keep_features:
            # A part of a larger tensor would keep all of it in memory.
            self.features[first] = pooled.detach().float().cpu().contiguous()

    def merge(self, other: SetStatistics) -> None:
        """Add what another process has seen of the same set."""
        if other.pooled is None:
            return
        self.size = other.size
        if self.pooled is None:
            self.pooled, self.spatial, self.classes = other.pooled, other.spatial, other.classes
        else:
            for name in ("pooled", "spatial", "classes"):
                if getattr(self, name) is not None:
                    getattr(self, name).merge(getattr(other, name))
        self.features.update(other.features)

    def all_features(self) -> Optional[Tensor]:
        """[N, F] in the order of the images; None if they were not kept."""
        if not self.features:
            return None
        if len(self.features) > 1:  # kept as one from now on, not twice
            features = [self.features[first] for first in sorted(self.features)]
            self.features = {0: torch.cat(features)}
        return next(iter(self.features.values()))
