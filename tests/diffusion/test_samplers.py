"""The samplers against the papers' formulas in float64, step by step, and against exact solutions.

diffusers keeps its tables in float32, where 1 - alpha_bar of the first timestep has three digits: that, not our loop, is
the tolerance of 1e-5.
"""

import math

import pytest
import torch

from moh_vision.diffusion import make_scheduler, sample_images

ALPHA_BAR = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
SHAPE = (2, 4, 4)


def bent(x, t, labels):
    """A nonlinear model: x_0 = 1.3 tanh(0.7 x + class) + a wave in t, in float64, and a variance that waves too."""
    x64, t = x.double(), t.view(-1, 1, 1, 1)
    a = ALPHA_BAR[t]
    x0 = 1.3 * torch.tanh(0.7 * x64 + labels.view(-1, 1, 1, 1)) + 0.1 * torch.sin(t / 70)
    eps = (x64 - a.sqrt() * x0) / (1 - a).sqrt()
    return torch.cat([eps, torch.sin(3 * x64 + t / 50)], dim=1)


def trajectory(scheduler, labels, predict=bent):
    """x after every step, in float32."""
    states = []
    seeds = list(range(len(labels)))
    keep = dict(null_label=2, on_step=lambda step, t, x: states.append(x))
    sample_images(predict, scheduler, labels, SHAPE, seeds, **keep)
    assert all(x.dtype == torch.float32 for x in states)
    return torch.stack(states)


def noise_streams(images, steps):
    """[steps + 1, images, *SHAPE]: what the seeds 0, 1, ... give, first the start, then one draw a step."""
    generators = [torch.Generator().manual_seed(s) for s in range(images)]
    draws = [[torch.randn(SHAPE, generator=g) for g in generators] for _ in range(steps + 1)]
    return torch.stack([torch.stack(step) for step in draws]).double()


def ancestral_sampling(steps, labels, clip):
    """Nichol and Dhariwal 2021: the process respaced to a subset of the steps, with a learned-range variance."""
    subset = [round(i * 999 / (steps - 1)) for i in range(steps)]
    kept = ALPHA_BAR[subset]
    before = torch.cat([torch.ones(1, dtype=torch.float64), kept[:-1]])
    beta = 1 - kept / before
    tilde = beta * (1 - before) / (1 - kept)
    z = noise_streams(len(labels), steps)
    x, states = z[0], []
    for number, i in enumerate(reversed(range(steps))):
        out = bent(x, torch.full((len(labels),), subset[i]), labels)
        eps, v = out[:, :2], (out[:, 2:] + 1) / 2
        x0 = (x - (1 - kept[i]).sqrt() * eps) / kept[i].sqrt()
        if clip:
            x0 = x0.clamp(-1, 1)
        of_x0 = before[i].sqrt() * beta[i] / (1 - kept[i])
        of_xt = (1 - beta[i]).sqrt() * (1 - before[i]) / (1 - kept[i])
        mean = of_x0 * x0 + of_xt * x
        if i > 0:
            log_variance = v * beta[i].log() + (1 - v) * tilde[i].log()
            mean = mean + (0.5 * log_variance).exp() * z[number + 1]
        x = mean
        states.append(x)
    return torch.stack(states)


@pytest.mark.parametrize("steps", [25, 50, 250])
@pytest.mark.parametrize("clip", [False, True])
def test_ddpm_is_the_respaced_ancestral_sampler(steps, clip):
    labels = torch.tensor([0, 1, 0])
    got = trajectory(make_scheduler("ddpm", steps, True, clip), labels)
    want = ancestral_sampling(steps, labels, clip)
    assert got.shape == want.shape == (steps, 3, *SHAPE)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    assert (want[-1].abs().max() <= 1) == clip  # the model does go beyond


@pytest.mark.parametrize("steps, clip", [(25, True), (50, False), (250, True)])
def test_ddim_is_equation_12(steps, clip):
    """Song 2021, eq. 12 with eta = 0, over the steps 0, k, 2k, ..., k = 1000 / steps; the noise is that of the clipped image."""
    labels = torch.tensor([1, 0])
    subset = list(range(0, 1000, 1000 // steps))
    x, want = noise_streams(2, 0)[0], []
    for i in reversed(range(steps)):
        a, before = ALPHA_BAR[subset[i]], ALPHA_BAR[subset[i - 1]] if i else torch.tensor(1.0)
        eps = bent(x, torch.full((2,), subset[i]), labels)[:, :2]
        x0 = (x - (1 - a).sqrt() * eps) / a.sqrt()
        x0 = x0.clamp(-1, 1) if clip else x0
        x = before.sqrt() * x0 + (1 - before).sqrt() * (x - a.sqrt() * x0) / (1 - a).sqrt()
        want.append(x)
    got, want = trajectory(make_scheduler("ddim", steps, True, clip), labels), torch.stack(want)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


def gaussian(mean, std):
    """A model that knows that pixels are N(mean, std^2)."""

    def predict(x, t, labels):
        a = ALPHA_BAR[t].view(-1, 1, 1, 1)
        eps = (1 - a).sqrt() * (x.double() - a.sqrt() * mean) / (a * std**2 + 1 - a)
        return torch.cat([eps, eps.cos()], dim=1)

    return predict


def error(sampler, steps, mean, std):
    """Root mean square distance to the exact solution of the probability flow: (x - alpha mean) / spread is constant."""
    labels = torch.zeros(64, dtype=torch.long)
    start = noise_streams(64, 0)[0]
    a = ALPHA_BAR[999]
    want = mean + std * (start - a.sqrt() * mean) / (a * std**2 + 1 - a).sqrt()
    got = trajectory(make_scheduler(sampler, steps, True, False), labels, gaussian(mean, std))[-1]
    return (got - want).square().mean().sqrt().item()


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (0.0, 0.8), (0.3, 0.3)])
def test_order_of_convergence(mean, std):
    """Twice the steps: half the error of DDIM, a quarter of DPM-Solver++'s."""
    ddim = [error("ddim", n, mean, std) for n in (10, 20, 50, 100)]
    dpm = [error("dpm-solver++", n, mean, std) for n in (10, 20, 50, 100)]
    assert ddim == sorted(ddim, reverse=True) and dpm == sorted(dpm, reverse=True)
    assert math.log2(ddim[2] / ddim[3]) == pytest.approx(1, abs=0.15)
    assert math.log2(dpm[2] / dpm[3]) > 1.8
    assert all(fast < 0.35 * slow for fast, slow in zip(dpm, ddim))


def test_fine_detail_survives_few_steps():
    """Pixels of nearly one value, as images are along most directions. Uniform steps in t leave an error of 0.036."""
    assert error("dpm-solver++", 20, 0.3, 0.05) < 0.002
    assert error("ddim", 20, 0.3, 0.05) > 0.02


def test_dpm_solver_clips_like_the_others():
    def too_bright(x, t, labels):
        a = ALPHA_BAR[t].float().view(-1, 1, 1, 1)
        return (x - a.sqrt() * 1.5) / (1 - a).sqrt()

    for sampler in ("ddpm", "ddim", "dpm-solver++"):
        for clip, value in ((True, 1.0), (False, 1.5)):
            scheduler = make_scheduler(sampler, 20, False, clip)
            last = trajectory(scheduler, torch.tensor([0]), too_bright)[-1]
            torch.testing.assert_close(last, torch.full_like(last, value), atol=2e-3, rtol=0)
