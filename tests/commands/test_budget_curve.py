"""The command budget-curve, which draws scores and latency over the share of heads."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
from PIL import Image

from moh_vision.attention import attention_layers, head_budget
from moh_vision.attention.budget import resolve_budget
from moh_vision.classification import validate
from moh_vision.commands.budget_curve import budgets_of, draw, measure
from moh_vision.engine.accelerator import make_accelerator
from moh_vision.engine.opened import Opened
from moh_vision.models.head_budgets import budget_pairs
from tests.support import tiny_vit
from tests.support.refusals import assert_says, refuse

HEADS = ["--model.num_heads", "8"]


def vit(budget, **kwargs):
    options = dict(tiny_vit.TINY, depth=3, embed_dim=48, num_heads=8, head_budget=budget)
    return timm.create_model("moh_vit_tiny_patch16_224", **{**options, **kwargs}).eval()


def active(budgets):
    """Return {share: active heads of each layer} of {share: budgets of the model}."""
    return {share: [b.active for b in one.heads] for share, one in budgets.items()}


def test_shares_are_spread_as_the_model_s_own():
    """A model whose budget is a ramp gets ramps, and one whose budget is uniform gets uniform budgets."""
    ramp = vit(0.5)
    uniform = vit("uniform:0.5")
    found = active(budgets_of(ramp, ["1", "0.75"]))
    assert list(found) == [0.5, 0.75, 1]
    assert found[0.75] == [b.active for b in resolve_budget(0.75, 3, 8, 6)]
    assert found[0.75][0] < found[0.75][2]
    assert active(budgets_of(uniform, ["0.75"])) == {0.5: [4] * 3, 0.75: [6] * 3}
    assert active(budgets_of(ramp, ["uniform:0.75"]))[0.75] == [6] * 3
    for model in (ramp, uniform):
        shared = [layer.budget.shared for layer in attention_layers(model)]
        for budgets in budgets_of(model, None).values():
            assert [b.shared for b in budgets.heads] == shared


MLPS = dict(scope="sample", mlp_budget=0.5)
# Case -> (budget of the heads, what a share changes, heads and groups at shares of 0.5 and 0.75 in words).
CHANGED = {
    "heads and groups": (
        0.5,
        "heads and groups of MLPs",
        ["50.0 % of the heads and 50.0 % of the MLPs' groups"]
        + ["75.0 % of the heads and 75.0 % of the MLPs' groups"],
    ),
    "groups alone": (
        [(8, 0)] * 3,
        "groups of MLPs",
        ["100.0 % of the heads and 50.0 % of the MLPs' groups"]
        + ["100.0 % of the heads and 75.0 % of the MLPs' groups"],
    ),
}


@pytest.mark.parametrize("budget, parts, words", CHANGED.values(), ids=CHANGED)
def test_groups_of_mlps_run_at_the_share_of_the_heads(budget, parts, words):
    found = budgets_of(vit(budget, **MLPS), ["0.5", "0.75"])
    assert list(found) == [0.5, 0.75]
    assert [str(budgets) for budgets in found.values()] == words
    assert {budgets.parts for budgets in found.values()} == {parts}


def test_the_saved_budget_is_named_as_it_is():
    """At its share of heads the curve has the model as it was saved, with another share of groups."""
    found = budgets_of(vit(0.5, scope="sample", mlp_budget=0.75), ["0.5"])
    assert [str(budgets) for budgets in found.values()] == [
        "50.0 % of the heads and 75.0 % of the MLPs' groups"
    ]


def test_shares_that_the_shared_heads_do_not_allow():
    # 14 of 24 heads are the least that can run: the shared ones, and a routed one in each layer.
    model = vit([(4, 2), (4, 2), (3, 3)])
    assert list(budgets_of(model, None)) == [0.625, 0.75, 0.875, 1.0]
    assert list(budgets_of(model, ["0.584"])) == [14 / 24, 0.75]
    refuse("--shares 0.5 0.583 1", budgets_of, model, ["0.75", "0.5"])
    refuse(
        "MoHVisionTransformer routed moh_vision.convert",
        lambda: budgets_of(vit([(8, 0)] * 3), None),
    )
    for router in ("dense", "mae", "gated"):
        assert active(budgets_of(vit(None, router=router), ["0.75"])) == {1.0: [8] * 3}


def test_scores_and_times_are_measured_with_the_budget_of_their_share(monkeypatch):
    """The score and the milliseconds of the model are its number of active heads."""

    def timer(_, globals, num_threads):
        def blocked_autorange(min_run_time):
            return SimpleNamespace(mean=globals["run"]() / 1000)

        return SimpleNamespace(blocked_autorange=blocked_autorange)

    monkeypatch.setattr("torch.utils.benchmark.Timer", timer)
    model = vit(0.75)
    before = budget_pairs(model)

    def running():
        return head_budget(model)["active"]

    one = Opened(None, None, model, dict(weights="W", architecture="A"))
    one.scores = lambda: dict(top1=float(running()), active_heads=[1])
    one.make_forward = lambda: (running, 2)
    one.accelerator = make_accelerator("no")
    (line,) = measure(["run"], [one], ["0.5", "1"], rounds=3)
    assert line["shares"] == [0.5, 0.75, 1.0] and line["share"] == 0.75
    assert [s["top1"] for s in line["scores"]] == [12, 18, 24]
    assert line["milliseconds"] == [[12] * 3, [18] * 3, [24] * 3]
    assert [sum(map(sum, layers)) for layers in line["layers"]] == [12, 18, 24]
    assert budget_pairs(model) == before
    figure = draw([line, {**line, "run": "other", "shares": [0.5, 0.75, 0.9]}])
    above, below = figure.axes
    assert above.get_ylabel() == "top-1, %" and list(above.lines[0].get_ydata()) == [12, 18, 24]
    legend = [text.get_text() for text in above.get_legend().get_texts()]
    assert legend == ["run, token scope", "other, token scope"]
    assert list(above.lines[1].get_xdata()) == [75]
    assert list(below.lines[0].get_ydata()) == [12, 18, 24]


@pytest.fixture
def curve(run_command, hours_pass):
    """curve(*argv) runs the command and returns the lines of its figure, and what it printed."""
    hours_pass()

    def run(*argv):
        code, out, _ = run_command("budget-curve", *argv, "--rounds", 1)
        assert code == 0
        figure = argv[argv.index("--output") + 1]
        return json.loads(figure.with_suffix(".json").read_text())["lines"], out

    return run


def test_classifiers_of_both_scopes(trained, tmp_path, capsys, curve, refused):
    runs = [trained("cls", 2, *HEADS, "--model.scope", scope) for scope in ("token", "sample")]
    figure = tmp_path / "curve.png"
    options = ["--shares", "0.5", "1", "--data.eval_batch_size", "50"]
    (token, sample), shown = curve(*runs, "--output", figure, *options)
    words = "/ema.safetensors; scored on digits, val split\n"
    assert all(shown.count(f"{run}: weights of {run}{words}") == 1 for run in runs)
    assert shown.count(" ms a batch\n") == 6
    assert shown.count(" of the heads, top-1, % ") == 6 == shown.count("validation: 1 of 8 steps, ")
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert (token["scope"], sample["scope"]) == ("token", "sample")
    assert token["shares"] == [0.5, 0.75, 1.0]
    assert token["batch_size"] == 50
    assert token["executor"] == "auto"
    assert token["data"] == "digits, val split"
    for low, middle, high in token["milliseconds"]:
        assert 0 < low <= middle <= high
    # validate.py with the same budget finds the same loss.
    validate.main(
        ["--checkpoint", str(runs[0]), "--model.head_budget", json.dumps(token["layers"][0])]
    )
    assert f"loss {token['scores'][0]['loss']:.4f}, 355 images" in capsys.readouterr().out
    error = refused("budget-curve", *runs, "--output", tmp_path / "new.svg", "--shares", "0.1")
    assert_says(error, f"{runs[0]} --shares 0.1 0.438 1")
    dense = trained("cls", 1, *HEADS, "--model.router", "dense", "--model.head_budget", "null")
    (token, dense), _ = curve(runs[0], dense, "--output", tmp_path / "new.svg", "--shares", "0.75")
    assert (token["shares"], dense["shares"]) == ([0.75], [1.0])
    assert "cls, all heads" in (tmp_path / "new.svg").read_text()
    for digit in range(10):
        folder = tmp_path / "data/val" / str(digit)
        folder.mkdir(parents=True)
        Image.new("L", (8, 8)).save(folder / "a.png")
    other = Path(shutil.copytree(runs[0], tmp_path / "other"), "config.yaml")
    other.write_text(other.read_text().replace("root: digits", f"root: {tmp_path}/data"))
    error = refused("budget-curve", *runs, other.parent, "--output", tmp_path / "more.svg")
    assert_says(error, f"{tmp_path}/data digits --data.root")


def test_a_classifier_with_routed_mlps(trained, tmp_path, curve, refused):
    """Scores at a share are those of validate.py with this share of heads and of groups."""
    groups = [*HEADS, "--model.scope", "sample", "--model.mlp_budget", "0.75"]
    run = trained("cls", 2, *groups)
    figure = tmp_path / "curve.svg"
    dense_mlps = trained("cls", 2, *HEADS, "--model.scope", "sample")
    lines, said = curve(run, dense_mlps, "--output", figure, "--shares", "0.5")
    assert [line["parts"] for line in lines] == ["heads and groups of MLPs", "heads"]
    assert "50.0 % of the heads and 50.0 % of the MLPs' groups, top-1, % " in said
    assert [sum(map(sum, mlps)) for mlps in lines[0]["mlps"]] == [8, 12]
    assert "active heads or groups of MLPs, %" in figure.read_text()
    assert "sample scope, heads and groups of MLPs" in figure.read_text()
    scores = tmp_path / "scores.json"
    validate.main(
        f"--checkpoint {run} --model.head_budget 0.5 --model.mlp_budget 0.5 --score-file {scores}".split()
    )
    found = json.loads(scores.read_text())
    assert found["loss"] == pytest.approx(lines[0]["scores"][0]["loss"], abs=1e-5)
    argv = ["--output", tmp_path / "new.png", "--model.mlp_budget", "0.5"]
    error = refused("budget-curve", run, *argv)
    assert_says(error, "model.mlp_budget 0.5 effect --shares groups")


def test_samples_of_a_diffusion_model(trained, tmp_path, curve):
    cls = trained("cls", 6, *HEADS)
    dit = trained("dit", 6, *HEADS, "--optim.lr", "0.1")
    figure = tmp_path / "curve.svg"
    short = ["--num-images", "40", "--steps", "2", "--batch-size", "20"]
    (line,), said = curve(
        dit, "--output", figure, "--shares", "1", *short, "--score", "digits", "--extractor", cls
    )
    assert said.count("samples: 2 steps\n") == 2 == said.count("real images: 1 of ")
    assert line["shares"] == [0.75, 1.0] and line["batch_size"] == 20
    assert line["data"] == "40 samples, ddpm 2 steps, guidance 1; reference digits"
    for scores in line["scores"]:
        assert scores["frechet_distance"] > 0 and scores["num_generated"] == 40
        assert 0 <= scores["recognised"] <= 100
    assert line["scores"][0] != line["scores"][1] and "<svg" in figure.read_text()


def test_perplexity_of_language_models(trained, tmp_path, curve):
    run = trained("clm", 4)
    (line,), said = curve(run, "--output", tmp_path / "curve.png", "--shares", "0.5", "1")
    assert said.count("scoring: 1 of ") == 3
    # The preset's budget is uniform, and so are the shares.
    assert line["shares"] == [0.5, 0.75, 1.0] and line["layers"][0][0] == line["layers"][0][1]
    validation = json.loads((run / "results.json").read_text())["validation"]
    assert line["scores"][1]["loss"] == pytest.approx(validation["loss"], rel=1e-6)
    assert len({scores["perplexity"] for scores in line["scores"]}) == 3


def test_a_published_folder_takes_data_and_precision_from_the_first_run(
    trained, tmp_path, curve, run_command, forget_precision
):
    forget_precision()
    run = trained("cls", 2, *HEADS, "--mixed_precision", "bf16")
    assert run_command("publish", run, "--output", tmp_path / "folder").code == 0
    lines, _ = curve(run, tmp_path / "folder", "--output", tmp_path / "curve.png", "--shares", "1")
    assert lines[0]["data"] == lines[1]["data"]
    assert lines[0]["scores"][0]["loss"] == lines[1]["scores"][0]["loss"]
