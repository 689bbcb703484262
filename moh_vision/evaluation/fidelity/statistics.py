"""Statistics of a set of images: collected batch by batch, and saved."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from moh_vision.common.errors import reason_of
from moh_vision.common.io import whole_file
from moh_vision.evaluation.fidelity.extractors import Extracted
from moh_vision.evaluation.fidelity.images import archive_members, open_array

ROWS = 512  # number of feature vectors that are collected before the covariance is updated
SPLIT = 5000  # images per split of the inception score, in file order, as in ADM's evaluator
# A note is due if splits lower the logarithm of the score by more than this (and chance): 2 % of the score.
LEAST_LOSS = 0.02
MAX_FEATURES = 16_384  # a covariance of this many features takes 2 GiB
# ADM's names of the mean and covariance of pooled and of spatial features; a file may lack the latter.
ADM = (("mu", "sigma"), ("mu_s", "sigma_s"))


def _is_size(value) -> bool:
    return isinstance(value, list) and list(map(type, value)) == [int, int]


def _is_counter(value) -> bool:
    return isinstance(value, dict) and set(map(type, value.values())) <= {int}


# Key of a saved file's record -> check of its value. A value of None means "not known".
RECORDED = dict(
    count=lambda value: value is None or (type(value) is int and value > 0),
    extractor=lambda value: value is None or isinstance(value, str),
    weights_sha256=lambda value: value is None or isinstance(value, str),
    source=lambda value: isinstance(value, str),
    channels=lambda value: value in (None, 1, 3),
    size=lambda value: value is None or _is_size(value),
    formats=lambda value: value is None or _is_counter(value),
)


class Moments:
    """Mean and covariance of features [B, F], in float64, batch by batch (Chan, Golub, LeVeque 1979)."""

    def __init__(self, dim: int):
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64)  # sum of (x - mean)(x - mean)^T
        self.waiting: list[Tensor] = []

    def add(self, features: Tensor, first: int = 0) -> None:
        """Add features [B, F]. `first` has no effect, as moments do not depend on the order of images."""
        self.waiting.append(features.detach().to("cpu", torch.float64))
        if sum(map(len, self.waiting)) >= ROWS:
            self._flush()

    def merge(self, other: Self) -> None:
        """Add the images that `other` has seen."""
        self._flush()
        other._flush()
        self._merge(other.count, other.mean, other.scatter)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return mean [F] and unbiased covariance [F, F]."""
        self._flush()
        return self.mean, self.scatter / max(self.count - 1, 1)

    def _flush(self) -> None:
        """Add the waiting features to mean and scatter."""
        if self.waiting:
            x = torch.cat(self.waiting)  # [ROWS or more, F]
            self.waiting = []
            mean = x.mean(0)
            x -= mean
            self._merge(len(x), mean, x.T @ x)

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        """Add `count` images with this mean and scatter."""
        if count > 0:
            total = self.count + count
            delta = mean - self.mean
            self.scatter += scatter + torch.outer(delta, delta) * (self.count * count / total)
            self.mean += delta * (count / total)
            self.count = total


class ClassScore:
    """Inception score of logits [B, classes], batch by batch, in ordered splits of `SPLIT` images."""

    def __init__(self):
        # Index of a split -> [2 + classes]: images, sum of p log p, sums of p. Counter.update adds tensors.
        self.splits: Counter = Counter()

    def add(self, logits: Tensor, first: int) -> None:
        """Add logits [B, classes] of the images first, first + 1, ..."""
        log_p = logits.detach().to("cpu", torch.float64).log_softmax(1)
        p = log_p.exp()
        p_log_p = (p * log_p).sum(1, keepdim=True)
        rows = torch.cat([torch.ones(len(p), 1), p_log_p, p], 1)  # [B, 2 + classes]
        split_of = torch.arange(first, first + len(p)) // SPLIT  # [B]
        self.splits.update(
            {split: rows[split_of == split].sum(0) for split in split_of.unique().tolist()}
        )

    def merge(self, other: Self) -> None:
        self.splits.update(other.splits)

    @property
    def notes(self) -> list[str]:
        """Return notes for the user on how the splits affect the score."""
        return [note for note in (self.short_split_note, self.order_note) if note]

    @property
    def order_note(self) -> str | None:
        """Return a note if the images are not in mixed order, such as sorted by class; else None.

        Splits lower the logarithm of the score by KL(p(y) of a split || p(y) of all images), averaged over the splits.
        In mixed order, chance alone makes this about (classes - 1)(splits - 1) / 2N (half a chi-squared variable, by N).
        """
        sums = torch.stack(list(self.splits.values()))  # [splits, 2 + classes]
        count = sums[:, 0]
        overall = sums.sum(0) / count.sum()  # [2 + classes], means over all images
        marginals = sums[:, 2:] / count[:, None]  # [splits, classes], p(y) of each split
        divergence = torch.xlogy(marginals, marginals) - torch.xlogy(marginals, overall[2:])
        lost = float((divergence.sum(1) * count).sum() / count.sum())
        classes = sums.shape[1] - 2
        splits = len(sums)
        chance = (classes - 1) * (splits - 1) / (2 * float(count.sum()))
        if lost <= 2 * chance + LEAST_LOSS:
            return None
        whole = _inception_score(overall)
        return (
            f"the images are not in mixed order: its splits of {SPLIT} in file order hold different classes, which "
            f"lowers it; {whole:.3f} of all images as one split"
        )

    @property
    def short_split_note(self) -> str | None:
        """Return a note if the last split is smaller than the others; else None."""
        last = max(self.splits)
        count = int(self.splits[last][0])
        if last == 0 or count == SPLIT:
            return None
        return f"the last of its {last + 1} splits has {count} of {SPLIT} images; the fewer, the lower is its score"

    def result(self) -> tuple[float, float]:
        """Return mean and standard deviation over splits of exp(E KL(p(y|x) || p(y))), Salimans 2016."""
        scores = [_inception_score(sums / sums[0]) for sums in self.splits.values()]
        return float(np.mean(scores)), float(np.std(scores))


def _inception_score(means: Tensor) -> float:
    """Return exp(E KL(p(y|x) || p(y))) from the means [1, E p log p, p(y)] of a split, [2 + classes]."""
    marginal = means[2:]
    return float(np.exp((means[1] - torch.special.xlogy(marginal, marginal).sum()).item()))


class SetStatistics:
    """Collects, batch by batch, all that the scores need of one set of images.

    With `keep_features` it also keeps the features, for precision, recall and KID: N x F x 4 bytes (50,000 x 2048: 410
    MB).
    """

    def __init__(self, keep_features: bool):
        self.keep_features = keep_features
        self.size: tuple[int, int] | None = None  # height and width of the images
        self.parts: dict[str, Moments | ClassScore] = {}  # by the fields of `Extracted`
        self.features: dict[int, Tensor] = {}  # index of a batch's first image -> [B, F]

    def add(self, first: int, out: Extracted) -> None:
        """Add what the extractor gives for the images first, first + 1, ..."""
        for name, x in out._asdict().items():
            if x is None:
                continue
            if not torch.isfinite(x).all():
                row = first + int((~torch.isfinite(x)).any(1).nonzero()[0])
                named = dict(pooled="features", spatial="spatial features").get(name, name)
                raise ValueError(
                    f"the {named} of image {row} are not finite numbers; the extractor or its weights are broken"
                )
            if name not in self.parts:
                if name == "logits":
                    self.parts[name] = ClassScore()
                else:
                    self.parts[name] = Moments(x.shape[1])
            self.parts[name].add(x, first)
        if self.keep_features:
            # Contiguous, because a view would keep the whole tensor behind it in memory.
            self.features[first] = out.pooled.detach().float().cpu().contiguous()

    def merge(self, other: Self) -> None:
        """Add what another process has seen of the same set."""
        self.size = other.size or self.size
        self.features.update(other.features)
        for name, statistics in other.parts.items():
            if name in self.parts:
                self.parts[name].merge(statistics)
            else:
                self.parts[name] = statistics

    def all_features(self) -> Tensor | None:
        """Return [N, F] in the order of the images; None if they were not kept."""
        if not self.features:
            return None
        return torch.cat([self.features[first] for first in sorted(self.features)])


@dataclass
class Statistics:
    """Statistics of one set of images under one extractor."""

    pooled: tuple[Tensor, Tensor]  # mean [F] and covariance [F, F], float64
    spatial: tuple[Tensor, Tensor] | None
    source: str  # what was read
    count: int | None = None  # number of images; here and below, None: the file does not say
    features: Tensor | None = None  # [N, F], for precision, recall and KID
    extractor: str | None = None
    weights_sha256: str | None = None  # of the extractor
    channels: int | None = None  # of the image files, 1 or 3
    size: tuple[int, int] | None = None  # height and width of the images
    formats: dict[str, int] | None = None  # number of image files by format
    classes: ClassScore | None = None  # not saved

    def save(self, path: Path) -> None:
        """Write an .npz file with ADM's names of the moments, features if any, and their origin as JSON."""
        arrays = dict(features=self.features)
        for names, moments in zip(ADM, (self.pooled, self.spatial)):
            arrays.update(zip(names, moments or (None, None)))
        present = {name: tensor.numpy() for name, tensor in arrays.items() if tensor is not None}
        record = {name: getattr(self, name) for name in RECORDED}
        with whole_file(path) as file:
            np.savez(file, record=json.dumps(record), **present)


def load_statistics(path: Path) -> Statistics:
    """Read what `Statistics.save` wrote, or ADM's statistics, which do not say where they come from."""
    members = archive_members(path)
    record = {}
    source = str(path)
    if "record" in members:
        record = _record(path)
        source = f"{path} ({record.pop('source')})"
    pooled = _moments(path, *ADM[0])
    spatial = None
    if set(ADM[1]) <= set(members):
        spatial = _moments(path, *ADM[1])
    features = None
    if "features" in members:
        shape = [record.get("count"), len(pooled[0])]
        features = _floats(path, "features", shape).float()
    return Statistics(pooled, spatial, source, features=features, **record)


def _moments(path: Path, mean: str, covariance: str) -> tuple[Tensor, Tensor]:
    """Read a mean [F] and a covariance [F, F], by the names of their arrays."""
    vector = _floats(path, mean, [None])
    return vector, _floats(path, covariance, [len(vector), len(vector)])


def _record(path: Path) -> dict:
    try:
        record = json.loads(str(_array(path, "record", "U", [])))
        for name, possible in RECORDED.items():
            if not possible(record[name]):
                raise ValueError(f"{name} is {record[name]!r}")
    except Exception as error:  # damaged files raise exceptions of many classes
        raise ValueError(f"{path}: not a file of statistics ({reason_of(error)})") from None
    return {name: record[name] for name in RECORDED}


def _floats(path: Path, name: str, expected: list[int | None]) -> Tensor:
    array = _array(path, name, "f", expected)
    if not np.isfinite(array).all():
        raise ValueError(f"{path}: {name} holds numbers that are not finite")
    return torch.from_numpy(array.astype(np.float64))


def _has_shape(shape: tuple[int, ...], expected: list[int | None]) -> bool:
    """Return whether a shape is the expected one, where None stands for 1 to `MAX_FEATURES`."""
    if len(shape) != len(expected):
        return False
    for length, wanted in zip(shape, expected):
        if wanted is None and not 0 < length <= MAX_FEATURES:
            return False
        if wanted is not None and length != wanted:
            return False
    return True


def _array(path: Path, name: str, type_code: str, expected: list[int | None]) -> np.ndarray:
    """Read an array of a NumPy type ("f" or "U") and a shape, see `_has_shape`."""
    file, (shape, _, dtype) = open_array(path, name)
    with file:  # check the header before reading, because a small file can unpack to any size
        fits = dtype.kind == type_code and dtype.itemsize <= MAX_FEATURES
        if not fits or not _has_shape(shape, expected):
            allowed = str(expected).replace("None", f"1 to {MAX_FEATURES}")
            type_name = dict(f="floats", U="text")[type_code]
            raise ValueError(
                f"{path}: {name} is {dtype} {list(shape)}; expected {type_name} {allowed}"
            )
        try:
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # damaged compression raises exceptions of many classes
            raise ValueError(f"{path}: {name} is damaged ({reason_of(error)})") from None
