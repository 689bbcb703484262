"""Scores of class-conditional samples with a classifier trained on the same classes.

They are no FID: the features are the classifier's, and they are named after it.
"""

from typing import Callable, Dict

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
def extract(
    forward: Callable[[Tensor], Dict[str, Tensor]], images: Tensor, batch_size: int, device
) -> Dict[str, Tensor]:
    """Run `forward` (images -> dict of tensors) over [N, C, h, w] in batches; results on the CPU."""
    parts = [forward(batch.to(device)) for batch in images.split(batch_size)]
    return {name: torch.cat([p[name].cpu() for p in parts]) for name in parts[0]}
