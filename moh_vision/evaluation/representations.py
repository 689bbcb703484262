"""How alike two networks represent the same samples: CKNNA (Huh 2024), as REPA reports it (Yu 2024, figures 2 and 3)."""

import torch
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 10  # of a sample, in both papers


def cknna(features: Tensor, compared: Tensor, neighbours: int = NEIGHBOURS) -> float:
    """Return the centred kernel nearest-neighbour alignment of two sets of features of the same samples, 1 for equal ones.

        CKNNA = A(K, L) / sqrt(A(K, K) A(L, L))
        A(K, L) = HSIC(a K, a L),  K_ij = <x_i, x_j>,  L_ij = <y_i, y_j>

    with unit vectors x_i and y_i, and a_ij = 1 where sample j is among the nearest neighbours of i in both sets, i itself left
    out, else 0. HSIC is the unbiased estimate, see `hsic`. It is computed so in the code that Huh 2024 published; the
    formula of their appendix subtracts means before it looks for neighbours.

    Args:
        features: [N, D].
        compared: [N, E].
        neighbours: k, at least 2 and below N.
    """
    samples = len(features)
    if not 2 <= neighbours < samples:
        raise ValueError(
            f"neighbours {neighbours} is out of range: 2 to {samples - 1}, the other samples"
        )
    kernels = []
    nearest = []
    for vectors in (features, compared):
        vectors = F.normalize(vectors.double(), dim=1)
        kernel = vectors @ vectors.T
        without_itself = kernel.clone().fill_diagonal_(-torch.inf)
        indices = without_itself.topk(neighbours, dim=1).indices
        kernels.append(kernel)
        nearest.append(torch.zeros_like(kernel).scatter_(1, indices, 1.0))
    mutual = nearest[0] * nearest[1]
    both = hsic(mutual * kernels[0], mutual * kernels[1])
    # The common neighbours of a set and itself are its own.
    alone = [hsic(near * kernel, near * kernel) for near, kernel in zip(nearest, kernels)]
    return (both / (alone[0] * alone[1]).sqrt()).item()


def hsic(kernel: Tensor, other: Tensor) -> Tensor:
    """Return the unbiased estimate of the Hilbert-Schmidt independence criterion (Song 2012, equation 5).

        HSIC = [tr(K L) + (1'K 1)(1'L 1) / ((n - 1)(n - 2)) - 2 / (n - 2) 1'K L 1] / (n (n - 3))

    of kernels K and L whose diagonals are set to zero. It is unbiased for symmetric kernels. Those of `cknna` are not
    symmetric, because a neighbour's neighbours are others; the published code takes the same formula for them.

    Args:
        kernel, other: [n, n].
    """
    n = len(kernel)
    kernel = kernel.clone().fill_diagonal_(0)
    other = other.clone().fill_diagonal_(0)
    trace = (kernel * other.T).sum()
    means = kernel.sum() * other.sum() / ((n - 1) * (n - 2))
    mixed = 2 * (kernel.sum(0) @ other.sum(1)) / (n - 2)
    return (trace + means - mixed) / (n * (n - 3))
