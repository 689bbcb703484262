"""Every sampler on a model that knows its data, where each pixel is N(mean, std^2): its grid, its order, its tolerance.

Such a model is linear in x, and so is a sampler: an image is B + A z + c_1 z_1 + ... of the starting noise z and the noises
of the steps. Drawn from impulses instead of noise, pixel k shows the k-th coefficient, so that mean B and variance
A^2 + c_1^2 + ... are known without chance. For a deterministic sampler their error is that of the image itself.
"""

import math

import diffusers
import pytest
import torch

from moh_vision.diffusion import SAMPLERS, make_scheduler, sample_images
from moh_vision.diffusion.schedulers import ADAPTIVE, fit_scheduler, set_steps, step_count

ALPHA_BAR = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
SHIFT = 6.93  # RAE's
MEAN = 0.3
STDS = (0.3, 0.8)


def noise_of(std):
    """E[eps | x_t] of the noise of 1000 steps."""

    def predict(x, t, labels):
        a = ALPHA_BAR[t.long()].view(-1, 1, 1, 1)
        return (1 - a).sqrt() * (x.double() - a.sqrt() * MEAN) / (a * std**2 + 1 - a)

    return predict


def slope_of_velocity(t, std):
    return (t - (1 - t) * std**2) / ((1 - t) ** 2 * std**2 + t**2)


def velocity_of(std):
    """E[eps - x_0 | x_t] of a flow."""

    def predict(x, t, labels):
        t = t.double().view(-1, 1, 1, 1) / 1000
        return slope_of_velocity(t, std) * (x.double() - (1 - t) * MEAN) - MEAN

    return predict


MODELS = dict(noise=noise_of, velocity=velocity_of)


def limit(sampler, std):
    """Return (mean, standard deviation) of the images of endlessly many steps."""
    if sampler in (
        "ddim",
        "dpm-solver++",
    ):  # begin at the last of 1000 steps, where some of the image is left
        a = ALPHA_BAR[-1].item()
        scale = std / math.sqrt(a * std**2 + 1 - a)
        return MEAN - scale * math.sqrt(a) * MEAN, scale
    if sampler == "sit-sde":  # x_0 - t eps of the exact x at t = 0.04
        t = 0.04
        slope = slope_of_velocity(t, std)
        spread = math.sqrt((1 - t) ** 2 * std**2 + t**2)
        return MEAN, spread * (1 - t * slope - t * (1 + (1 - t) * slope))
    return MEAN, std


def error(scheduler, steps, output, want, std, monkeypatch):
    """Return how far mean and standard deviation of the images are from `want`."""
    draws = []

    def impulse(shape, **options):
        z = torch.zeros(shape)
        z[..., len(draws)] = 1
        draws.append(z)
        return z

    monkeypatch.setattr(torch, "randn", impulse)
    labels = torch.zeros(1, dtype=torch.long)
    shape = (1, 1, steps + 1)  # the last pixel has no impulse
    image = sample_images(MODELS[output](std), scheduler, labels, shape, [0], 1)
    monkeypatch.undo()
    image = image.flatten().double()
    mean = image[-1]
    return math.hypot(mean - want[0], (image - mean).norm() - want[1])


# Sampler -> its order, and a number of steps from which on it shows.
ORDERS = {
    "ddpm": (1, 100),
    "ddim": (1, 25),
    "dpm-solver++": (2, 20),
    "euler": (1, 50),
    "heun": (2, 50),
    "sde": (1, 100),
    "sit-sde": (1, 100),
}
CASES = [(sampler, 1.0) for sampler in ORDERS]
CASES += [(sampler, SHIFT) for sampler in ORDERS if SAMPLERS[sampler].output == "velocity"]


def test_every_sampler_has_an_order_or_chooses_its_steps():
    assert {*ORDERS, ADAPTIVE} == set(SAMPLERS)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("sampler, shift", CASES)
def test_twice_the_steps_are_nearer_by_the_order(sampler, shift, std, monkeypatch):
    order, steps = ORDERS[sampler]
    errors = []
    for n in (steps, 2 * steps, 4 * steps):
        scheduler = make_scheduler(sampler, n, False, False, shift)
        want = limit(sampler, std)
        errors.append(error(scheduler, n + 1, SAMPLERS[sampler].output, want, std, monkeypatch))
    assert errors == sorted(errors, reverse=True)
    assert math.log2(errors[1] / errors[2]) == pytest.approx(order, abs=0.3)


@pytest.mark.parametrize("shift", [1.0, SHIFT])
@pytest.mark.parametrize("std", STDS)
def test_dopri5_is_as_near_as_its_tolerance(std, shift):
    """Whatever the number of steps, of which it makes few."""
    start = torch.stack(
        [torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    )
    passes = []

    def predict(x, t, labels):
        passes.append(t.item())
        return velocity_of(std)(x, t, labels)

    labels = torch.zeros(4, dtype=torch.long)
    for rtol, most in ((1e-3, 50), (1e-5, 100)):
        scheduler = make_scheduler(ADAPTIVE, 7, False, False, shift)
        assert step_count(scheduler) is None and scheduler.config.rtol == 1e-3
        scheduler.register_to_config(rtol=rtol)
        images = sample_images(predict, scheduler, labels, (1, 32, 32), range(4), 1)
        assert (images - MEAN - std * start).square().mean().sqrt() < rtol
        assert max(passes) == 1000 and min(passes) == 0 and len(passes) < most
        passes.clear()


# Sampler, shift -> the timesteps at which the steps of 5 begin; docs/guides/sampling.md says them.
GRIDS = {
    ("ddpm", 1): [999, 749, 500, 250, 0],
    ("ddim", 1): [800, 600, 400, 200, 0],
    ("euler", 1): [1000, 800, 600, 400, 200],
    ("euler", 3): [1000, 12000 / 13, 9000 / 11, 2000 / 3, 3000 / 7],  # Esser 2024, eq. 23
    ("sit-sde", 1): [1000, 760, 520, 280, 40],
    ("sit-sde", 3): [1000, 901.6393, 755.1020, 513.5135, 40],
}
for name in ("heun", "sde"):
    for of_shift in (1, 3):
        GRIDS[name, of_shift] = GRIDS["euler", of_shift]


@pytest.mark.parametrize("sampler, shift", GRIDS)
def test_the_grid_is_the_one_that_the_page_states(sampler, shift):
    """Heun's makes two passes at each time but the first: 2 n - 1, the last step being Euler's."""
    scheduler = make_scheduler(sampler, 5, False, False, shift)
    begins = GRIDS[sampler, shift]
    passes = begins
    if sampler == "heun":
        passes = [begins[0], *sorted(2 * begins[1:], reverse=True)]
    assert scheduler.timesteps.tolist() == pytest.approx(passes, rel=1e-6)
    assert step_count(scheduler) == len(passes)
    if SAMPLERS[sampler].output == "velocity":
        ends = [*passes, 0]  # in the loop of diffusers a step leads from one sigma to the next
        assert (1000 * scheduler.sigmas).tolist() == pytest.approx(ends, rel=1e-6)


def test_the_grid_of_equal_log_snr():
    timesteps = make_scheduler("dpm-solver++", 5, False, False).timesteps
    a = ALPHA_BAR[timesteps]
    log_snr = (a / (1 - a)).log()
    steps = log_snr.diff()
    assert timesteps[0] == 999 and steps.max() / steps.min() < 1.1


@pytest.mark.parametrize("shift", [1.0, SHIFT])
@pytest.mark.parametrize("name", ["FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete"])
def test_a_scheduler_of_diffusers_gets_the_same_grid(name, shift):
    """In a pipeline too, where a user put it, or that was saved with it."""
    theirs = getattr(diffusers, f"{name}Scheduler")(shift=shift)
    set_steps(fit_scheduler(theirs, False), 20)
    ours = make_scheduler("euler", 20, False, False, shift)
    torch.testing.assert_close(theirs.sigmas.unique(), ours.sigmas.unique())
