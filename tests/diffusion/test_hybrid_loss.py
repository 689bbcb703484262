"""The loss term by term against closed forms that are computed another way, in float64 where it matters.

The tables are float32, as in training: that is the tolerance of 1e-5.
"""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from moh_vision.diffusion.objectives.noise import HybridLoss, discretised_nll
from tests.support.refusals import refuse

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
        want = math.sqrt(keep) * x0[i] + math.sqrt(1 - keep) * noise[i]
        torch.testing.assert_close(xt[i], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [-1.0, 1.0, 127 / 127.5 - 1, 20 / 127.5 - 1])
@pytest.mark.parametrize(
    "mean, log_var", [(0.0, -4.0), (-1.0, -9.2), (0.99, -9.2), (0.2, 0.0), (-1.4, -3.0)]
)
def test_discretised_likelihood_is_the_integral(value, mean, log_var):
    """The density integrated over the bin of an 8-bit value; the outer bins go on to infinity (Ho 2020, eq. 13)."""
    sigma = math.exp(0.5 * log_var)
    low = value - 1 / 255
    high = value + 1 / 255
    if value == -1:
        low = mean - 40 * sigma
    if value == 1:
        high = mean + 40 * sigma
    mass = torch.tensor(0.0)
    if high > low:  # all of the density may lie outside
        # In pieces no wider than the density is.
        grid = torch.linspace(low, high, 200_001, dtype=torch.float64)
        mass = torch.trapezoid(Normal(mean, sigma).log_prob(grid).exp(), grid)
    got = discretised_nll(*(torch.tensor(v, dtype=torch.float64) for v in (value, mean, log_var)))
    assert got.item() == pytest.approx(-math.log(max(mass.item(), 1e-12)), rel=1e-6, abs=1e-9)


def exact(t):
    """As `batch`, in float64 with the means and variances of q(x_{t-1} | x_t, x_0), from the definitions."""
    loss, x0, noise, _, t = batch(t)
    x0 = x0.double()
    noise = noise.double()
    a = ALPHA_BAR[t].view(-1, 1, 1, 1)
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    return loss.double(), x0, noise, xt, t


def posterior(x0, xt, t):
    """(mean, standard deviation) of q(x_{t-1} | x_t, x_0), t > 0."""
    a, before, beta = (
        table.view(-1, 1, 1, 1) for table in (ALPHA_BAR[t], ALPHA_BAR[t - 1], BETA[t])
    )
    mean = (before.sqrt() * beta * x0 + (1 - beta).sqrt() * (1 - before) * xt) / (1 - a)
    return mean, (beta * (1 - before) / (1 - a)).sqrt()


def bound(output, x0, xt, t):
    """L_t in bits per dimension, for one t, with torch.distributions."""
    eps = output[:, :3]
    v = (output[:, 3:] + 1) / 2
    a = ALPHA_BAR[t].view(-1, 1, 1, 1)
    x0_pred = (xt - (1 - a).sqrt() * eps) / a.sqrt()  # not clipped
    if t.item() == 0:  # the lower end of the variance is that of t = 1
        sigma = BETA[0].sqrt() ** v * posterior(x0, xt, torch.tensor([1]))[1] ** (1 - v)
        model = Normal(x0_pred, sigma)
        upper = torch.where(x0 > 0.999, 1.0, model.cdf(x0 + 1 / 255))
        lower = torch.where(x0 < -0.999, 0.0, model.cdf(x0 - 1 / 255))
        return -(upper - lower).clamp_min(1e-12).log2().mean()
    mean, std = posterior(x0, xt, t)
    sigma = BETA[t].view(-1, 1, 1, 1).sqrt() ** v * std ** (1 - v)
    model = Normal(posterior(x0_pred, xt, t)[0], sigma)
    return kl_divergence(Normal(mean, std), model).mean() / math.log(2)


def test_the_mean_over_timesteps_is_the_sum_of_the_paper():
    """L_hybrid = L_simple + L_vlb / 1000 with L_vlb = L_0 + ... + L_999, for a model that is wrong everywhere."""
    loss, x0, noise, xt, t = exact(torch.arange(1000))
    wrong_noise = noise + 0.05 * torch.randn_like(noise)
    wrong_variance = torch.rand_like(noise) * 2.4 - 1.2
    output = torch.cat([wrong_noise, wrong_variance], 1)
    terms = loss(output, x0, xt, noise, t)
    each = torch.stack(
        [bound(output[i : i + 1], x0[i : i + 1], xt[i : i + 1], t[i : i + 1]) for i in range(1000)]
    )
    # The tables are float32: they have 3 digits at t = 0, 1.
    torch.testing.assert_close(terms["vb"], each, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(terms["vb"][50:], each[50:], rtol=2e-5, atol=1e-7)
    simple = (output[:, :3] - noise).square().mean()
    hybrid = simple + each.sum() / 1000
    assert terms["loss"].mean().item() == pytest.approx(hybrid.item(), rel=1e-4)


def test_gradients():
    """The bound has none into the noise, at any t; the loss has that of the squares alone into the noise."""
    loss, x0, noise, xt, t = exact(torch.tensor([0, 7, 800]))
    output = torch.randn(3, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    terms = loss(output, x0, xt, noise, t)
    (of_bound,) = torch.autograd.grad(terms["vb"].sum(), output, retain_graph=True)
    (of_loss,) = torch.autograd.grad(terms["loss"].sum(), output)
    assert of_bound[:, :3].abs().max() == 0 and (of_bound[1:, 3:].abs() > 0).all()
    squares = 2 * (output - torch.cat([noise, noise], 1))[:, :3].detach() / noise[0].numel()
    torch.testing.assert_close(of_loss[:, :3], squares)
    # d KL / d log variance = (1 - (var of q + squared distance of the means) / var) / 2
    eps = output[1:, :3].detach()
    v = (output[1:, 3:].detach() + 1) / 2
    a, beta = (table[t[1:]].view(-1, 1, 1, 1) for table in (ALPHA_BAR, BETA))
    mean, std = posterior(x0[1:], xt[1:], t[1:])
    other = posterior((xt[1:] - (1 - a).sqrt() * eps) / a.sqrt(), xt[1:], t[1:])[0]
    variance = beta**v * (std**2) ** (1 - v)
    slope = (1 - (std**2 + (mean - other) ** 2) / variance) / 2 * (beta / std**2).log() / 2
    torch.testing.assert_close(
        of_bound[1:, 3:], slope / math.log(2) / noise[0].numel(), rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_computed_in_float32_or_better(dtype):
    loss, x0, noise, xt, t = exact(torch.tensor([0, 500]))
    wanted = torch.float64
    if dtype != torch.float64:
        loss = loss.float()
        x0, noise, xt = (tensor.float() for tensor in (x0, noise, xt))
        wanted = torch.float32
    terms = loss(torch.randn(2, 6, 4, 4, dtype=dtype), x0, xt, noise, t)
    assert all(
        term.dtype == wanted and term.shape == (2,) and term.isfinite().all()
        for term in terms.values()
    )


def test_timesteps_are_integers():
    refuse("timesteps torch.float32 integers 0 999", batch, torch.rand(2))


@pytest.mark.parametrize("channels", [6, 3], ids=["learned variance", "fixed variance"])
def test_min_snr_weighs_the_noises_error(channels):
    """Hang 2023: min(SNR, gamma) / SNR of the squared error, and nothing of the bound."""
    _, x0, noise, xt, t = batch(torch.tensor([0, 100, 300, 999]))
    output = torch.randn(4, channels, 4, 4)
    plain, weighted = (HybridLoss(gamma)(output, x0, xt, noise, t) for gamma in (None, 5.0))
    snr = ALPHA_BAR[t] / (1 - ALPHA_BAR[t])
    weight = torch.minimum(snr, torch.tensor(5.0)) / snr
    assert weight[0] < 1e-3 and 0 < weight[1] < 1 and weight[2:].tolist() == [1, 1]
    want = weight.float() * plain["mse"] + plain.get("vb", 0)
    torch.testing.assert_close(weighted["loss"], want, rtol=1e-4, atol=1e-6)
    assert torch.equal(weighted["mse"], plain["mse"])
