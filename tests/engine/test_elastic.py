"""Elastic budgets: the shares of steps, resumed runs, and what results and cards say of each share."""

import pytest
import timm

import moh_vision
from moh_vision.__main__ import main
from moh_vision.attention import budgets_at
from moh_vision.attention.budget import BudgetError
from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.commands.runs import read_runs
from moh_vision.commands.table import make_table
from moh_vision.models.elastic import CYCLE, ElasticBudget
from moh_vision.models.head_load import HeadLoad
from tests.support.refusals import assert_says, refuse
from tests.support.small_runs import arguments, logged, results, whole_and_resumed

ELASTIC = "--budget_range 0.5 1 --model.head_budget 0.5 --optim.schedule constant".split()


def small_model(**kwargs):
    sizes = dict(img_size=8, patch_size=4, embed_dim=32, depth=3, num_heads=8, num_classes=3)
    return timm.create_model("moh_vit_tiny_patch16_224", **sizes, **kwargs)


def active(model):
    """Return the number of active heads of each layer."""
    return [layer["active"] for layer in moh_vision.head_budget(model)["layers"]]


def test_the_shares_of_steps():
    """Of every `CYCLE` steps one runs the smallest share and one the largest; the others run shares in between."""
    elastic, same_seed, other = (
        ElasticBudget(small_model(head_budget=0.5), (0.5, 1.0), seed) for seed in (7, 7, 8)
    )
    shares = [elastic.share_of(step) for step in range(400)]
    assert shares == [same_seed.share_of(step) for step in range(400)]
    assert shares != [other.share_of(step) for step in range(400)]
    for begin in range(0, 400, CYCLE):
        cycle = shares[begin : begin + CYCLE]
        assert cycle.count("0.5") == cycle.count("1") == 1
    assert set(shares) == {"0.5", "0.625", "0.75", "0.875", "1"}
    assert set(shares[::20]) == set(shares)  # a log of every 20th step shows all shares


@pytest.mark.parametrize("shape", ["", "uniform:"])
def test_a_share_runs_what_set_head_budget_sets(shape):
    model = small_model(head_budget="uniform:0.5")
    elastic = ElasticBudget(model, [f"{shape}0.5", f"{shape}1"], seed=0)
    assert active(model) == [8, 8, 8]
    for share in elastic.budgets:
        with elastic.running(model, share):
            ran = active(model)
            assert sum(ran) == round(24 * elastic.active_share(share))
        assert active(model) == [8, 8, 8]
        other = moh_vision.set_head_budget(small_model(head_budget="uniform:0.5"), share)
        assert active(other) == ran


def groups(model):
    """Return the number of active groups of each routed MLP."""
    return [layer["active"] for layer in moh_vision.head_budget(model)["mlp"]["layers"]]


def test_groups_of_mlps_run_at_the_share_of_the_heads():
    model = small_model(scope="sample", head_budget=0.5, mlp_budget=0.5)
    elastic = ElasticBudget(model, (0.5, 1.0), seed=0)
    assert active(model) == groups(model) == [8, 8, 8]
    for share, all_heads in {"0.5": 12, "0.75": 18, "1": 24}.items():
        with elastic.running(model, share):
            assert sum(active(model)) == sum(groups(model)) == all_heads
            assert elastic.active_share(share) == all_heads / 24
    assert groups(model) == [8, 8, 8]
    said = "elastic: trained at 50.0 to 100.0 % of the heads and groups of MLPs, saved with 100.0 %"
    assert str(elastic) == said


def test_groups_alone_are_elastic_where_all_heads_run():
    model = small_model(scope="sample", head_budget=[(8, 0)] * 3, mlp_budget=0.5)
    elastic = ElasticBudget(model, (0.5, 1.0), seed=0)
    with elastic.running(model, "0.5"):
        assert sum(groups(model)) == 12 and active(model) == [8, 8, 8]
    assert "50.0 to 100.0 % of the groups of MLPs" in str(elastic)
    refuse("budget_range [0.99, 1.0] equally groups", ElasticBudget, model, (0.99, 1.0), seed=0)


# Case -> (arguments of the model, the range, what the error says).
BAD_RANGES = {
    "falling": (
        {},
        (1.0, 0.5),
        "budget_range [1.0, 0.5] 0 1 smallest first",
    ),
    "above 1": ({}, (0.5, 1.5), "budget_range [0.5, 1.5] 0 1"),
    "a shape and a number": ({}, ("uniform:0.5", 1.0), "budget_range uniform:0.5 1.0"),
    "an unknown shape": ({}, ("0.5:0.4", "1:0.4"), "budget_range 0.5:0.4 1:0.4 uniform:0.5"),
    "too narrow": ({}, (0.99, 1.0), "budget_range [0.99, 1.0] equally heads"),
    "below the shared heads": (
        dict(head_budget=0.9),
        (0.2, 1.0),
        "budget_range [0.2, 1.0] 12 24 0.5 model.head_budget",
    ),
    "below the shared groups": (
        dict(scope="sample", head_budget=0.5, mlp_budget=0.9),
        (0.4, 1.0),
        "budget_range [0.4, 1.0] 12 24 groups 0.5 model.mlp_budget",
    ),
    "a layer without routed heads": (
        dict(head_budget=[[4, 1], [4, 4], [8, 0]]),
        (0.5, 1.0),
        "budget_range [0.5, 1.0] layer 2 8 shared model.head_budget",
    ),
    "a dense model": (
        dict(router="dense"),
        (0.5, 1.0),
        "budget_range [0.5, 1.0] routed moh_vision.convert",
    ),
    "gated": (
        dict(router="gated"),
        (0.5, 1.0),
        "budget_range [0.5, 1.0] routed moh_vision.convert",
    ),
    "MAE": (dict(router="mae"), (0.5, 1.0), "budget_range [0.5, 1.0] routed moh_vision.convert"),
}


@pytest.mark.parametrize("options, ends, facts", BAD_RANGES.values(), ids=BAD_RANGES)
def test_ranges_that_cannot_be(options, ends, facts):
    refuse(facts, ElasticBudget, small_model(**options), ends, seed=0)


def test_the_advice_of_a_share_is_replaced_by_that_of_a_range():
    """The advice for a single share does not fit the ends of a range."""
    model = small_model(head_budget=0.9)
    with pytest.raises(BudgetError) as of_share:
        budgets_at(model, "0.2")
    with pytest.raises(ValueError) as of_range:
        ElasticBudget(model, (0.2, 1.0), seed=0)
    message = str(of_range.value)
    assert of_share.value.reason in message
    assert of_share.value.advice and of_share.value.advice not in message
    assert_says(message, "model.head_budget shared smallest")


def test_a_run_that_resumes_has_the_same_bits(tmp_path, capsys):
    """A run that stops within a cycle resumes with the same shares; the saved model runs the largest share."""
    whole, resumed = whole_and_resumed("cls", tmp_path, [2, 6], *ELASTIC)
    for key in ("loss", "active_share"):
        expected = [entry[key] for entry in logged(whole)]
        assert [entry[key] for entry in logged(resumed)] == expected
    assert {entry["active_share"] for entry in logged(whole)} >= {0.5, 1.0}
    for entry in logged(whole):
        usage = sum(map(sum, entry["head_usage"])) / 16
        assert usage == pytest.approx(entry["active_share"], abs=2e-3)
    assert moh_vision.head_budget(moh_vision.load_run(whole))["share"] == 1
    capsys.readouterr()
    validation = results(whole)
    assert list(validation["by_share"]) == ["0.5", "0.75", "1"]
    assert validation["by_share"]["1"]["loss"] == validation["loss"]
    assert validation["active_share"] == 1
    validate.main(f"--checkpoint {whole} --model.head_budget 0.5 --data.workers 0".split())
    assert f"loss {validation['by_share']['0.5']['loss']:.4f}" in capsys.readouterr().out
    # The table and the model card have the scores of each share, and the head load can be drawn.
    capsys.readouterr()
    table = make_table(read_runs([whole]))
    active, top1 = (table.titles.index(title) for title in ("active heads, %", "top-1, %"))
    rows = {row[0].rpartition(", ")[2]: row for row in table.rows}
    shares = {"0.5": "50", "0.75": "75", "1": "100"}
    assert list(rows) == [f"at a share of {share}" for share in shares]
    for share, percent in shares.items():
        row = rows[f"at a share of {share}"]
        assert row[active] == percent
        assert row[top1] == f"{validation['by_share'][share]['top1']:.2f}"
    macs = [float(row[table.titles.index("MACs, M")]) for row in table.rows]
    assert macs == sorted(macs) and macs[0] < macs[2]
    folder = tmp_path / "published"
    assert main(["publish", str(whole), "--output", str(folder)]) == 0
    card = (folder / "README.md").read_text()
    trained = "it is trained at shares of 0.5 to 1.0, `moh_vision.set_head_budget"
    assert f"heads active; {trained}" in card
    half = f"{validation['by_share']['0.5']['top1']:.2f}"
    assert f"| top-1, %, at a share of 0.5 | {half} |" in card
    load = HeadLoad.read(whole / "head_load.json")
    assert load.choosing() and sum(layer["routed"] + layer["shared"] for layer in load.layers) == 8
    assert main(["head-load", str(whole), "--output", str(tmp_path / "load.png")]) == 0


def test_the_scores_of_a_run_with_routed_mlps_at_its_shares(tmp_path, capsys):
    routed = ["--model.scope", "sample", "--model.mlp_budget", "0.5"]
    run = tmp_path / "run"
    train_cls.main(arguments("cls", run, 4, 4, *ELASTIC, *routed))
    validation = results(run)
    for share, scores in validation["by_share"].items():
        assert scores["active_share"] == scores["active_groups_share"] == float(share)
    assert len(validation["active_heads"]) == len(validation["active_groups"]) == 2
    capsys.readouterr()
    shares = "--model.head_budget 0.5 --model.mlp_budget 0.5"
    validate.main(f"--checkpoint {run} {shares} --data.workers 0".split())
    out = capsys.readouterr().out
    assert f"loss {validation['by_share']['0.5']['loss']:.4f}" in out
    assert "active heads per layer: 3, 5 (50.0 % of all)\n" in out
    assert "active groups per MLP: 3, 5 (50.0 % of all)\n" in out
    table = make_table(read_runs([run]))
    columns = [table.titles.index(f"active {parts}, %") for parts in ("heads", "groups")]
    shown = [[row[column] for column in columns] for row in table.rows]
    assert shown == [["50", "50"], ["75", "75"], ["100", "100"]]
    macs = [float(row[table.titles.index("MACs, M")]) for row in table.rows]
    assert macs == sorted(set(macs))


def test_an_elastic_run_says_so_and_a_dense_one_names_no_command_that_fails(tmp_path, capsys):
    """The largest share here is 1, so all heads are active: only "elastic" tells such a run from a dense one."""
    said = "elastic: trained at 50.0 to 100.0 % of the heads, saved with 100.0 %"
    train_cls.main(arguments("cls", tmp_path / "none", 1, 1, *ELASTIC, "--dry-run"))
    assert f"{said}\n" in capsys.readouterr().out
    train_cls.main(arguments("cls", tmp_path / "elastic", 1, 1, *ELASTIC))
    out = capsys.readouterr().out
    assert f"16 of 16 heads active (100.0 %); {said}\n" in out and "moh_vision head-load" in out
    dense = ["--model.router", "dense", "--model.head_budget", "null"]
    train_cls.main(arguments("cls", tmp_path / "dense", 1, 1, *dense))
    assert "moh_vision head-load" not in capsys.readouterr().out  # it would fail: no head is chosen
