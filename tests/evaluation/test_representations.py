"""CKNNA: its estimate of HSIC against sums over samples, what it is invariant to, and its range."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from moh_vision.evaluation.representations import cknna, hsic
from tests.support.refusals import refuse


def test_hsic_is_a_mean_over_four_samples():
    """Of symmetric kernels, as Song 2012 defines it: over all i, j, q and r that differ."""
    torch.manual_seed(0)
    k, other = torch.randn(2, 7, 7, dtype=torch.float64)
    k, other = k + k.T, other + other.T
    terms = [
        k[i, j] * other[i, j] + k[i, j] * other[q, r] - 2 * k[i, j] * other[i, q]
        for i, j, q, r in itertools.permutations(range(7), 4)
    ]
    torch.testing.assert_close(hsic(k, other), torch.stack(terms).mean())


def hsic_of_sums(k, other):
    """Its formula, one sum after another."""
    n = len(k)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    trace = sum(k[i, j] * other[j, i] for i, j in pairs)
    sums = [sum(matrix[i, j] for i, j in pairs) for matrix in (k, other)]
    mixed = sum(k[i, j] * other[p, q] for i, j in pairs for p, q in pairs if j == p)
    return (trace + sums[0] * sums[1] / ((n - 1) * (n - 2)) - 2 / (n - 2) * mixed) / (n * (n - 3))


def cknna_of_sums(x, y, neighbours):
    """CKNNA by its definition, sample by sample."""
    n = len(x)
    kernels = []
    near = []
    for vectors in (x, y):
        vectors = [v / v.norm() for v in vectors]
        kernel = torch.tensor(
            [[float(v @ w) for w in vectors] for v in vectors], dtype=torch.float64
        )
        kernels.append(kernel)
        mask = torch.zeros(n, n, dtype=torch.float64)
        for i in range(n):
            others = sorted((j for j in range(n) if j != i), key=lambda j: -kernel[i, j])
            mask[i, others[:neighbours]] = 1
        near.append(mask)

    def alignment(one, two):
        a = near[one] * near[two]
        return hsic_of_sums(a * kernels[one], a * kernels[two])

    return alignment(0, 1) / (alignment(0, 0) * alignment(1, 1)).sqrt()


def test_cknna_is_that_of_its_definition():
    torch.manual_seed(1)
    x = torch.randn(9, 4, dtype=torch.float64)
    y = x @ torch.randn(4, 6, dtype=torch.float64) + torch.randn(9, 6, dtype=torch.float64)
    for neighbours in (2, 4, 8):
        assert cknna(x, y, neighbours) == pytest.approx(
            cknna_of_sums(x, y, neighbours).item(), abs=1e-12
        )


def test_equal_rotated_and_unrelated_features():
    torch.manual_seed(2)
    x = torch.randn(200, 16)
    rotation, _ = torch.linalg.qr(torch.randn(16, 16))
    lengths = torch.rand(200, 1) + 0.5
    assert cknna(x, x) == pytest.approx(1)
    assert cknna(x, lengths * x @ rotation) == pytest.approx(1, abs=1e-5)
    assert abs(cknna(x, torch.randn(200, 16))) < 0.15
    noisy = [cknna(x, x + scale * torch.randn(200, 16)) for scale in (0.1, 0.5, 2.0)]
    assert noisy == sorted(noisy, reverse=True)
    assert cknna(x, F.pad(x, (0, 3))) == pytest.approx(1)


def test_neighbours_that_cannot_be():
    x = torch.randn(5, 3)
    for neighbours in (1, 5):
        refuse(f"neighbours {neighbours} 2 4", cknna, x, x, neighbours)
