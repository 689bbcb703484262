"""Scores of class-conditional samples with a classifier trained on the same classes.

They are no FID: the features are the classifier's, and they are named after it.
"""

from collections.abc import Iterable

import torch

from moh_vision.engine.progress import Progress
from moh_vision.evaluation.fidelity.metrics import frechet_distance
from moh_vision.evaluation.fidelity.statistics import Moments


@torch.no_grad()
def score_with_classifier(
    classifier, generated: Iterable[dict], reference: Iterable[dict], device
) -> dict:
    """Return the shares of images classified as their class, and the distance of Gaussians fitted to the features.

    The distance is None with no more images than features. `classifier` is a timm model in eval mode; batches are dicts
    of images [B, C, h, w], normalised for it, and labels [B], for samples the requested classes.
    """

    def run(batches: Iterable[dict]):
        moments, right, count = None, 0, 0
        for batch in batches:
            features = classifier.forward_features(batch["images"].to(device))
            features = classifier.forward_head(features, pre_logits=True)
            moments = moments or Moments(features.shape[1])
            moments.add(features)  # [B, F]
            labels = classifier.get_classifier()(features).argmax(-1)
            right += int((labels.cpu() == batch["labels"]).sum())
            count += len(features)
        return right / count, count, moments.result()

    recognised, fakes, fake = run(Progress.over(generated, "samples"))
    recognised_real, reals, real = run(Progress.over(reference, "real images"))
    features = len(fake[0])
    return dict(
        recognised=recognised,
        recognised_real=recognised_real,
        frechet_distance=frechet_distance(*fake, *real) if min(fakes, reals) > features else None,
        num_generated=fakes,
        num_reference=reals,
        num_features=features,
    )
