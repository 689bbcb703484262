"""An objective that the package does not know, the cosine interpolant in a file of a user's own: trained, resumed, sampled,
scored, published and opened again."""

import json
import math

import diffusers
import pytest
import timm
import torch

import moh_vision
from moh_vision.diffusion import (
    OBJECTIVES,
    SAMPLERS,
    FlowMatchingLoss,
    MoHDiTPipeline,
    Prediction,
    Sampler,
    make_scheduler,
    sample,
    sample_images,
    train,
)
from moh_vision.diffusion.schedulers import samplers_of
from tests.support.own_files import OBJECTIVE
from tests.support.refusals import assert_says, one_line, refuse, refused
from tests.support.sampling import JUDGE, JUDGE_SIZES, exported
from tests.support.small_runs import arguments, logged, whole_and_resumed
from tests.support.tiny_dit import TINY

PREDICTION = Prediction("cosine", "velocity")
COSINE = ["--objective", "cosine"]
ODE = ["euler", "heun", "dopri5"]
MEAN, STD = 0.3, 0.4


def test_it_does_all_that_the_packages_own_do(own_files, tmp_path, run_command, capsys):
    file = own_files.write("cosine_interpolant", OBJECTIVE)
    imports = ["--imports", file]
    previews = "--preview.every 2 --preview.steps 2 --preview.images 10".split()
    whole, _ = whole_and_resumed("dit", tmp_path, [1, 2], *imports, *COSINE, *previews)
    assert (whole / "previews" / "step_2.png").is_file()
    assert all(entry["mse"] > 0 for entry in logged(whole))
    assert f"imports {file} (sha256 " in capsys.readouterr().out

    judge = tmp_path / "judge"
    judge.mkdir()
    classes = [str(number) for number in range(10)]
    exported(judge, JUDGE, classes, img_size=8, patch_size=2, in_chans=1, **JUDGE_SIZES)
    scores = f"--score digits --extractor {judge} --score-file {tmp_path}/scores.json"
    published = tmp_path / "published"
    assert run_command("publish", whole, "--output", published, *imports).code == 0

    own_files.forget()  # what is left needs no code: weights and pipelines say what they predict
    sample.main(f"--checkpoint {whole} --num-images 12 --steps 2 {scores}".split())
    scored = json.loads((tmp_path / "scores.json").read_text())
    assert scored["sampling"]["sampler"] == "euler"
    pipe = MoHDiTPipeline.from_pretrained(published)
    assert pipe.transformer.prediction == PREDICTION
    opened = moh_vision.open_run(published)
    assert opened.model.prediction == moh_vision.load_run(whole).prediction == PREDICTION
    drawn = pipe([3], num_inference_steps=2, guidance_scale=1.0, output_type="latent").images
    assert drawn.isfinite().all()


def test_only_its_loss_needs_the_file(own_files, tmp_path, run_command):
    file = own_files.write("cosine_interpolant", OBJECTIVE)
    argv = arguments("dit", tmp_path / "run", 1, 1, "--imports", file, *COSINE)
    train.main(argv)
    opened = moh_vision.open_run(tmp_path / "run")
    assert type(opened.objective) is OBJECTIVES["cosine"]
    own_files.forget()
    with one_line(f"objective 'cosine' noise flow --imports {file}"):
        moh_vision.open_run(tmp_path / "run").data("train")
    argv = ["search", tmp_path / "run", "--share", "0.5", "--images", "8"]
    output = ["--output", tmp_path / "budget.yaml"]
    assert_says(run_command(*argv, *output).err, f"objective 'cosine' --imports {file}")
    done = run_command(*argv, "--imports", file, *output)
    assert done.code == 0, done.err


# ---------------------------------------------------------------- samplers


def velocity(x, t, labels):
    """E[dx_t / dt | x_t] where every pixel is N(MEAN, STD^2)."""
    a = math.pi / 2 * t.double().view(-1, 1, 1, 1) / 1000
    cos, sin = a.cos(), a.sin()
    variance = cos**2 * STD**2 + sin**2
    off = x.double() - cos * MEAN
    image = MEAN + cos * STD**2 / variance * off
    noise = sin / variance * off
    return math.pi / 2 * (cos * noise - sin * image)


@pytest.mark.parametrize("sampler", ODE)
def test_solvers_of_any_velocity_reach_the_exact_solution(sampler):
    scheduler = make_scheduler(sampler, 100, False, clip=False)
    shape = (1, 16, 16)
    found = sample_images(velocity, scheduler, torch.zeros(1, dtype=torch.long), shape, [0], 1)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found[0], MEAN + STD * start, rtol=0, atol=0.03)


def test_samplers_follow_from_the_prediction():
    assert samplers_of(PREDICTION) == ODE
    assert samplers_of(Prediction("cosine", "noise")) == []


def test_a_sampler_of_ones_own(monkeypatch):
    """For noise on a path of one's own, with its own table of noise levels."""

    def make(learned_variance, clip, shift):
        return diffusers.DDIMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=clip)

    noise = Prediction("squared cosine", "noise")
    monkeypatch.setitem(SAMPLERS, "ddim_cos", Sampler(make, "noise", "squared cosine"))
    assert samplers_of(noise) == ["ddim_cos"]
    assert "ddim_cos" not in samplers_of(Prediction())
    scheduler = make_scheduler("ddim_cos", 2, False, clip=True)
    pipe = MoHDiTPipeline(tiny(noise), scheduler)
    assert pipe([0], num_inference_steps=2, output_type="latent").images.isfinite().all()
    facts = "scheduler DDIMScheduler ddpm velocity cosine"
    refuse(facts, MoHDiTPipeline, tiny(PREDICTION), scheduler)


# ---------------------------------------------------------------- refusals


def tiny(prediction):
    return timm.create_model(
        "dit_small_patch2", **TINY, learn_sigma=False, prediction=prediction
    ).eval()


@pytest.mark.parametrize("path", ["linear", "ddpm"])
def test_a_model_on_another_path_is_no_guide(tmp_path, path):
    """In the pipeline too, which names no objective."""
    other = tiny(FlowMatchingLoss.prediction if path == "linear" else None)
    pipe = MoHDiTPipeline(tiny(PREDICTION), make_scheduler("euler", 2, False, False))
    with one_line(f"guide path {path} cosine"):
        pipe([0], guidance_scale=1.0, guide=other, guide_scale=2.0, num_inference_steps=2)
    pipe([0], guidance_scale=1.0, guide=tiny(PREDICTION), guide_scale=2.0, num_inference_steps=2)


@pytest.mark.parametrize("sampler", ["sde", "ddim"])
def test_a_scheduler_of_another_path_is_refused(sampler):
    scheduler = make_scheduler(sampler, 4, False, False)
    facts = "scheduler velocity cosine euler heun dopri5"
    refuse(facts, MoHDiTPipeline, tiny(PREDICTION), scheduler)


def test_a_solver_that_adds_noise_as_on_the_linear_path_is_refused():
    euler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    refuse("linear velocity cosine", MoHDiTPipeline, tiny(PREDICTION), euler)


HUBER = """from torch.nn import functional as F

from moh_vision.diffusion import OBJECTIVES, FlowMatchingLoss


class HuberFlow(FlowMatchingLoss):
    def forward(self, output, x0, xt, noise, t):
        terms = super().forward(output, x0, xt, noise, t)
        loss = F.smooth_l1_loss(output.float(), noise - x0, reduction="none").flatten(1).mean(1)
        return dict(terms, loss=loss)


OBJECTIVES["huber"] = HuberFlow
"""


def test_another_loss_on_the_linear_path_keeps_its_keys_and_prediction(own_files, tmp_path, capsys):
    imports = ["--imports", own_files.write("huber_flow", HUBER)]
    options = "--objective huber --flow.shift 2 --preview.every 1 --preview.sampler heun --preview.steps 2"
    run = tmp_path / "run"
    train.main(arguments("dit", run, 1, 1, *imports, *options.split()))
    assert moh_vision.load_run(run).prediction == FlowMatchingLoss(shift=2.0).prediction
    assert logged(run)[0]["loss"] < logged(run)[0]["mse"]
    argv = arguments("dit", run, 1, 1, *imports, "--flow.shift", "2")
    assert_says(refused(capsys, train.main, *argv), "flow.shift 2.0 objective flow huber")


REFUSED = {
    "unknown": ("", "objective 'cosine' noise flow --imports FILE"),
    "option": ("--objective_kwargs.weigth 2", "objective_kwargs.weigth weight"),
    "keys of another": ("--flow.shift 2", "flow.shift 2.0 objective flow"),
    "sampler": ("--preview.every 1 --preview.sampler sde", "preview.sampler sde cosine euler heun"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes(case, own_files, tmp_path, capsys):
    options, facts = REFUSED[case]
    argv = arguments("dit", tmp_path / "run", 1, 1, *COSINE, *options.split())
    if case != "unknown":
        argv += ["--imports", own_files.write("cosine_interpolant", OBJECTIVE)]
    assert_says(refused(capsys, train.main, *argv), facts)
    assert not (tmp_path / "run").exists()


def test_options_are_of_objectives_without_keys_of_their_own(tmp_path, capsys):
    argv = arguments("dit", tmp_path / "run", 1, 1, "--objective_kwargs.weight", "2")
    assert_says(refused(capsys, train.main, *argv), "objective_kwargs weight objective own")
