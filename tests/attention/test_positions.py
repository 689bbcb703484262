"""Masks, rotary embedding and the cache of earlier keys and values."""

import pytest
import torch

from moh_vision.attention import HeadBudget, HeadMixtureAttention, KeyValueCache
from moh_vision.attention.masks import rotate, visible

B, N, C, H, D = 2, 9, 24, 6, 4
CASES = {
    "moh": dict(router="moh", budget=(2, 2)),
    "query_norm": dict(router="query_norm", budget=(2, 2), kv_heads=3),
    "moa": dict(router="moa", budget=(0, 3), kv_heads=1),
    "dense": dict(router="dense", budget=(6, 0), qk_norm=True),
}


def build(budget, **kwargs):
    layer = HeadMixtureAttention(C, HeadBudget(H, D, *budget), **kwargs).eval().double()
    for p in layer.router.parameters():
        torch.nn.init.normal_(p)
    return layer


def angles(tokens, start=0):
    rates = torch.arange(start, start + tokens).unsqueeze(1) * torch.tensor([1.0, 0.1], dtype=torch.float64)
    return rates.repeat(1, 2).cos(), rates.repeat(1, 2).sin()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("executor", ["masked", "packed", "auto", "reference"])
@pytest.mark.parametrize("padded", [False, True])
def test_token_by_token_is_the_whole_sequence(name, executor, padded):
    """Three tokens, one, two at once, then the rest one by one, with rotary positions, against one causal call."""
    layer = build(executor=executor, **CASES[name])
    x = torch.randn(B, N, C, dtype=torch.float64)
    padding = torch.arange(N) < torch.tensor([[0], [2]]) if padded else None  # on the left, as for generation
    with torch.no_grad():
        whole = layer(x, is_causal=True, rotary=angles(N), padding_mask=padding)[0]
        cache, start = KeyValueCache(), 0
        for step in (3, 1, 2, 1, 1, 1):
            end = start + step
            seen = None if padding is None else padding[:, :end]
            part = layer(x[:, start:end], is_causal=True, rotary=angles(step, start), cache=cache, padding_mask=seen)[0]
            real = slice(None) if padding is None or start > 1 else slice(0, 1)
            torch.testing.assert_close(part[real], whole[real, start:end])
            start = end
    assert cache.length == N


def test_cache_grows_by_doubling_and_copies_only_what_is_new():
    cache = KeyValueCache()
    k = torch.randn(1, 2, 40, 3)
    where = []
    for n in range(40):
        keys, values = cache.update(k[:, :, n : n + 1], -k[:, :, n : n + 1])
        where.append(keys.data_ptr())
    assert torch.equal(keys, k) and torch.equal(values, -k)
    assert len(set(where)) <= 7  # 1, 2, 4, .. 64


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (
            dict(budget=(6, 0), router="mae"),
            "cannot be routed by all of them together .router MAERouter, scope 'token'",
        ),
        (
            dict(budget=(2, 2), scope="sample"),
            "cannot be routed by all of them together .router MoHRouter, scope 'sample'",
        ),
    ],
)
def test_a_cache_is_refused_where_routing_needs_more(kwargs, words):
    with pytest.raises(ValueError, match=words):
        build(**kwargs)(torch.randn(B, 1, C, dtype=torch.float64), cache=KeyValueCache())


def test_rotary_is_refused_with_a_context():
    x = torch.randn(B, N, C, dtype=torch.float64)
    with pytest.raises(ValueError, match="not with a context"):
        build((2, 2))(x, x, rotary=angles(N))
    with pytest.raises(ValueError, match="not with a context"):
        build((2, 2))(x, x, cache=KeyValueCache())


def test_padding_of_the_wrong_length_is_refused():
    cache = KeyValueCache()
    layer = build((2, 2))
    layer(torch.randn(B, 3, C, dtype=torch.float64), cache=cache)
    with pytest.raises(ValueError, match="padding_mask has 1 columns, not 4: 3 cached tokens and 1 new ones"):
        layer(torch.randn(B, 1, C, dtype=torch.float64), cache=cache, padding_mask=torch.zeros(B, 1, dtype=torch.bool))


def test_a_mask_that_broadcasts_over_keys_stays_causal():
    got, _ = visible(torch.ones(4, 1, dtype=torch.bool), True, None, 4, 4, 0, torch.device("cpu"))
    assert torch.equal(got[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())


def test_rotary_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64)

    def score(i, j):
        return (rotate(q, angles(1, i)) * rotate(k, angles(1, j))).sum()

    torch.testing.assert_close(score(7, 3), score(14, 10))
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3
    torch.testing.assert_close(rotate(q, angles(1, 5)).norm(), q.norm())
    # Channel 1 and channel 1 + D/2 are one point, turned by position times its rate.
    point = torch.zeros(1, 1, 1, D, dtype=torch.float64)
    point[..., 1] = 1
    want = torch.tensor([0, torch.tensor(0.3).cos(), 0, torch.tensor(0.3).sin()], dtype=torch.float64)
    torch.testing.assert_close(rotate(point, angles(1, 3)).flatten(), want, atol=1e-7, rtol=0)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("given", [None, "bool", "additive"])
def test_one_mask_out_of_many(past, tokens, causal, padded, given):
    keys = past + tokens
    padding = torch.arange(keys) < torch.tensor([[0], [2]]) if padded else None
    allowed = torch.rand(tokens, keys) > 0.3
    allowed[torch.arange(tokens), past + torch.arange(tokens)] = True
    mask = {None: None, "bool": allowed, "additive": torch.randn(tokens, keys)}[given]
    got, is_causal = visible(mask, causal, padding, tokens, keys, past, torch.device("cpu"))
    assert not (is_causal and got is not None)
    for b in range(2):
        for n in range(tokens):
            for m in range(keys):
                ok = not (causal and m > past + n) and not (padded and padding[b, m])
                if given == "bool":
                    ok = ok and bool(allowed[n, m])
                ok = ok or (m == past + n)
                if got is None:
                    assert ok == (not is_causal or m <= n)
                    continue
                entry = got.expand(2, 1, tokens, keys)[b, 0, n, m] if got.dim() == 4 else got[n, m]
                if got.dtype == torch.bool:
                    assert bool(entry) == ok
                else:
                    assert entry.item() == (mask[n, m].item() if ok else float("-inf"))
