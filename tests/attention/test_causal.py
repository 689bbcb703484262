"""No token of a causal layer may learn of a later one. MAE's gates in a decoder; decoding itself: test_cache.py."""

import itertools
from copy import deepcopy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moh_vision.attention import KeyValueCache, SeparateHeadMixtureAttention
from tests.support import layers
from tests.support.layers import ROUTERS, C, H
from tests.support.refusals import refuse

B, N = 2, 9
MAE = ["mae running", "mae window"]
PADDING = torch.arange(N) >= torch.tensor([[7], [5]])
# A prompt and an answer, each padded.
HOLES = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0, 1]]).bool()


def build(**options):
    return layers.build(dtype=torch.float64, **options)


def means(x, padding, window):
    """What a causal gate reads, token by token."""
    n = torch.arange(x.shape[1])
    seen = (n <= n[:, None]) & (n > n[:, None] - window) & ~padding[:, None]  # [B, N, N]
    return seen.double() @ x / seen.sum(2, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("name", MAE)
@pytest.mark.parametrize("training", [False, True])
def test_the_gate_of_a_token(name, training):
    """Its formula, with running statistics, and where these go in training."""
    layer = build(**ROUTERS[name]).train(training)
    router = layer.router
    x = torch.randn(B, N, C, dtype=torch.float64)
    norm = deepcopy(router.norm)
    routing = router(x, None, HOLES)
    pooled = means(x, HOLES, router.window or N)
    normed = (pooled - norm.running_mean) / (
        norm.running_var + 1e-5
    ).sqrt() * norm.weight + norm.bias
    hidden = torch.tanh(normed @ router.hidden.weight.T + router.hidden.bias)
    g = (hidden @ router.out.weight.T + router.out.bias).softmax(-1)  # [B, N, experts]
    for j in range(H):  # expert j leaves head j out
        torch.testing.assert_close(
            routing.weights[~HOLES][:, j], (H / (H - 1) * (1 - g[..., j]))[~HOLES]
        )
    torch.testing.assert_close(routing.stats.probs, g * ~HOLES.unsqueeze(-1))
    assert routing.stats.counts.tolist() == [[6] * H, [5] * H]

    real = pooled[~HOLES]  # [11, C]
    share = 0.1 if training else 0.0
    torch.testing.assert_close(
        router.norm.running_mean, (1 - share) * norm.running_mean + share * real.mean(0)
    )
    torch.testing.assert_close(
        router.norm.running_var, (1 - share) * norm.running_var + share * real.var(0)
    )


@pytest.mark.parametrize("name", MAE)
def test_every_token_draws_its_own_expert(name):
    layer = build(**ROUTERS[name]).train()
    layer.router.set_mode("random")
    routing = layer.router(
        torch.randn(200, N, C, dtype=torch.float64), None, PADDING[1:].expand(200, -1)
    )
    left_out = (routing.weights == 0).double()
    assert left_out.sum(-1).unique().tolist() == [1]
    assert (left_out[:, 0] != left_out[:, 1]).any(-1).double().mean() > 0.7  # 5/6 of the sequences
    assert routing.stats.counts.sum(1).unique().tolist() == [5 * (H - 1)]
    assert (routing.stats.probs[:, 5:] == 0).all() and not routing.stats.probs.requires_grad


@pytest.mark.parametrize("pool", ["running", "window", "sequence"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_the_forward_exactly(pool, reentrant):
    """The running statistics have moved on by then; they must move once, and the repetition use those of before."""
    x = torch.randn(B, N, C, dtype=torch.float64)
    plain = build(budget=(6, 0), router="mae", router_kwargs=dict(pool=pool, dropout=0.0)).train()
    kept = deepcopy(plain)

    def forward(layer, x):
        return layer(x, is_causal=pool != "sequence", padding_mask=PADDING)[0]

    for scale in (1, 3, 1):
        plain.zero_grad(), kept.zero_grad()
        inputs = [(scale * x).requires_grad_() for _ in range(2)]
        forward(plain, inputs[0]).square().sum().backward()
        checkpoint(forward, kept, inputs[1], use_reentrant=reentrant).square().sum().backward()
        grads = [
            [x.grad, *(p.grad for p in layer.parameters())]
            for x, layer in zip(inputs, (plain, kept))
        ]
        assert all(map(torch.equal, *grads))
    assert all(map(torch.equal, plain.buffers(), kept.buffers()))
    assert plain.router.norm.num_batches_tracked == 3


# Name -> arguments of `build`, of every router in every form that a decoder may have.
CAUSAL = {
    **ROUTERS,
    "query_norm, groups": dict(
        router="query_norm", budget=(2, 2), kv_heads=3, router_kwargs=dict(group=2)
    ),
    "moa, noisy": dict(ROUTERS["moa"], router_kwargs=dict(noisy=True)),
    "mae running, one drawn": dict(
        router="mae", budget=(6, 0), router_kwargs=dict(pool="running", mode="sampled")
    ),
    "mae window, one drawn": dict(
        router="mae", budget=(6, 0), router_kwargs=dict(pool="window", mode="sampled")
    ),
    "separate": dict(budget=(2, 2), layer_class=SeparateHeadMixtureAttention),
}
# Scope -> shape of the condition.
SCOPES = {
    "token": None,
    "sample": None,
    "sample, a condition": (B, C),
    "sample, one condition": (C,),
}
# How many tokens a call has, with a cache; None: all, without one.
STEPS = {"no cache": None, "a prompt": (N,), "two parts": (5, 4), "token by token": (1,) * N}
CHANGED = (1, 6)  # the first token that is another
EXECUTORS = [
    *itertools.product(("packed", "auto"), ("cpp",)),
    *itertools.product(("packed", "masked", "reference"), ("torch",)),
]
# Executor, path and steps. The others are slow tests.
QUICK = [("packed", "cpp", "no cache"), ("masked", "torch", "two parts")]
RUNS = [
    pytest.param(*run, marks=[] if run in QUICK else pytest.mark.slow)
    for run in ((*executor, steps) for executor in EXECUTORS for steps in STEPS)
]


def outputs(layer, x, steps, **call):
    """Return y [B, N, C] of causal calls."""
    torch.manual_seed(3)  # of experts that are drawn
    if steps is None:
        return layer(x, is_causal=True, **call)[0]
    cache = KeyValueCache()
    parts = []
    for part in x.split(steps, 1):
        parts.append(layer(part, is_causal=True, cache=cache, **call)[0])
    return torch.cat(parts, 1)


@pytest.mark.parametrize("executor, path, steps", RUNS, indirect=["path"])
@pytest.mark.parametrize(
    "name, scope",
    [
        (name, scope)
        for name in CAUSAL
        for scope in SCOPES
        if layers.is_possible(CAUSAL[name], scope=scope.partition(",")[0])
    ],
)
@torch.no_grad()
def test_no_token_moves_those_before_it(name, scope, executor, path, steps):
    """What a choice of all tokens would do is refused, in training and after it."""
    layer = layers.build(**CAUSAL[name], scope=scope.partition(",")[0], executor=executor)
    steps = STEPS[steps]
    call = {}
    if SCOPES[scope] is not None:
        call["condition"] = torch.randn(SCOPES[scope])
    x = torch.randn(B, N, C)
    reads_all = layer.router.reads == "sequence" and scope == "token"
    reads_mean_token = scope == "sample"
    reads_mean_query = layer.needs_query and scope != "token"
    if reads_all or reads_mean_token or reads_mean_query:
        refuse("is_causal scope 'token' pool 'running' 'window'", outputs, layer, x, steps, **call)
        return
    for training in (True, False):
        layer.train(training)
        before = deepcopy(layer)  # running statistics move on
        want = outputs(layer, x, steps, **call)
        for n in CHANGED:
            other = torch.cat([x[:, :n], torch.randn(B, N - n, C)], 1)
            got = outputs(deepcopy(before), other, steps, **call)
            torch.testing.assert_close(got[:, :n], want[:, :n], rtol=1e-5, atol=1e-5)
            assert (got[:, n] - want[:, n]).abs().max() > 1e-3
