"""The calls of attention and of routed MLPs that a script makes are those that it measured.

A call that differs from all measured ones in a field of its signature would be decided by a rule, on a GPU always for all
heads, without a word. Here every call that could skip heads must have a row; the few that cannot are named with a reason.
"""

import itertools

import pytest

from moh_vision.attention.executors import measurement_table
from moh_vision.classification import validate
from moh_vision.diffusion import sample
from tests.support.pictures import gradient
from tests.support.sampling import run_of
from tests.support.small_runs import arguments, script

PER_SAMPLE = ("--model.scope", "sample")
HALF = ("--model.head_budget", "uniform:0.5")
NONE_SHARED = ("--model.head_budget", "uniform:0.5:0")
NO_GROUP_SHARED = ("--model.mlp_budget", "uniform:0.5:0")
BY_TIMESTEP = (*PER_SAMPLE, *HALF, "--model.kwargs.route_by", "timestep")
GROUPS = ("--model.mlp_budget", "uniform:0.5")
ELASTIC = ("--budget_range", "0.5", "1")
BFLOAT16 = ("--mixed_precision", "bf16")
# Pictures of a training: in the last step, fewer of them in the last batch.
PREVIEWS = ("--preview.every", "2", "--preview.images", "34", "--preview.steps", "2")
AUTOGUIDED = (*PREVIEWS, "--preview.guide", "heads:0.25", "--preview.guide_scale", "1.5")
# CLASSIFIER, DIT: runs with other heads, whose features are compared or that teach.
SCORES = (
    *("--score.every", "2", "--score.images", "70", "--score.steps", "2"),
    *("--score.split", "val", "--score.extractor", "CLASSIFIER"),
)
LOGITS = ("--distill.teacher", "CLASSIFIER")
TOKENS = (*LOGITS, "--distill.token_loss_weight", "1")
TOKENS_ALONE = (*TOKENS, "--distill.distill_loss_weight", "0")
PREDICTIONS = ("--distill.teacher", "DIT")
REPA = ("--repa.teacher", "CLASSIFIER", "--repa.block", "1")
# Options of a run that teaches: its signature is another than the student's.
TEACHERS = {"CLASSIFIER": ("cls", HALF), "DIT": ("dit", BY_TIMESTEP)}

# Case -> small run and its options. A case of SLOW has its kinds of calls in another one too, together with more.
TRAININGS = {
    "images, per token": ("cls", HALF),
    "images, per sample": ("cls", (*HALF, *PER_SAMPLE)),
    "images, groups": ("cls", (*HALF, *PER_SAMPLE, *GROUPS)),
    "images, elastic": ("cls", (*HALF, *PER_SAMPLE, *GROUPS, *ELASTIC)),
    "images, TransNeXt": ("transnext", ()),
    "images, bfloat16": ("cls", (*HALF, *PER_SAMPLE, *BFLOAT16)),
    "diffusion, per token": ("dit", (*HALF, *PREVIEWS)),
    "diffusion, by condition": ("dit", (*HALF, *PER_SAMPLE, *PREVIEWS)),
    "diffusion, by timestep": ("dit", (*BY_TIMESTEP, *PREVIEWS)),
    "diffusion, groups": ("dit", (*BY_TIMESTEP, *GROUPS, *PREVIEWS)),
    "diffusion, bfloat16": ("dit", (*BY_TIMESTEP, *PREVIEWS, *BFLOAT16)),
    "diffusion, autoguided": ("dit", (*NONE_SHARED, *AUTOGUIDED)),
    "diffusion, autoguided, groups": (
        "dit",
        (*NONE_SHARED, *PER_SAMPLE, *NO_GROUP_SHARED, *AUTOGUIDED),
    ),
    "diffusion, without EMA": ("dit", (*BY_TIMESTEP, *PREVIEWS, "--ema.decay", "0")),
    "diffusion, scores": ("dit", (*HALF, *SCORES)),
    "images, a teacher's logits": ("cls", (*HALF, *PER_SAMPLE, *LOGITS, *BFLOAT16)),
    "images, a teacher's tokens": ("cls", (*HALF, *PER_SAMPLE, *TOKENS)),
    "images, a teacher's tokens alone": ("cls", (*HALF, *PER_SAMPLE, *TOKENS_ALONE)),
    "diffusion, a teacher": ("dit", (*HALF, *PREDICTIONS)),
    "diffusion, a teacher, bfloat16": ("dit", (*HALF, *PREDICTIONS, *BFLOAT16)),
    "diffusion, REPA": ("dit", (*BY_TIMESTEP, *REPA)),
    "language model": ("clm", ()),
    "masked language model": ("mlm", ()),
}


@pytest.fixture
def measured(monkeypatch, forget_precision, skipping_takes, long_drawing):
    """Measuring is on with a cache of its own, skipping is always faster, and every call is measured.

    Returns a list to which the words of every call without a row are appended, once a table with rows is in use.
    """
    forget_precision()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    skipping_takes(0.5)
    long_drawing()
    noted = []
    note = measurement_table.note_unmeasured

    def note_and_keep(call):
        note(call)
        if measurement_table.current_table().rows:
            noted.append(call)

    monkeypatch.setattr(measurement_table, "note_unmeasured", note_and_keep)
    return noted


def train(name, folder, *options):
    script(name).main(arguments(name, folder, 2, 1, *options))
    return folder


SLOW = {
    "images, per token",
    "images, per sample",
    "images, groups",
    "diffusion, per token",
    "diffusion, by timestep",
    "diffusion, bfloat16",
    "diffusion, autoguided",
    "images, a teacher's logits",
    "images, a teacher's tokens alone",
    "diffusion, a teacher, bfloat16",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in TRAININGS],
)
def test_of_a_training(case, measured, forget_precision, tmp_path, capsys):
    """Evaluations, previews and scores included."""
    name, options = TRAININGS[case]
    for word, (kind, of_teacher) in TEACHERS.items():
        if word in options:
            run = train(kind, tmp_path / word, *of_teacher)
            options = [str(run) if option == word else option for option in options]
    forget_precision()
    capsys.readouterr()
    measured.clear()
    train(name, tmp_path / "run", *options)
    assert "attention measured in " in capsys.readouterr().out
    assert measured == []


@pytest.mark.slow
def test_of_a_compiled_training(measured, tmp_path, capsys):
    """The EMA is evaluated uncompiled, the last weights compiled."""
    train("cls", tmp_path / "run", *HALF, *PER_SAMPLE, "--compile", "true")
    assert "3 of 3 kinds of calls" in capsys.readouterr().out
    assert measured == []


# Case -> options of a run that translates, and how often calls of a kind that has no row may run.
TRANSLATIONS = {
    "heads": (("--model.name", "mt_moh_50"), []),
    # The gates of the encoder are soft in validation. Translations with one expert are few, and each has another length.
    "gates of the encoder argmax": (
        ("--generate.gate_modes", "[soft, argmax]"),
        ["WholeSequences inference"],
    ),
}


@pytest.mark.parametrize("case", TRANSLATIONS)
def test_of_a_training_to_translate(case, measured, tmp_path, monkeypatch, capsys):
    """Validation and beam search included.

    Sentences have many lengths, of which the first batch has one: calls of other lengths have no row of their sizes, but
    they differ in nothing else.
    """
    options, allowed = TRANSLATIONS[case]
    kinds = set()
    use = measurement_table.use_table

    def use_and_keep(record):
        use(record)
        kinds.update(measurement_table.current_table().by_call)

    monkeypatch.setattr(measurement_table, "use_table", use_and_keep)
    train("text", tmp_path / "run", *options, "--generate.beam", "2")
    assert "attention measured in " in capsys.readouterr().out
    assert measured
    unknown = set()
    for call in measured:
        kind, _, _ = call.rpartition(", ")
        if kind not in kinds:
            unknown.add(" ".join(kind.split()[:2]))
    assert sorted(unknown) == allowed


# Case -> options of a classifier's run.
RUNS = {
    "per token": HALF,
    "per sample": (*HALF, *PER_SAMPLE),
    "groups, bfloat16": (*HALF, *PER_SAMPLE, *GROUPS, *BFLOAT16),
}


@pytest.mark.parametrize(
    "case",
    [
        "per token",
        pytest.param("per sample", marks=pytest.mark.slow),
        "groups, bfloat16",
    ],
)
def test_of_commands_on_a_run(case, measured, tmp_path, run_command):
    """They follow what the run has measured, which is in the user's cache."""
    run = train("cls", tmp_path / "run", *RUNS[case])
    picture = tmp_path / "picture.png"
    gradient().save(picture)
    measured.clear()
    validate.main(["--checkpoint", str(run)])
    assert run_command("predict", run, picture, picture).code == 0
    assert measured == []


# Case -> shared and routed heads, of two; options of sample.py. Fewer heads than one cannot guide.
SAMPLINGS = {
    "guided": ((0, 1), ("--cfg-scale", "2")),
    "not guided": ((0, 1), ("--cfg-scale", "1")),
    "guided in an interval": ((0, 1), ("--cfg-scale", "2", "--cfg-interval", "0.3", "0.6")),
    "guided by fewer heads": ((0, 2), ("--guide", "heads:0.5", "--guide-scale", "1.5")),
    "one image": ((0, 1), ("--num-images", "1")),
    "one image, guided in an interval": (
        (0, 1),
        ("--num-images", "1", "--cfg-scale", "2", "--cfg-interval", "0.3", "0.6"),
    ),
}
ROUTED_BY = {
    "token": {},
    "sample": dict(scope="sample"),
    "timestep": dict(scope="sample", route_by="timestep"),
}


# What guides meets each way of routing; of the other cases one way is fast.
FAST = {
    ("guided by fewer heads", "token"),
    ("not guided", "sample"),
    ("guided in an interval", "timestep"),
    ("one image", "timestep"),
    ("one image, guided in an interval", "token"),
}


@pytest.mark.parametrize(
    "case, routed_by",
    [
        pytest.param(
            *given, marks=() if given[0] == "guided" or given in FAST else pytest.mark.slow
        )
        for given in itertools.product(SAMPLINGS, ROUTED_BY)
    ],
)
def test_of_sampling(case, routed_by, measured, tmp_path, capsys):
    heads, options = SAMPLINGS[case]
    run = run_of(tmp_path, 3, pixels=True, heads=heads, routing=ROUTED_BY[routed_by])
    argv = f"--checkpoint {run} --num-images 5 --batch-size 3 --steps 4 --grid {tmp_path}/grid.png"
    sample.main([*argv.split(), *options])
    assert "attention measured in " in capsys.readouterr().out
    assert measured == []


def test_of_sampling_guided_by_another_run(measured, tmp_path, capsys):
    """Of the other model's calls too."""
    run, guide = tmp_path / "run", tmp_path / "guide"
    run_of(run, 3, pixels=True, heads=(0, 1))
    run_of(guide, 3, pixels=True, heads=(0, 1), routing=ROUTED_BY["timestep"])
    argv = f"--checkpoint {run} --num-images 5 --batch-size 3 --steps 4 --grid {tmp_path}/grid.png"
    sample.main([*argv.split(), "--guide", str(guide), "--guide-scale", "1.5"])
    assert "2 of 2 kinds of calls" in capsys.readouterr().out
    assert measured == []


def test_of_sampling_with_scores(measured, tmp_path, capsys):
    """Of the classifier that makes the features, too."""
    classifier = train("cls", tmp_path / "classifier", *HALF)
    run = train("dit", tmp_path / "run", *BY_TIMESTEP)
    capsys.readouterr()
    measured.clear()
    argv = f"--checkpoint {run} --num-images 5 --batch-size 3 --steps 2 --cfg-scale 2 --score digits".split()
    sample.main([*argv, "--score-split", "val", "--extractor", str(classifier)])
    assert "2 of 2 kinds of calls" in capsys.readouterr().out
    assert measured == []


# Case -> small run, its options and those of the command.
CURVES = {
    "images": ("cls", (*HALF, *PER_SAMPLE, *GROUPS), ()),
    "text": ("clm", (), ()),
    "diffusion": (
        "dit",
        (*BY_TIMESTEP, *GROUPS),
        ("--score", "digits", "--score-split", "val", "--num-images", "5", "--batch-size", "3")
        + ("--steps", "2", "--cfg-scale", "2"),
    ),
}


@pytest.mark.parametrize("case", CURVES)
def test_of_budget_curve(case, measured, tmp_path, monkeypatch, run_command):
    """Of scoring and timing at each share, on a machine that has measured nothing before."""
    name, options, more = CURVES[case]
    classifier = None
    if name == "dit":
        classifier = train("cls", tmp_path / "classifier", *HALF)
        more = (*more, "--extractor", classifier)
    run = train(name, tmp_path / "run", *options)
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "empty"))
    measured.clear()
    figure = tmp_path / "curve.png"
    answer = run_command(
        "budget-curve", run, "--rounds", "1", "--shares", "0.5", "0.75", "--output", figure, *more
    )
    assert answer.code == 0
    assert "attention measured in " in answer.out
    assert measured == []
