from functools import partial

import diffusers
import pytest
import torch
from refusals import each_refused, one_line

from moh_vision.diffusion import SAMPLERS, Guidance, make_scheduler, sample_images
from moh_vision.diffusion.sampling import fit_scheduler, set_steps, to_uint8

ALPHA_BAR = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
SHAPE = (2, 3, 3)


def points(*values, objective="noise"):
    """A model that knows the data: class c is the single image filled with values[c]."""
    table = torch.tensor(values)

    def predict(x, t, labels):
        if objective == "flow":
            return (x - table[labels].view(-1, 1, 1, 1)) / (t.view(-1, 1, 1, 1) / 1000)
        a = ALPHA_BAR[t.long()].float().view(-1, 1, 1, 1)
        eps = (x - a.sqrt() * table[labels].view(-1, 1, 1, 1)) / (1 - a).sqrt()
        return torch.cat([eps, -torch.ones_like(eps)], dim=1)

    return predict


@pytest.mark.parametrize("scale", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_guidance_extrapolates_from_no_class(sampler, scale):
    scheduler = make_scheduler(sampler, 20, True, clip=False)
    exact = points(0.2, -0.1, objective=SAMPLERS[sampler])
    images = sample_images(exact, scheduler, torch.tensor([0]), SHAPE, [1], 1, Guidance(scale))
    torch.testing.assert_close(images, torch.full_like(images, -0.1 + scale * 0.3), atol=1e-2, rtol=0)


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_only_latents_of_four_channels_have_one_that_is_not_guided(channels):
    cond, uncond = torch.randn(2, 8, 3, 3), torch.randn(2, 8, 3, 3)
    every = Guidance(2.0, "all").combine(cond, uncond, channels)
    assert torch.equal(Guidance(2.0).combine(cond, uncond, channels), every)


@pytest.mark.parametrize("channels, n", [(None, 3), (1, 1), ("all", 4)])
@pytest.mark.parametrize(
    "scale, w, passes", [(1, 1, [1]), (2.5, 1, [2]), (1, 2, [1, 1]), (0, 0, [2, 1]), (2.5, 1.5, [2, 1])]
)
def test_guidance_away_from_no_class_and_from_a_weak_model(scale, w, passes, channels, n):
    """The equation of `Guidance`, and with label scale 1 Karras 2024's, in float64; outside the interval the class alone."""
    cond, none, weak = torch.randn(3, 8, 3, 3)
    calls = []

    def predict(outputs, x, t, labels):
        calls.append(len(labels))
        return torch.stack([outputs[label] for label in labels.tolist()])

    guidance = Guidance(scale, channels, (0.2, 0.6), w)
    guided = guidance.around(partial(predict, [cond, none]), torch.tensor([0]), 1, partial(predict, [weak]))
    got, x = guided(torch.zeros(1, 4, 3, 3), torch.tensor(600))[0], torch.ones(1, 4, 3, 3)
    assert calls == passes and torch.equal(guided(x, torch.tensor(200))[0], got)
    calls.clear()
    for t in (199, 601):
        assert torch.equal(guided(x, torch.tensor(t))[0], cond) and calls == [1] * len(calls)
    cond, none, weak = cond.double(), none.double(), weak.double()
    want = none + scale * (cond - none) + (w - 1) * (cond - weak) if scale != 1 else weak + w * (cond - weak)
    torch.testing.assert_close(got, torch.cat([want[:n], cond[n:]]).float())


test_bad_guidance = each_refused(
    lambda arguments: Guidance(**arguments),
    (dict(scale=-1.0), "guidance scale -1.0 is out of range: 0 or more"),
    (dict(scale=float("nan")), "guidance scale nan"),
    (dict(weak_scale=-1.0), "guide scale -1.0 is out of range: 0 or more"),
    (dict(channels=0), "guidance channels 0 is out of range"),
    (dict(interval=(0.6, 0.3)), r"guidance interval \(0.6, 0.3\) is out of range: 0 <= low <= high <= 1"),
    (dict(interval=(0, 999)), "guidance interval"),
)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_image_depends_on_its_seed_alone(sampler):
    def smooth(x, t, labels):  # elementwise, so that batch size cannot change its rounding
        return torch.cat([x * 0.9, x * 0.0], dim=1)

    def run(seeds):
        scheduler = make_scheduler(sampler, 10, True, clip=True)
        return sample_images(smooth, scheduler, torch.zeros(len(seeds), dtype=torch.long), SHAPE, seeds, 1)

    together, alone = run([5, 6, 7]), run([6])
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])
    assert torch.equal(run([5, 6, 7]), together)


test_bad_arguments = each_refused(
    lambda *sampler: make_scheduler(*sampler, True, False),
    ("eulr", 5, r"sampler 'eulr' is not one of ddpm, ddim, dpm-solver\+\+, euler, heun, sde"),
    ("euler", 1001, "steps 1001 is out of range: 1 to 1000"),
    ("ddim", 0, "steps 0 is out of range"),
    ("ddim", 600, "steps 600: the steps of DDIMScheduler would begin at timestep 599 of 1000"),
)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["DDIM", "DPMSolverMultistep", "EulerDiscrete", "UniPCMultistep", "HeunDiscrete"])
def test_a_scheduler_made_from_anothers_configuration(name, clip):
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
        torch.testing.assert_close(bright, torch.full_like(bright, 1.0 if clip else 1.5), atol=0.02, rtol=0)
    assert fit_scheduler(ddpm, True) is ddpm
    with one_line("variance_type learned_range needs a model with a learned variance"):
        fit_scheduler(ddpm, False)


def test_to_uint8():
    assert to_uint8(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 128, 255, 255]
