"""Scores of class-conditional samples with a classifier trained on the same classes.

The distance is not FID, because the features are the classifier's.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moh_vision.common.progress import Progress
from moh_vision.evaluation.fidelity.metrics import frechet_distance
from moh_vision.evaluation.fidelity.statistics import Moments


def features_of(classifier: nn.Module, images: Tensor) -> Tensor:
    """Return a timm model's features [B, F] of images [B, C, h, w], from which its classifier computes the logits."""
    return classifier.forward_head(classifier.forward_features(images), pre_logits=True)


@torch.no_grad()
def score_with_classifier(
    classifier, generated: Iterable[dict], reference: Iterable[dict], device
) -> dict:
    """Return the shares of images classified as their label, and the distance of Gaussians fitted to the features.

    The distance is None unless both sets have more images than there are features.

    Args:
        classifier: a timm model in eval mode.
        generated, reference: batches, dicts of images [B, C, h, w], normalised for the classifier, and labels [B]; the
            label of a generated image is the class that was requested.
        device: where the classifier runs.
    """

    def run(batches: Iterable[dict]):
        """Return the share of images classified as their label, the number of images, and mean and covariance."""
        moments = None
        right = 0
        count = 0
        for batch in batches:
            features = features_of(classifier, batch["images"].to(device))
            if not features.isfinite().all():
                raise ValueError(
                    "the classifier's features are not finite numbers; its weights are broken"
                )
            if moments is None:
                moments = Moments(features.shape[1])
            moments.add(features)
            labels = classifier.get_classifier()(features).argmax(-1)
            right += int((labels.cpu() == batch["labels"]).sum())
            count += len(features)
        return right / count, count, moments.result()

    recognised, num_generated, fake = run(Progress.over(generated, "samples"))
    recognised_real, num_reference, real = run(Progress.over(reference, "real images"))
    num_features = len(fake[0])
    distance = None
    if min(num_generated, num_reference) > num_features:
        distance = frechet_distance(*fake, *real)
    return dict(
        recognised=recognised,
        recognised_real=recognised_real,
        frechet_distance=distance,
        num_generated=num_generated,
        num_reference=num_reference,
        num_features=num_features,
    )
