"""The loss term by term against closed forms that are computed another way."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from moh_vision.diffusion.hybrid_loss import HybridLoss, discretised_nll, gaussian_kl

BETA = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
ALPHA_BAR = (1 - BETA).cumprod(0)


def batch(t):
    x0 = torch.rand(len(t), 3, 4, 4).mul(255).round() / 127.5 - 1
    noise = torch.randn(len(t), 3, 4, 4)
    loss = HybridLoss()
    return loss, x0, noise, loss.add_noise(x0, noise, t), t


def test_noise_level_is_the_product_of_the_single_steps():
    loss, x0, noise, xt, t = batch(torch.tensor([0, 250, 999]))
    for i, step in enumerate(t.tolist()):
        keep = math.prod(1 - b for b in BETA[: step + 1].tolist())
        torch.testing.assert_close(
            xt[i], math.sqrt(keep) * x0[i] + math.sqrt(1 - keep) * noise[i], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("t", [1, 10, 500, 999])
def test_posterior_is_bayes_rule(t):
    """q(x_{t-1} | x_t, x_0) as the normalised product of two Gaussians in x_{t-1}."""
    loss = HybridLoss()
    x0, xt = 0.3, -0.7
    # q(x_t | x_{t-1}) seen as a Gaussian in x_{t-1}, and q(x_{t-1} | x_0)
    mean1, var1 = xt / math.sqrt(1 - BETA[t]), BETA[t] / (1 - BETA[t])
    mean2, var2 = math.sqrt(ALPHA_BAR[t - 1]) * x0, 1 - ALPHA_BAR[t - 1]
    var = 1 / (1 / var1 + 1 / var2)
    mean = var * (mean1 / var1 + mean2 / var2)
    got = loss._posterior_mean(torch.full((1, 1, 1, 1), x0), torch.full((1, 1, 1, 1), xt), torch.tensor([t]))
    assert got.item() == pytest.approx(float(mean), abs=1e-5)
    assert loss.log_posterior[t].item() == pytest.approx(math.log(var), abs=1e-4)


def test_kl_is_the_closed_form():
    m1, m2, s1, s2 = (torch.randn(50, dtype=torch.float64) for _ in range(4))
    want = kl_divergence(Normal(m1, s1.exp()), Normal(m2, s2.exp()))
    torch.testing.assert_close(gaussian_kl(m1, 2 * s1, m2, 2 * s2), want)


def test_discretised_likelihood_sums_to_one():
    values = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    for mean, log_var in ((0.2, -3.0), (-0.98, -2.0), (1.1, -1.0)):
        mass = (-discretised_nll(values, torch.tensor(mean), torch.tensor(log_var))).exp()
        assert mass.sum().item() == pytest.approx(1, abs=1e-6)


def test_a_perfect_model_has_no_loss():
    """The true noise and the posterior's own variance: mse 0, and KL 0 at every t > 0."""
    loss, x0, noise, xt, t = batch(torch.tensor([1, 100, 999]))
    perfect = torch.cat([noise, -torch.ones_like(noise)], 1)
    terms = loss(perfect, x0, xt, noise, t)
    assert terms["mse"].abs().max() == 0 and terms["vb"].abs().max() < 1e-4


def test_wrong_variance_costs_its_kl():
    """With the true mean the bound is the KL of two variances, beta against beta tilde."""
    loss, x0, noise, xt, t = batch(torch.tensor([3, 400]))
    terms = loss(torch.cat([noise, torch.ones_like(noise)], 1), x0, xt, noise, t)
    for i, step in enumerate(t.tolist()):
        tilde = BETA[step] * (1 - ALPHA_BAR[step - 1]) / (1 - ALPHA_BAR[step])
        want = kl_divergence(Normal(0.0, tilde.sqrt()), Normal(0.0, BETA[step].sqrt())) / math.log(2)
        assert terms["vb"][i].item() == pytest.approx(float(want), rel=1e-2, abs=2e-5)


def test_wrong_noise_costs_its_square():
    loss, x0, noise, xt, t = batch(torch.tensor([5, 50]))
    assert loss(noise + 0.5, x0, xt, noise, t)["loss"].tolist() == pytest.approx([0.25, 0.25], rel=1e-5)


def test_first_step_is_a_likelihood_in_bits():
    loss, x0, noise, xt, t = batch(torch.tensor([0]))
    vb = loss(torch.cat([noise, torch.ones_like(noise)], 1), x0, xt, noise, t)["vb"]
    sigma = BETA[0].sqrt()
    normal = Normal(x0.double(), sigma)  # with the true noise the predicted mean is x_0
    upper = torch.where(x0 > 0.999, 1.0, normal.cdf(x0.double() + 1 / 255))
    lower = torch.where(x0 < -0.999, 0.0, normal.cdf(x0.double() - 1 / 255))
    assert vb.item() == pytest.approx(-(upper - lower).log2().mean().item(), rel=1e-2)


def test_the_bound_trains_the_variance_only():
    loss, x0, noise, xt, t = batch(torch.tensor([0, 7, 800]))
    output = torch.randn(3, 6, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(output, x0, xt, noise, t)["vb"].sum(), output)
    assert gradient[:, :3].abs().max() == 0 and gradient[:, 3:].abs().max() > 0
