"""Flows whose noise is wider than N(0, 1), as in JiT's models of 512 pixels: losses, samplers and what is refused."""

import math

import pytest
import timm
import torch

from moh_vision.diffusion import MoHDiTPipeline, make_scheduler, train
from moh_vision.diffusion.objectives import FlowMatchingLoss, make_objective
from moh_vision.diffusion.sampling import sample_images, weak_predict
from moh_vision.models.prediction import to_velocity
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments
from tests.support.tiny_dit import TINY

SCALE = 2.0
MEAN = 0.3
STD = 0.3


@pytest.mark.parametrize("predict", ["velocity", "x", "noise"])
def test_the_loss_is_jits(predict):
    """z = t x + (1 - t) e with e = 2 N(0, 1), v = (x - z) / max(1 - t, 0.05), as JiT's training has it."""
    torch.manual_seed(0)
    x, noise, predicted = torch.randn(3, 4, 3, 8, 8, dtype=torch.float64)
    t = torch.tensor([0.0, 0.3, 0.97, 0.99], dtype=torch.float64)  # from noise to image
    e = SCALE * noise
    z = t.view(-1, 1, 1, 1) * x + (1 - t).view(-1, 1, 1, 1) * e
    objective = make_objective(
        dict(objective="flow", flow=dict(predict=predict, noise_scale=SCALE))
    )
    timesteps = 1000 * (1 - t)
    xt = objective.add_noise(x, noise, timesteps)
    torch.testing.assert_close(xt, z)
    velocity = to_velocity(predict, predicted, xt, timesteps)  # of the model
    found = objective(velocity, x, xt, noise, timesteps)["loss"]
    rest = (1 - t).clamp(min=0.05).view(-1, 1, 1, 1)
    past = t.clamp(min=0.05).view(-1, 1, 1, 1)
    difference = dict(
        velocity=predicted - (e - x), x=(predicted - x) / rest, noise=(predicted - e) / past
    )[predict]
    torch.testing.assert_close(found, difference.square().flatten(1).mean(1))


def exact_velocity(x, t, labels):
    """E[e - x_0 | x_t] where every pixel is N(MEAN, STD^2) and e is N(0, SCALE^2)."""
    t = t.double().view(-1, 1, 1, 1) / 1000
    variance = (1 - t) ** 2 * STD**2 + (t * SCALE) ** 2
    slope = (t * SCALE**2 - (1 - t) * STD**2) / variance
    return slope * (x.double() - (1 - t) * MEAN) - MEAN


def drawn(sampler, steps, on_step=None):
    labels = torch.zeros(8, dtype=torch.long)
    scheduler = make_scheduler(sampler, steps, False, clip=False)
    return sample_images(
        exact_velocity,
        scheduler,
        labels,
        (1, 32, 32),
        range(8),
        1,
        on_step=on_step,
        noise_scale=SCALE,
    )


def error_of(sampler, steps):
    start = torch.stack(
        [torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    )
    difference = drawn(sampler, steps) - (MEAN + STD * start)
    return difference.square().mean().sqrt().item()


@pytest.mark.parametrize("sampler, order", [("euler", 1), ("heun", 2)])
def test_solvers_converge_to_the_exact_solution(sampler, order):
    errors = [error_of(sampler, steps) for steps in (40, 80)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.3)


def test_an_adaptive_solver_reaches_the_exact_solution():
    assert error_of("dopri5", 1) < 1e-3  # its relative tolerance


def test_the_sde_has_the_marginals_of_the_flow():
    """At every step, not at the end alone: its noise has the scale, too."""
    seen = {}

    def note(step, t, x):
        seen[step] = (x.mean().item(), x.std().item())

    found = drawn("sde", 200, note)
    assert found.mean().item() == pytest.approx(MEAN, abs=0.02)
    assert found.std().item() == pytest.approx(STD, rel=0.05)
    for step in (49, 99, 149):
        t = 1 - (step + 1) / 200
        mean, std = seen[step]
        want = math.sqrt((1 - t) ** 2 * STD**2 + (t * SCALE) ** 2)
        assert mean == pytest.approx((1 - t) * MEAN, abs=0.05)
        assert std == pytest.approx(want, rel=0.03)


def pipeline_of(noise_scale):
    torch.manual_seed(0)
    prediction = FlowMatchingLoss(noise_scale=noise_scale).prediction
    flow = dict(learn_sigma=False, prediction=prediction)
    model = timm.create_model("dit_small_patch2", **TINY, **flow)  # a new model's velocity is 0
    return MoHDiTPipeline(model, make_scheduler("euler", 2, False, False))


def test_noise_that_a_user_gives_a_pipeline_is_n01():
    noise = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    pipe = pipeline_of(SCALE)
    images = pipe([0], guidance_scale=1.0, latents=noise, output_type="latent").images
    torch.testing.assert_close(images, SCALE * noise)


def test_what_is_refused(tmp_path, capsys):
    refuse("flow.noise_scale 0 above", FlowMatchingLoss, noise_scale=0)
    for wrong, facts in (
        (dict(path="linear", noise_scale=math.inf), "prediction.noise_scale inf above 0"),
        (dict(noise_scale=True), "prediction.noise_scale True above 0"),
        (dict(noise_scale=2.0), "prediction 2.0 path ddpm"),
        (dict(path=""), "prediction.path ''"),
        (dict(scale=2.0), "prediction scale path predict noise_scale shift"),
        ("x", "prediction 'x' path predict noise_scale shift"),
    ):
        refuse(facts, timm.create_model, "dit_small_patch2", **TINY, prediction=wrong)
    facts = "guide noise_scale 1.0 2.0"
    refuse(facts, weak_predict, pipeline_of(SCALE).transformer, pipeline_of(1.0).transformer)
    for options, facts in (
        ("--flow.noise_scale 2", "flow.noise_scale 2.0 objective flow"),
        (
            "--objective flow --flow.noise_scale 2 --model.kwargs.prediction.path linear "
            "--model.kwargs.prediction.noise_scale 3",
            "model.kwargs.prediction 3 effect 2.0",
        ),
    ):
        argv = arguments("dit", tmp_path / "run", 1, 1, *options.split())
        assert_says(refused(capsys, train.main, *argv), facts)
    assert not (tmp_path / "run").exists()
