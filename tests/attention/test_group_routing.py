"""`query_norm` with groups: whole groups of heads are chosen, as if each were one wide head."""

import pytest
import torch
from refusals import each_refused
from torch import nn

from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    attention_layers,
    head_usage,
    load_balance_loss,
    resolve_budget,
    set_routed_heads,
)
from moh_vision.attention.routers.query_norm import QueryNormRouter

B, N, C, H, D, GROUP = 3, 7, 24, 8, 4, 2
BUDGET = HeadBudget(H, D, 2, 4)  # one shared group, two of the three others


def routed(group=GROUP, padding=None, train=False):
    """Queries, the routing of groups, and of the wide heads that the groups stand for."""
    q = torch.randn(B, H, N, D, dtype=torch.float64, requires_grad=True)
    x = torch.randn(B, N, C, dtype=torch.float64)
    wide = q.unflatten(1, (H // group, group)).permute(0, 1, 3, 2, 4).flatten(3)  # [B, H/g, N, g*D]
    grouped = QueryNormRouter(C, BUDGET, group=group).train(train)
    budget = HeadBudget(H // group, D * group, BUDGET.shared // group, BUDGET.routed // group)
    single = QueryNormRouter(C, budget).train(train)
    return q, grouped(x, q, padding), single(x, wide, padding)


@pytest.mark.parametrize("padded", [False, True])
def test_a_group_is_one_wide_head(padded):
    padding = torch.arange(N) >= torch.tensor([[N], [5], [2]]) if padded else None
    q, got, want = routed(padding=padding)
    torch.testing.assert_close(got.weights, want.weights.repeat_interleave(GROUP, -1), rtol=0, atol=1e-12)
    assert torch.equal(got.stats.counts, want.stats.counts.repeat_interleave(GROUP, -1))
    torch.testing.assert_close(got.stats.probs, want.stats.probs.repeat_interleave(GROUP, -1) / GROUP)
    torch.testing.assert_close(got.stats.logits, want.stats.logits.repeat_interleave(GROUP, -1))
    torch.testing.assert_close(got.stats.logits.softmax(-1), routed_probs(got, padding))
    # The gradient too: every head of a group hands its own on to the group's probability.
    slope = torch.randn_like(got.weights)
    (a,) = torch.autograd.grad((got.weights * slope).sum(), q, retain_graph=True)
    (b,) = torch.autograd.grad((want.weights.repeat_interleave(GROUP, -1) * slope).sum(), q, retain_graph=True)
    torch.testing.assert_close(a, b)
    assert a[:, 2:].norm() > 1e-3
    # MoH's loss in heads is the loss in groups times the heads of one.
    torch.testing.assert_close(load_balance_loss([got.stats]), GROUP * load_balance_loss([want.stats]))
    for usage in head_usage([got.stats]):
        assert torch.equal(usage[::2], usage[1::2]) and usage[:2].tolist() == [1, 1]


def routed_probs(routing, padding):
    """What the softmax says also at padding, where the statistics have 0."""
    probs = routing.stats.probs
    return probs if padding is None else torch.where(padding.unsqueeze(-1), routing.stats.logits.softmax(-1), probs)


def test_heads_run_in_whole_groups():
    with torch.no_grad():
        _, got, want = routed()
    assert torch.equal(got.active, want.active.repeat_interleave(GROUP, -1))
    assert torch.equal(got.active, got.weights > 0) and (got.active.sum(-1) == BUDGET.active).all()
    assert got.active[..., : BUDGET.shared].all()
    assert len(got.active.flatten(0, 1).unique(dim=0)) == 3  # the choices differ from token to token


def test_balance_loss_at_balance_is_the_number_of_routed_heads():
    """Three tokens whose norms are turned round: every group is chosen as often and as probably as any other."""
    length = torch.tensor([1.0, 2.0, 4.0])
    rows = torch.stack([length.roll(n) for n in range(3)], dim=1)  # [3 groups, 3 tokens]
    q = torch.cat([torch.ones(1, 3), rows]).repeat_interleave(GROUP, 0)  # [H, 3]
    q = q.view(1, H, 3, 1).expand(1, H, 3, D)
    stats = QueryNormRouter(C, BUDGET, group=GROUP)(torch.zeros(1, 3, C), q).stats
    assert stats.counts.tolist() == [[3, 3, 2, 2, 2, 2, 2, 2]]
    torch.testing.assert_close(load_balance_loss([stats]), torch.tensor(float(BUDGET.routed)))
    # And above it where all tokens agree.
    same = QueryNormRouter(C, BUDGET, group=GROUP)(torch.zeros(1, 3, C), q[:, :, :1].expand(1, H, 3, D)).stats
    assert load_balance_loss([same]) > BUDGET.routed + 0.1


@pytest.mark.parametrize("executor", ["masked", "packed", "auto", "decode"])
def test_layers_with_groups(executor):
    """Output and gradients of grouped-query attention; queries of the heads that are off have their gradient (eq. 10)."""
    options = dict(kv_heads=H // GROUP, router_kwargs=dict(group=GROUP), dtype=torch.float64)
    layer = HeadMixtureAttention(C, BUDGET, "query_norm", **options)
    x = torch.randn(B, N, C, dtype=torch.float64)
    results = {}
    for name in ("reference", executor):
        layer.executor = name
        y, stats = layer(x, is_causal=True)
        loss = (y * torch.linspace(-1, 1, C, dtype=torch.float64)).sum() + load_balance_loss([stats])
        results[name] = [y.detach(), *torch.autograd.grad(loss, layer.parameters())]
        with torch.no_grad():
            torch.testing.assert_close(layer.eval()(x, is_causal=True)[0], y)
        layer.train()
    for got, want in zip(results[executor], results["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "budget, weights", [((H, 0), [1] * H), ((6, 2), [1] * H)], ids=["all shared", "one group to choose from"]
)
def test_nothing_to_choose(budget, weights):
    router = QueryNormRouter(C, HeadBudget(H, D, *budget), group=GROUP)
    routing = router(torch.randn(B, N, C), torch.randn(B, H, N, D))
    assert torch.equal(routing.weights, torch.tensor(weights).float().expand(B, N, H))
    assert torch.isfinite(load_balance_loss([routing.stats]))


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("spec", [0.5, 0.75, "uniform:0.5", 1.0])
def test_shares_are_rounded_to_whole_groups(spec, group):
    budgets = resolve_budget(spec, 4, 32, 16, group=group)
    alone = resolve_budget(spec, 4, 32 // group, 16 * group)
    for b, wide in zip(budgets, alone):
        assert (b.heads, b.head_dim) == (32, 16)
        assert (b.shared, b.routed) == (wide.shared * group, wide.routed * group)
    share = float(str(spec).rpartition(":")[2])
    assert sum(b.active for b in budgets) == share * 4 * 32


def model(group=4, shared=4, routed=8):
    def layer():
        options = dict(kv_heads=4, router_kwargs=dict(group=group))
        return HeadMixtureAttention(32, HeadBudget(16, 2, shared, routed), "query_norm", **options)

    return nn.ModuleList([layer(), layer()])


def test_changing_the_budget_of_a_model():
    net = model()
    set_routed_heads(net, 0.5)
    assert [(b.budget.shared, b.budget.routed) for b in attention_layers(net)] == [(4, 4), (4, 4)]
    with torch.no_grad():
        _, stats = net[0].eval()(torch.randn(2, 5, 32))
    assert stats.counts.sum(1).tolist() == [5 * 8] * 2
    set_routed_heads(net, [(4, 12), (4, 4)])
    assert [layer.router.num_routed for layer in net] == [12, 4]


test_what_is_refused = each_refused(
    lambda make: make(),
    (
        lambda: QueryNormRouter(C, BUDGET, group=3),
        "heads=8 is not a multiple of group=3: heads are chosen in whole",
    ),
    (lambda: QueryNormRouter(C, HeadBudget(8, 4, 1, 4), group=2), "shared=1 is not a multiple of group=2"),
    (lambda: QueryNormRouter(C, HeadBudget(8, 4, 2, 3), group=2), "routed=3 is not a multiple of group=2"),
    (lambda: QueryNormRouter(C, BUDGET, group=0), "group=0 is not a number of heads, 1 or more"),
    (lambda: QueryNormRouter(C, BUDGET, group=True), "group=True is not a number of heads, 1 or more"),
    (lambda: resolve_budget(0.5, 2, 8, 4, group=3), "head_budget, layer 0: heads=8 is not a multiple of group=3"),
    (
        lambda: resolve_budget([(4, 4), (4, 6)], 2, 16, 4, group=4),
        r"head_budget, layer 1: \(4, 6\) is not a pair of multiples of group=4: heads are chosen in whole groups",
    ),
    (lambda: resolve_budget([(4, 4)], 2, 16, 4, group=4), "head_budget lists 1 layers, the model has 2"),
    (
        lambda: set_routed_heads(model(), [(4, 4), (4, 2)]),
        r"layer 1: \(4, 2\) is not a pair of multiples of group=4",
    ),
    (lambda: set_routed_heads(model(), 0.25), r"head_budget 0.25: .* \(counted in groups of 4 heads\)"),
    (lambda: model(group=2), "router_kwargs: group=2 is neither 1 nor 4, the query heads of one key-value head"),
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, GROUP])
def test_the_choice_alone_is_the_same_choice(group, dtype):
    """Also where queries tie, as those of equal length do."""
    router = QueryNormRouter(C, BUDGET, group=group).eval()
    for q in (torch.randn(B, H, N, D).to(dtype), torch.ones(B, H, N, D, dtype=dtype)):
        with torch.no_grad():
            want, got = router(torch.randn(B, N, C, dtype=dtype), q), router.choose(q)
        assert torch.equal(got.active, want.active) and torch.equal(got.weights.to(want.weights), want.weights)
        assert got.active.sum(-1).unique().tolist() == [BUDGET.active]
