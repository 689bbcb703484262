"""One contract for every router, and what the papers say of each; of MoH written out with numpy for one token."""

import itertools
from itertools import combinations

import numpy as np
import pytest
import torch

from moh_vision.attention import ROUTERS, HeadBudget, HeadMixtureAttention
from moh_vision.attention.kernels.eager import gate_logits
from moh_vision.attention.routers.common import masked_mean
from moh_vision.attention.routers.moa import MoARouter
from moh_vision.attention.routers.moh import MoHRouter
from tests.support import layers
from tests.support.refusals import refuse

B = 3
N = 6
C = 16
H = 6
D = 4
ALL = HeadBudget(H, D, H, 0)
BUDGETS = {name: HeadBudget(H, D, *layers.budget_of(name, routed=3)) for name in ROUTERS}
# The sum of a token's weights, of routers that fix it.
SUMS = {"query_norm": 5.0, "moa": 1.0, "mae": float(H)}


def build(name, **options):
    router = ROUTERS[name](C, BUDGETS[name], **options)
    for p in router.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p)
    return router


def inputs(name, batch=B, tokens=N):
    """Draw tokens, and queries if the router reads them."""
    x = torch.randn(batch, tokens, C)
    if ROUTERS[name].needs_query:
        return x, torch.randn(batch, H, tokens, D)
    return x, None


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_weights_counts_and_gradients(name):
    """Weights are deterministic and of each sequence by itself; gradients reach every parameter and scored queries."""
    router = build(name).eval()
    active = BUDGETS[name].active
    fixed = router.counted or router.all_heads  # whether every token runs so many heads
    x, q = inputs(name)
    if q is not None:
        q.requires_grad_()
    routing = router(x, q)
    again = router(x, q)
    alone = router(x[1:2], None if q is None else q[1:2])
    assert all(isinstance(tensor, torch.Tensor) for tensor in routing.stats)
    counts = routing.stats.counts
    assert counts.shape == (B, H) and not counts.requires_grad
    assert torch.equal(again.stats.counts, counts)
    assert torch.equal(alone.stats.counts[0], counts[1])
    tokens = 1 if router.choice == "sequence" else N
    assert not fixed or counts.sum(1).tolist() == [tokens * active] * B
    if router.plain_attention:
        assert routing.weights is None
        return
    assert routing.weights.shape == (B, tokens, H) and routing.weights.dtype == torch.float32
    assert torch.equal(again.weights, routing.weights)
    torch.testing.assert_close(alone.weights[0], routing.weights[1])
    if name in SUMS:
        torch.testing.assert_close(routing.weights.sum(-1), torch.full((B, tokens), SUMS[name]))
    assert not fixed or (routing.weights > 0).sum(-1).unique().tolist() == [active]
    if routing.active is not None:
        assert torch.equal(routing.active, routing.weights > 0)
    (routing.weights * torch.randn(H)).sum().backward()
    for parameter_name, p in router.named_parameters():
        assert p.grad is not None and p.grad.norm() > 1e-7, parameter_name
    if q is not None:
        assert q.grad[:, 2:].norm() > 0 and q.grad[:, :2].norm() == 0  # shared heads are not scored


def cases_of_layers():
    """Yield name, scope, options, and whether the layer is causal, which it refuses where a choice reads all tokens."""
    for name in sorted(ROUTERS):
        for scope in ROUTERS[name].scopes:
            yield name, scope, {}, False
        if ROUTERS[name].reads != "sequence":
            yield name, "token", {}, True
    for pool, causal in itertools.product(("running", "window"), (False, True)):
        yield "mae", "token", dict(pool=pool), causal


@pytest.mark.parametrize("name, scope, options, causal", list(cases_of_layers()))
def test_padding_in_the_layer(name, scope, options, causal):
    """Neither outputs nor statistics know of it."""
    layer = HeadMixtureAttention(C, BUDGETS[name], router=name, scope=scope).eval()
    layer.router = build(name, **options).eval()
    x = torch.randn(B, N, C)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1:, 4:] = True
    padded, stats = layer(x, padding_mask=padding, is_causal=causal)
    for rows, tokens in ((slice(0, 1), N), (slice(1, B), 4)):
        cut, cut_stats = layer(x[rows, :tokens], is_causal=causal)
        torch.testing.assert_close(padded[rows, :tokens], cut)
        torch.testing.assert_close(stats.counts[rows], cut_stats.counts)
        torch.testing.assert_close(stats.probs[rows, :tokens], cut_stats.probs)
        assert not stats.probs[rows, tokens:].any()
    left = layer(x.flip(1), padding_mask=padding.flip(1), is_causal=causal)[0]
    assert left.isfinite().all()


def test_logits_of_16_bit_tokens_and_their_gradient():
    """Logits are those of float32; the tokens are kept for backward in their 16 bits."""
    x = torch.randn(2, 5, C).bfloat16().requires_grad_()
    w = torch.randn(4, C, requires_grad=True)
    logits = gate_logits(x, w)
    want = x.float() @ w.t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, want)
    assert all(t.dtype == torch.bfloat16 or t is w for t in logits.grad_fn.saved_tensors)
    weight = torch.randn(2, 5, 4)
    slopes = [
        torch.autograd.grad((y.square() * weight).sum(), (x, w), create_graph=True)
        for y in (logits, want)
    ]
    curvatures = [torch.autograd.grad(dw.square().sum(), (x, w)) for _, dw in slopes]
    torch.testing.assert_close(*slopes)
    for got, exact in zip(*curvatures):  # of x two terms, each rounded to 16 bits
        assert (got - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("k", [1, 3])
def test_moa_weights_and_their_detached_sum(k):
    """Which gives the gate of a single expert a gradient, though its weight is always 1."""
    router = MoARouter(C, HeadBudget(H, D, 0, k))
    assert not router.gate.weight.any()  # a new one is uniform
    torch.nn.init.normal_(router.gate.weight)
    x = torch.randn(1, 1, C)
    p = (x[0, 0] @ router.gate.weight.T).softmax(0)
    top = p.topk(k).indices
    routing = router(x)
    torch.testing.assert_close(routing.weights[0, 0, top], p[top] / p[top].sum())
    w = torch.randn(H)
    got = torch.autograd.grad(
        (routing.weights[0, 0] * w).sum(), router.gate.weight, retain_graph=True
    )[0]
    want = torch.autograd.grad((p[top] / p[top].sum().detach() * w[top]).sum(), router.gate.weight)[
        0
    ]
    torch.testing.assert_close(got, want)
    assert got.norm() > 1e-3
    plain = MoARouter(C, HeadBudget(H, D, 0, k), renormalise=False)
    plain.load_state_dict(router.state_dict())
    torch.testing.assert_close(plain(x).weights[0, 0, top], p[top].detach())


@pytest.mark.parametrize("leave_out, experts", [(1, 6), (2, 15)])
def test_mae_is_the_mixture_of_its_experts(leave_out, experts):
    """sum_S g_S * h / (h - t) * sum_{j in S} H_j, with the heads themselves."""
    router = build("mae", leave_out=leave_out).eval()
    heads = torch.randn(B, H, 7)
    routing = router(torch.randn(B, N, C))
    g = routing.stats.probs[:, 0]
    assert g.shape == (B, experts)
    mixture = torch.zeros(B, 7)
    for s, left in enumerate(combinations(range(H), leave_out)):
        members = [j for j in range(H) if j not in left]
        mixture += g[:, s, None] * H / (H - leave_out) * heads[:, members].sum(1)
    torch.testing.assert_close(torch.einsum("bh,bhc->bc", routing.weights[:, 0], heads), mixture)


def left_out(weights):
    """Which heads no token of a sequence runs, [B, H], one of each."""
    heads = (weights[:, 0] == 0).float()
    assert heads.sum(-1).unique().tolist() == [1]
    return heads


def test_mae_modes():
    router = build("mae", mode="uniform").eval()
    x = torch.randn(B, N, C)
    assert not list(router.parameters())  # UNI-MAE "does not have parameterized gating functions"
    torch.testing.assert_close(router(x).weights, torch.ones(B, 1, H))  # plain attention
    assert left_out(router.train()(x).weights).shape == (B, H)
    router.set_mode("random")
    refuse(
        "mode 'argmax' gate 'uniform'",
        router.set_mode,
        "argmax",
    )
    router = build("mae").eval()
    best = router(x).stats.probs[:, 0].argmax(-1)
    router.set_mode("argmax")
    assert torch.equal(left_out(router(x).weights).argmax(-1), best)
    router.set_mode("random")
    drawn = left_out(router(x.repeat(400, 1, 1)).weights).mean(0)
    torch.testing.assert_close(drawn, torch.full((H,), 1 / H), atol=0.05, rtol=0)
    router.train().set_mode("uniform")
    assert left_out(router(x).weights).shape == (B, H)
    refuse("mode 'best' soft sampled uniform argmax random", router.set_mode, "best")


def test_mae_f_step_draws_one_expert_from_the_gate_without_a_gradient():
    router = build("mae", mode="sampled")
    for p in (router.hidden, router.out):
        torch.nn.init.normal_(p.weight, std=0.3)
    routing = router.eval()(torch.randn(1, N, C).expand(4000, -1, -1))
    drawn = left_out(routing.weights)
    torch.testing.assert_close(routing.weights.sum(-1), torch.full((4000, 1), float(H)))
    torch.testing.assert_close(drawn.mean(0), routing.stats.probs[0, 0], atol=0.04, rtol=0)
    assert not routing.weights.requires_grad
    assert len(drawn.unique(dim=0)) > 1  # each instance draws an expert
    # No gradient reaches the gate, and none is lost elsewhere.
    layer = HeadMixtureAttention(C, ALL, router="mae", router_kwargs=dict(mode="sampled"))
    layer(torch.randn(B, N, C))[0].sum().backward()
    assert all(p.grad is None for p in layer.router.parameters())
    assert layer.qkv.weight.grad.norm() > 0


BAD_OPTIONS = [
    (
        "moh",
        HeadBudget(H, D, 2, 2),
        dict(gate_scale="half"),
        "gate_scale 'half' released paper",
    ),
    ("moa", HeadBudget(H, D, 2, 2), {}, "router 'moa' shared 2"),
    ("mae", HeadBudget(H, D, 2, 2), {}, "router 'mae' 6 4 head_budget"),
    ("mae", ALL, dict(leave_out=6), "leave_out 6 1 5"),
    ("mae", ALL, dict(pool="max"), "pool 'max' sequence running window"),
    ("gated", HeadBudget(H, D, 2, 2), {}, "router 'gated' 6 4 head_budget"),
    ("dense", HeadBudget(H, D, 2, 2), {}, "router 'dense' 6 4 head_budget"),
]


@pytest.mark.parametrize(
    "name, budget, options, facts", BAD_OPTIONS, ids=[row[3] for row in BAD_OPTIONS]
)
def test_bad_options(name, budget, options, facts):
    refuse(facts, ROUTERS[name], C, budget, **options)


def test_a_padded_sequence_is_pooled_over_its_real_tokens():
    """Five, one and no tokens are real; the mean of no token is 0."""
    x = torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [1], [0]])
    want = torch.stack([x[0].mean(0), x[1, 0], torch.zeros(8)])
    torch.testing.assert_close(masked_mean(x, padding)[:, 0], want)


def expected_weights(router, x, heads, shared, routed, released):
    """Jin 2024 eq. 5 and 6 for one token, or the released code's scales."""

    def softmax(linear):
        e = np.exp(linear.weight.numpy(force=True) @ x)
        return e / e.sum()

    w = np.zeros(heads)
    if not 0 < shared < heads:  # one group: there is nothing to balance
        alpha = np.ones(2)
    else:
        alpha = np.array([0.5, 0.5])
        if router.balance is not None:
            alpha = softmax(router.balance)
        if released:
            alpha = 2 * alpha
    if shared:
        s = softmax(router.shared) if shared > 1 else np.ones(1)
        w[:shared] = alpha[0] * s * (shared if released else 1)
    if shared < heads:
        p = softmax(router.routed)
        top = np.argsort(-p)[:routed]
        w[shared + top] = alpha[1] * p[top] * (routed / p[top].sum() if released else 1)
    return w


@pytest.mark.parametrize(
    "shared, routed", [(2, 2), (2, 4), (0, 3), (0, 6), (1, 2), (1, 5), (6, 0), (5, 1)]
)
@pytest.mark.parametrize("gate_scale", ["released", "paper"])
@pytest.mark.parametrize("two_stage", [True, False])
def test_weights_follow_the_formulas(shared, routed, gate_scale, two_stage):
    router = MoHRouter(C, HeadBudget(6, 8, shared, routed), gate_scale, two_stage).double()
    for p in router.parameters():
        torch.nn.init.normal_(p)
    needed = dict(shared=shared > 1, routed=shared < 6, balance=two_stage and 0 < shared < 6)
    found = {name.removesuffix(".weight") for name, _ in router.named_parameters()}
    assert found == {name for name, is_needed in needed.items() if is_needed}
    x = torch.randn(2, 5, C, dtype=torch.float64)
    routing = router(x)
    for token, weights, active in zip(
        *(t.flatten(0, 1).numpy(force=True) for t in (x, routing.weights, routing.active))
    ):
        want = expected_weights(router, token, 6, shared, routed, gate_scale == "released")
        np.testing.assert_allclose(weights, want, atol=1e-12)
        assert np.array_equal(active, want > 0)
    assert routing.weights.count_nonzero(-1).unique().tolist() == [shared + routed]
