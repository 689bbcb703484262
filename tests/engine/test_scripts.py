"""The scripts as a user runs them, with the quickstart's configurations and smaller models."""

import contextlib
import io
import json
import math
import re
import runpy
import shlex
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from moh_vision.attention import head_budget
from moh_vision.classification import validate
from moh_vision.data.sources import Digits
from moh_vision.diffusion import sample
from moh_vision.diffusion.config import PreviewConfig, SampleConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.loading import find_checkpoint, open_pipeline
from moh_vision.diffusion.previews import Previews
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.step_folders import damage
from moh_vision.models import dit_transformer, set_up, vit
from moh_vision.models.counts import least_activations
from moh_vision.models.creation import create
from moh_vision.models.weights import find_weights
from tests.support.benchmarks import benchmark
from tests.support.paths import ROOT
from tests.support.pictures import write_folder
from tests.support.refusals import assert_says, refused
from tests.support.small_runs import arguments, entries, logged, results, same, script

STEPS = 10


TWO_STEPS = "--optim.lr 1e-3 --optim.min_lr 0 --optim.warmup_steps 0 --optim.epochs .04".split()


def train(task, output, steps, *more):
    """Train a small run, "cls" or "dit", that saves every fourth step."""
    script(task).main(arguments(task, output, steps, 4, *more))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run train_cls.py and train_dit.py; return the folder of both runs and {task: printed text}."""
    folder = tmp_path_factory.mktemp("runs")
    printed = {}
    for task in ("cls", "dit"):
        argv = [f"train_{task}.py", *arguments(task, folder / task, STEPS, 4)]
        with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch.object(sys, "argv", argv):
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        printed[task] = out.getvalue()
    return folder, printed


@pytest.mark.parametrize("task", ["cls", "dit"])
def test_training_writes_what_it_promises(runs, task):
    folder, printed = runs
    run = folder / task
    weights = {"model.safetensors", "ema.safetensors"}
    written = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", *weights} <= written
    checkpoints = run / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_10", "step_8"]
    # A model without MAE's gates has no second optimiser.
    saved = {path.name for path in (checkpoints / "step_10").iterdir()}
    assert saved == {"model.safetensors", "ema.safetensors", "optimizer.safetensors", "step.json"}
    steps = logged(run)
    assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
    assert not any("gate" in name or "trained" in name for entry in steps for name in entry)
    for e in steps:
        assert e["loss"] == pytest.approx(e["task_loss"] + 0.01 * e["balance_loss"], abs=1e-4)
        assert 0 < e["balance_share"] < 0.5
        assert e["balance_share"] == pytest.approx(0.01 * e["balance_loss"] / e["loss"], abs=1e-5)
        assert e["images_per_s"] > 0 and e["peak_memory_mib"] > 100 and e["skipped"] == 0
        active = sum(sum(layer) for layer in e["head_usage"])
        assert active == pytest.approx(12, abs=0.02)  # 75 % of 2 layers x 8 heads
    assert "img/s, peak" in printed[task]
    if task == "cls":
        validation = results(run)
        assert validation["images"] == 355 and 0 <= validation["top1"] <= validation["top5"] <= 100


@pytest.mark.parametrize("task, models", [("cls", vit), ("dit", dit_transformer)])
def test_checkpointing_computes_each_block_twice_and_changes_no_bit(
    tmp_path, monkeypatch, task, models
):
    plain = models.run_block
    # Value of --checkpointing -> for each call of a block, whether it was checkpointed.
    checkpointed = dict(false=[], true=[])

    def run_block(*args, checkpoint=None, **more):
        checkpointed[on].append(checkpoint is not None)
        return plain(*args, checkpoint=checkpoint, **more)

    monkeypatch.setattr(models, "run_block", run_block)
    for on in checkpointed:
        script(task).main(arguments(task, tmp_path / on, 2, 2, "--checkpointing", on))
    assert same(tmp_path / "false" / "model.safetensors", tmp_path / "true" / "model.safetensors")
    assert not any(checkpointed["false"])
    assert checkpointed["true"][:4] == [True] * 4  # two layers in two steps


# ---------------------------------------------------------------- mistakes


def test_a_changed_configuration_is_refused(runs, capsys):
    argv = arguments("cls", runs[0] / "cls", STEPS, 4, "--optim.lr", "0.5")
    error = refused(capsys, script("cls").main, *argv)
    assert_says(error, f"{runs[0]}/cls optim.lr 0.003 0.5 --allow-change --fresh")
    config = runs[0] / "cls" / "config.yaml"
    before = config.read_text()
    argv = ["--config", config, "--model.depth", 3, "--allow-change", "model.depth"]
    error = refused(capsys, script("cls").main, *argv)
    assert_says(error, f"{runs[0]}/cls/checkpoints/step_{STEPS} model.blocks.2.norm1.weight")
    assert config.read_text() == before, "the run's own command still goes on"


@pytest.mark.parametrize("task, argv, facts", [
    ("cls", "--model.head_budget 1.5", "head_budget 1.5 0 1 'uniform:0.75' pair"),
    ("cls", "--data.root /no/where", "data.root /no/where folder hfds/NAME digits"),
    ("cls", "--data.img_size 1000000", "data.img_size 1000000 128 476,837 GiB"),
    ("cls", "--model.embed_dim 30000000 --model.head_budget 1", "moh_vit_tiny_patch16_224 bytes"),
    ("cls", "--data.img_size 9", "img_size 9 multiple patch_size 2"),
    ("cls", "--model.name moh_vit_smal", "model.name 'moh_vit_smal' moh_vit_small_patch16_224"),
    ("cls", "--model.name vit_small_patch16_224", "model.name 'vit_small_patch16_224' moh_vit_* model.router dense"),
    ("cls", "--model.name dit_small_patch2 --model.head_budget null", "model.name 'dit_small_patch2' diffusion classifier moh_vit_small_patch16_224"),
    ("cls", "--model.kwargs '{headz: 3}'", "'headz' model.kwargs"),
    ("cls", "--optim.batch_size 7 --optim.accumulation 2", "optim.batch_size 7 multiple accumulation 2"),
    ("cls", "--init-from /no/where", "init_from /no/where"),
    ("dit", "--model.name DiT-S/2", "model.name 'DiT-S/2' dit_small_patch2"),
    ("dit", "--preview.every 5 --preview.steps 600", "preview.steps 600 DDIMScheduler 599 divisor 1000"),
    ("dit", "--preview.every 5 --preview.classes 12", "preview.classes 12 10 0 9"),
])  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path, capsys, task, argv, facts):
    common = ["--config", f"quickstart/{task}", "--output", tmp_path / "run"]
    assert_says(refused(capsys, script(task).main, *common, *shlex.split(argv)), facts)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- dry runs and weights to start from


@pytest.mark.parametrize("task", ["cls", "dit"])
def test_a_dry_run_loads_the_weights_that_the_run_starts_from(runs, tmp_path, capsys, task):
    more = ["--dry-run", f"--init-from={runs[0]}/{task}", "--data.img_size=16"]
    argv = arguments(task, tmp_path / "run", 1, 1, *more)
    script(task).main(argv)
    out = capsys.readouterr().out
    assert 0 < out.index("init_from: pos_embed is ") < out.index("active heads: 12 of 16 (75.0 %)")
    assert "parameters:" in out and "MACs:" in out and "attention runs " in out
    assert f"init_from: weights of {runs[0]}/{task}/ema.safetensors\n" in out
    for more, facts in (("embed_dim=64", "shape model.name"), ("router=dense", "fit")):
        with pytest.raises(SystemExit, match="2"):
            script(task).main([*argv, f"--model.{more}"])
        out, error = capsys.readouterr()
        assert_says(error.splitlines()[-1], f"init_from {runs[0]}/{task} {facts}")
        assert "init_from" not in out
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["cls", "dit"])
def test_a_line_says_if_weights_begin_with_other_heads(tmp_path, capsys, task):
    """The projections of a dense layer have the same shapes with any number of heads."""
    dense = ["--model.router=dense", "--model.head_budget=null"]

    def said(name, heads, *more):
        argv = arguments(task, tmp_path / name, 1, 1, *dense, f"--model.num_heads={heads}", *more)
        script(task).main(argv)
        return [
            line for line in capsys.readouterr().out.splitlines() if " heads, this model" in line
        ]

    assert said("source", 4) == []
    source = tmp_path / "source"
    assert said("same", 4, f"--init-from={source}", "--dry-run") == []
    other = said("other", 8, f"--init-from={source}", "--dry-run")
    assert other == [f"init_from: {source} was trained with 4 heads, this model has 8"]
    # A file of weights alone does not say how many heads they are of.
    save_file(load_file(source / "model.safetensors"), tmp_path / "weights.safetensors")
    assert said("unknown", 8, f"--init-from={tmp_path}/weights.safetensors", "--dry-run") == []


# Case -> (tasks, output folder and options); {run} is the folder of a run of 2 steps.
REFUSED_SET_UPS = {
    "another run": ("cls dit text clm", "{run} --seed 1", "--output {run} seed 0 1"),
    "a file": ("cls dit text clm", "{run}/config.yaml", "--output {run}/config.yaml file"),
    "no run": ("cls dit text clm", "{other}", "--output {other} empty"),
    "a damaged log": ("cls dit text clm", "{damaged}", "{damaged}/metrics.jsonl 1"),
    "a teacher": ("cls", "{new} --distill.teacher ./none", "distill.teacher ./none"),
    "another teacher": ("dit", "{new} --repa.teacher ./none", "repa.block 8 1 2"),
    "classes": ("dit", "{new} --preview.every 1 --preview.classes dog", "preview.classes dog 10"),
    "a reference": (
        "dit",
        "{new} --score.every 1 --score.reference none.npz",
        "score.reference none.npz",
    ),
    "weights": ("text clm", "{new} --init-from none", "init_from none"),
    "nothing to do": ("text clm", "{new} --max-steps 0", "max_steps 0 init_from model.pretrained"),
}


@pytest.mark.parametrize(
    "task, case", [(task, case) for case, row in REFUSED_SET_UPS.items() for task in row[0].split()]
)
def test_a_dry_run_refuses_what_the_run_refuses(trained, tmp_path, capsys, task, case):
    run = trained(task, 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "metrics.jsonl").write_text("[1]\n")
    folders = dict(run=run, other=tmp_path / "other", damaged=damaged, new=tmp_path / "new")
    _, options, facts = (text.format(**folders) for text in REFUSED_SET_UPS[case])
    output, *more = options.split()
    argv = arguments(task, output, 2, 100, *more)
    main = script(task).main
    error = refused(capsys, main, *argv)
    assert_says(error, facts)
    assert error == refused(capsys, main, *argv, "--dry-run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("task", ["cls", "dit"])
def test_a_step_that_cannot_fit_in_memory_is_refused(tmp_path, capsys, monkeypatch, task):
    """The system would kill such a run. With activation checkpointing the same step fits."""
    monkeypatch.setattr(set_up, "memory_limit", lambda device: 2**16)
    argv = arguments(task, tmp_path / "run", 1, 1)
    error = refused(capsys, script(task).main, *argv)
    assert_says(error, "8 images GiB optim.batch_size optim.accumulation --checkpointing")
    script(task).main([*argv, "--dry-run"])  # the run may be meant for a larger machine
    refusal = error.partition("error: ")[2]
    assert f"refused on this machine: {refusal}" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    script(task).main([*argv, "--checkpointing"])
    assert (tmp_path / "run" / "model.safetensors").exists()


# Case -> name of a model and its options.
KEEPING = {
    "ViT": ("moh_vit_tiny_patch16_224", {}),
    "routed MLPs": (
        "moh_vit_tiny_patch16_224",
        dict(scope="sample", mlp_budget="uniform:0.25", head_budget=0.5, executor="packed"),
    ),
    "TransNeXt": ("moh_transnext_small_75", {}),
}


@pytest.mark.parametrize("name, options", KEEPING.values(), ids=KEEPING)
def test_the_estimate_of_kept_activations_is_a_lower_bound(name, options):
    """The estimate may not exceed what a forward saves for its backward, or runs that fit would be refused."""
    model = timm.create_model(name, num_classes=3, **options).train()
    images = torch.randn(1, 3, 224, 224)
    least = 4 * least_activations(model, images)
    saved = benchmark("attention").saved_bytes(model, images)
    assert 0.2 * saved < least < saved


def test_a_dry_run_writes_nothing(trained, tmp_path):
    """A dry run that resumes a run changes none of its files, and a dry run of a new one makes no folder."""
    for task in ("cls", "dit", "clm"):
        run = shutil.copytree(trained(task, 2), tmp_path / task)
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*.*")}
        for output in (run, tmp_path / "new"):
            script(task).main(arguments(task, output, 3, 100, "--dry-run"))
        assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*.*")}
        assert not (tmp_path / "new").exists()


def test_checkpoints_are_sampled_validated_and_started_from(runs, tmp_path, capsys):
    cls, dit = (runs[0] / task / "checkpoints" / "step_8" for task in ("cls", "dit"))
    argv = f"--checkpoint {dit} --num-images 10 --sampler ddim --steps 2 --score digits --extractor {cls}".split()
    sample.main(argv)
    assert (runs[0] / "dit" / "scores_step_8.json").exists() and damage(dit, 8) is None
    capsys.readouterr()
    validate.main(["--checkpoint", str(cls)])
    assert f"{cls / 'ema.safetensors'} (moh_vit" in capsys.readouterr().out
    train("cls", tmp_path / "run", 1, "--init-from", cls)
    assert (tmp_path / "run" / "results.json").exists()
    empty = tmp_path / "run" / "checkpoints" / "step_1"
    (empty / "model.safetensors").unlink()
    (empty / "ema.safetensors").unlink()
    error = refused(capsys, sample.main, "--checkpoint", empty, "--grid", tmp_path / "never.png")
    assert_says(error, f"{empty} ema.safetensors model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, more", [("cls", "--mix.mixup 0.8 --mix.cutmix 1 --label_smoothing 0.1"), ("dit", "")]
)
def test_compiled_training_learns_the_same(tmp_path, task, more):
    for compiled in ("false", "true", "blocks"):
        options = ["--compile", compiled, "--optim.warmup_steps", 0, *more.split()]
        train(task, tmp_path / compiled, 6, *options)
    plain = [e["loss"] for e in logged(tmp_path / "false")]
    assert plain[0] != plain[-1]
    for compiled in ("true", "blocks"):
        assert [e["loss"] for e in logged(tmp_path / compiled)] == pytest.approx(plain, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["cls", "dit"])
def test_cifar10_loss_falls_in_200_steps(cifar10, tmp_path, task):
    argv = f"--config {task}/cifar10_small_cpu --data.root {cifar10} --output {tmp_path}/run"
    script(task).main(argv.split())
    losses = [e["task_loss"] for e in logged(tmp_path / "run")]
    assert np.mean(losses[-3:]) < 0.85 * losses[0]


# ---------------------------------------------------------------- sampling


def assert_grid(path, columns, rows):
    """Assert that a picture has so many columns and rows of 50 pixels, and names of classes at the left."""
    with Image.open(path) as grid:
        assert grid.height == rows * 50 + 2
        assert 0 < grid.width - (columns * 50 + 2) < 40, "the names of the classes"


def test_samples_of_digits_are_scored_and_replace_others_with_overwrite(runs, tmp_path, capsys):
    folder = runs[0]
    grid = tmp_path / "grid.png"
    score_file = tmp_path / "scores.json"
    argv = f"--checkpoint {folder}/dit --sampler ddim --steps 4 --cfg-scale 1.5 --batch-size 35".split()
    scored = (
        f"--grid {grid} --score digits --extractor {folder}/cls --score-file {score_file}".split()
    )
    sample.main([*argv, "--num-images", "70", *scored])
    out = capsys.readouterr().out
    scores = json.loads(score_file.read_text())
    assert "recognised as the class asked for" in out and "not Inception, not FID" in out
    assert_grid(grid, columns=7, rows=10)
    assert 0 <= scores["recognised"] <= 1
    assert scores["frechet_distance"] > 0
    assert scores["num_reference"] == 355
    argv += ["--out", f"{tmp_path}/folder", "--num-images"]
    sample.main([*argv, "5"])
    error = refused(capsys, sample.main, *argv, 5)
    assert_says(error, f"--out {tmp_path}/folder exists --overwrite")
    sample.main([*argv, "2", "--overwrite", "true"])
    assert len(list((tmp_path / "folder").glob("*.png"))) == 2
    fewer = SampleConfig(checkpoint=f"{folder}/dit", head_budget=0.5, out="x")
    pipe, _ = open_pipeline(fewer, find_checkpoint(fewer))
    assert head_budget(pipe.transformer)["share"] == 0.5


def test_a_grid_of_twelve_classes_has_one_class_a_row(tmp_path):
    sizes = dict(
        img_size=8, in_chans=3, num_classes=12, embed_dim=16, depth=1, num_heads=2, head_budget=1.0
    )
    name = "moh_dit_small_patch2_75"
    metadata = dict(
        architecture=name,
        arguments=sizes,
        classes=[str(number) for number in range(12)],
        config=dict(kind="diffusion", label_drop=0),
    )
    export_weights(create(name, "diffusion", **sizes), tmp_path / "model.safetensors", metadata)
    argv = f"--checkpoint {tmp_path} --sampler ddim --steps 1 --num-images 30 --grid {tmp_path}/grid.png".split()
    sample.main(argv)
    assert_grid(tmp_path / "grid.png", columns=2, rows=10)  # the first ten classes, two of each


def test_what_is_no_diffusion_run_is_not_sampled(runs, tmp_path, capsys):
    folder = runs[0]
    text = dict(architecture="mt_transformer_base", arguments={}, vocabularies=["a", "a"])
    export_weights(torch.nn.Linear(2, 2), tmp_path / "text" / "model.safetensors", text)
    for name in ("config.json", "config.yaml"):
        (tmp_path / "text" / name).write_text("{}")
    classifier = "classifier moh_vit_tiny_patch16_224 train_cls.py"
    translator = "text mt_transformer_base train_text.py"
    for checkpoint, facts in (
        (folder / "cls", f"{folder}/cls/ema.safetensors {classifier} train_dit.py"),
        (folder / "ditt", f"--checkpoint {folder}/ditt {folder}/dit"),
        (tmp_path / "text", f"{tmp_path}/text/model.safetensors {translator} train_dit.py"),
    ):
        argv = ["--grid", tmp_path / "never.png", "--checkpoint", checkpoint]
        assert_says(refused(capsys, sample.main, *argv), facts)


# ---------------------------------------------------------------- another learning rate after a resume

# A run did 2 steps of a cosine of 7: optim.epochs .04 of 1,442 digits in batches of 8. The rates of step 2 are
# .5 (1 + cos(2 pi / 7)) = .812 of the peak, and .950 where the cosine has 14 steps.
RESUMED = {
    "the run's length alone": ("--max_steps 4", None),
    "optim.epochs": (
        "--max_steps 4 --optim.epochs .08 --allow_change optim.epochs",
        "optim.epochs 0.04 -> 0.08: the learning rate at step 2 goes from 0.000812 to 0.00095",
    ),
    "optim.lr": (
        "--max_steps 4 --optim.lr 5e-4 --allow_change optim.lr",
        "optim.lr 0.001 -> 0.0005: the learning rate at step 2 goes from 0.000812 to 0.000406",
    ),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "run"
    train("cls", folder, 2, *TWO_STEPS)
    return folder


@pytest.mark.parametrize("options, line", RESUMED.values(), ids=RESUMED)
def test_a_line_says_that_a_resumed_run_has_another_learning_rate(
    two_steps, tmp_path, capsys, options, line
):
    shutil.copytree(two_steps, tmp_path / "run")
    train("cls", tmp_path / "run", 2, *TWO_STEPS, *options.split())
    said = [text for text in capsys.readouterr().out.splitlines() if "goes from" in text]
    assert said == [line] * (line is not None)


def test_a_line_says_that_more_images_change_the_learning_rate(tmp_path, capsys):
    """Two epochs of 8 images in batches of 4 are 4 steps, of 16 images 8."""
    of_epochs = "--optim.lr 1e-3 --optim.warmup_steps 0 --optim.batch_size 4 --optim.epochs 2 --data.img_size 8"
    options = [*of_epochs.split(), "--data.root", str(tmp_path / "images")]
    write_folder(tmp_path / "images", train=4)
    train("cls", tmp_path / "run", 2, *options)
    line = "max_steps 2 ends before the schedule of optim.epochs 2, 4 steps, and the learning rate stays high"
    assert line in capsys.readouterr().out
    shutil.rmtree(tmp_path / "images")
    write_folder(tmp_path / "images", train=8)
    train("cls", tmp_path / "run", 3, *options, "--allow_change", "data.root")
    line = "another number of training images: the learning rate at step 2 goes from 0.0005 to 0.000854\n"
    assert line in capsys.readouterr().out


# ---------------------------------------------------------------- previews and scores while training


def test_previews_draw_the_same_noise_and_change_nothing(tmp_path, capsys):
    """A run with previews ends with the weights of a run without them.

    The exported weights draw the last preview again, with the same pixels.
    """
    schedule = ["--optim.schedule", "cosine", "--optim.warmup_steps", "0"]
    drawn = "--preview.every 2 --preview.images 12 --preview.columns 6 --preview.steps 3".split()
    train("dit", tmp_path / "plain", 4, *schedule)
    train("dit", tmp_path / "drawn", 4, *schedule, *drawn)
    for name in ("model", "ema"):
        assert same(*(tmp_path / run / f"{name}.safetensors" for run in ("plain", "drawn")))
    folder = tmp_path / "drawn" / "previews"
    first, last = (np.asarray(Image.open(folder / f"step_{step}.png")) for step in (2, 4))
    assert first.shape == last.shape and (first != last).any()

    model = find_weights(tmp_path / "drawn").build()
    config = PreviewConfig(every=1, images=12, columns=6, steps=3)
    told = []

    def pictures(*picture):
        told.append(picture)

    log = SimpleNamespace(enabled=True, say=told.append, pictures=pictures, pause=int)
    run = SimpleNamespace(log=log, done=4, ema=None, folder=tmp_path / "again")
    again = run.folder / "previews" / "step_4.png"
    inputs = SimpleNamespace(source=Digits("train"), space=None)
    previews = Previews(config, inputs, model)
    previews.draw(model, run)
    (step, _, images), said = told
    assert said == f"preview (ddim 3 steps, guidance 1.5): {again}"
    assert step == 4 and images.shape == (12, 1, 8, 8) and images.dtype == torch.uint8
    assert (np.asarray(Image.open(again)) == last).all()
    # A run may resume with other preview keys.
    more = "--preview.every 5 --preview.steps 1 --preview.classes 7 2 --preview.images 7".split()
    capsys.readouterr()
    train("dit", tmp_path / "drawn", 5, *schedule, *more)
    out = capsys.readouterr().out
    # 1e-3 (1 + cos(4 pi / 5)) of the peak
    assert "max_steps 4 -> 5: the learning rate at step 4 goes from 0 to 0.000191\n" in out
    assert "digits: 1442 training images of 10 classes; 5 steps of " in out
    assert "\n1 process on cpu\n" in out
    averaged = r"EMA, [0-9.]+% of it still the weights of step 1"
    line = rf"preview \(ddim 1 steps, guidance 1.5, {averaged}\): {tmp_path / 'drawn'}"
    assert re.search(line, out)
    with Image.open(folder / "step_5.png") as picture:  # one class a row, with its name
        assert picture.height == 2 * 50 + 2
        assert 3 * 50 + 2 < picture.width < 4 * 50


def test_previews_and_scores_that_fail_are_counted_and_training_goes_on(
    tmp_path, capsys, monkeypatch
):
    def bad_images(*_):
        return torch.full((1, 1, 8, 8), math.nan)

    def no_scorer(*_, **__):
        """Return None in place of a scorer: the images are bad, so none is called."""

    monkeypatch.setattr("moh_vision.diffusion.previews.sample_images", bad_images)
    monkeypatch.setattr("moh_vision.diffusion.previews.make_scorer", no_scorer)
    output = tmp_path / "run"
    train("dit", output, 3, *"--preview.every 1 --score.every 1".split())
    failures = [(entry["failed_previews"], entry["failed_scores"]) for entry in logged(output)]
    assert failures == [(0, 0), (1, 1), (2, 2)]
    error = "after decoding: 1 of 1 images hold NaN or infinity"
    assert entries(output)[-1]["scores"] == dict(error=error)
    said = capsys.readouterr().out
    assert said.count("could not be drawn: after decoding: 1 of 1 images hold NaN") == 3
    assert (output / "ema.safetensors").exists() and not (output / ".scoring").exists()


def test_pictures_of_a_run_shorter_than_every_are_drawn_where_asked_for(
    tmp_path, capsys, hours_pass
):
    """A trial of a few steps with a configuration for millions does not end with minutes of sampling.

    Previews that take long are announced with an estimate of their time.
    """
    small = ["--preview.images", 40, "--preview.steps", 3]
    short = tmp_path / "short"
    late = "--preview.every 4 --score.every 4 --score.reference nowhere".split()
    train("dit", short, 3, *small, *late)
    said = capsys.readouterr().out
    assert "preview.every 4: none in 3 steps; --preview.every 3 asks for it\n" in said
    assert "score.every 4: none in 3" in said
    assert not (short / "previews").exists()
    assert not any("scores" in entry for entry in entries(short))
    hours_pass()
    train("dit", tmp_path / "long", 3, *small, "--preview.every", 2)
    said = capsys.readouterr().out
    previews = [path.name for path in (tmp_path / "long" / "previews").iterdir()]
    assert sorted(previews) == ["step_2.png", "step_3.png"]
    first, second = [line for line in said.splitlines() if line.startswith("preview")][:2]
    # Two batches, and a minute a step.
    assert first == "preview: 40 images in 3 steps each take about 06:00"
    assert second.endswith("long/previews/step_2.png")


def test_scores_while_training(tmp_path, runs, capsys):
    """Scores use the features of a classification run, and the run ends with the weights of a run without scores."""
    cls = runs[0] / "cls"
    argv = f"--score.every 2 --score.images 70 --score.steps 2 --score.extractor {cls} --score.split val".split()
    train("dit", tmp_path / "plain", 4)
    train("dit", tmp_path / "run", 4, *argv)
    assert "scores after 4 steps" in capsys.readouterr().out
    scores = [line["scores"] for line in entries(tmp_path / "run") if "scores" in line]
    assert len(scores) == 2
    assert scores[0]["fd"] != scores[1]["fd"] and scores[0]["num_generated"] == 70
    assert scores[0]["num_reference"] == 355 and scores[0]["label"].startswith("FD-moh_vit_tiny")
    assert not list((tmp_path / "run").glob(".samples-*"))
    assert same(tmp_path / "plain" / "ema.safetensors", tmp_path / "run" / "ema.safetensors")
    # Mistakes, such as too few images for the features, are refused before the first step.
    for more, facts in {
        "--score.images 20": "20 images 32 features allow_biased",
        "--score.reference nowhere": "score.reference nowhere",
        f"--score.reference {tmp_path}": f"score.reference {tmp_path} split val",
        "--score.extractor timm:vit": "extractor 'timm:vit' timm 'vit'",
        "--score.inception_weights x": f"inception_weights x extractor {runs[0]}/cls inception",
    }.items():
        again = arguments("dit", tmp_path / "none", 4, 4, *argv, *more.split())
        assert_says(refused(capsys, script("dit").main, *again), facts)
    assert not (tmp_path / "none").exists()


def test_samples_that_a_killed_score_left_are_not_those_of_other_weights(tmp_path, monkeypatch):
    run = tmp_path / "run"
    drawn = []

    def scorer(parts, *_):
        drawn.append(parts.images([0]))
        return {}, ""

    monkeypatch.setattr("moh_vision.diffusion.previews.make_scorer", lambda *_, **__: scorer)
    argv = "--score.every 1 --score.steps 2 --score.images 3 --score.reference digits".split()
    train("dit", run, 1, *argv)
    black = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    ImageParts(run / ".scoring", 3, 32, dict(step=2)).add(0, black)
    train("dit", run, 2, *argv)
    assert len(drawn) == 2 and drawn[1].float().std() > 1
    assert not (run / ".scoring").exists()
