"""The calls of attention and of routed MLPs that a script makes are those that it measured.

A call that differs from all measured ones in a field of its signature would be decided by a rule, on a GPU always for all
heads, without a word. Here every call that could skip heads must have a row; the few that cannot are named with a reason.
"""

import pytest

from moh_vision.attention import measure, trial
from moh_vision.attention.executors import measurement_table
from moh_vision.classification import validate
from moh_vision.diffusion import sample
from tests.support.pictures import gradient
from tests.support.sampling import run_of
from tests.support.small_runs import arguments, script

PER_SAMPLE = ("--model.scope", "sample")
HALF = ("--model.head_budget", "uniform:0.5")
BY_TIMESTEP = (*PER_SAMPLE, *HALF, "--model.kwargs.route_by", "timestep")
GROUPS = ("--model.mlp_budget", "uniform:0.5")
# Pictures of a training: guided, in the last step, fewer of them in the last batch.
PREVIEWS = ("--preview.every", "2", "--preview.images", "34", "--preview.steps", "2")

# Case -> small run and its options.
TRAININGS = {
    "images, per token": ("cls", HALF),
    "images, per sample": ("cls", (*HALF, *PER_SAMPLE)),
    "diffusion, per token": ("dit", (*HALF, *PREVIEWS)),
    "diffusion, by condition": ("dit", (*HALF, *PER_SAMPLE, *PREVIEWS)),
    "diffusion, by timestep": ("dit", (*BY_TIMESTEP, *PREVIEWS)),
    "diffusion, groups": ("dit", (*BY_TIMESTEP, *GROUPS, *PREVIEWS)),
    "language model": ("clm", ()),
}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measuring is on with a cache of its own, skipping is always faster, and every call is measured.

    Returns a list to which the words of every call without a row are appended.
    """
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MOH_VISION_MEASURE", "auto")
    monkeypatch.setattr(measurement_table, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(trial, "timed", lambda call, left: (0.5, 0.0))
    monkeypatch.setattr(trial, "compare", lambda *given: None)
    monkeypatch.setattr(measure, "STEPS", 1000)
    monkeypatch.setattr(sample, "WORTH_MEASURING", 0)
    measurement_table.use_table(None)
    noted = []
    note = measurement_table.note_unmeasured

    def note_and_keep(call):
        note(call)
        noted.append(call)

    monkeypatch.setattr(measurement_table, "note_unmeasured", note_and_keep)
    yield noted
    measurement_table.use_table(None)


def train(name, folder, *options):
    script(name).main(arguments(name, folder, 2, 1, *options))
    return folder


@pytest.mark.parametrize("case", TRAININGS)
def test_of_a_training(case, measured, tmp_path, capsys):
    """Evaluations and previews included."""
    name, options = TRAININGS[case]
    train(name, tmp_path / "run", *options)
    said = capsys.readouterr().out
    assert "attention measured in " in said
    assert "were not measured" not in said


def test_of_commands_on_a_run(measured, tmp_path, run_command):
    """They follow what the run has measured, which is in the user's cache."""
    run = train("cls", tmp_path / "run", *HALF)
    picture = tmp_path / "picture.png"
    gradient().save(picture)
    measured.clear()
    validate.main(["--checkpoint", str(run)])
    assert run_command("predict", run, picture).code == 0
    assert measured == []


# Case -> shared and routed heads, of two; options of sample.py. Fewer heads than one cannot guide.
SAMPLINGS = {
    "guided": ((0, 1), ("--cfg-scale", "2")),
    "not guided": ((0, 1), ("--cfg-scale", "1")),
    "guided in an interval": ((0, 1), ("--cfg-scale", "2", "--cfg-interval", "0.3", "0.6")),
    "guided by fewer heads": ((0, 2), ("--guide", "heads:0.5", "--guide-scale", "1.5")),
    "one image": ((0, 1), ("--num-images", "1")),
}
ROUTED_BY = {
    "token": {},
    "sample": dict(scope="sample"),
    "timestep": dict(scope="sample", route_by="timestep"),
}


@pytest.mark.parametrize("routed_by", ROUTED_BY)
@pytest.mark.parametrize("case", SAMPLINGS)
def test_of_sampling(case, routed_by, measured, tmp_path, capsys):
    heads, options = SAMPLINGS[case]
    run = run_of(tmp_path, 3, pixels=True, heads=heads, routing=ROUTED_BY[routed_by])
    argv = f"--checkpoint {run} --num-images 5 --batch-size 3 --steps 4 --grid {tmp_path}/grid.png"
    sample.main([*argv.split(), *options])
    said = capsys.readouterr().out
    assert "attention measured in " in said
    assert "were not measured" not in said
