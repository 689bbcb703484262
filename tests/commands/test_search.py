"""The command search: exact if the loss is a sum over layers; its file is a budget that runs take."""

import itertools
import random
import re

import numpy as np
import pytest
import timm
import torch
import yaml

import moh_vision
from moh_vision.__main__ import main
from moh_vision.attention import (
    HeadBudget,
    ModelBudgets,
    attention_layers,
    head_budget,
    mlp_layers,
    model_budgets,
    resolve_budget,
    running,
)
from moh_vision.attention.budget import change_budget, spread
from moh_vision.classification import train as train_cls
from moh_vision.commands.search import cheapest, compare, search_budget
from moh_vision.engine.command_line import parse_config
from moh_vision.language.config import LanguageConfig
from moh_vision.language.data.inputs import INPUTS
from moh_vision.models.head_budgets import budget_pairs
from moh_vision.models.weights import find_weights
from tests.support.refusals import assert_says, one_line, refuse, unread
from tests.support.small_runs import arguments

SIZES = dict(img_size=16, patch_size=8, embed_dim=48, num_heads=6, depth=3, num_classes=3)
VIT = "moh_vit_tiny_patch16_224"


def vit(**kwargs):
    torch.manual_seed(0)
    return timm.create_model(
        VIT, **{**SIZES, "head_budget": [(2, 2), (1, 3), (0, 4)], **kwargs}
    ).eval()


@pytest.mark.parametrize("seed", range(5))
def test_no_budget_costs_less(seed):
    """`cheapest` is compared with a search through all budgets."""
    draw = random.Random(seed)
    # For each layer {active heads: cost}.
    costs = [
        {k: draw.random() for k in range(least, heads + 1)}
        for least, heads in ((1, 5), (2, 6), (4, 4), (1, 4))
    ]

    def cost(chosen):
        return sum(layer[k] for layer, k in zip(costs, chosen))

    for total in range(8, 20):
        every = (chosen for chosen in itertools.product(*costs) if sum(chosen) == total)
        assert tuple(cheapest(costs, total)) == min(every, key=cost)
    # Layers that choose heads in groups of two cannot run 7 heads in total, but 6.
    assert cheapest([{2: 1.0, 4: 0.0}, {2: 3.0, 4: 0.0}], 7) == [2, 4]


def test_a_separable_loss_is_searched_exactly_and_the_model_stays():
    model = vit()
    before = budget_pairs(model)
    layers = attention_layers(model)
    # table[i][k]: what layer i adds to the loss with k active heads
    table = [[random.Random(f"{i} {k}").random() for k in range(7)] for i in range(3)]

    def loss_of(model):
        return sum(losses[layer.budget.active] for losses, layer in zip(table, layers))

    active, losses = search_budget(model, loss_of, 0.7)
    assert budget_pairs(model) == before
    # Each layer runs at least its shared heads and one routed head.
    assert [min(of_layer) for of_layer in losses] == [3, 2, 1]
    every = (c for c in itertools.product(*losses) if sum(c) == 13)
    assert tuple(active) == min(every, key=lambda c: sum(t[k] for t, k in zip(table, c)))


def test_losses_are_measured_with_the_budgets_they_are_listed_for():
    model = vit()
    images = torch.randn(4, 3, 16, 16)

    @torch.no_grad()
    def loss_of(model):
        return model(images).square().mean().item()

    active, losses = search_budget(model, loss_of, 0.75)
    moh_vision.set_head_budget(model, [(2, 4), (1, 2), (0, 6)])
    assert losses[1][3] == loss_of(model) != losses[1][6]
    compared = compare(model, active, loss_of)
    assert {sum(budget["active"]) for budget in compared.values()} == {14}
    moh_vision.set_head_budget(model, [(2, active[0] - 2), (1, active[1] - 1), (0, active[2])])
    assert compared["searched"]["loss"] == loss_of(model)


def test_spread_is_the_ramp_and_keeps_shared_heads():
    ramp = resolve_budget("ramp:0.75", 12, 12, 64)
    assert spread("ramp", 108, ramp) == [b.active for b in change_budget("ramp:0.75", ramp)]
    assert spread("uniform", 54, resolve_budget("uniform:0.75:0", 12, 6, 64)) == [4] * 6 + [5] * 6
    fixed = resolve_budget([(6, 0), (3, 2), (1, 2)], 3, 6, 64)
    assert spread("uniform", 12, fixed) == [6, 4, 2]


def test_groups_of_mlps_are_searched_exactly_with_the_heads_as_they_are():
    model = vit(scope="sample", mlp_budget=[(2, 2), (1, 3), (0, 4)], mlp_groups=6)
    before = model_budgets(model)
    layers = mlp_layers(model)
    # table[i][k]: what layer i adds to the loss with k active groups
    table = [[random.Random(f"{i} {k}").random() for k in range(7)] for i in range(3)]

    def loss_of(model):
        assert model_budgets(model).heads == before.heads
        return sum(losses[layer.budget.active] for losses, layer in zip(table, layers))

    active, losses = search_budget(model, loss_of, 0.7, parts="groups")
    assert [min(of_layer) for of_layer in losses] == [3, 2, 1]
    every = (c for c in itertools.product(*losses) if sum(c) == 13)
    assert tuple(active) == min(every, key=lambda c: sum(t[k] for t, k in zip(table, c)))
    compared = compare(model, active, loss_of, "groups")
    assert {sum(budget["active"]) for budget in compared.values()} == {13}
    assert compared["searched"]["loss"] == min(budget["loss"] for budget in compared.values())
    assert model_budgets(model) == before


@pytest.mark.parametrize(
    "share, options, facts",
    [
        pytest.param(
            0.3,
            {},
            "share 0.3 18 heads 5 6 0.333",
            id="too small a share",
        ),
        pytest.param(
            0.5,
            dict(router="dense", head_budget=None),
            "MoHVisionTransformer heads moh_vision.convert",
            id="a dense model",
        ),
        pytest.param(
            0.5,
            dict(router="mae", head_budget=None),
            "MoHVisionTransformer router all heads",
            id="MAE",
        ),
        pytest.param(
            0.5,
            dict(router="gated", head_budget=None),
            "MoHVisionTransformer router all heads",
            id="gated",
        ),
    ],
)
def test_what_cannot_be_searched(share, options, facts):
    refuse(facts, search_budget, vit(**options), lambda model: 0.0, share)


# Models without routed MLPs -> what is said.
WITHOUT_GROUPS = {
    "routed heads": ({}, "MoHVisionTransformer groups model.mlp_budget"),
    "dense": (
        dict(router="dense", head_budget=None),
        "MoHVisionTransformer groups moh_vision.convert",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_GROUPS)
def test_a_model_without_routed_mlps_has_no_groups_to_search(case):
    options, facts = WITHOUT_GROUPS[case]
    refuse(facts, search_budget, vit(**options), lambda model: 0.0, 0.5, parts="groups")


def test_a_loss_that_is_not_finite_is_named():
    model = vit()
    first = attention_layers(model)[0]

    def loss_of(model):
        return float("nan") if first.budget.active == 3 else 1.0

    with one_line("loss 3 6 heads layer 0 nan"):
        search_budget(model, loss_of, 0.7)
    assert budget_pairs(model) == [[2, 2], [1, 3], [0, 4]]


def test_heads_of_llama_are_searched_in_whole_groups():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
    )
    pairs = [[2, 1], [1, 4], [0, 6]]
    model = moh_vision.convert(transformers.LlamaForCausalLM(config), pairs)
    assert model.config.moh["head_budget"] == pairs
    tokens = torch.arange(20)[None]

    def loss_of(model):
        return model(input_ids=tokens, labels=tokens).loss.item()

    active, losses = search_budget(model.eval(), loss_of, 0.75)
    assert sum(active) == 14 and len(set(losses[0].values())) > 1
    config.num_key_value_heads = 3
    model = moh_vision.convert(transformers.LlamaForCausalLM(config), group=True).eval()
    active, losses = search_budget(model, loss_of, 0.75)
    assert sum(active) in (12, 14) and all(k % 2 == 0 for of_layer in losses for k in of_layer)
    for budget in compare(model, active, lambda m: 0.0).values():
        assert sum(budget["active"]) == sum(active)


def test_a_run_takes_what_the_search_of_another_wrote(trained, tmp_path, monkeypatch):
    first = trained("cls", 2)
    second = tmp_path / "second"
    file = tmp_path / "budget.yaml"
    argv = ["search", str(first), "--share", "0.75", "--images", "16", "--output", str(file)]
    with unread(monkeypatch):
        assert main(argv) == 0
    text = file.read_text()
    pairs = yaml.safe_load(text)
    assert sum(map(sum, pairs)) == 12
    assert f"# 12 heads by python -m moh_vision search: {first}" in text
    losses = r"searched \d\.\d+, uniform \d\.\d+, ramp \d\.\d+\n"
    assert re.search(rf"# cross-entropy of all heads .*; on others of digits: {losses}", text)
    # A shell passes the text on by --model.head_budget "$(cat budget.yaml)".
    train_cls.main(arguments("cls", second, 2, 2, "--model.head_budget", text))
    found = find_weights(second)
    model = found.build()
    assert budget_pairs(model) == pairs
    assert found.arguments["head_budget"] == pairs
    assert found.config["model"]["head_budget"] == pairs
    assert budget_pairs(moh_vision.set_head_budget(moh_vision.load_run(first), pairs)) == pairs


# Options of the search -> percent of the groups that run in it.
SEARCHED_WITH = {
    "as in the run": ([], 75),
    "another mlp_budget": (["--model.mlp_budget", "0.5"], 50),
}


@pytest.mark.parametrize("options, percent", SEARCHED_WITH.values(), ids=SEARCHED_WITH)
def test_heads_are_searched_with_the_groups_of_mlps_as_they_are(
    trained, tmp_path, run_command, options, percent
):
    run = trained("cls", 2, "--model.scope", "sample", "--model.mlp_budget", "0.75")
    file = tmp_path / "budget.yaml"
    argv = ["search", run, "--share", "0.75", "--images", "16", "--output", file, *options]
    out = run_command(*argv).out
    assert f"groups of MLPs stay: {percent:.1f} % of them run\n" in out
    pairs = yaml.safe_load(file.read_text())
    model = moh_vision.load_run(run)
    assert len(pairs) == len(attention_layers(model))
    moh_vision.set_head_budget(model, pairs)
    assert head_budget(model)["share"] == head_budget(model)["mlp"]["share"] == 0.75


# Options of a run, and the layers of the model that the search makes of a dense one.
GROUPS_SEARCHED_IN = {
    "a run with routed MLPs": ["--model.scope", "sample", "--model.mlp_budget", "0.75"],
    "a dense run": ["--model.router", "dense"],
}


@pytest.mark.parametrize("name", GROUPS_SEARCHED_IN)
def test_groups_of_a_run_are_searched(trained, tmp_path, run_command, name):
    run = trained("dit", 2, *GROUPS_SEARCHED_IN[name])
    file = tmp_path / "budget.yaml"
    out = run_command("search", run, "--mlp-share", "0.75", "--images", "8", "--output", file).out
    dense = name == "a dense run"
    heads = 100.0 if dense else 75.0
    assert f"heads stay: {heads:.1f} % of them run\nlayer  loss above that of all groups" in out
    use = f'{file}: --model.mlp_budget "$(cat {file})"'
    if dense:
        use += " --model.convert.scope sample --calibrate-images 8"
    assert f"{use}\n" in out
    text = file.read_text()
    assert ("converted with its strongest groups shared" in text) == dense
    pairs = yaml.safe_load(text)
    assert sum(map(sum, pairs)) == 12
    model = moh_vision.load_run(run)
    if dense:
        moh_vision.convert(model, scope="sample", mlp_budget=pairs)
    else:
        moh_vision.set_head_budget(model, mlp=pairs)
    groups = head_budget(model)["mlp"]
    assert [layer["active"] for layer in groups["layers"]] == list(map(sum, pairs))


SHARES = {"none": [], "both": ["--share", "0.5", "--mlp-share", "0.5"]}


@pytest.mark.parametrize("given", SHARES)
def test_one_share_is_asked_for(tmp_path, capsys, given):
    argv = ["search", "RUN", "--output", str(tmp_path / "a.yaml"), *SHARES[given]]
    assert main(argv) == 2
    assert_says(capsys.readouterr().err, "--share heads --mlp-share groups")


def test_a_dense_diffusion_model_is_converted_and_searched_on_fixed_noise(
    trained, tmp_path, run_command, hours_pass
):
    hours_pass()
    run = trained("dit", 2, "--model.router", "dense")
    argv = ["search", run, "--share", "0.8", "--images", "8", "--output"]
    outs = [run_command(*argv, tmp_path / f"{number}.yaml").out for number in (1, 2)]
    found, again = ((tmp_path / f"{number}.yaml").read_text() for number in (1, 2))
    assert found == again
    assert "converted with its strongest" in found
    assert sum(map(sum, yaml.safe_load(found))) == 13
    assert "converted with its strongest heads shared: diffusion loss" in outs[0]
    # The count that is announced at first is that of the end.
    count = outs[0].partition("search: 1 of ")[2].split()[0]
    assert f"search: {count} of {count} measurements, 00:00 left" in outs[0]


def test_causal_runs_are_searched_on_blocks_of_text(trained, tmp_path, run_command):
    for name in ("clm_small", "clm_moh_small_75"):
        run = trained("clm", 2, "--model.name", name)
        file = tmp_path / f"{name}.yaml"
        out = run_command("search", run, "--share", "0.625", "--images", "4", "--output", file).out
        assert "nats per token of 4 blocks" in out
        pairs = yaml.safe_load(file.read_text())
        assert ("converted with" in file.read_text()) == (name == "clm_small")
        assert sum(map(sum, pairs)) == 10
        model = moh_vision.load_run(run)
        if name == "clm_small":
            moh_vision.convert(model, pairs)
        else:
            moh_vision.set_head_budget(model, pairs)
        assert [layer["active"] for layer in head_budget(model)["layers"]] == list(map(sum, pairs))
    # The loss of all heads is the mean over the tokens of those blocks.
    config = parse_config(LanguageConfig, ["--config", str(run / "config.yaml")], "t")
    inputs = INPUTS["clm"](config.data, str(tmp_path), 0, str(run))
    blocks = [inputs.train[0, i * len(inputs.train) // 8] for i in range(0, 8, 2)]
    ids, labels = (torch.tensor(np.stack(side)) for side in zip(*blocks))
    full = [
        HeadBudget(8, 4, layer.budget.shared, layer.budget.candidates)
        for layer in attention_layers(model)
    ]
    with torch.no_grad(), running(model, ModelBudgets(tuple(full))):
        logits = model(input_ids=ids).logits
    kept = labels != -100
    loss = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    written = float(re.search(r"of all heads ([\d.]+);", file.read_text())[1])
    assert written == pytest.approx(loss.item(), rel=1e-5)
