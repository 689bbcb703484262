"""The samplers against the papers' formulas in float64, step by step, and fine detail; guidance.

diffusers keeps its tables in float32, where 1 - alpha_bar of the first timestep has three digits: that, not our loop, is
the tolerance of 1e-5.
"""

from functools import partial

import diffusers
import pytest
import torch

from moh_vision.diffusion import SAMPLERS, Guidance, make_scheduler, sample_images
from moh_vision.diffusion.sampling import to_uint8
from moh_vision.diffusion.schedulers import ADAPTIVE, fit_scheduler, set_steps
from tests.support.refusals import one_line, refuse

ALPHA_BAR = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
SHAPE = (2, 4, 4)


def bent(x, t, labels):
    """A nonlinear model: x_0 = 1.3 tanh(0.7 x + class) + a wave in t, in float64, and a variance that waves too."""
    x64 = x.double()
    t = t.view(-1, 1, 1, 1)
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
    x = z[0]
    states = []
    for number, i in enumerate(reversed(range(steps))):
        out = bent(x, torch.full((len(labels),), subset[i]), labels)
        eps = out[:, :2]
        v = (out[:, 2:] + 1) / 2
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
    x = noise_streams(2, 0)[0]
    states = []
    for i in reversed(range(steps)):
        a = ALPHA_BAR[subset[i]]
        before = torch.tensor(1.0)
        if i > 0:
            before = ALPHA_BAR[subset[i - 1]]
        eps = bent(x, torch.full((2,), subset[i]), labels)[:, :2]
        x0 = (x - (1 - a).sqrt() * eps) / a.sqrt()
        if clip:
            x0 = x0.clamp(-1, 1)
        x = before.sqrt() * x0 + (1 - before).sqrt() * (x - a.sqrt() * x0) / (1 - a).sqrt()
        states.append(x)
    want = torch.stack(states)
    got = trajectory(make_scheduler("ddim", steps, True, clip), labels)
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


def test_fine_detail_survives_few_steps():
    """Pixels of nearly one value, as images are along most directions. Uniform steps in t leave an error of 0.036."""
    assert error("dpm-solver++", 20, 0.3, 0.05) < 0.002
    assert error("ddim", 20, 0.3, 0.05) > 0.02


@pytest.mark.parametrize("clip, value", [(True, 1.0), (False, 1.5)])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm-solver++"])
def test_every_sampler_clips_alike(sampler, clip, value):
    last = trajectory(make_scheduler(sampler, 20, False, clip), torch.tensor([0]), points(1.5))[-1]
    torch.testing.assert_close(last, torch.full_like(last, value), atol=2e-3, rtol=0)


# ---------------------------------------------------------------- guidance, seeds, schedulers of others


def points(*values):
    """A model that knows the data: class c is the single image filled with values[c]."""
    table = torch.tensor(values)

    def predict(x, t, labels):
        a = ALPHA_BAR[t.long()].float().view(-1, 1, 1, 1)
        eps = (x - a.sqrt() * table[labels].view(-1, 1, 1, 1)) / (1 - a).sqrt()
        return torch.cat([eps, -torch.ones_like(eps)], dim=1)

    return predict


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_only_latents_of_four_channels_have_one_that_is_not_guided(channels):
    cond = torch.randn(2, 8, 3, 3)
    uncond = torch.randn(2, 8, 3, 3)
    every = Guidance(2.0, "all").combine(cond, uncond, channels)
    assert torch.equal(Guidance(2.0).combine(cond, uncond, channels), every)


@pytest.mark.parametrize("channels, n", [(None, 3), (1, 1), ("all", 4)])
@pytest.mark.parametrize(
    "scale, w, passes",
    [(1, 1, [1]), (2.5, 1, [2]), (1, 2, [1, 1]), (0, 0, [2, 1]), (2.5, 1.5, [2, 1])],
)
def test_guidance_away_from_no_class_and_from_a_weak_model(scale, w, passes, channels, n):
    """The equation of `Guidance`, and with label scale 1 Karras 2024's, in float64; outside the interval the class alone."""
    cond, none, weak = torch.randn(3, 8, 3, 3)
    calls = []

    def predict(outputs, x, t, labels):
        calls.append(len(labels))
        return torch.stack([outputs[label] for label in labels.tolist()])

    guidance = Guidance(scale, channels, (0.2, 0.6), w)
    guided = guidance.around(
        partial(predict, [cond, none]), torch.tensor([0]), 1, partial(predict, [weak])
    )
    got = guided(torch.zeros(1, 4, 3, 3), torch.tensor(599))[0]
    x = torch.ones(1, 4, 3, 3)
    assert calls == passes and torch.equal(guided(x, torch.tensor(201))[0], got)
    calls.clear()
    for t in (200, 600):
        assert torch.equal(guided(x, torch.tensor(t))[0], cond)
        assert calls == [1] * len(calls)
    cond, none, weak = cond.double(), none.double(), weak.double()
    if scale == 1:
        want = weak + w * (cond - weak)
    else:
        want = none + scale * (cond - none) + (w - 1) * (cond - weak)
    torch.testing.assert_close(got, torch.cat([want[:n], cond[n:]]).float())


@pytest.mark.parametrize(
    "arguments, facts",
    [
        (dict(scale=-1.0), "guidance scale -1.0 0"),
        (dict(scale=float("nan")), "guidance scale nan 0"),
        (dict(weak_scale=-1.0), "guide scale -1.0 0"),
        (dict(channels=0), "guidance channels 0 1 all"),
        (dict(interval=(0.6, 0.3)), "guidance interval (0.6, 0.3) 0 low < high 1"),
        (dict(interval=(0.5, 0.5)), "guidance interval (0.5, 0.5) 0 low < high 1"),
        (dict(interval=(0, 999)), "guidance interval (0, 999) 0 low < high 1"),
    ],
    ids=["scale below 0", "scale nan", "weak scale", "channels", "interval", "empty", "timesteps"],
)
def test_bad_guidance(arguments, facts):
    refuse(facts, Guidance, **arguments)


def drawn_smoothly(sampler, seeds):
    def smooth(x, t, labels):  # elementwise, so that batch size cannot change its rounding
        return torch.cat([x * 0.9, x * 0.0], dim=1)

    scheduler = make_scheduler(sampler, 10, True, clip=True)
    labels = torch.zeros(len(seeds), dtype=torch.long)
    return sample_images(smooth, scheduler, labels, SHAPE, seeds, 1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_image_depends_on_its_seed_alone(sampler):
    """Of dopri5, whose steps follow from the whole batch, but for its tolerance."""
    together = drawn_smoothly(sampler, [5, 6, 7])
    alone = drawn_smoothly(sampler, [6])
    if sampler == ADAPTIVE:
        torch.testing.assert_close(together[1], alone[0], rtol=1e-3, atol=1e-6)
    else:
        assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])
    assert torch.equal(drawn_smoothly(sampler, [5, 6, 7]), together)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_bounds_of_the_interval_are_not_guided_and_0_and_1_are_no_bounds(sampler):
    """With bounds at two of the sampler's timesteps, the third from either end."""
    passes = []

    def predict(x, t, labels):
        passes.append((round(t.item() / 1000, 6), len(labels) == 2))
        return torch.cat([x.sin(), x * 0.0], dim=1)

    def guided(*interval):
        passes.clear()
        guidance = Guidance(2.0, interval=interval)
        scheduler = make_scheduler(sampler, 10, True, clip=True)
        sample_images(predict, scheduler, torch.tensor([0]), SHAPE, [3], 1, guidance)
        return list(passes)

    everywhere = guided(0, 1)
    assert all(is_guided for t, is_guided in everywhere)
    times = sorted({t for t, _ in everywhere})
    low, high = times[2], times[-3]
    assert guided(low, high) == [(t, low < t < high) for t, _ in everywhere]
    assert guided(0, high) == [(t, t < high) for t, _ in everywhere]
    assert guided(low, 1) == [(t, low < t) for t, _ in everywhere]


@pytest.mark.parametrize(
    "sampler, steps, facts",
    [
        ("eulr", 5, "sampler 'eulr' ddpm ddim dpm-solver++ euler heun dopri5 sde sit-sde"),
        ("sit-sde", 1, "steps 1 2 1000"),
        ("euler", 1001, "steps 1001 1 1000"),
        ("ddim", 0, "steps 0 1 1000"),
        ("ddim", 600, "steps 600 DDIMScheduler timestep 599 divisor 1000"),
    ],
)
def test_bad_arguments(sampler, steps, facts):
    refuse(facts, make_scheduler, sampler, steps, True, False)


@pytest.mark.parametrize("clip, brightest", [(False, 1.5), (True, 1.0)])
@pytest.mark.parametrize(
    "name", ["DDIM", "DPMSolverMultistep", "EulerDiscrete", "UniPCMultistep", "HeunDiscrete"]
)
def test_a_scheduler_made_from_anothers_configuration(name, clip, brightest):
    """As diffusers' users swap them, from a DDPM with a learned variance, on four channels. The last take no generator."""
    ddpm = make_scheduler("ddpm", 250, True, clip)
    scheduler = fit_scheduler(getattr(diffusers, f"{name}Scheduler").from_config(ddpm.config), True)
    set_steps(scheduler, 50)
    labels = torch.tensor([0, 1])
    images = sample_images(points(-0.5, 0.7, 0.0), scheduler, labels, (4, 3, 3), [1, 2], 2)
    want = torch.tensor([-0.5, 0.7]).view(2, 1, 1, 1).expand_as(images)
    torch.testing.assert_close(images, want, atol=0.02, rtol=0)
    if name != "EulerDiscrete":
        bright = sample_images(points(1.5, 0.0), scheduler, torch.tensor([0]), (4, 3, 3), [1], 1)
        torch.testing.assert_close(bright, torch.full_like(bright, brightest), atol=0.02, rtol=0)
    assert fit_scheduler(ddpm, True) is ddpm
    with one_line("scheduler variance_type learned_range learned variance"):
        fit_scheduler(ddpm, False)


def test_to_uint8():
    assert to_uint8(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 128, 255, 255]
