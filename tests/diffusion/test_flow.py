"""Flow matching: the loss and its timesteps by hand, the samplers against the exact solution of Gaussian data, and a run."""

import math

import diffusers
import numpy as np
import pytest
import timm
import torch
from torch.utils.data import default_collate

from moh_vision import head_budget, open_run
from moh_vision.data.sources import Digits
from moh_vision.diffusion import (
    FlowMatchingLoss,
    MoHDiTPipeline,
    make_scheduler,
    sample_images,
    train,
)
from moh_vision.diffusion.batches import NoisedImages, cropped
from moh_vision.diffusion.objectives import HybridLoss, make_objective
from moh_vision.diffusion.objectives.noise import draw_step
from moh_vision.diffusion.schedulers import ADAPTIVE, samplers_of
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.prediction import Prediction, to_velocity
from tests.support import refusals
from tests.support.pipelines import draw, transformer
from tests.support.refusals import assert_says, refuse
from tests.support.sampling import call, refused, run_of
from tests.support.small_runs import arguments, logged, whole_and_resumed

FLOW = samplers_of(FlowMatchingLoss.prediction)
X = FlowMatchingLoss("x").prediction.tree()


def test_the_loss_by_hand():
    loss = FlowMatchingLoss()
    x0, noise, output = torch.randn(3, 2, 2, 4, 4, dtype=torch.float64)
    t = torch.tensor([250.0, 1000.0], dtype=torch.float64)
    xt = loss.add_noise(x0, noise, t)
    torch.testing.assert_close(xt[0], 0.75 * x0[0] + 0.25 * noise[0])
    assert torch.equal(xt[1], noise[1])
    velocity = (xt - loss.add_noise(x0, noise, t - 1)) * 1000
    torch.testing.assert_close(velocity, noise - x0)
    terms = loss(output, x0, xt, noise, t)
    want = [
        sum((o - n + x) ** 2 for o, n, x in zip(*map(torch.ravel, row))) / 32
        for row in zip(output, noise, x0)
    ]
    torch.testing.assert_close(terms["loss"], torch.stack(want))
    assert terms["loss"].dtype == torch.float64 and torch.equal(terms["mse"], terms["loss"])


def predictions(x0, noise):
    return dict(velocity=noise - x0, x=x0, noise=noise)


@pytest.mark.parametrize(
    "predict, slowed",  # at t of 0.02, 0.05, 0.6, 0.96 and 1: by divisors of at least 0.05 (Li and He 2025)
    [("velocity", [1, 1, 1, 1, 1]), ("x", [0.4, 1, 1, 1, 1]), ("noise", [1, 1, 1, 0.8, 0])],
)
def test_whatever_is_predicted_the_loss_is_in_velocity(predict, slowed):
    loss = FlowMatchingLoss(predict)
    t = torch.tensor([20, 50, 600, 960, 1000.0], dtype=torch.float64)
    x0, noise = torch.randn(2, 5, 2, 4, 4, dtype=torch.float64)
    xt = loss.add_noise(x0, noise, t)
    right = predictions(x0, noise)[predict]
    slowed = torch.tensor(slowed)
    velocity = to_velocity(predict, right, xt, t)
    torch.testing.assert_close(velocity, slowed.view(-1, 1, 1, 1) * (noise - x0))
    assert loss(velocity, x0, xt, noise, t)["loss"].abs().max() == 0
    divisors = dict(
        velocity=t**0, x=(t / 1000).clamp(min=0.05), noise=(1 - t / 1000).clamp(min=0.05)
    )
    wrong = loss(to_velocity(predict, right + 0.1, xt, t), x0, xt, noise, t)["mse"]
    torch.testing.assert_close(wrong, (0.1 / divisors[predict]) ** 2)
    for_one_timestep = to_velocity(predict, right, xt, t[2])  # one number for the batch
    torch.testing.assert_close(for_one_timestep[2], velocity[2])


@pytest.mark.parametrize("predict", ["velocity", "x", "noise"])
@pytest.mark.parametrize("compared", ["velocity", "x", "noise"])
def test_what_the_loss_compares(predict, compared):
    """The nine cells of table 1 of Li and He 2025, in whose time 0 is the noise; divisors are at least 0.05."""
    loss = FlowMatchingLoss(predict, noise_scale=2.0, loss=compared)
    ours = torch.tensor([20, 50, 600, 960, 990.0], dtype=torch.float64)
    x0, unit_noise, network = torch.randn(3, 5, 2, 4, 4, dtype=torch.float64)
    z = loss.add_noise(x0, unit_noise, ours)
    t = (1 - ours / 1000).view(-1, 1, 1, 1)
    to_image, to_noise = t.clamp(min=0.05), (1 - t).clamp(min=0.05)

    def cell(predicted):
        """What a cell makes of the network's output. The velocity of the paper runs from the noise to the image."""
        return {
            ("x", "x"): predicted,
            ("x", "noise"): (z - t * predicted) / to_noise,
            ("x", "velocity"): (predicted - z) / to_noise,
            ("noise", "x"): (z - (1 - t) * predicted) / to_image,
            ("noise", "noise"): predicted,
            ("noise", "velocity"): (z - predicted) / to_image,
            ("velocity", "x"): (1 - t) * -predicted + z,
            ("velocity", "noise"): z - t * -predicted,
            ("velocity", "velocity"): -predicted,
        }[predict, compared]

    exact = predictions(x0, 2 * unit_noise)[predict]
    want = (cell(network) - cell(exact)).square().flatten(1).mean(1)
    terms = loss(to_velocity(predict, network, z, ours), x0, z, unit_noise, ours)
    torch.testing.assert_close(terms["loss"], want)
    velocities = FlowMatchingLoss(predict, noise_scale=2.0)
    same = velocities(to_velocity(predict, network, z, ours), x0, z, unit_noise, ours)
    assert torch.equal(terms["mse"], same["loss"])


@pytest.mark.parametrize(
    "arguments, quantiles",  # at 0.1587, 0.5 and 0.8413: one standard deviation of a normal to either side
    [
        pytest.param(dict(), [158.7, 500, 841.3], id="uniform"),
        pytest.param(
            dict(timesteps="logit-normal"),
            [268.9, 500, 731.1],  # sigmoids of -1, 0 and 1
            id="logit-normal",
        ),
        pytest.param(
            dict(shift=3.0),
            [3 * 0.1587 / (1 + 2 * 0.1587) * 1000, 750, 3 * 0.8413 / (1 + 2 * 0.8413) * 1000],
            id="shifted",
        ),
        pytest.param(
            dict(timesteps="logit-normal", shift=3.0),
            [524.6, 750, 890.8],
            id="logit-normal, shifted",
        ),
        pytest.param(
            dict(timesteps="logit-normal", location=0.8, spread=0.8),
            [500, 690.0, 832.0],  # sigmoids of 0, 0.8 and 1.6
            id="logit-normal, moved and narrower",
        ),
    ],
)
def test_timesteps_are_real_and_depend_on_seed_and_position_alone(arguments, quantiles):
    draw = FlowMatchingLoss(**arguments).draw
    data = NoisedImages(Digits("train"), cropped("none", 8, 1), 0, draw, 0.25, (1, 8, 8))
    items = [data[(p, p)] for p in range(3)]
    again = data[(2, 20)]
    assert again["timesteps"] == items[2]["timesteps"]
    assert torch.equal(again["noise"], items[2]["noise"])
    steps = default_collate(items)["timesteps"]
    assert steps.dtype == torch.float32 and len(set(steps.tolist())) == 3
    many = [draw(np.random.default_rng(seed)) for seed in range(3000)]
    assert 0 <= min(many) and max(many) <= 1000
    np.testing.assert_allclose(np.quantile(many, [0.1587, 0.5, 0.8413]), quantiles, atol=35)


def test_noise_dropped_labels_and_whole_timesteps():
    source = Digits("train")
    data = NoisedImages(
        source, cropped("none", 8, 1), 0, draw_step, label_drop=0.25, noise_shape=(1, 8, 8)
    )
    items = [data[(p, p % len(source))] for p in range(2000)]
    assert torch.equal(data[(5, 5)]["noise"], items[5]["noise"])
    noise = torch.stack([i["noise"] for i in items])
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    dropped = np.mean([i["labels"] == 10 for i in items])
    assert 0.2 < dropped < 0.3
    steps = np.array([i["timesteps"] for i in items])
    assert steps.min() >= 0 and steps.max() <= 999 and 470 < steps.mean() < 530


def test_objectives_of_configurations():
    plain = make_objective({})
    noise = make_objective(dict(objective="noise", flow=dict(shift=2.0)))
    assert type(plain) is type(noise) is HybridLoss
    flow = make_objective(dict(objective="flow", flow=dict(timesteps="logit-normal", shift=2.0)))
    assert (flow.prediction.shift, flow.draw.keywords["sampling"]) == (2.0, "logit-normal")
    for bad, facts in (
        (dict(objective="score"), "objective 'score' noise flow --imports"),
        (dict(objective="flow", flow=3), "flow 3 section objective flow"),
        (
            dict(objective="flow", flow=dict(timesteps="x")),
            "flow.timesteps 'x' uniform logit-normal",
        ),
        (dict(objective="flow", flow=dict(shift=0)), "flow.shift 0 above"),
        (dict(objective="flow", flow=dict(shift="2")), "flow.shift '2' above 0"),
        (dict(min_snr_gamma="5"), "min_snr_gamma '5' above 0"),
        (dict(objective="flow", flow=dict(predict="v")), "flow.predict 'v' velocity x noise"),
        (dict(objective="flow", flow=dict(loss="v")), "flow.loss 'v' velocity x noise"),
        (dict(objective="flow", flow=dict(spread=0)), "flow.spread 0 above"),
        (dict(objective="flow", flow=dict(location=math.inf)), "flow.location inf above -inf"),
    ):
        refuse(facts, make_objective, bad)


# ---------------------------------------------------------------- samplers


def gaussian(mean, std):
    """E[eps - x_0 | x_t] where every pixel is N(mean, std^2): the exact velocity."""

    def predict(x, t, labels):
        t = t.double().view(-1, 1, 1, 1) / 1000
        x = x.double()
        slope = (t - (1 - t) * std**2) / ((1 - t) ** 2 * std**2 + t**2)
        return slope * (x - (1 - t) * mean) - mean

    return predict


def drawn(sampler, steps, mean=0.3, std=0.3, shift=1.0, images=8, predict="velocity"):
    scheduler = make_scheduler(sampler, steps, False, clip=True, shift=shift)
    exact = gaussian(mean, std)
    labels = torch.zeros(images, dtype=torch.long)

    def network(x, t, labels):
        v = exact(x, t, labels)
        s = t.double().view(-1, 1, 1, 1) / 1000
        predicted = predictions(x - s * v, x + (1 - s) * v)[predict]
        return to_velocity(predict, predicted, x, t)

    return sample_images(network, scheduler, labels, (1, 32, 32), range(images), 1)


def error(*arguments, mean=0.3, std=0.3, **more):
    """Root mean square distance to the exact solution, which is a straight line in the starting noise."""
    start = torch.stack(
        [torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    )
    found = drawn(*arguments, mean=mean, std=std, **more)
    return (found - mean - std * start).square().mean().sqrt().item()


@pytest.mark.parametrize("sampler", FLOW)
@pytest.mark.parametrize("predict, far", [("x", 0.02), ("noise", 0.03)])
def test_every_sampler_draws_the_same_images_of_any_prediction(sampler, predict, far):
    """But for the steps nearer to an end than 0.05: the image's nearly clean ones, the noise's first."""
    found = drawn(sampler, 20, predict=predict)
    assert (found - drawn(sampler, 20)).square().mean().sqrt() < far


@pytest.mark.parametrize("mean, std", [(0.3, 0.3), (-0.5, 0.05), (0.0, 1.0)])
def test_the_sde_has_the_datas_mean_and_variance(mean, std):
    """From noise of its own: the images are not those of the ODE. 8,192 pixels: the mean is known to std / 90."""
    images = drawn("sde", 100, mean, std)
    assert images.mean().item() == pytest.approx(mean, abs=0.045 * std)
    assert images.std().item() == pytest.approx(std, rel=0.04)
    assert error("sde", 100, mean=mean, std=std) > std
    # What diffusers has under that name has too little variance, however many steps it makes.
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    theirs.set_timesteps(100)
    labels = torch.zeros(8, dtype=torch.long)
    drawn_by_them = sample_images(gaussian(mean, std), theirs, labels, (1, 32, 32), range(8), 1)
    assert drawn_by_them.std() < 0.85 * std


# ---------------------------------------------------------------- pipelines


@pytest.mark.parametrize("sampler", FLOW)
def test_a_pipeline_of_a_flow(tmp_path, sampler):
    jit = dict(learn_sigma=False, prediction=X, patch_bottleneck=5)
    scheduler = make_scheduler(sampler, 4, False, False, shift=2.0)
    if sampler == ADAPTIVE:
        scheduler.register_to_config(rtol=0.1, atol=0.1)  # few steps
    pipe = MoHDiTPipeline(transformer(3, **jit), scheduler)
    pipe.save_pretrained(tmp_path)
    again = MoHDiTPipeline.from_pretrained(tmp_path)
    assert type(again.scheduler) is type(scheduler) and again.scheduler.config.shift == 2
    assert again.transformer.prediction == pipe.transformer.prediction
    images = draw(pipe, [0, 6], 1, 2)
    assert torch.equal(draw(again, [0, 6], 1, 2), images)
    if sampler != ADAPTIVE:  # whose steps follow from the whole batch
        assert torch.equal(draw(pipe, [3, 6], 9, 2)[1], images[1])
    again.scheduler = make_scheduler("ddim", 4, False, True)
    facts = "scheduler DDIMScheduler ddpm transformer x linear euler heun dopri5 sde sit-sde"
    refuse(facts, draw, again, [0], 1)
    facts = f"{type(scheduler).__name__} linear transformer noise ddpm ddim dpm-solver++"
    refuse(facts, MoHDiTPipeline, transformer(3), pipe.scheduler)


# ---------------------------------------------------------------- runs


def test_sample_py_takes_the_samplers_of_the_runs_objective(tmp_path, capsys):
    flow = dict(learn_sigma=False, prediction=FlowMatchingLoss(shift=2.0).prediction.tree())
    run = run_of(tmp_path, 3, pixels=True, routing=flow)
    plain = run_of(tmp_path / "noise", 3)
    pipe_folder = tmp_path / "pipe"
    call(run, "--out", tmp_path / "a.npz", "--save-pipeline", pipe_folder)
    assert "5 images, sde 4 steps, guidance 2" in capsys.readouterr().out
    pipe = MoHDiTPipeline.from_pretrained(pipe_folder)
    assert type(pipe.scheduler).__name__ == "FlowMatchSDEScheduler"
    assert pipe.scheduler.config.shift == 2
    call(run, "--sampler", "heun", "--head-load", tmp_path / "b.json")
    steps = HeadLoad.read(tmp_path / "b.json").groups["timestep"]
    assert (steps[0], steps[-1], len(steps)) == ("1000", "400", 4)  # of 7 passes
    of_flow = "velocity linear euler heun dopri5 sde sit-sde"
    for checkpoint, sampler, facts in (
        (run, "ddpm", of_flow),
        (pipe_folder, "ddpm", of_flow),
        (plain, "sde", "noise ddpm ddim dpm-solver++"),
    ):
        error = refused(capsys, checkpoint, "--sampler", sampler)
        assert_says(error, f"--sampler {sampler} {facts}")


def test_a_run_goes_on_to_the_bit_and_starts_others(tmp_path, capsys):
    def run(name, steps, *more):
        train.main(arguments("dit", tmp_path / name, steps, 2, *more))
        return tmp_path / name

    flow = "--objective flow --flow.timesteps logit-normal --flow.shift 1.5 --flow.predict x --model.patch_bottleneck 3"
    flow = flow.split()
    previews = "--preview.every 2 --preview.steps 2 --preview.images 10".split()
    whole, resumed = whole_and_resumed("dit", tmp_path, [1, 2], *flow, *previews)
    for run_folder in (whole, resumed):
        assert (run_folder / "previews" / "step_2.png").exists()
    assert all("vb" not in line and line["mse"] > 0 for line in logged(whole))
    opened = open_run(whole)
    model = opened.model.config
    assert model.patch_bottleneck == 3
    assert (
        opened.model.prediction == opened.objective.prediction == Prediction("linear", "x", 1, 1.5)
    )
    capsys.readouterr()
    run("velocity", 1, "--init-from", whole, "--objective", "flow", "--model.patch_bottleneck", "3")
    said = capsys.readouterr().out
    before = f"{whole} was trained to predict x on path linear"
    assert f"{before}, this model predicts velocity on path linear\n" in said
    run("noise", 1, "--init-from", whole, "--model.patch_bottleneck", "3")
    said = capsys.readouterr().out
    assert f"{before}, this model predicts noise on path ddpm\n" in said
    assert "init_from: final_layer.linear.weight is made anew, [4, 32] -> [8, 32]" in said


def test_a_saved_jit_starts_a_run(tmp_path, capsys):
    """The folder says that it has no variance, without which predict x is refused."""
    folder = tmp_path / "jit"
    jit = dict(learn_sigma=False, prediction=X, patch_bottleneck=3, embed_dim=32, depth=2)
    digits = dict(img_size=8, in_chans=1, num_classes=10)
    timm.create_model("dit_small_patch2", num_heads=4, **jit, **digits).save_pretrained(folder)
    sizes = (
        "--model.embed_dim null --model.depth null --model.num_heads null --model.head_budget 0.5"
    )
    source = f"--model.name pretrained --model.pretrained {folder} --model.convert.router moh"
    options = f"--objective flow --flow.predict x {source} {sizes}".split()
    train.main(arguments("dit", tmp_path / "run", 1, 1, *options))
    assert "was trained to predict" not in capsys.readouterr().out
    model = open_run(tmp_path / "run").model
    assert (model.prediction.tree(), model.config.patch_bottleneck) == (X, 3)
    assert head_budget(model)["share"] == 0.5


def test_mistakes(tmp_path, capsys):
    given = "--model.kwargs.prediction."
    for argv, facts in {
        f"--objective flow {given}path linear {given}predict x": "model.kwargs.prediction 'x' 'velocity'",
        "--objective flow --preview.every 1 --preview.sampler ddim": "preview.sampler ddim velocity linear euler heun",
        "--score.every 1 --score.sampler sde": "score.sampler sde noise ddpm ddim",
    }.items():
        argv = arguments("dit", tmp_path / "run", 1, 1, *argv.split())
        assert_says(refusals.refused(capsys, train.main, *argv), facts)
        assert not list(tmp_path.iterdir())
