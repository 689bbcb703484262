"""Many tokens of a causal model at once: packed queries in blocks, each with the keys up to its last token."""

import pytest
import torch

from moh_vision.attention import HeadBudget, HeadMixtureAttention, KeyValueCache, Routing
from moh_vision.attention.executors import choose
from moh_vision.attention.kernels import causal, eager
from moh_vision.attention.routing import Call, RoutingStats

B, N, C, H, D = 2, 23, 24, 6, 4


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of 3 queries, so that there are some; what is returned counts the calls."""
    calls, real = [], eager.attend_causal

    def spy(q, k, v, position, segments):
        calls.append(q.shape[0])
        return real(q, k, v, position, segments)

    monkeypatch.setattr(causal, "ROWS", 3)
    monkeypatch.setattr(eager, "attend_causal", spy)
    return calls


@pytest.fixture
def threads(monkeypatch):
    """How many threads `choose` believes in."""

    def believe(count):
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)

    believe(1)
    return believe


def build(budget=(2, 2), dtype=torch.float64, **kwargs):
    layer = HeadMixtureAttention(C, HeadBudget(H, D, *budget), dtype=dtype, **kwargs).eval()
    for p in layer.router.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p)
    return layer


def angles():
    turn = torch.arange(N, dtype=torch.float64).unsqueeze(1) * torch.tensor([1.0, 0.1] * (D // 2), dtype=torch.float64)
    return turn.cos(), turn.sin()


LAYERS = {
    "moh": dict(),
    "moh, no shared heads": dict(budget=(0, 3)),
    "moh, an odd number of shared heads, two key-value heads": dict(budget=(1, 3), kv_heads=2),
    "query_norm": dict(router="query_norm"),
    "query_norm, whole groups": dict(router="query_norm", kv_heads=3, router_kwargs=dict(group=2)),
    "moa": dict(router="moa", budget=(0, 2), kv_heads=1),
    "qk-norm": dict(router="query_norm", qk_norm=True),
}


@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_reference(name, rotary, blocks):
    layer, x = build(**LAYERS[name]), torch.randn(B, N, C, dtype=torch.float64)
    with torch.no_grad():
        routing, q = layer.route(x)
        call = Call(x, routing, None, q, is_causal=True, rotary=angles() if rotary else None)
        want = layer.execute(call, "reference")
        torch.testing.assert_close(layer.execute(call, "packed"), want, rtol=1e-10, atol=1e-10)
    routed = layer.budget.routed
    assert blocks == [B * N * routed]


@pytest.mark.parametrize(
    "rule",
    [
        lambda b, n, h: n >= N - 2,  # late tokens only
        lambda b, n, h: (n < 4) & (h == 3),  # one head, and early tokens only
        lambda b, n, h: (b == 1) & (n == N - 1) & (h > 2),  # one token of one sequence
        lambda b, n, h: (n % 7 == 0) | (h == 5),  # one head for all, holes in the others
    ],
)
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_any_table_of_heads(rule, kv_heads, blocks):
    layer, x = build((2, 3), kv_heads=kv_heads), torch.randn(B, N, C, dtype=torch.float64)
    b, n, h = torch.meshgrid(torch.arange(B), torch.arange(N), torch.arange(H), indexing="ij")
    active = rule(b, n, h) | (h < 2)
    weights = torch.rand(B, N, H, dtype=torch.float64) * active
    empty = weights.new_zeros(B, N, 0)
    call = Call(x, Routing(weights, active, RoutingStats(empty, active.sum(1), empty)), is_causal=True)
    with torch.no_grad():
        torch.testing.assert_close(
            layer.execute(call, "packed"), layer.execute(call, "reference"), rtol=1e-10, atol=1e-10
        )
    assert blocks == [int(active[..., 2:].sum())]


def test_keys_behind_a_block_are_not_read(blocks, monkeypatch):
    """Their number is what a causal kernel reads, and no more than a block's span over it."""
    read, real = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        read.append((q.shape[2], k.shape[2]))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(causal.F, "scaled_dot_product_attention", spy)
    q, k = torch.randn(8, D), torch.randn(1, 1, N, D)
    position = torch.tensor([0, 1, 5, 6, 7, 20, 3, 4])
    k[:, :, 21:] = float("nan")
    o = causal.attend_causal(q, k, k, position, [(0, 0, 6), (0, 0, 2)])
    assert read == [(3, 6), (3, 21), (2, 5)] and o.isfinite().all()
    for i, n in enumerate(position.tolist()):
        weights = (q[i] @ k[0, 0, : n + 1].T / D**0.5).softmax(-1)
        torch.testing.assert_close(o[i], weights @ k[0, 0, : n + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["gradient", "dropout", "mask"])
def test_where_a_mask_is_written_out_instead(case, blocks):
    layer, x = build(), torch.randn(B, N, C, dtype=torch.float64)
    mask = torch.rand(N, N).tril() > 0.3
    mask.fill_diagonal_(True)
    with torch.set_grad_enabled(case == "gradient"):
        routing, q = layer.route(x)
        call = Call(x, routing, None, q, is_causal=case != "mask")
        if case == "mask":
            call = call._replace(attn_mask=mask[None, None])
        want = layer.execute(call, "reference")
        got = layer.execute(call._replace(dropout_p=1e-9) if case == "dropout" else call, "packed")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert blocks == []


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_a_prompt_into_a_cache_and_then_token_by_token(kv_heads, blocks):
    layer, x = build(executor="packed", kv_heads=kv_heads), torch.randn(B, N, C, dtype=torch.float64)
    cache, parts = KeyValueCache(), []
    with torch.no_grad():
        want = layer(x, is_causal=True)[0]
        blocks.clear()
        for begin, end in ((0, 15), (15, 18), (18, 19), (19, N)):
            parts.append(layer(x[:, begin:end], is_causal=True, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-10, atol=1e-10)
    assert blocks == [B * 15 * 2] and cache.length == N  # later pieces have a mask, or one token


def chosen(length, budget, dtype=torch.float32, training=False, heads=16, cached=False, **kwargs):
    layer = HeadMixtureAttention(heads * 64, HeadBudget(heads, 64, *budget), dtype=dtype, **kwargs).train(training)
    x = torch.randn(1, length, heads * 64, dtype=dtype)
    with torch.set_grad_enabled(training):
        routing = layer.route(x)[0]
        return choose(layer, Call(x, routing, is_causal=True, cache=KeyValueCache() if cached else None))


@pytest.mark.parametrize("path", ["torch"], indirect=True)
@pytest.mark.parametrize("cached", [False, True])
def test_auto_packs_long_prompts_in_pytorch(cached, threads, path, shipped_limits):
    assert chosen(2048, (4, 4), cached=cached)[0] == "packed"
    assert chosen(2048, (6, 6), cached=cached)[0] == "masked"
    assert chosen(1024, (4, 4), cached=cached)[0] == "masked"
    assert chosen(4096, (4, 4), cached=cached)[0] == "packed"


@pytest.mark.parametrize("path", ["torch"], indirect=True)
def test_auto_packs_causal_calls_where_that_was_measured(threads, path, shipped_limits):
    assert chosen(2048, (4, 4), training=True)[0] == "masked"
    assert chosen(2048, (4, 4), training=True, cached=True)[0] == "masked"
    assert chosen(2048, (4, 4), dtype=torch.bfloat16)[0] == "masked"
    assert chosen(2048, (0, 4), router="moa", kv_heads=1)[0] == "masked"
    threads(3)
    picked, reason = chosen(2048, (4, 4))
    assert picked == "masked" and "the mask of every query" in reason


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize("cached", [False, True])
def test_auto_packs_prompts_with_the_operators(cached, threads, path, shipped_limits):
    threads(3)
    assert chosen(512, (6, 6), cached=cached)[0] == "packed"
    assert chosen(512, (4, 4), kv_heads=4, cached=cached)[0] == "packed"
    assert chosen(512, (4, 4), training=True, cached=cached)[0] == ("masked" if cached else "packed")
