"""Runs with groups of MLPs: trained, resumed, opened, started from, validated, sampled, published, exported."""

import json
import re

import pytest
import timm
import torch
from diffusers import DiffusionPipeline

import moh_vision
from moh_vision.__main__ import main as command
from moh_vision.attention import mlp_layers
from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.diffusion import sample
from moh_vision.diffusion.sampling import weak_predict
from moh_vision.models.creation import create
from moh_vision.models.head_budgets import saved_budget
from moh_vision.models.weight_files import read_safetensors
from moh_vision.models.weights import load_checkpoint
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, entries, same, tensors, whole_and_resumed
from tests.support.tiny_dit import awake

GROUPS = "--model.scope sample --model.head_budget 0.75 --model.mlp_budget 0.75".split()
# Steps large enough that another share is seen in outputs.
LIVELY = "--optim.lr 0.03 --optim.warmup_steps 0 --optim.schedule constant".split()
MORE = {
    "cls": [*GROUPS, *LIVELY],
    "dit": [*GROUPS, *LIVELY, "--model.kwargs.route_by", "timestep"],
}
# Groups alone: all heads run.
ALONE = "--model.router dense --model.scope sample --model.mlp_budget 0.5 --balance_weight 0.1"
WINGS = ("cls", "dit")


def images(name):
    """Return inputs of a model of a small run."""
    torch.manual_seed(1)
    pixels = torch.randn(2, 1, 8, 8)
    if name == "cls":
        return (pixels,)
    return pixels, torch.tensor([5, 900]), torch.tensor([1, 10])


def output(model, name):
    with torch.no_grad():
        return model.eval().forward_routed(*images(name))[0]


def groups(model):
    return moh_vision.head_budget(model)["mlp"]


@pytest.fixture(scope="module")
def runs(trained):
    """Runs of 4 steps with groups by name."""
    options = ("--save-every", 1, "--ema.decay", 0)
    return {name: trained(name, 4, *options, *MORE[name]) for name in WINGS}


@pytest.fixture(scope="module")
def published(runs, tmp_path_factory):
    """What publish makes of the runs."""
    folder = tmp_path_factory.mktemp("published")
    for name, run in runs.items():
        assert command(["publish", str(run), "--output", str(folder / name)]) == 0
    return folder


@pytest.mark.parametrize("name", [pytest.param("cls", marks=pytest.mark.slow), "dit"])
def test_resuming_changes_no_bit(name, tmp_path):
    """Of weights, EMA and optimiser, with an elastic budget, whose steps run other groups too."""
    more = [*MORE[name], "--budget_range", "0.5", "1.0", "--ema.decay", "0.5"]
    whole, _ = whole_and_resumed(name, tmp_path, [2, 4], *more)
    average = tensors(whole / "ema.safetensors")
    last = tensors(whole / "model.safetensors")
    moved = "blocks.0.mlp.router.routed.weight"
    assert not torch.equal(average[moved], last[moved])
    assert groups(moh_vision.load_run(whole))["share"] == 1
    balance = [entry["balance_loss"] for entry in entries(whole) if "balance_loss" in entry]
    assert len(balance) == 4 and min(balance) > 0


@pytest.mark.parametrize("name", WINGS)
def test_every_form_of_a_run_has_its_groups(runs, published, name):
    run = runs[name]
    model = moh_vision.open_run(run).model
    assert groups(model)["share"] == 0.75
    for form in (run / "model.safetensors", run / "checkpoints" / "step_4", published / name):
        again = moh_vision.open_run(str(form)).model
        assert same(again, model)
        assert saved_budget(again) == saved_budget(model)
        assert torch.equal(output(again, name), output(model, name))


def test_a_published_classifier_is_timms(runs, published, tmp_path):
    model = moh_vision.load_run(runs["cls"])
    loaded = timm.create_model(f"local-dir:{published / 'cls'}", pretrained=True)
    assert torch.equal(output(loaded, "cls"), output(model, "cls"))
    moh_vision.set_head_budget(loaded, mlp=0.5)
    timm.models.save_for_hf(loaded, tmp_path, model_args=loaded._model_args)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert groups(again)["share"] == 0.5
    assert torch.equal(output(again, "cls"), output(loaded, "cls"))
    asked = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, mlp_budget=1.0)
    assert groups(asked)["share"] == 1


def test_a_published_pipeline_is_diffusers(runs, published, tmp_path):
    model = moh_vision.load_run(runs["dit"])
    folder = str(published / "dit")
    pipe = DiffusionPipeline.from_pretrained(folder, custom_pipeline=folder, trust_remote_code=True)
    assert torch.equal(output(pipe.transformer, "dit"), output(model, "dit"))
    moh_vision.set_head_budget(pipe.transformer, mlp=0.5)
    pipe.save_pretrained(tmp_path)
    again = type(pipe).from_pretrained(tmp_path)
    assert groups(again.transformer)["share"] == 0.5
    assert torch.equal(output(again.transformer, "dit"), output(pipe.transformer, "dit"))


@pytest.mark.parametrize("name", WINGS)
def test_the_card_of_a_model_with_groups(published, name):
    text = (published / name / "README.md").read_text()
    assert "75.0 % of its attention heads active and 75.0 % of its MLPs' groups" in text
    assert "mlp_budget 0.75" in text
    assert "active groups: 12 of 16 (75.0 %)" in text


CARDS = {
    "heads and groups": (MORE["cls"], "set_head_budget(model, SHARE, mlp=SHARE)"),
    "groups alone": (ALONE.split(), "set_head_budget(model, mlp=SHARE)"),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_sets_shares_that_the_model_has(trained, tmp_path, case):
    """Its line runs as it stands."""
    more, words = CARDS[case]
    run = trained("cls", 1, "--budget_range", "0.5", "1.0", *more)
    assert command(["publish", str(run), "--output", str(tmp_path / "card")]) == 0
    assert f"`moh_vision.{words}` sets another one" in (tmp_path / "card/README.md").read_text()
    model = moh_vision.load_run(run)
    eval(f"moh_vision.{words}", dict(moh_vision=moh_vision, model=model, SHARE=0.5))
    assert groups(model)["share"] == 0.5


def test_validation_at_another_share_of_groups(runs, capsys):
    options = ["--checkpoint", str(runs["cls"])]
    scores = []
    for share in ("0.75", "1.0"):
        validate.main([*options, "--model.mlp_budget", share])
        scores.append(re.search(r"loss (\S+)", capsys.readouterr().out)[1])
    assert scores[0] != scores[1]
    dense = [*options, "--model.scope", "token"]
    error = refused(capsys, validate.main, *dense)
    assert_says(error, "model.scope effect model.head_budget model.mlp_budget")


def test_samples_at_another_share_of_groups(runs, trained, tmp_path, capsys):
    """The share is in the scores, in the table, and in the MACs of its row."""
    draw = f"--checkpoint {runs['dit']} --num-images 8 --batch-size 8 --steps 2 --sampler ddim"
    drawn = {}
    macs = {}
    for share in (0.5, 1.0):
        file = tmp_path / f"{share}.npz"
        judged = f"--score digits --extractor {runs['cls']} --overwrite true"
        sample.main([*f"{draw} --out {file} --mlp_budget {share} {judged}".split()])
        scores = json.loads((runs["dit"] / "scores.json").read_text())
        assert scores["sampling"]["mlp_budget"] == share
        capsys.readouterr()
        assert command(["table", str(runs["dit"])]) == 0
        printed = capsys.readouterr().out
        assert f"mlp_budget {share}" in printed
        titles, _, row = (line.split("|") for line in printed.splitlines()[:3])
        macs[share] = float(row[titles.index(" MACs, M ")])
        drawn[share] = file.read_bytes()
    assert macs[0.5] < macs[1.0]
    assert drawn[0.5] != drawn[1.0]
    dense = trained("dit", 1)
    argv = f"--checkpoint {dense} --num-images 2 --grid {tmp_path}/g.png --mlp_budget 0.5"
    error = refused(capsys, sample.main, *argv.split())
    assert_says(error, "mlp_budget 0.5 MoHDiTTransformer2DModel dense moh_vision.convert")


STARTS = {
    "with routers of MLPs": GROUPS,
    "with other shared groups": [*GROUPS[:-1], "[[3,1],[4,2]]"],
}
STILL = "--optim.lr 1e-12 --optim.weight_decay 0 --optim.warmup_steps 0 --ema.decay 0".split()


def started(folder, source, *more):
    """Return the model of a run of one step that changes next to nothing."""
    train_cls.main(arguments("cls", folder, 1, 1, *GROUPS, *STILL, *more, "--init_from", source))
    return moh_vision.load_run(folder)


@pytest.mark.parametrize(
    "case",
    [pytest.param("with routers of MLPs", marks=pytest.mark.slow), "with other shared groups"],
)
def test_a_run_starts_with_the_groups_of_weights(trained, tmp_path, case):
    """Their routers and their number of shared groups; the share is the run's."""
    source = trained("cls", 2, *STARTS[case])
    first = moh_vision.load_run(source)
    model = started(tmp_path / "run", source)
    shared = [row["shared"] for row in groups(first)["layers"]]
    assert [row["shared"] for row in groups(model)["layers"]] == shared
    assert groups(model)["share"] == 0.75
    for name, tensor in tensors(first).items():
        torch.testing.assert_close(tensors(model)[name], tensor, rtol=0, atol=1e-6)
    # A new model takes the shared groups too.
    _, metadata = read_safetensors(tmp_path / "run" / "model.safetensors")
    fresh = create("moh_vit_tiny_patch16_224", None, **metadata["arguments"])
    loaded = load_checkpoint(fresh, tmp_path / "run")
    assert saved_budget(loaded) == saved_budget(model)


LACKING = {
    "routers of MLPs": GROUPS[:-2],
    "all routers": ["--model.router", "dense", "--model.head_budget", "null"],
}


@pytest.mark.parametrize("lacking", LACKING)
def test_routers_that_weights_lack_start_as_the_dense_model(lacking, trained, tmp_path, capsys):
    """The output is the source's while all heads and groups run, as after `convert`."""
    source = trained("cls", 2, *LACKING[lacking])
    first = moh_vision.load_run(source)
    model = started(tmp_path / "run", source)
    added = tensors(model).keys() - tensors(first).keys()
    assert added and all(".router." in name for name in added)
    said = f"init_from: {len(added)} router tensors start as a dense model"
    assert said in capsys.readouterr().out
    assert max(layer.router.routed.weight.abs().max() for layer in mlp_layers(model)) < 1e-9
    moh_vision.set_head_budget(model, 1.0, mlp=1.0)
    moh_vision.set_head_budget(first, 1.0)
    torch.testing.assert_close(output(model, "cls"), output(first, "cls"), rtol=0, atol=1e-5)


def test_weights_with_another_number_of_groups_are_refused(runs, tmp_path, capsys):
    options = ["--model.mlp_groups", "16", "--init_from", runs["cls"]]
    argv = arguments("cls", tmp_path / "run", 1, 1, *GROUPS, *options)
    error = refused(capsys, train_cls.main, *argv)
    assert_says(error, f"init_from {runs['cls']} blocks.0.mlp groups mlp_groups 16")


def test_a_guide_with_fewer_groups_alone():
    """heads:0.5 is weaker than half of the heads and all groups; no part of it may run more."""
    options = dict(img_size=8, in_chans=1, embed_dim=32, depth=2, num_heads=4, num_classes=10)
    options.update(scope="sample", head_budget=0.5, mlp_budget=0.5)
    model = awake(create("moh_dit_small_patch2_75", None, **options))

    def guided(share):
        torch.manual_seed(0)
        weak = weak_predict(model, f"heads:{share}")
        with torch.no_grad():
            return weak(*images("dit"))

    refuse("guide 4 heads smaller", guided, 0.5)
    moh_vision.set_head_budget(model, mlp=1.0)
    assert not torch.allclose(guided(0.5), output(model, "dit"))
    refuse("guide 6 heads 4 smaller", guided, 0.75)
