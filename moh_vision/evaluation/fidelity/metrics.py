"""Compare the features of two sets: Frechet distance and KID by torch-fidelity, and precision and recall."""

import numpy as np
import torch
from torch import Tensor

NEIGHBOURS = 3
KID_SUBSET = 1000  # images
KID_SUBSETS = 100


def frechet_distance(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """Return |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^1/2), Heusel 2017 eq. 6. Means [F], covariances [F, F]."""
    from torch_fidelity.metric_fid import fid_statistics_to_metric

    first = dict(mu=mean1.double().numpy(), sigma=cov1.double().numpy())
    second = dict(mu=mean2.double().numpy(), sigma=cov2.double().numpy())
    distances = fid_statistics_to_metric(first, second, verbose=False)
    return float(np.real(distances["frechet_inception_distance"]))


def precision_recall(
    generated: Tensor, reference: Tensor, device="cpu", chunk: int = 5000
) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi 2019) of features [N, F] and [M, F].

    A set covers a point if the point lies in a ball around one of the set's own points; each ball reaches to the 3rd
    nearest other point of the set. Precision is the share of generated points that the reference covers; recall is the
    reverse. Squared distances are |x|^2 + |y|^2 - 2 x.y in float64, after the reference's mean is subtracted, because a
    large common offset would cost digits. Points count as inside up to `tolerance`, so that a copy of a point is inside a
    ball of radius 0. chunk x chunk distances, 8 bytes each, are in memory at a time.
    """
    for name, features in (("generated", generated), ("reference", reference)):
        if len(features) <= NEIGHBOURS:
            raise ValueError(
                f"precision and recall need more than {NEIGHBOURS} images, the {name} set has {len(features)}"
            )
    if torch.device(device).type == "mps":  # it has no float64
        device = "cpu"
    mean = reference.double().mean(0).to(device)

    def centred(x: Tensor) -> Tensor:
        return x.to(device).double() - mean

    def longest(x: Tensor) -> float:
        """Return the largest squared length of a point."""
        return max(float(centred(rows).square().sum(1).max()) for rows in x.split(chunk))

    # A sum of F products has an error of at most F eps / 2 of the products' absolute sum, here |x|^2, |y|^2 or |x| |y|, and
    # adding the three rounds again. The squared distance and the squared radius each err by half of this tolerance.
    rounding = (generated.shape[1] + 3) * torch.finfo(torch.float64).eps
    tolerance = 4 * rounding * max(longest(generated), longest(reference))

    def squared_distances(x: Tensor, y: Tensor) -> Tensor:
        x = centred(x)
        y = centred(y)
        norms = x.square().sum(1)[:, None] + y.square().sum(1)
        return norms.addmm_(x, y.T, alpha=-2)  # [N, M]

    def squared_radii(x: Tensor) -> Tensor:
        """Return the squared distance of each point to its 3rd nearest other point, [N]."""
        result = []
        for rows in x.split(chunk):
            nearest = torch.empty(len(rows), 0, dtype=torch.float64, device=device)
            for columns in x.split(chunk):
                nearest = torch.cat([nearest, squared_distances(rows, columns)], 1)
                kept = min(NEIGHBOURS + 1, nearest.shape[1])  # + 1: each point is nearest to itself
                nearest = nearest.topk(kept, largest=False).values
            result.append(nearest[:, NEIGHBOURS])
        return torch.cat(result)

    def covered(points: Tensor, centres: Tensor) -> float:
        """Return the share of the points that are inside a ball around a centre."""
        limits = squared_radii(centres) + tolerance
        count = 0
        for rows in points.split(chunk):
            inside = torch.zeros(len(rows), dtype=torch.bool, device=device)
            for columns, limit in zip(centres.split(chunk), limits.split(chunk)):
                inside |= (squared_distances(rows, columns) <= limit).any(1)
            count += int(inside.sum())
        return count / len(points)

    return covered(generated, reference), covered(reference, generated)


def kernel_distance(generated: Tensor, reference: Tensor) -> float:
    """KID (Binkowski 2018): squared MMD, kernel (x.y / F + 1)^3, mean over 100 subsets of up to 1000 images.

    Subsets are drawn as in torch-fidelity. The kernel is computed in float64, because in float32 the difference of cubes
    would lose its digits. The estimate is unbiased for independent sets. For a set of n images and itself it is below 0, by
    2 / n of the mean difference of k(x, x) and k(x, y).
    """
    from torch_fidelity.metric_kid import kernel_mmd

    size = min(KID_SUBSET, len(generated), len(reference))
    rng = np.random.RandomState(2020)

    def subset(features: Tensor) -> np.ndarray:
        return features[rng.choice(len(features), size, replace=False)].double().numpy()

    # The generated subset is drawn before the reference's, as arguments are computed from left to right.
    distances = [kernel_mmd(subset(generated), subset(reference)) for _ in range(KID_SUBSETS)]
    return float(np.mean(distances))
