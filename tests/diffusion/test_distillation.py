"""A diffusion model learns from a teacher: the loss, runs from the teacher's own weights, teachers that do not fit."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file

from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.objectives import FlowMatchingLoss, HybridLoss
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.diffusion.teacher import DiffusionTeacher
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.config import DistillConfig
from moh_vision.models.creation import create
from tests.support.pictures import write_folder
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, refused
from tests.support.small_runs import arguments, logged, outcome, whole_and_resumed
from tests.support.tiny_dit import TINY, awake
from tests.support.tiny_vae import tiny_vae

DIGITS = [str(digit) for digit in range(10)]
SIZES = dict(img_size=8, in_chans=1, num_classes=10, patch_size=2, embed_dim=32, depth=2)
# A dense DiT's conversion; calibrated, it predicts at all of its heads what the dense model does.
CONVERTED = (
    "--data.root digits --data.workers 0 --optim.batch_size 8 --optim.lr 1e-4 --ema.decay 0.5 --model.name pretrained "
    "--model.convert.router moh --calibrate_images 8"
)
FLOW = dict(prediction=dict(path="linear", predict="velocity"), learn_sigma=False)


def dense_run(folder, seed=0, label_drop=0.1, classes=DIGITS, vae=None, **changes):
    """Write the weights of a run of a dense DiT on digits with random weights, none of them zero; return the folder."""
    torch.manual_seed(seed)
    sizes = dict(SIZES, num_heads=4, num_classes=len(classes)) | changes
    model = awake(create("dit_small_patch2", "diffusion", **sizes))
    config = dict(kind="diffusion", label_drop=label_drop)
    metadata = dict(architecture="dit_small_patch2", arguments=sizes, classes=classes)
    folder.mkdir(parents=True, exist_ok=True)
    metadata.update(config=config, vae=vae)
    export_weights(model, folder / "model.safetensors", metadata)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return dense_run(tmp_path_factory.mktemp("dense"))


def converted(teacher, run, steps, *more):
    """Return the command line of the fine-tuning of the teacher's conversion at all of its heads."""
    argv = [*CONVERTED.split(), "--model.pretrained", teacher, "--model.head_budget", "uniform:1"]
    argv += ["--distill.teacher", "source", "--log-every", 1, "--max-steps", steps]
    return [str(word) for word in [*argv, "--output", run, *more]]


@pytest.mark.parametrize("objective", ["hybrid", "min-SNR", "without variance", "flow"])
def test_the_loss_is_that_of_the_equation(objective):
    objective = {
        "hybrid": HybridLoss(),
        "min-SNR": HybridLoss(min_snr_gamma=5),
        "without variance": HybridLoss(learn_sigma=False),
        "flow": FlowMatchingLoss(),
    }[objective]
    sizes = dict(TINY, learn_sigma=objective.learn_sigma, prediction=objective.prediction)
    torch.manual_seed(0)
    model = awake(timm.create_model("moh_dit_small_patch2_75", head_budget=0.5, **sizes))
    x, noise, taught = torch.randn(3, 4, 3, 8, 8)
    labels, t = torch.tensor([0, 1, 2, 5]), torch.tensor([1, 20, 500, 990])
    distill = DistillConfig("teacher", task_loss_weight=0.3, distill_loss_weight=0.8)

    def losses_of(distill, *more):
        task = DiffusionTask(model, 0.0, objective, distill=distill)
        losses = task(x, labels, t, noise, *more)
        task.zero_grad()
        losses["loss"].backward()
        last = model.final_layer.linear
        # Rows of the last layer: patches of the prediction, then of the variance in each pixel.
        by_channel = last.weight.grad.unflatten(0, (4, model.out_channels))
        return losses, by_channel[:, 3:].clone()

    plain, of_variance = losses_of(None)
    mixed, of_variance_mixed = losses_of(distill, None, taught)
    xt = objective.add_noise(x, noise, t)
    with torch.no_grad():
        output, _ = model.forward_routed(xt, t, labels)
    weight = torch.ones(4)
    if isinstance(objective, HybridLoss):
        weight = objective.weight[t]
        assert (weight < 1).any() == (objective.weight < 1).any()
    distances = (output[:, :3] - taught).square().mean((1, 2, 3))
    kd_loss = (weight * distances).mean()
    vb = plain.get("vb", 0)
    expected = 0.3 * (plain["loss"] - vb) + 0.8 * kd_loss + vb
    torch.testing.assert_close(mixed["kd_loss"], kd_loss)
    torch.testing.assert_close(mixed["loss"], expected)
    assert mixed["mse"] == plain["mse"]
    assert (of_variance.shape[1] > 0) == objective.learn_sigma
    torch.testing.assert_close(of_variance_mixed, of_variance)


@pytest.mark.parametrize("flow", [False, True])
def test_with_all_heads_a_conversion_predicts_what_its_teacher_does(flow, teacher, tmp_path):
    """Labels are dropped for both alike, or the two would differ."""
    more = ["--label_drop", "0.5"]
    if flow:
        teacher = dense_run(tmp_path / "dense", **FLOW)
        more += ["--objective", "flow"]
    train_dit.main(converted(teacher, tmp_path / "run", 1, *more))
    (line,) = logged(tmp_path / "run")
    assert line["mse"] > 0.1 and line["kd_loss"] == 0
    more += ["--model.head_budget", "uniform:0.5"]
    train_dit.main(converted(teacher, tmp_path / "half", 1, *more))
    (line,) = logged(tmp_path / "half")
    assert line["kd_loss"] > 0.01


def test_a_fixed_choice_stays(teacher, tmp_path):
    """As docs/guides/mlp.md says: one routed part a layer and no balance loss, and nothing trains what chooses it."""
    fixed = (
        "--balance_weight 0 --model.head_budget uniform:0.5:0.9 --model.mlp_budget uniform:0.5:0.9"
    )
    usual = "--model.head_budget uniform:0.5 --model.mlp_budget uniform:0.5"
    moved = {}
    for name, options in (("fixed", fixed), ("usual", usual)):
        scope = ["--model.convert.scope", "sample", "--optim.warmup_steps", "0"]
        train_dit.main(converted(teacher, tmp_path / name, 3, *scope, *options.split()))
        weights = load_file(tmp_path / name / "model.safetensors")
        chooses = [weight for key, weight in weights.items() if "router.routed" in key]
        assert len(chooses) == 4  # attention and MLP of two blocks
        moved[name] = [bool(weight.any()) for weight in chooses]
    assert moved == dict(fixed=[False] * 4, usual=[True] * 4)


def test_a_run_learns_what_the_teacher_says_and_goes_on_to_the_bit(teacher, tmp_path):
    learn = f"--distill.teacher {teacher} --distill.task_loss_weight 0 --balance_weight 0 --optim.schedule constant --optim.warmup_steps 0 --optim.lr 1e-2".split()
    whole, resumed = whole_and_resumed("dit", tmp_path, [4, 12], *learn)
    lines = logged(whole)
    plain = tmp_path / "plain"
    train_dit.main(arguments("dit", plain, 1, 1))
    assert lines[0]["mse"] == logged(plain)[0]["mse"]  # draws and first weights
    assert 0 < lines[-1]["kd_loss"] < 0.8 * lines[0]["kd_loss"]
    for line in lines:
        assert line["loss"] == pytest.approx(line["kd_loss"] + line["vb"], rel=1e-5)
    for weights in ("model", "ema"):
        tensors = load_file(whole / f"{weights}.safetensors").keys()
        assert tensors == load_file(plain / "model.safetensors").keys()
    assert not list(whole.glob("checkpoints/step_*/beside.safetensors"))
    record = json.loads((resumed / "frozen.json").read_text())
    assert record.keys() == {"distill.teacher"}


def on_a_rank(rank, folder, teacher):
    train_dit.main(converted(teacher, folder / "two", 3, "--model.head_budget", "uniform:0.5"))


@pytest.mark.slow
def test_two_processes_see_the_loss_of_one(teacher, tmp_path):
    on_two_ranks(on_a_rank, tmp_path, teacher)
    train_dit.main(converted(teacher, tmp_path / "one", 3, "--model.head_budget", "uniform:0.5"))
    one = logged(tmp_path / "one")
    two = logged(tmp_path / "two")
    assert len(one) == len(two) == 3
    for line, other in zip(one, two):
        assert line["kd_loss"] > 0.01
        assert other["kd_loss"] == pytest.approx(line["kd_loss"], rel=1e-3)
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-3)


@pytest.mark.parametrize(
    "options", ["--ema.decay 0", pytest.param("--compile true", marks=pytest.mark.slow)]
)
def test_the_teacher_is_part_of_no_checkpoint(options, teacher, tmp_path):
    options += " --optim.schedule constant"
    whole = tmp_path / "whole"
    train_dit.main(converted(teacher, whole, 2, *options.split()))
    for steps in (1, 2):
        train_dit.main(converted(teacher, tmp_path / "resumed", steps, *options.split()))
    assert outcome(whole) == outcome(tmp_path / "resumed")


def test_a_teacher_with_other_class_order_gets_its_own_labels(tmp_path):
    """Its rows are found by name; "no class" stays the last."""
    names = ["a", "b", "c"]
    source = dense_run(tmp_path / "t", classes=names)
    model = create("dit_small_patch2", "diffusion", **dict(SIZES, num_heads=4, num_classes=3))
    said = []
    ours = DiffusionTeacher(str(source), model, ["c", "a", "b"], 0.1, None, said.append)
    theirs = DiffusionTeacher(str(source), model, names, 0.1, None, said.append)
    x, t = torch.randn(4, 1, 8, 8), torch.tensor([1, 300, 600, 900])
    torch.testing.assert_close(
        ours(x, t, torch.tensor([0, 1, 2, 3])), theirs(x, t, torch.tensor([2, 0, 1, 3]))
    )
    assert ours(x, t, torch.zeros(4).long()).shape == x.shape  # of the mean alone
    assert ours.sha256 == theirs.sha256
    assert not any(p.requires_grad for p in ours.parameters()) and not ours.teacher.training


def test_a_teacher_that_changed_between_two_starts_is_refused(tmp_path, capsys):
    source = dense_run(tmp_path / "t")
    run = tmp_path / "run"
    train_dit.main(converted(source, run, 1))
    dense_run(source)  # the same weights, written anew
    train_dit.main(converted(source, run, 2))
    dense_run(source, seed=1)
    said = refused(capsys, train_dit.main, *converted(source, run, 3))
    assert_says(said, f"distill.teacher {source} weights {run} sha256 frozen.json --allow-change")
    train_dit.main(converted(source, run, 3, "--allow-change", "distill.teacher"))
    assert_says(capsys.readouterr().out, f"distill.teacher {source} weights {run}")


# Case -> changes of the teacher's run, options of the student's, facts of the refusal.
UNFIT = {
    "image size": (dict(img_size=16), "", "sample_size 16 8"),
    "channels": (dict(in_chans=3), "", "in_channels 3 1"),
    "number of classes": (dict(classes=DIGITS[:5]), "", "num_classes 5 10"),
    "classes": (dict(classes=["ten", *DIGITS[1:]]), "", "classes 10 0"),
    "no class": (dict(label_drop=0), "", 'label_drop 0 0.1 "no class"'),
    "path": ({}, "--objective flow", "path ddpm linear"),
    "quantity": (FLOW, "--objective flow --flow.predict x", "predict velocity x"),
    "noise": (FLOW, "--objective flow --flow.noise_scale 2", "noise_scale 1.0 2.0"),
    "latents": (dict(vae=dict(sha256="abc")), "", "VAE abc None"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_teachers_that_do_not_fit(case, tmp_path, capsys):
    changes, options, facts = UNFIT[case]
    source = dense_run(tmp_path / "t", **changes)
    argv = arguments("dit", tmp_path / "run", 1, 1, "--distill.teacher", source, *options.split())
    assert_says(refused(capsys, train_dit.main, *argv), f"distill.teacher {source} {facts}")
    assert not (tmp_path / "run").exists()


def test_a_teacher_without_no_class_serves_where_no_label_is_dropped(tmp_path):
    source = dense_run(tmp_path / "t", label_drop=0)
    train_dit.main(converted(source, tmp_path / "run", 1, "--label_drop", "0"))
    assert logged(tmp_path / "run")[0]["kd_loss"] == 0


# Options -> facts of the refusal.
REFUSED = {
    "--distill.teacher source": "distill.teacher source model.pretrained init_from",
    "--distill.teacher ./none": "distill.teacher ./none",
    "--distill.teacher dit_xlarge_patch3": "distill.teacher dit_xlarge_patch3 registered",
    "--distill.teacher dit_small_patch2": "distill.teacher dit_small_patch2 weights",
    "--distill.task_loss_weight 0.5": "distill.task_loss_weight distill.teacher",
    "--distill.teacher {0} --distill.distill_loss_weight 0": "distill.teacher {0} distill.distill_loss_weight 0",
    "--distill.teacher {0} --distill.temperature 2": "distill.temperature",
    "--distill.teacher {0} --distill.token_loss_weight 2": "distill.token_loss_weight",
    "--distill.teacher {1}": "distill.teacher {1} model.safetensors",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_distilled_is_refused(options, teacher, tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"torn")
    sources = (teacher, tmp_path / "broken")
    argv = arguments("dit", tmp_path / "run", 1, 1, *options.format(*sources).split())
    said = refused(capsys, train_dit.main, *argv)
    assert_says(said, REFUSED[options].format(*sources))
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_latents_learns_with_the_vae_of_its_own(tmp_path, capsys):
    """The images are encoded first; latents of another VAE are refused."""
    vaes = []
    for seed in range(2):
        tiny_vae(seed).save_pretrained(tmp_path / f"vae{seed}")
        vaes.append(tmp_path / f"vae{seed}")
    root = write_folder(tmp_path / "images", size=(16, 16))
    of_latents = ["--data.root", root, "--data.img_size", "16", "--vae"]
    dense = tmp_path / "dense"
    plain = ["--model.name", "dit_small_patch2", "--ema.decay", "0", "--ema.warmup", "false"]
    train_dit.main(arguments("dit", dense, 1, 1, *of_latents, vaes[0], *plain))
    train_dit.main(converted(dense, tmp_path / "run", 2, *of_latents, vaes[0]))
    lines = logged(tmp_path / "run")
    assert lines[0]["kd_loss"] == 0 < lines[0]["mse"]
    frozen = json.loads((tmp_path / "run" / "frozen.json").read_text())
    assert frozen.keys() == {"distill.teacher", "vae"}
    argv = converted(dense, tmp_path / "other", 1, *of_latents, vaes[1])
    assert_says(refused(capsys, train_dit.main, *argv), f"distill.teacher {dense} VAE")


def test_an_estimate_names_the_time_of_the_teacher(teacher, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moh_vision.engine.estimate.PRODUCT_SECONDS", 0.01)
    train_dit.main(converted(teacher, tmp_path / "run", 2, "--estimate"))
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("  teacher")]
    assert float(line.split()[1]) > 0
    assert not (tmp_path / "run").exists()
    train_dit.main(arguments("dit", tmp_path / "run", 2, 1, "--estimate"))
    assert "  teacher" not in capsys.readouterr().out


def test_steps_as_graphs_learn_the_same(teacher, tmp_path, eager_graphs):
    """The teacher predicts before a graph is replayed, which gets its prediction as it gets the noise."""
    made = eager_graphs()
    for name, more in (("eager", ()), ("graph", ("--cuda_graph", "on"))):
        argv = ["--distill.teacher", teacher, *more]
        train_dit.main(arguments("dit", tmp_path / name, 6, 100, *argv))
    assert made[-1].replays > 0
    assert outcome(tmp_path / "eager") == outcome(tmp_path / "graph")


def test_a_saved_pipeline_and_published_weights_teach(teacher, tmp_path, monkeypatch, run_command):
    """Published weights name neither classes nor a VAE: their classes are taken in the order of the data."""
    published = tmp_path / "published"
    run = tmp_path / "run"
    train_dit.main(converted(teacher, run, 1, "--optim.lr", "1e-9"))
    assert run_command("publish", run, "--output", published).code == 0
    said = []
    model = create("dit_small_patch2", "diffusion", **dict(SIZES, num_heads=4))
    by_pipeline = DiffusionTeacher(str(published), model, DIGITS, 0.1, None, said.append)
    by_run = DiffusionTeacher(str(run), model, DIGITS, 0.1, None, said.append)
    x, t, labels = torch.randn(2, 1, 8, 8), torch.tensor([10, 900]), torch.tensor([3, 10])
    torch.testing.assert_close(by_pipeline(x, t, labels), by_run(x, t, labels))
    assert by_pipeline.sha256 == by_run.sha256

    def open_by_name(found):
        assert found.source == found.architecture == "dit_xlarge_patch2.in1k_256"
        return by_run.teacher, dict(label_drop=None, vae=None, classes=[], weights="its own")

    monkeypatch.setattr("moh_vision.diffusion.teacher.open_model", open_by_name)
    name = "dit_xlarge_patch2.in1k_256"
    by_name = DiffusionTeacher(name, model, DIGITS, 0.1, None, said.append)
    torch.testing.assert_close(by_name(x, t, labels), by_run(x, t, labels))
    assert_says("\n".join(said), f"distill.teacher {name} 10 classes")
