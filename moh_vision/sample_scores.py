"""Scores of what sample.py drew: by a classifier of the same classes, or FID and its kin."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Optional

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from moh_vision.analysis.figures import as_pil
from moh_vision.data.batches import LabelledImages, evaluation_batches, image_transform
from moh_vision.data.crop import center_crop
from moh_vision.data.latents.cache import is_latent_cache
from moh_vision.data.order import rank_slice
from moh_vision.data.splits import open_source
from moh_vision.engine.image_parts import ImageParts
from moh_vision.evaluation.classifier_scores import score_with_classifier
from moh_vision.evaluation.fidelity import Extractor, TimmExtractor, make_extractor, score, statistics_of
from moh_vision.evaluation.fidelity.images import EXTENSIONS
from moh_vision.evaluation.fidelity.table import table
from moh_vision.models.weights import from_run


class ClassifierScores:
    """The share of samples recognised as their class, and the Frechet distance in a classifier's features.

    Args:
        reference: `data.root` whose val split is compared with.
        extractor: a classification run on the same classes.
        classes: of the diffusion run.
        index_dir: see `open_source`.

    Raises:
        ValueError, FileNotFoundError: if one of the three has other classes.
    """

    def __init__(self, reference: str, extractor: str, classes: list, index_dir: str):
        self.source = open_source(reference, "val", index_dir)
        self.classifier, self.judge = from_run(extractor, "classifier")
        if self.judge["classes"] != classes or self.source.classes != classes:
            raise ValueError(
                f"--extractor {extractor} and --score {reference} need the classes of the run: {classes}; without them "
                "--extractor inception or timm:NAME"
            )
        self.reference = reference

    def __call__(self, parts: ImageParts, labels: Tensor, device, batch_size: int) -> tuple[dict, str]:
        """Samples and their labels [N] -> (scores, text)."""
        images = torch.cat([batch for _, batch in parts.batches()])  # [N, C, h, w]
        source, judge = self.source, self.judge
        mean, std = (self.classifier.pretrained_cfg[k][: source.channels] for k in ("mean", "std"))
        transform = image_transform("none", judge["arguments"]["img_size"], source.channels, mean, std)
        slices = rank_slice(len(source), 0, 1, 256)
        real = evaluation_batches(LabelledImages(source, transform, 0), slices, 0)
        fake = torch.stack([transform(as_pil(image)) for image in images])
        scores = score_with_classifier(self.classifier.to(device), fake, labels, real, device)
        scores.update(
            feature_space=f"penultimate layer of {judge['weights']} ({judge['architecture']}); not Inception, not FID",
            reference=f"{self.reference}, test split",
        )
        recognised, on_real = (100 * scores[k] for k in ("recognised", "recognised_real"))
        distance = scores["frechet_distance"]
        shown = "needs more images than features" if distance is None else f"{distance:.2f}"
        text = (
            f"recognised as the class asked for: {recognised:.1f} % (real test images: {on_real:.1f} %)\n"
            f"Frechet distance: {shown}; {scores['num_features']} features, {scores['feature_space']}"
        )
        return scores, text


class FidelityScores:
    """`moh_vision.evaluation.fidelity.score` against a folder of images, .npz, saved statistics, or a data set.

    Args:
        reference: path, or `data.root` of a data set, whose images are center-cropped to the samples' size.
        split: of a data set.
        extractor: "inception", "timm:NAME", or a classification run.
        inception_weights: see `fidelity.Inception`.
        allow_biased: see `fidelity.score`.
        index_dir: see `open_source`.

    Raises:
        ValueError, FileNotFoundError: for a reference or extractor that is not there.
    """

    def __init__(
        self,
        reference: str,
        split: str,
        extractor: str,
        inception_weights: Optional[str],
        allow_biased: bool,
        index_dir: str,
    ):
        self.reference, self.allow_biased, self.source, self.statistics = reference, allow_biased, None, None
        if not is_image_set(reference):
            self.source = open_source(reference, split, index_dir)
            self.reference = f"{reference}, {split} split"
        self.network = open_extractor(extractor, inception_weights)

    def __call__(self, parts: ImageParts, labels: Tensor, device, batch_size: int) -> tuple[dict, str]:
        """Samples -> (scores, text); every process calls it."""
        if self.source is not None and self.statistics is None:  # once, for scores while training
            images = source_batches(self.source, next(parts.batches())[1].shape[-1], batch_size)
            self.statistics = statistics_of(images, self.network, batch_size, device, self.reference)
        generated = (batch.expand(-1, 3, -1, -1) for _, batch in parts.batches())
        scores = score(
            generated,
            self.statistics or self.reference,
            extractor=self.network,
            batch_size=batch_size,
            device=device,
            allow_biased=self.allow_biased,
        )
        scores["reference"] = self.reference
        return scores, table(scores, "these samples", self.reference)


def open_extractor(extractor: str, inception_weights: Optional[str] = None) -> Extractor:
    """What --extractor names: a classification run, or what `fidelity.make_extractor` takes.

    Raises:
        ValueError, FileNotFoundError: see `from_run` and `make_extractor`.
    """
    if not Path(extractor).exists():
        return make_extractor(extractor, inception_weights)
    model, about = from_run(extractor, "classifier")
    return TimmExtractor(model, f"{about['architecture']} of {extractor}")


def make_judge(config, classes: list, index_dir: str):
    """What scores samples, as a function of (parts, labels, device, batch size), for a `SampleConfig` with score.

    A classification run as extractor and a data set as reference: `ClassifierScores`; else `FidelityScores`.

    Raises:
        ValueError, FileNotFoundError: naming the key.
    """
    extractor = config.extractor or "inception"
    if Path(extractor).exists() and not is_image_set(config.score):
        return ClassifierScores(config.score, extractor, classes, index_dir)
    return FidelityScores(
        config.score, config.score_split, extractor, config.inception_weights, config.allow_biased, index_dir
    )


def make_training_judge(config, index_dir: str) -> FidelityScores:
    """The same for a `DitConfig`; without score.reference its own training data, which must be images.

    Raises:
        ValueError, FileNotFoundError: naming the key.
    """
    c = config.score
    reference = c.reference or config.data.root
    if is_latent_cache(reference):
        raise ValueError(
            f"score.reference: data.root {reference} holds latents; name images, or ADM's .npz, to score against"
        )
    return FidelityScores(reference, c.split, c.extractor, c.inception_weights, c.allow_biased, index_dir)


def is_image_set(path: str) -> bool:
    """Whether a path is a file, or a folder with images directly in it, and not a data set."""
    place = Path(path)
    if place.is_dir():
        return any(p.suffix.lower() in EXTENSIONS for p in place.iterdir())
    return path.endswith((".npz", ".safetensors"))


def source_batches(source, size: int, batch_size: int) -> Iterator[Tensor]:
    """Every image of a data set, center-cropped: uint8 [B, 3, size, size]."""
    rgb = v2.RGB()
    for first in range(0, len(source), batch_size):
        numbers = range(first, min(first + batch_size, len(source)))
        crops = [np.asarray(center_crop(rgb(source.image(i)), size)) for i in numbers]
        yield torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)
