"""Score samples with a classifier of the same classes, or with FID and related scores."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms import v2

from moh_vision.data.batches import LabelledImages, evaluation_loader, image_transform
from moh_vision.data.decode import AS_STORED, Decoding
from moh_vision.data.order import rank_slice
from moh_vision.data.splits import match_classes
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.evaluation.classifier_scores import score_with_classifier
from moh_vision.evaluation.fidelity import Reference, make_extractor, score
from moh_vision.evaluation.fidelity.extractors import num_features
from moh_vision.evaluation.fidelity.images import SourceImages, open_set
from moh_vision.evaluation.fidelity.scoring import table
from moh_vision.models.class_names import indices_of
from moh_vision.models.weights import from_run


class ClassifierScores:
    """Computes the share of samples recognised as their class, and the Frechet distance of a classifier's features."""

    def __init__(self, reference: SourceImages, extractor: str, classes: list):
        self.source = reference.source
        self.reference = reference.name
        self.remarks = reference.remarks
        self.classifier, self.metadata = from_run(extractor, "classification")
        # For each class of the samples, its number in the classifier.
        self.numbers = indices_of(classes, within=self.metadata["classes"])
        if self.numbers is None or {*self.source.classes} != {*classes}:
            needed = f"need the classes of the run: {classes}; without them --extractor inception or timm:NAME"
            raise ValueError(f"--extractor {extractor} and --score {self.reference} {needed}")
        match_classes(self.metadata["classes"], extractor, self.source, self.reference)

    def __call__(self, parts: ImageParts, labels: Tensor, device) -> tuple[dict, str]:
        """Score samples with their labels [N]; return (scores, text)."""
        metadata = self.metadata
        cfg = self.classifier.pretrained_cfg
        labels = torch.tensor(self.numbers)[labels]  # now with the classifier's class numbers
        img_size = metadata["arguments"].get("img_size") or cfg["input_size"][-1]
        channels = metadata["arguments"].get("in_chans", 3)
        transform = image_transform(
            "none", img_size, channels, cfg["mean"][:channels], cfg["std"][:channels]
        )
        slices = rank_slice(len(self.source), rank=0, world=1, batch_size=parts.batch_size)
        real = evaluation_loader(LabelledImages(self.source, transform, seed=0), slices, workers=0)

        def samples() -> Iterator[dict]:
            for (_, batch), y in zip(parts.batches(), labels.split(parts.batch_size)):
                images = [transform(v2.functional.to_pil_image(x)) for x in batch]
                yield dict(images=torch.stack(images), labels=y)

        fake = samples()
        scores = score_with_classifier(self.classifier.to(device), fake, real, device)
        space = f"penultimate layer of {metadata['weights']} ({metadata['architecture']}); not Inception, not FID"
        scores.update(feature_space=space, reference=self.reference)
        recognised = 100 * scores["recognised"]
        on_real = 100 * scores["recognised_real"]
        shown = "needs more images than features"
        if scores["frechet_distance"] is not None:
            shown = f"{scores['frechet_distance']:.2f}"
        text = f"recognised as the class asked for: {recognised:.1f} % (real images: {on_real:.1f} %)\n"
        text += f"Frechet distance: {shown}; {scores['num_features']} features, {space}"
        if on_real < 50:
            text += f"\n{metadata['weights']} misses most of the real images: a weak judge, whose numbers say little"
        text += "".join(f"\nnote: {remark}" for remark in self.remarks)
        return scores, text


def make_scorer(
    config: SampleConfig,
    channels: int,
    classes: list | None = None,
    key="--score",
    default_split="val",
    decoding: Decoding = AS_STORED,
) -> Callable[..., tuple[dict, str]]:
    """Open the reference and the extractor; return a function of (parts, labels, device) that scores samples.

    All ranks must call the returned function together. It is a `ClassifierScores` if the extractor is a run, the
    reference is a data set and the samples have classes; else it calls `fidelity.score`.

    Args:
        config: the keys of sample.py.
        channels: channels of the samples.
        classes: names of the samples' classes.
        key: the key or option that the reference was given with, for messages.
        default_split: the split to take of a data set as reference, if `config` names none.
        decoding: how the image files of the reference become pixels.
    """
    source = open_set(key, config.score, config.score_split, default_split, decoding)
    extractor = config.extractor or "inception"
    weights = config.inception_weights
    biased = config.allow_biased
    if classes and isinstance(source, SourceImages) and Path(extractor).exists():
        for name, value in (("inception_weights", weights), ("allow_biased", biased)):
            if value:
                raise ValueError(
                    f"{name} {value} has no effect with a run as extractor and a data set as reference"
                )
        return ClassifierScores(source, extractor, classes)
    reference = Reference(source, decoding)
    name = getattr(source, "name", source)  # `source` may be a path, which has no name
    # Open the extractor last: it may have to be fetched.
    network = make_extractor(extractor, weights)
    reference.check(network, num_features(network), config.num_images, biased, channels)

    def scorer(parts: ImageParts, labels: Tensor, device) -> tuple[dict, str]:
        if isinstance(source, SourceImages):
            source.size = next(parts.batches())[1].shape[-1]
        images = (batch.expand(-1, 3, -1, -1) for _, batch in parts.batches())
        scores = score(
            images,
            reference,
            extractor=network,
            batch_size=parts.batch_size,
            device=device,
            allow_biased=biased,
        )
        scores = dict(scores, reference=name)
        return scores, table(scores, "these samples", name)

    return scorer


def record_text(record: dict) -> str:
    """Return the record of how images were drawn as lines of text, with shortened hashes."""
    lines = []
    for name, value in record.items():
        if isinstance(value, dict):
            parts = []
            for key, entry in value.items():
                if entry is None:
                    continue
                if key.endswith("_sha256"):
                    entry = entry[:12]
                parts.append(f"{key} {entry}")
            value = ", ".join(parts)
        if value:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)
