"""`query_norm`: the longest queries run; with groups whole groups of heads are chosen, as if each were one wide head."""

import pytest
import torch
from torch import nn

from moh_vision import set_head_budget
from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    load_balance_loss,
    resolve_budget,
)
from moh_vision.attention.routers.query_norm import QueryNormRouter
from tests.support.refusals import refuse

B = 3
N = 7
C = 24
H = 8
D = 4
GROUP = 2
BUDGET = HeadBudget(H, D, 2, 4)  # one shared group, two of the three others
ONE = HeadBudget(6, D, 2, 2)


def test_the_longest_queries_run_with_weight_one():
    router = QueryNormRouter(C, ONE).eval()
    assert not list(router.parameters())
    lengths = torch.tensor(
        [[9.0, 9.0, 1.0, 4.0, 2.0, 3.0], [1.0] * 6]
    )  # equal norms take the first
    q = lengths.t().view(1, 6, 2, 1).expand(1, 6, 2, D)
    with torch.no_grad():
        routing = router(torch.zeros(1, 2, C), q)
    assert routing.weights[0].tolist() == [[1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 0]]
    assert torch.equal(routing.active, routing.weights > 0)


def test_the_gradient_is_that_of_the_softmax():
    """Jin 2024 eq. 10: what comes into the 0/1 weight goes to p unchanged, for heads that are off too, which so must run."""
    q = torch.randn(1, 6, 1, D, requires_grad=True)
    w = torch.randn(4)
    routing = QueryNormRouter(C, ONE)(torch.zeros(1, 1, C), q)
    assert routing.active is None
    (got,) = torch.autograd.grad((routing.weights[0, 0, 2:] * w).sum(), q)
    norms = q[0, 2:, 0].norm(dim=-1)
    (want,) = torch.autograd.grad(((norms / norms.std()).softmax(0) * w).sum(), q)
    torch.testing.assert_close(got, want)


def test_it_sees_queries_before_their_norm():
    layer = HeadMixtureAttention(C, ONE, router="query_norm", qk_norm=True)
    with torch.no_grad():
        # Head 3 has the longest query, which a norm would hide.
        layer.qkv.weight[3 * D : 4 * D] *= 100
    assert layer(torch.randn(1, N, C))[1].counts[0, 3] == N


@pytest.mark.parametrize("padded", [False, True])
def test_a_group_is_one_wide_head(padded):
    padding = None
    real = torch.ones(B, N, dtype=torch.bool)
    if padded:
        real = torch.arange(N) < torch.tensor([[N], [5], [2]])
        padding = ~real
    q = torch.randn(B, H, N, D, dtype=torch.float64, requires_grad=True)
    x = torch.randn(B, N, C, dtype=torch.float64)
    wide = q.unflatten(1, (H // GROUP, GROUP)).permute(0, 1, 3, 2, 4).flatten(3)  # [B, H/g, N, g*D]
    grouped = QueryNormRouter(C, BUDGET, group=GROUP).eval()
    single = QueryNormRouter(C, HeadBudget(H // GROUP, D * GROUP, 1, 2)).eval()
    got = grouped(x, q, padding)
    want = single(x, wide, padding)

    def per_head(t):
        return t.repeat_interleave(GROUP, -1)

    torch.testing.assert_close(got.weights, per_head(want.weights), rtol=0, atol=1e-12)
    assert torch.equal(got.stats.counts, per_head(want.stats.counts))
    torch.testing.assert_close(got.stats.probs, per_head(want.stats.probs) / GROUP)
    torch.testing.assert_close(got.stats.logits, per_head(want.stats.logits))
    torch.testing.assert_close(got.stats.logits.softmax(-1)[real], got.stats.probs[real])
    # The gradient too: every head of a group hands its own on to the group's probability.
    slope = torch.randn_like(got.weights)
    (a,) = torch.autograd.grad((got.weights * slope).sum(), q, retain_graph=True)
    (b,) = torch.autograd.grad((per_head(want.weights) * slope).sum(), q, retain_graph=True)
    torch.testing.assert_close(a, b)
    assert a[:, 2:].norm() > 1e-3
    # MoH's loss in heads is the loss in groups times the heads of one.
    balance = load_balance_loss([got.stats])
    torch.testing.assert_close(balance, GROUP * load_balance_loss([want.stats]))

    with torch.no_grad():  # whole groups run
        got = grouped(x, q, padding)
        want = single(x, wide, padding)
    assert torch.equal(got.active, per_head(want.active))
    assert torch.equal(got.active, got.weights > 0)
    assert (got.active.sum(-1) == BUDGET.active).all()
    assert got.active[..., : BUDGET.shared].all()
    # The choices differ from token to token.
    assert len(got.active.flatten(0, 1).unique(dim=0)) == 3


@pytest.mark.parametrize("budget", [(H, 0), (6, 2)], ids=["all shared", "one group to choose from"])
def test_nothing_to_choose(budget):
    router = QueryNormRouter(C, HeadBudget(H, D, *budget), group=GROUP)
    routing = router(torch.randn(B, N, C), torch.randn(B, H, N, D))
    assert torch.equal(routing.weights, torch.ones(B, N, H))
    assert load_balance_loss([routing.stats]).item() == pytest.approx(budget[1])  # perfect balance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, GROUP])
def test_the_choice_alone_is_the_same_choice(group, dtype):
    """The choice is the same where queries of equal length tie, too."""
    router = QueryNormRouter(C, BUDGET, group=group).eval()
    for q in (torch.randn(B, H, N, D).to(dtype), torch.ones(B, H, N, D, dtype=dtype)):
        with torch.no_grad():
            x = torch.randn(B, N, C, dtype=dtype)
            want = router(x, q)
            got = router.choose(x, q, None)
        assert torch.equal(got.active, want.active)
        assert torch.equal(got.weights.to(want.weights), want.weights)
        assert got.active.sum(-1).unique().tolist() == [BUDGET.active]


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("spec", [0.5, 0.75, "uniform:0.5", 1.0])
def test_shares_are_rounded_to_whole_groups(spec, group):
    budgets = resolve_budget(spec, 4, 32, 16, group=group)
    alone = resolve_budget(spec, 4, 32 // group, 16 * group)
    want = [HeadBudget(32, 16, wide.shared * group, wide.routed * group) for wide in alone]
    share = float(str(spec).rpartition(":")[2])
    assert list(budgets) == want and sum(b.active for b in budgets) == share * 4 * 32


@pytest.mark.parametrize("spec", [0.5, "uniform:0.5"])
def test_a_share_of_shared_heads_counts_in_groups_too(spec):
    """The default share of a router, here of one that shares no heads."""
    budgets = resolve_budget(spec, 4, 32, 16, group=4, shared_share=0.0)
    assert [b.shared for b in budgets] == [0] * 4 and sum(b.routed for b in budgets) == 64
    halves = resolve_budget("uniform:0.5", 4, 32, 16, group=4, shared_share=0.5)
    assert [(b.shared, b.routed) for b in halves] == [(8, 8)] * 4


def model(group=4):
    options = dict(kv_heads=4, router_kwargs=dict(group=group))
    return nn.ModuleList(
        HeadMixtureAttention(32, HeadBudget(16, 2, 4, 8), "query_norm", **options) for _ in range(2)
    )


def test_changing_the_budget_of_a_model():
    net = model()
    set_head_budget(net, 0.5)
    assert [(b.budget.shared, b.budget.routed) for b in net] == [(4, 4), (4, 4)]
    with torch.no_grad():
        _, stats = net[0].eval()(torch.randn(2, 5, 32))
    assert stats.counts.sum(1).tolist() == [5 * 8] * 2
    set_head_budget(net, [(4, 12), (4, 4)])
    assert [layer.router.num_routed for layer in net] == [12, 4]


@pytest.mark.parametrize(
    "shared, routed, group, facts",
    [
        (2, 4, 3, "heads=8 multiple group=3"),
        (1, 4, 2, "shared=1 multiple group=2"),
        (2, 3, 2, "routed=3 multiple group=2"),
        (2, 4, 0, "group=0 1"),
        (2, 4, True, "group=True 1"),
    ],
)
def test_refused_routers(shared, routed, group, facts):
    budget = HeadBudget(8, 4, shared, routed)
    refuse(facts, QueryNormRouter, C, budget, group=group)


@pytest.mark.parametrize(
    "spec, heads, group, facts",
    [
        (0.5, 8, 3, "head_budget layer 0 heads=8 multiple group=3"),
        (
            [(4, 4), (4, 6)],
            16,
            4,
            "head_budget layer 1 (4, 6) multiples group=4",
        ),
    ],
)
def test_specs_of_broken_groups_are_refused(spec, heads, group, facts):
    refuse(facts, resolve_budget, spec, 2, heads, 4, group=group)


@pytest.mark.parametrize(
    "spec, facts",
    [
        ([(4, 4), (4, 2)], "head_budget layer 1 (4, 2) multiples group=4"),
        (0.25, "head_budget 'ramp:0.25' 4 8 0.5 groups"),
    ],
)
def test_changed_budgets_of_broken_groups_are_refused(spec, facts):
    refuse(facts, set_head_budget, model(), spec)


def test_groups_across_key_value_heads_are_refused():
    refuse("router_kwargs group=2 1 4 kv_heads=4", model, group=2)
