"""Scores of samples: by a classifier of the same classes, or FID and its kin."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch
from torch import Tensor
from torchvision.transforms import v2

from moh_vision.data.batches import LabelledImages, evaluation_batches, image_transform
from moh_vision.data.order import rank_slice
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.evaluation.classifier_scores import score_with_classifier
from moh_vision.evaluation.fidelity import Reference, make_extractor, score
from moh_vision.evaluation.fidelity.extractors import num_features
from moh_vision.evaluation.fidelity.images import SourceImages, open_set
from moh_vision.evaluation.fidelity.scoring import table
from moh_vision.models.weights import from_run


class ClassifierScores:
    """The share of samples recognised as their class, and the Frechet distance of a classifier's features.

    The `extractor` is a run on the same classes as the diffusion run and the reference.
    """

    def __init__(self, reference: SourceImages, extractor: str, classes: list):
        self.source, self.reference = reference.source, reference.name
        self.classifier, self.about = from_run(extractor, "classifier")
        if self.about["classes"] != classes or self.source.classes != classes:
            raise ValueError(
                f"--extractor {extractor} and --score {self.reference} need the classes of the run: {classes}; without them "
                "--extractor inception or timm:NAME"
            )

    def __call__(self, parts: ImageParts, labels: Tensor, device, batch_size: int) -> tuple[dict, str]:
        """Score samples with their labels [N]; return (scores, text)."""
        source, about, cfg = self.source, self.about, self.classifier.pretrained_cfg
        img_size = about["arguments"].get("img_size") or cfg["input_size"][-1]
        channels = about["arguments"].get("in_chans", 3)
        transform = image_transform("none", img_size, channels, cfg["mean"][:channels], cfg["std"][:channels])
        real = evaluation_batches(LabelledImages(source, transform, 0), rank_slice(len(source), 0, 1, batch_size), 0)
        fake = (
            dict(
                images=torch.stack([transform(v2.functional.to_pil_image(x)) for x in batch]),
                labels=labels[first : first + len(batch)],
            )
            for first, batch in parts.batches()
        )
        scores = score_with_classifier(self.classifier.to(device), fake, real, device)
        scores.update(
            feature_space=f"penultimate layer of {about['weights']} ({about['architecture']}); not Inception, not FID",
            reference=self.reference,
        )
        recognised, on_real = (100 * scores[k] for k in ("recognised", "recognised_real"))
        distance = scores["frechet_distance"]
        shown = "needs more images than features" if distance is None else f"{distance:.2f}"
        text = (
            f"recognised as the class asked for: {recognised:.1f} % (real images: {on_real:.1f} %)\n"
            f"Frechet distance: {shown}; {scores['num_features']} features, {scores['feature_space']}"
        )
        if on_real < 50:
            text += f"\n{about['weights']} misses most of the real images: a weak judge, whose numbers say little"
        return scores, text


class FidelityScores:
    """`fidelity.score` against a folder of images, .npz, saved statistics, or data set (`SourceImages`).

    References with too few samples for `num_images` with `channels` each are refused.
    """

    def __init__(
        self,
        reference,
        extractor: str,
        inception_weights: Optional[str],
        allow_biased: bool,
        num_images: int,
        channels: int,
    ):
        self.allow_biased, self.source = allow_biased, reference
        self.reference = Reference(reference)
        self.network = make_extractor(extractor, inception_weights)  # may be fetched, so the last to fail
        self.reference.check(self.network, num_features(self.network), num_images, allow_biased, channels)

    def __call__(self, parts: ImageParts, labels: Tensor, device, batch_size: int) -> tuple[dict, str]:
        """Score samples; return (scores, text). Every process calls this."""
        if isinstance(self.source, SourceImages):
            self.source.size = next(parts.batches())[1].shape[-1]
        scores = score(
            (batch.expand(-1, 3, -1, -1) for _, batch in parts.batches()),
            self.reference,
            extractor=self.network,
            batch_size=batch_size,
            device=device,
            allow_biased=self.allow_biased,
        )
        scores["reference"] = name = getattr(self.source, "name", self.source)
        return scores, table(scores, "these samples", name)


def make_scorer(
    *,
    key: str,
    reference: str,
    split: Optional[str],
    default_split: str,
    extractor: str,
    inception_weights: Optional[str],
    allow_biased: bool,
    num_images: int,
    channels: int,
    index_dir: str,
    classes: Optional[list] = None,
):
    """Open all that scores need, and return a function of (parts, labels, device, batch size).

    With `classes`, a classifier as extractor and a data set: a `ClassifierScores`. `key` is for messages.
    """
    source = open_set(key, reference, split, default_split, index_dir)
    if classes is None or not isinstance(source, SourceImages) or not Path(extractor).exists():
        return FidelityScores(source, extractor, inception_weights, allow_biased, num_images, channels)
    for name, value in (("inception_weights", inception_weights), ("allow_biased", allow_biased)):
        if value:
            raise ValueError(f"{name} {value} has no effect with a run as extractor and a data set as reference")
    return ClassifierScores(source, extractor, classes)


def record_text(record: dict) -> str:
    """Return how images were drawn: a line each for protocol, sampling and versions of scores.json.

    Hashes are shortened, and None is left out.
    """
    lines = []
    for name, part in record.items():
        if isinstance(part, dict):
            shown = {k: v[:12] if k.endswith("_sha256") else v for k, v in part.items() if v is not None}
            part = ", ".join(f"{k} {v}" for k, v in shown.items())
        if part:
            lines.append(f"{name}: {part}")
    return "\n".join(lines)
