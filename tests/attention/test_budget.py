import contextlib
import pickle
import re

import pytest
import torch

from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    full_budget,
    head_budget,
    resolve_budget,
)
from moh_vision.attention.budget import GROUPS, BudgetError, change_budget, parse_share
from tests.support.refusals import assert_says, one_line, refuse


def totals(budgets):
    return (
        sum(b.active for b in budgets),
        sum(b.heads for b in budgets),
        sum(b.shared for b in budgets),
    )


UNEQUAL = [[8, 16, 24], [24, 16, 8], [8] * 9 + [16] * 10 + [24] * 9, [2, 4, 6]]


@pytest.mark.parametrize("heads", [*([h] * 12 for h in (3, 6, 12, 16)), *UNEQUAL], ids=str)
@pytest.mark.parametrize("share", [0.4, 0.5, 0.75, 0.9, 1.0])
def test_ramp_total_is_nearest_and_rises_with_depth(heads, share):
    """Weighted by heads where layers have unequal numbers of them."""
    budgets = resolve_budget(share, len(heads), heads, 64)
    active, total, shared = totals(budgets)
    assert abs(active - share * total) <= 0.5
    shares = [b.active / b.heads for b in budgets]
    assert shares == sorted(shares) or heads in UNEQUAL
    # 40 % of the active heads, except where every layer must keep one head to route
    assert abs(shared - 0.4 * active) <= 0.5 or all(b.routed == 1 for b in budgets if b.shared)
    assert resolve_budget(f"ramp:{share}", len(heads), heads, 64) == budgets


def test_ramp_uniform_and_list():
    counts = [b.active for b in resolve_budget(0.75, 12, 12, 64)]
    assert (counts[0], counts[-1], sum(counts)) == (6, 12, 108)
    assert set(resolve_budget("uniform:0.75", 12, 6, 64)) == {
        HeadBudget(6, 64, 2, 3)
    }  # 4.5 of 6 is rounded up
    listed = resolve_budget([(8, 0), (10, 2)], 2, [8, 16], 72)
    assert listed == (HeadBudget(8, 72, 8, 0), HeadBudget(16, 72, 10, 2))


@pytest.mark.parametrize("share", [0, 0.139, 0.375, 0.6, 0.74])
def test_share_of_shared_heads(share):
    """As in Jin 2024, table 7: how many of the active heads are shared."""
    budgets = resolve_budget(f"uniform:0.75:{share}", 12, 12, 64)
    assert {budget.active for budget in budgets} == {9}
    assert {budget.shared for budget in budgets} == {int(9 * share + 0.5)}
    active, _, shared = totals(resolve_budget(f"ramp:0.75:{share}", 12, 12, 64))
    assert (active, shared) == (108, int(108 * share + 0.5))
    assert resolve_budget("ramp:0.5:0.4", 6, 8, 64) == resolve_budget(0.5, 6, 8, 64)


IMPOSSIBLE = [
    (0, "head_budget 0 0.75 1 pair"),
    (1.2, "head_budget 1.2 0 1 pair"),
    (float("nan"), "head_budget nan 0 1 pair"),
    ("ramp:x", "head_budget 'ramp:x' 'ramp:0.75'"),
    ("linear:0.5", "head_budget 'linear:0.5' 'uniform:0.75'"),
    ("uniform:0.5:1", "head_budget 'uniform:0.5:1' 'ramp:0.75:0.4'"),
    ("uniform:0.5:-0.1", "head_budget 'uniform:0.5:-0.1' 'ramp:0.75:0.4'"),
    ([(1, 1)], "head_budget 1 layers 4"),
    ([(1, 1), (1, 1), (4, 3), (1, 1)], "head_budget layer 2 shared=4 routed=3 7 6"),
    ([(1, 1), (3, 0), (1, 1), (1, 1)], "head_budget layer 1 routed=0 shared=3 6"),
    ([(0, 0)] * 4, "head_budget layer 0 shared=0 routed=0 1"),
    ([(-1, 3)] * 4, "head_budget layer 0 shared=-1 negative"),
    ([(1.5, 3)] * 4, "head_budget layer 0 (1.5, 3) whole"),
    ("uniform:0.01", "head_budget 'uniform:0.01' layer 0 6 heads 0.167"),
    (0.02, "head_budget 0.02 layer 0 6 heads 0.167"),
]


@pytest.mark.parametrize("spec, facts", IMPOSSIBLE, ids=[str(spec) for spec, _ in IMPOSSIBLE])
def test_impossible_specs_name_layer_and_numbers(spec, facts):
    refuse(facts, resolve_budget, spec, 4, 6, 64)


@pytest.mark.parametrize("shape", ["uniform", "ramp"])
@pytest.mark.parametrize("heads", [[3] * 12, [6] * 12, [8, 16, 24], [2, 4, 6]])
def test_a_share_too_small_is_refused_with_the_smallest_one(shape, heads):
    full = [HeadBudget(h, 64, *pair) for h, pair in zip(heads, full_budget(heads))]

    def resolve(spec):
        return resolve_budget(spec, len(heads), heads, 64)

    def change(spec):
        return change_budget(spec, full)

    for budget in (resolve, change):
        with one_line(f"head_budget '{shape}:0.01'") as error:
            budget(f"{shape}:0.01")
        least = float(re.search(r"the smallest share is (0\.\d+)", str(error.value))[1])
        if budget is change:
            assert_says(str(error.value), "made converted")
        active = [layer.active for layer in budget(f"{shape}:{least}")]
        assert sum(active) / sum(heads) == pytest.approx(least, abs=6e-4)  # whole heads reach it
        for total in range(1, sum(active)):
            with contextlib.suppress(ValueError):
                fewer = budget(f"{shape}:{total / sum(heads)}")
                assert sum(layer.active for layer in fewer) != total
        refuse(f"head_budget '{shape}:0.02' {least}", budget, f"{shape}:0.02")
    layers = [HeadBudget(10, 64, 2, 8)] * 5
    refuse("head_budget 'ramp:0.1' 0.3", change_budget, "ramp:0.1", layers)
    change_budget("ramp:0.3", layers)


def test_a_share_that_whole_heads_miss_is_logged(caplog):
    for _ in range(2):  # it is said once
        resolve_budget("uniform:0.51", 12, 3, 64)
    assert caplog.messages == [
        "head_budget 'uniform:0.51' runs 24 of 36 heads, 66.7 %, because a layer runs whole heads"
    ]
    for spec, heads in (("uniform:0.75", 8), (0.6, 3), ("uniform:0.71", 4), ([(1, 1)] * 12, 3)):
        resolve_budget(spec, 12, heads, 64)
    assert len(caplog.messages) == 1


def test_an_error_has_its_reason_and_its_advice_apart():
    """And another process gets both."""
    with pytest.raises(BudgetError) as raised:
        change_budget(0.5, FIXED)
    error = pickle.loads(pickle.dumps(raised.value))
    assert error.reason == "0.5: layer 1 has no routed heads, all 4 are shared"
    assert error.advice == "give a list of pairs with (4, 0) there"
    assert str(error) == f"head_budget {error.reason}; {error.advice}"
    with pytest.raises(BudgetError) as raised:
        change_budget(0.25, [B(16, 2, 4, 8)] * 2, groups=[4, 4])
    assert raised.value.advice.endswith("fewer heads (counted in groups of 4 heads)")


def test_head_budget_report():
    report = head_budget(
        torch.nn.Sequential(
            *(HeadMixtureAttention(24, HeadBudget(6, 4, *p)) for p in ((2, 2), (6, 0)))
        )
    )
    assert (report["active"], report["heads"], report["share"]) == (10, 12, 10 / 12)
    assert report["layers"][0] == dict(name="0", heads=6, head_dim=4, shared=2, routed=2, active=4)
    refuse(
        "Linear HeadMixtureAttention moh_vision.convert",
        lambda: head_budget(torch.nn.Linear(2, 2)),
    )


B = HeadBudget
FIXED = [B(8, 4, 2, 2), B(4, 4, 4, 0)]


@pytest.mark.parametrize(
    "spec, layers, active",
    [
        (0.5, [B(8, 4, 2, 6)] * 4, [3, 4, 4, 5]),
        ("uniform:0.5", [B(8, 4, 2, 6)] * 4, [4, 4, 4, 4]),
        (1.0, FIXED, [8, 4]),
        (1.0, [B(4, 4, 4, 0)], [4]),
        ([(2, 1), (4, 0)], FIXED, [3, 4]),
        (
            0.75,
            [B(8, 4, 0, 2), B(16, 4, 15, 1)],
            [2, 16],
        ),  # the second cannot run fewer than 15 + 1
    ],
)
def test_routed_heads_change(spec, layers, active):
    changed = change_budget(spec, layers)
    assert [b.active for b in changed] == active
    assert [b.shared for b in changed] == [b.shared for b in layers]


REFUSED = [
    (
        0.5,
        FIXED,
        "head_budget 0.5 layer 1 4 shared (4, 0)",
    ),
    (
        0.5,
        [B(4, 4, 4, 0)],
        "head_budget 0.5 no routed moh_vision.convert",
    ),
    ([(1, 2), (4, 0)], FIXED, "head_budget layer 0 2 shared 1"),
    ([(2, 0), (4, 0)], FIXED, "head_budget layer 0 routed=0 shared=2 8"),
    ([(2, 7), (4, 0)], FIXED, "head_budget layer 0 shared=2 routed=7 9 8"),
    ("half", FIXED, "head_budget 'half' 'ramp:0.75' pair"),
    ("ramp:0.5:0.4", FIXED, "head_budget 'ramp:0.5:0.4' shared leave 0.4"),
    (
        0.5,
        [B(8, 4, 5, 2)] * 2,
        "head_budget 0.5 12 16 0.75",
    ),
    ("uniform:0.5", [B(8, 4, 5, 2)] * 2, "head_budget 'uniform:0.5' layer 0 4 8 5 shared 0.75"),
]


@pytest.mark.parametrize("spec, layers, facts", REFUSED, ids=[row[2] for row in REFUSED])
def test_routed_heads_refused(spec, layers, facts):
    refuse(facts, change_budget, spec, layers)


def test_a_budget_of_groups_speaks_of_groups_and_leaves_what_was_given():
    with pytest.raises(BudgetError) as raised:
        parse_share("head:0.5", GROUPS)
    assert_says(str(raised.value), "mlp_budget 'head:0.5' 'ramp:0.75' groups")
    assert_says(raised.value.reason, "'head:0.5' groups")
