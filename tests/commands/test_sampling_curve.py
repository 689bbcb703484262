"""The command sampling-curve, which draws scores of samples over an option of sampling."""

import json

import pytest

from moh_vision.commands.sampling_curve import Point, best_of, not_told_apart
from moh_vision.diffusion import sample
from tests.support.refusals import assert_says

SMALL = ["--num-images", "40", "--batch-size", "20"]


@pytest.fixture
def curve(run_command, hours_pass):
    """curve(*argv) runs the command and returns the lines of its figure, and what it printed."""
    hours_pass()

    def run(*argv):
        code, out, _ = run_command("sampling-curve", *argv)
        assert code == 0
        figure = argv[argv.index("--output") + 1]
        return json.loads(figure.with_suffix(".json").read_text())["lines"], out

    return run


@pytest.fixture
def judged(trained):
    """A run of a DiT, and the options that score its samples."""
    classifier = trained("cls", 6)
    run = trained("dit", 6, "--optim.lr", "0.1")
    return run, ["--score", "digits", "--extractor", classifier, *SMALL]


def test_each_value_scores_what_sample_py_scores(judged, tmp_path, curve):
    """Also with the second noise, whose seed is one more."""
    run, scored = judged
    figure = tmp_path / "curve.svg"
    more = ["--steps", "2", "--seed", "3", "--noises", "2", *scored]
    (line,), said = curve(run, "--over", "cfg-scale", "1", "2.5", "--output", figure, *more)
    assert line["over"] == "cfg_scale" and line["values"] == ["1", "2.5"]
    assert line["seeds"] == [3, 4]
    distances = line["scores"]["frechet_distance"]
    assert len(distances) == 2 and all(len(of_noises) == 2 for of_noises in distances)
    assert len({distance for of_noises in distances for distance in of_noises}) == 4
    for position, (scale, seed) in [((0, 0), (1, 3)), ((1, 1), (2.5, 4))]:
        file = tmp_path / f"scores_{seed}.json"
        own = ["--cfg-scale", scale, "--seed", seed, "--score-file", file]
        argv = ["--checkpoint", run, "--steps", 2, *scored, *own]
        sample.main(list(map(str, argv)))
        found = json.loads(file.read_text())
        value, noise = position
        assert distances[value][noise] == pytest.approx(found["frechet_distance"], rel=1e-6)
        recognised = line["scores"]["recognised"][value][noise]
        assert recognised == pytest.approx(100 * found["recognised"], rel=1e-6)
    assert "best cfg_scale" in said and "Frechet distance" in said
    assert "<svg" in figure.read_text()


# The option -> (its values, other options).
OPTIONS = {
    "cfg_interval": (["0,1", "0.2,0.8"], ["--cfg-scale", "2", "--steps", "4"]),
    "steps": (["2", "3"], ["--sampler", "ddim"]),
    "sampler": (["ddim", "dpm-solver++"], ["--steps", "3"]),
    "guide_scale": (["1.5", "3"], ["--guide", "heads:0.5", "--steps", "2"]),
    "weights": (["ema", "model"], ["--steps", "2"]),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_samples(option, judged, tmp_path, curve):
    values, more = OPTIONS[option]
    run, scored = judged
    output = ["--output", tmp_path / "curve.png", "--noises", "1"]
    (line,), said = curve(run, "--over", option, *values, *output, *more, *scored)
    first, second = line["scores"]["frechet_distance"]
    assert first != second
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert all(seconds > 0 for of_value in line["seconds"] for seconds in of_value)
    assert "--noises" in said  # one noise has no spread


def test_several_runs_are_several_lines(judged, trained, tmp_path, curve):
    run, scored = judged
    other = trained("dit", 4)
    output = tmp_path / "curve.svg"
    noises = ["--noises", "1", "--sampler", "ddim"]
    lines, said = curve(
        run, other, "--over", "steps", "2", "4", "--output", output, *noises, *scored
    )
    assert [line["run"] for line in lines] == [str(run), str(other)]
    assert said.count("best steps") == 2


def test_the_best_value_and_those_that_are_as_good():
    """Values draw the same noises: they are told apart by the differences of these, not by the spread of each."""
    points = [
        Point("1", {"frechet_distance": [5.0, 7.0, 6.0]}, [1.0]),
        Point("2", {"frechet_distance": [4.0, 6.0, 5.0]}, [1.0]),
        Point("3", {"frechet_distance": [4.3, 5.8, 5.2]}, [1.0]),
        Point("4", {"frechet_distance": [4.0, 6.0, 5.0]}, [1.0]),
    ]
    best = best_of(points, "frechet_distance")
    assert best.value == "2"
    assert [point.value for point in not_told_apart(points, best, "frechet_distance")] == ["3", "4"]
    assert best_of(points[:1], "frechet_distance").value == "1"
    # More recognised samples are better.
    rising = [Point("1", {"recognised": [50.0]}, [1.0]), Point("2", {"recognised": [60.0]}, [1.0])]
    assert best_of(rising, "recognised").value == "2"
    # Of one noise nothing can be said.
    assert not_told_apart(rising, rising[1], "recognised") == []


MISTAKES = {
    "--over cfg_scale 1": "--over cfg_scale 1 two",
    "--over cfg_scale 1 1.0": "--over cfg_scale 1.0 twice",
    "--over cfg_scale 1 -2": "cfg_scale -2.0 0",
    "--over cfg_scale 1 2 --cfg-scale 3": "cfg_scale 3 effect --over",
    "--over num_images 10 20": "--over num_images cfg_scale steps",
    "--over head_budget 0.5 0.75": "--over head_budget budget-curve",
    "--over cfg_interval 0.1 0.2": "--over cfg_interval 0.1 two numbers comma",
    "--over steps 2 3 --noises 0": "--noises 0 1",
    "--over steps 2 3 --grid g.png": "grid effect samples",
    "--over sampler ddim heun": "sampler heun",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_mistakes_are_said_before_anything_is_drawn(options, judged, tmp_path, refused):
    run, scored = judged
    argv = [run, *options.split(), "--output", tmp_path / "curve.png", *scored]
    assert_says(refused("sampling-curve", *argv), MISTAKES[options])


def test_a_classifier_has_no_samples(trained, tmp_path, refused):
    run = trained("cls", 2)
    argv = [run, "--over", "steps", "2", "3", "--output", tmp_path / "curve.png"]
    assert_says(
        refused("sampling-curve", *argv), f"RUN {run}/ema.safetensors classifier train_dit.py"
    )
