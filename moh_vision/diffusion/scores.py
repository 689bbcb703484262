"""Score samples with a classifier of the same classes, or with FID and related scores."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from moh_vision.attention.routed_layer import routed_layers
from moh_vision.common.wings import CLASSIFICATION
from moh_vision.data.batches import LabelledImages, evaluation_loader, image_transform
from moh_vision.data.decode import AS_STORED, Decoding
from moh_vision.data.order import rank_slice
from moh_vision.data.splits import match_classes
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.evaluation.classifier_scores import features_of, score_with_classifier
from moh_vision.evaluation.fidelity import Reference, make_extractor, score
from moh_vision.evaluation.fidelity.extractors import Extracted, Extractor, num_features
from moh_vision.evaluation.fidelity.images import SourceImages, open_set
from moh_vision.evaluation.fidelity.scoring import table
from moh_vision.models.class_names import indices_of
from moh_vision.models.weights import find_weights

SIDE = 32  # of images of noise


class Scorer:
    """Scores samples with a network that reads their pixels.

    Attributes:
        network: the network.
    """

    network: nn.Module

    def __call__(self, parts: ImageParts, labels: Tensor, device) -> tuple[dict, str]:
        """Score samples with their labels [N]; return (scores, text). All ranks must call it together."""
        raise NotImplementedError

    def features_of_noise(self, batch_size: int, device) -> object:
        """Run the network on a batch of noise, as it is run on images."""
        raise NotImplementedError

    def passes(self, batch_size: int, device) -> list[tuple[nn.Module, Callable[[], object]]]:
        """Return [(network, function that runs the network on a batch)], for `collect`; [] if no layer of it is routed."""
        if not routed_layers(self.network):
            return []
        self.network.to(device)
        return [(self.network, partial(self.features_of_noise, batch_size, device))]


class ClassifierScores(Scorer):
    """Computes the share of samples recognised as their class, and the Frechet distance of a classifier's features."""

    def __init__(self, reference: SourceImages, extractor: str, classes: list):
        self.source = reference.source
        self.reference = reference.name
        self.remarks = reference.remarks
        self.weights = find_weights(extractor, wing=CLASSIFICATION.name, key="--extractor")
        self.network = self.weights.build()
        # For each class of the samples, its number in the classifier.
        self.numbers = indices_of(classes, within=self.weights.classes or [])
        if self.numbers is None or {*self.source.classes} != {*classes}:
            needed = f"need the classes of the run: {classes}; without them --extractor inception or timm:NAME"
            raise ValueError(f"--extractor {extractor} and --score {self.reference} {needed}")
        match_classes(self.weights.classes, extractor, self.source, self.reference)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of an image as the classifier takes it, [C, h, w]."""
        arguments = self.weights.arguments
        img_size = arguments.get("img_size") or self.network.pretrained_cfg["input_size"][-1]
        return arguments.get("in_chans", 3), img_size, img_size

    def features_of_noise(self, batch_size: int, device) -> Tensor:
        return features_of(self.network, torch.randn(batch_size, *self.image_shape, device=device))

    def __call__(self, parts: ImageParts, labels: Tensor, device) -> tuple[dict, str]:
        cfg = self.network.pretrained_cfg
        labels = torch.tensor(self.numbers)[labels]  # now with the classifier's class numbers
        channels, img_size, _ = self.image_shape
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
        scores = score_with_classifier(self.network.to(device), fake, real, device)
        space = f"penultimate layer of {self.weights.said} ({self.weights.architecture}); not Inception, not FID"
        scores.update(feature_space=space, reference=self.reference)
        recognised = 100 * scores["recognised"]
        on_real = 100 * scores["recognised_real"]
        shown = "needs more images than features"
        if scores["frechet_distance"] is not None:
            shown = f"{scores['frechet_distance']:.2f}"
        text = f"recognised as the class asked for: {recognised:.1f} % (real images: {on_real:.1f} %)\n"
        text += f"Frechet distance: {shown}; {scores['num_features']} features, {space}"
        if on_real < 50:
            text += f"\n{self.weights.said} misses most of the real images: a weak judge, whose numbers say little"
        text += "".join(f"\nnote: {remark}" for remark in self.remarks)
        return scores, text


class FidelityScores(Scorer):
    """Computes FID and related scores, see `fidelity.score`.

    Args:
        source: images, or the path of statistics.
        reference: the `Reference` of `source`.
        network: an `Extractor`.
        allow_biased: see `fidelity.score`.
    """

    def __init__(self, source, reference: Reference, network: Extractor, allow_biased: bool):
        self.source = source
        self.reference = reference
        self.network = network
        self.allow_biased = allow_biased

    def features_of_noise(self, batch_size: int, device) -> Extracted:
        # Whatever the size of the samples is: the network resizes them.
        shape = (batch_size, 3, SIDE, SIDE)
        return self.network(torch.randint(256, shape, dtype=torch.uint8, device=device))

    def __call__(self, parts: ImageParts, labels: Tensor, device) -> tuple[dict, str]:
        name = getattr(self.source, "name", self.source)  # a path has no name
        if isinstance(self.source, SourceImages):
            self.source.size = next(parts.batches())[1].shape[-1]
        images = (batch.expand(-1, 3, -1, -1) for _, batch in parts.batches())
        scores = score(
            images,
            self.reference,
            extractor=self.network,
            batch_size=parts.batch_size,
            device=device,
            allow_biased=self.allow_biased,
        )
        scores = dict(scores, reference=name)
        return scores, table(scores, "these samples", name)


def make_scorer(
    config: SampleConfig,
    channels: int,
    classes: list | None = None,
    key="--score",
    default_split="val",
    decoding: Decoding = AS_STORED,
) -> Scorer:
    """Open the reference and the extractor; return what scores samples.

    It is a `ClassifierScores` if the extractor is a run, the reference is a data set and the samples have classes, else
    `FidelityScores`.

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
    # Open the extractor last: it may have to be fetched.
    network = make_extractor(extractor, weights)
    reference.check(network, num_features(network), config.num_images, biased, channels)
    return FidelityScores(source, reference, network, biased)


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
