"""The sampler that chooses its own steps, in the pipeline, in sample.py and in previews; its images: test_convergence.py."""

import json

import numpy as np
import pytest
import torch

from moh_vision.diffusion import FlowMatchingLoss, MoHDiTPipeline, make_scheduler, sample, train
from moh_vision.diffusion.schedulers import ADAPTIVE
from tests.support import refusals
from tests.support.pipelines import draw, transformer
from tests.support.sampling import by_pipeline, classifier_in, run_of
from tests.support.small_runs import arguments

FEW_STEPS = dict(rtol=0.1, atol=0.1)
FLOW = dict(learn_sigma=False, prediction=FlowMatchingLoss(shift=2.0).prediction.tree())


@pytest.fixture
def pipe():
    scheduler = make_scheduler(ADAPTIVE, 4, False, False)
    scheduler.register_to_config(**FEW_STEPS)
    return MoHDiTPipeline(transformer(3, **FLOW), scheduler)


def test_the_callback_sees_every_step_and_may_replace_the_image(pipe):
    seen = []

    def note(in_pipe, step, t, inputs):
        seen.append((step, t.item(), inputs["latents"]))

    images = draw(pipe, [1, 2], 5, 6, output_type="latent", callback_on_step_end=note)
    steps, begins, states = zip(*seen)
    assert list(steps) == list(range(len(seen))) and len(seen) > 2
    assert begins[0] == 1000 and list(begins) == sorted(begins, reverse=True) and begins[-1] > 0
    assert torch.equal(states[-1], images)

    def replaced(at):
        def replace(in_pipe, step, t, inputs):
            return {"latents": torch.ones(2, 3, 4, 4)} if step == at else None

        return draw(pipe, [1, 2], 5, 6, output_type="latent", callback_on_step_end=replace)

    assert (replaced(len(seen) - 1) == 1).all()
    early = replaced(0)
    assert (early[0] != 1).all() and (early[0] - images[0]).abs().max() > 0.01


def test_the_number_of_steps_changes_nothing(pipe):
    assert torch.equal(draw(pipe, [1], 5, steps=2), draw(pipe, [1], 5, steps=40))


def test_a_prediction_that_is_not_finite_is_refused(pipe):
    torch.nn.init.constant_(list(pipe.transformer.parameters())[-1], float("nan"))
    with refusals.one_line("timestep 1000 2 of 2 images NaN infinity", FloatingPointError):
        draw(pipe, [1, 2], 5, 6)


@pytest.fixture
def run(tmp_path):
    """A run of a flow."""
    return run_of(tmp_path / "run", 3, pixels=True, routing=FLOW, scale=0.02)


def call(run, *more):
    argv = f"--checkpoint {run} --num-images 5 --batch-size 3 --cfg-scale 2 --sampler {ADAPTIVE}"
    sample.main([*argv.split(), *map(str, more)])


def test_sample_py_draws_scores_and_saves_it(run, tmp_path, capsys):
    judge = classifier_in(tmp_path / "judge")
    outputs = ["--out", tmp_path / "a.npz", "--save-pipeline", tmp_path / "pipe"]
    scores = ["--score", tmp_path / "a.npz", "--extractor", judge]
    guidance = ["--cfg-interval", "0.2", "0.9"]
    call(run, *outputs, *guidance)
    said = capsys.readouterr().out
    assert "5 images, dopri5, guidance 2 between 0.2 and 0.9 of the timesteps, " in said
    images = np.load(tmp_path / "a.npz")["arr_0"]
    saved = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    again = by_pipeline(saved, [0, 1, 2], guidance_interval=(0.2, 0.9))
    assert np.abs(images[:3] - again).max() < 1
    options = [*scores, "--allow-biased", "true", "--score-file", tmp_path / "scores.json"]
    call(run, *guidance, *options)
    sampling = json.loads((tmp_path / "scores.json").read_text())["sampling"]
    assert (sampling["sampler"], sampling["steps"]) == (ADAPTIVE, None)
    assert "sampling: sampler dopri5, cfg_scale 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, value", [("steps", 20), ("denoising", "strip.gif"), ("head-load", "load.json")]
)
def test_what_needs_the_steps_before_is_refused(run, tmp_path, capsys, option, value):
    argv = ["--checkpoint", run, "--sampler", ADAPTIVE, "--out", tmp_path / "out"]
    error = refusals.refused(capsys, sample.main, *argv, f"--{option}", value)
    refusals.assert_says(error, f"{option.replace('-', '_')} {value!r} sampler dopri5")


def test_previews(tmp_path, capsys):
    flow = "--objective flow --preview.every 1 --preview.sampler dopri5 --preview.images 10"
    argv = arguments("dit", tmp_path / "run", 1, 1, *flow.split())
    error = refusals.refused(capsys, train.main, *argv, "--preview.steps", "5")
    refusals.assert_says(error, "preview.steps 5 preview.sampler dopri5")
    train.main(argv)
    assert "preview (dopri5, guidance 1.5, " in capsys.readouterr().out
    assert (tmp_path / "run/previews/step_1.png").is_file()
