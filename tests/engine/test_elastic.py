"""Elastic budgets: what a step runs, runs that resume, and what they leave behind."""

import pytest
import timm
from refusals import each_refused
from small_runs import logged, results, whole_and_resumed

import moh_vision
from moh_vision.classification import validate
from moh_vision.commands.table import make_table
from moh_vision.models.elastic import CYCLE, ElasticBudget

ELASTIC = "--budget_range 0.5 1 --model.head_budget 0.5 --optim.schedule constant".split()


def small_model(**kwargs):
    sizes = dict(img_size=8, patch_size=4, embed_dim=32, depth=3, num_heads=8, num_classes=3)
    return timm.create_model("moh_vit_tiny_patch16_224", **sizes, **kwargs)


def active(model):
    return [layer["active"] for layer in moh_vision.head_budget(model)["layers"]]


def test_the_shares_of_steps():
    """Of every four steps one runs the smallest share and one the largest, the others are between, at every place."""
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
    assert set(shares[::20]) == set(shares)  # what is logged


@pytest.mark.parametrize("kind", ["", "uniform:"])
def test_a_share_runs_what_set_head_budget_sets(kind):
    model = small_model(head_budget="uniform:0.5")
    elastic = ElasticBudget(model, [f"{kind}0.5", f"{kind}1"], seed=0)
    assert active(model) == [8, 8, 8]
    for share in elastic.budgets:
        with elastic.running(model, share):
            ran = active(model)
            assert sum(ran) == round(24 * elastic.active_share(share))
        assert active(model) == [8, 8, 8]
        other = moh_vision.set_head_budget(small_model(head_budget="uniform:0.5"), share)
        assert active(other) == ran


test_ranges_that_cannot_be = each_refused(
    lambda model, ends: ElasticBudget(small_model(**model), ends, seed=0),
    ({}, (1.0, 0.5), r"budget_range \[1.0, 0.5\]: expected two shares above 0 and up to 1, the smallest first"),
    ({}, (0.5, 1.5), r"budget_range \[0.5, 1.5\]: expected two shares"),
    ({}, ("uniform:0.5", 1.0), "expected two shares"),
    ({}, ("0.5:0.4", "1:0.4"), "expected two shares"),
    ({}, (0.99, 1.0), "both ends run equally many heads"),
    (dict(head_budget=0.9), (0.2, 1.0), "the shared heads and one routed head per layer .*: give the smallest share there"),
    (dict(head_budget=[[4, 1], [4, 4], [8, 0]]), (0.5, 1.0), "layer 2 has no routed heads, all 8 are shared; model.head_budget"),
    (dict(router="dense"), (0.5, 1.0), "the model has no routed heads"),
    (dict(router="mae"), (0.5, 1.0), "the model has no routed heads"),
)  # fmt: skip


def test_a_run_that_resumes_has_the_same_bits(tmp_path, capsys):
    """Ended between two steps of a cycle; what is saved runs the largest share."""
    whole, resumed = whole_and_resumed("cls", tmp_path, [2, 6], *ELASTIC)
    one, two = logged(whole), logged(resumed)
    assert [(e["loss"], e["active_share"]) for e in one] == [
        (e["loss"], e["active_share"]) for e in two
    ]
    assert {e["active_share"] for e in one} >= {0.5, 1.0}
    for e in one:
        assert sum(map(sum, e["head_usage"])) / 16 == pytest.approx(e["active_share"], abs=2e-3)
    assert moh_vision.head_budget(moh_vision.load_run(whole))["share"] == 1
    capsys.readouterr()
    validation = results(whole)
    assert list(validation["by_share"]) == ["0.5", "0.75", "1"]
    assert (
        validation["by_share"]["1"]["loss"] == validation["loss"]
        and validation["active_share"] == 1
    )
    validate.main(f"--checkpoint {whole} --model.head_budget 0.5 --data.workers 0".split())
    assert f"loss {validation['by_share']['0.5']['loss']:.4f}" in capsys.readouterr().out
    assert any("top-1" in title for title in make_table([whole]).titles)
