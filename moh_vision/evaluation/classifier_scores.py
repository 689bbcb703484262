"""Scores of class-conditional samples with a classifier trained on the same classes.

They are no FID: the features are the classifier's, and they are named after it.
"""

from typing import Iterable

import numpy as np
import torch
from torch import Tensor


def recognised_share(logits: Tensor, labels: Tensor) -> float:
    """Share of samples that the classifier takes for the class that was asked for. logits [N, classes], labels [N]."""
    return (logits.argmax(-1) == labels).double().mean().item()


def frechet_distance(features1: Tensor, features2: Tensor) -> float:
    """Frechet distance between Gaussians fitted to two sets of features [N, F].

    Raises:
        ValueError: for fewer samples than features, which cannot give a covariance of full rank.
    """
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    for name, features in (("first", features1), ("second", features2)):
        if len(features) <= features.shape[1]:
            raise ValueError(
                f"the {name} set has {len(features)} samples for {features.shape[1]} features; more samples than features are needed"
            )
    stats = [fid_features_to_statistics(f.double()) for f in (features1, features2)]
    return float(np.real(fid_statistics_to_metric(*stats, verbose=False)["frechet_inception_distance"]))


@torch.no_grad()
def score_with_classifier(classifier, images: Tensor, labels: Tensor, reference: Iterable[dict], device) -> dict:
    """Score samples.

    Args:
        classifier: a timm model in eval mode, trained on the same classes.
        images: samples [N, C, h, w], normalised for the classifier.
        labels: [N], the classes asked for.
        reference: batches of real images, dicts with images and labels.
        device: where to compute.

    Returns:
        dict(recognised, recognised_real, frechet_distance, num_generated, num_reference, num_features); the distance is
        None where there are not more images than features.
    """

    def run(batch: Tensor):
        hidden = classifier.forward_features(batch.to(device))
        features = classifier.forward_head(hidden, pre_logits=True)  # [B, F]
        return features.cpu(), classifier.get_classifier()(features).cpu()

    fake, fake_logits = (torch.cat(parts) for parts in zip(*(run(batch) for batch in images.split(256))))
    real, real_logits, real_labels = (
        torch.cat(parts) for parts in zip(*((*run(batch["images"]), batch["labels"]) for batch in reference))
    )
    enough = min(len(fake), len(real)) > fake.shape[1]
    return dict(
        recognised=recognised_share(fake_logits, labels),
        recognised_real=recognised_share(real_logits, real_labels),
        frechet_distance=frechet_distance(fake, real) if enough else None,
        num_generated=len(fake),
        num_reference=len(real),
        num_features=fake.shape[1],
    )
