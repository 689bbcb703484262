"""Decoding reads the caches of the heads that run, and nothing of the others."""

import logging
import sys
from functools import partial

import pytest
import torch

from moh_vision.attention import HeadBudget, HeadMixtureAttention, KeyValueCache
from moh_vision.attention.executors import attend_chosen, choose
from moh_vision.attention.executors import decode as decode_executor
from moh_vision.attention.executors.auto import say
from moh_vision.attention.executors.decode import pieces
from moh_vision.attention.executors.masked import attend
from moh_vision.attention.routing import Call

B, M, C, H, D = 3, 11, 24, 6, 4
LAYERS = {
    "moh": dict(router="moh", budget=(2, 2)),
    "query_norm": dict(router="query_norm", budget=(2, 2)),
    "query_norm, three key-value heads": dict(router="query_norm", budget=(2, 2), kv_heads=3),
    "query_norm, whole groups": dict(
        router="query_norm", budget=(2, 2), kv_heads=3, router_kwargs=dict(group=2), qk_norm=True
    ),
    "moa": dict(router="moa", budget=(0, 3), kv_heads=1),
    "mae": dict(router="mae", budget=(6, 0), router_kwargs=dict(pool="running", mode="argmax")),
    "dense": dict(router="dense", budget=(6, 0)),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """The heads are cut for so many threads; how many work does not matter here."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


def build(budget, dtype=torch.float64, **kwargs):
    layer = HeadMixtureAttention(C, HeadBudget(H, D, *budget), **kwargs).eval().to(dtype)
    for p in layer.router.parameters():
        torch.nn.init.normal_(p)
    return layer


def assert_near(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype
    error = (got - want).norm().item()
    assert error <= TOLERANCE[want.dtype] * want.norm().item(), error


def inputs(kv_heads, dtype=torch.float64):
    """Queries, and keys and values as a cache with room for more tokens returns them."""
    q = torch.randn(B, H, 1, D, dtype=dtype)
    k, v = torch.randn(2, B, kv_heads, M + 5, D, dtype=dtype)[..., :M, :]
    return q, k, v


MASKS = {"none": None, "left padding": (B, 1, 1, M), "for all sequences": (1, 1, 1, M), "of each head": (B, H, 1, M)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_equals_attention_of_all_heads_times_the_weights(kv_heads, mask, dtype, threads):
    active = torch.rand(B, 1, H) < 0.5
    active[1] = False  # a sequence that runs nothing
    weights = torch.randn(B, 1, H) * active
    given = [None]
    if mask is not None:
        seen = torch.rand(mask) < 0.5
        seen[..., -1] = True
        given = [seen, torch.randn(mask, dtype=dtype).masked_fill(~seen, -torch.inf)]
    q, k, v = inputs(kv_heads, dtype)
    for m in given:
        for w in (weights, None):
            want = attend(q, k, v, active.to(dtype) if w is None else w, m, grouped=kv_heads < H)
            # Heads in one even row over the batch, of a cache with room too; and as projections without a cache leave them.
            for turn in (False, True):
                keys, values = (t.transpose(1, 2).contiguous().transpose(1, 2) if turn else t for t in (k, v))
                assert_near(attend_chosen(q, keys, values, w, active, m), want)


@pytest.mark.parametrize("kv_heads", [6, 3])
def test_all_heads(kv_heads, threads):
    q, k, v = inputs(kv_heads)
    active = torch.ones(B, 1, H, dtype=torch.bool)
    assert_near(attend_chosen(q, k, v, None, active), attend(q, k, v, None, grouped=kv_heads < H))


@pytest.mark.parametrize("kv_heads", [6, 3])
def test_what_is_not_read_may_be_anything(kv_heads, threads):
    q, k, v = inputs(kv_heads)
    on = torch.tensor([[True, False, True], [False, False, True], [False, False, False]])  # groups of two heads
    active = on.repeat_interleave(2, 1).unsqueeze(1)
    active[0, 0, 1] = False  # one head of a group that runs
    want = attend_chosen(q, k, v, None, active)
    read = active[:, 0] if kv_heads == H else on
    k, v = (t.masked_fill(~read[:, :, None, None], torch.nan) for t in (k, v))
    got = attend_chosen(q, k, v, None, active)
    assert torch.equal(got, want)
    off = got.view(B, H, D)[~active[:, 0]]
    assert (off == 0).all() and (got.view(B, H, D)[active[:, 0]] != 0).all()
    # And what is read is read: the test would notice.
    k[0, 0] = torch.nan
    assert attend_chosen(q, k, v, None, active).isnan().any()


@pytest.mark.parametrize("mask", [None, (B, 1, 1, M)], ids=["no mask", "mask"])
def test_one_token_reads_a_shared_key_once(mask, monkeypatch):
    """`masked` takes the query heads of a key-value head as rows, and says the same as with enable_gqa."""
    q, k, v = inputs(3)
    seen = None if mask is None else torch.randn(mask, dtype=q.dtype)
    weights = torch.rand(B, 1, H, dtype=q.dtype)
    real, calls = torch.nn.functional.scaled_dot_product_attention, []
    want = real(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2) * weights.unsqueeze(-1)

    def spy(q, k, v, **kwargs):
        calls.append((tuple(q.shape), kwargs.get("enable_gqa", False)))
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    assert_near(attend(q, k, v, weights, seen, grouped=True), want.flatten(2))
    assert calls == [((B, 3, 2, D), False)]


def test_caches_are_not_copied(monkeypatch):
    """Every call of attention gets views of the cache, and only the heads that run are in them."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        seen.append((k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr(), k.shape[1]))
        return real(q, k, v, **kwargs)

    cache = KeyValueCache()
    q, k, v = inputs(H)
    k, v = cache.update(k, v)
    active = torch.rand(B, 1, H) < 0.5
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    attend_chosen(q, k, v, None, active)
    assert {pair[:2] for pair in seen} == {(k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr())}
    assert sum(heads for _, _, heads in seen) == active.sum()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_pieces(threads):
    for share in (0.1, 0.5, 0.9, 1.0):
        for _ in range(50):
            heads = (torch.rand(40) < share).nonzero().flatten().tolist()
            parts = [list(range(p.start, p.stop, p.step)) for p in pieces(heads, threads)]
            assert sorted(h for part in parts for h in part) == heads
            if threads == 1:
                assert all(part[-1] - part[0] == len(part) - 1 for part in parts)  # runs, and the longest there are:
                assert all(a[-1] + 1 < b[0] for a, b in zip(parts, parts[1:]))
            if threads == 2:  # no thread is idle, but at the end
                assert sum(len(part) % 2 for part in parts) <= 1
    assert pieces([], threads) == []


# ---------------------------------------------------------------- layers


def decode_whole(layer, x, padding=None, rotary=None):
    """Three tokens, then one by one; the outputs [B, N, C]."""
    cache, parts, start = KeyValueCache(), [], 0
    for step in (3, *[1] * (x.shape[1] - 3)):
        end = start + step
        part, _ = layer(
            x[:, start:end],
            is_causal=True,
            cache=cache,
            padding_mask=None if padding is None else padding[:, :end],
            rotary=None if rotary is None else tuple(t[start:end] for t in rotary),
        )
        parts.append(part)
        start = end
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_token_by_token_is_the_whole_sequence_and_every_executor_agrees(name, padded, dtype):
    layer = build(dtype=dtype, **LAYERS[name])
    x = torch.randn(B, 8, C, dtype=dtype)
    padding = torch.arange(8) < torch.tensor([[0], [2], [4]]) if padded else None
    rates = torch.arange(8).unsqueeze(1) * torch.tensor([1.0, 0.1]).repeat(2)
    rotary = (rates.cos(), rates.sin())
    keep = torch.ones(B, 8, dtype=torch.bool) if padding is None else ~padding
    with torch.no_grad():
        layer.executor = "reference"
        whole = layer(x, is_causal=True, padding_mask=padding, rotary=rotary)[0]
        outputs = {}
        for executor in ("reference", "masked", "decode"):
            layer.executor = executor
            outputs[executor] = decode_whole(layer, x, padding, rotary)
            # In 16 bits one token and many go through products of other shapes: the router may choose otherwise.
            if dtype != torch.bfloat16:
                assert_near(outputs[executor][keep], whole[keep])
    assert_near(outputs["decode"][keep], outputs["masked"][keep])
    assert_near(outputs["decode"][keep], outputs["reference"][keep])


def cached_call(layer, length=6, batch=B, grad=False):
    """A call for one token with a cache of `length` tokens; the cache can be used once."""
    cache = KeyValueCache()
    dtype = layer.qkv.weight.dtype
    with torch.set_grad_enabled(grad):
        layer(torch.randn(batch, length, C, dtype=dtype), is_causal=True, cache=cache)
        x = torch.randn(batch, 1, C, dtype=dtype)
        routing, q = layer.route(x)
    return Call(x, routing, q=q, cache=cache)


def test_a_layer_leaves_the_caches_of_other_heads_unread():
    layer = build(**LAYERS["query_norm, whole groups"])
    with torch.no_grad():
        call = cached_call(layer)
        off = ~call.routing.active[:, 0, ::2]  # [B, kv_heads]
        assert off.any() and not off.all()
        cache = call.cache
        for buffer in (cache._keys, cache._values):
            buffer.masked_fill_(off[:, :, None, None], torch.nan)
        y = layer.execute(call, "decode")
        cache.crop(6)
        assert layer.execute(call, "masked").isnan().any()
    assert not y.isnan().any()


@pytest.mark.parametrize("case", ["two tokens", "gradients", "every head", "dropout"])
def test_where_it_does_not_apply_it_is_masked(case, monkeypatch):
    def fail(*args):
        raise AssertionError("attend_chosen was called")

    layer = build(**LAYERS["dense" if case == "every head" else "moh"])
    with torch.set_grad_enabled(case == "gradients"):
        call = cached_call(layer, grad=case == "gradients")
        monkeypatch.setitem(decode_executor.__globals__, "attend_chosen", fail)
        if case == "two tokens":
            x = torch.randn(B, 2, C, dtype=torch.float64)
            call = call._replace(x=x, routing=layer.route(x)[0])
        elif case == "dropout":
            call = call._replace(dropout_p=0.5)
        torch.manual_seed(1)
        got = layer.execute(call, "decode")
        call.cache.crop(6)
        torch.manual_seed(1)
        want = layer.execute(call, "masked")
    assert torch.equal(got, want)
    assert got.requires_grad == (case == "gradients")


def test_gradients_while_decoding():
    """With a gradient asked for, "decode" gives masked's."""
    grads = []
    for executor in ("decode", "masked"):
        torch.manual_seed(0)
        layer = build(executor=executor, **LAYERS["moh"])
        x = torch.randn(B, 1, C, dtype=torch.float64, requires_grad=True)
        layer(x)[0].square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads) and grads[0].norm() > 0


def test_captured_it_is_masked():
    layer = build(executor="decode", **LAYERS["moh"])
    x = torch.randn(B, 1, C, dtype=torch.float64)
    with torch.no_grad():
        want = layer(x)[0]
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[0], want)


# ---------------------------------------------------------------- auto


def big(budget, kv_heads=None, heads=16, **kwargs):
    layer = HeadMixtureAttention(C, HeadBudget(heads, 64, *budget), "query_norm", kv_heads=kv_heads, **kwargs).eval()
    return layer


def picked(layer, length, threads=1, batch=1, monkeypatch=None):
    call = cached_call(layer, 1, batch)
    call.cache.length = length
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with torch.no_grad():
        return choose(layer, call)[0]


def test_auto_decodes_where_enough_stays_unread(monkeypatch):
    pick = partial(picked, monkeypatch=monkeypatch)
    half, most, all_but_one = big((4, 4)), big((6, 6)), big((7, 8))
    assert pick(half, 64) == "masked"  # a small cache
    assert pick(half, 16384) == pick(most, 16384) == "decode"
    # One head of 16 is little, and of eight sequences it is eight times as much.
    assert pick(all_but_one, 1024) == "masked" and pick(all_but_one, 2048, batch=8) == "decode"
    # A key-value head is left out only if none of its four query heads runs: here all are read.
    assert pick(big((12, 2), kv_heads=4), 16384) == "masked"
    assert pick(big((4, 4), kv_heads=4, router_kwargs=dict(group=4)), 4096) == "decode"
    assert pick(half, 16384, threads=2) == "decode" and pick(half, 768, threads=1) == "decode"
    assert pick(half, 768, threads=2) == "masked"  # two threads have less to gain from the same heads
    assert pick(half, 16384, threads=3) == "masked"  # not measured
    monkeypatch.setattr(sys.modules["moh_vision.attention.executors.decode"], "DECODE_THREADS", 16)
    assert pick(half, 16384, threads=16) == "masked"  # 16 heads at once take as long as one


def test_auto_decodes_for_one_token_without_gradients_only(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # more are masked
    layer = big((4, 4))
    call = cached_call(layer, 1)
    call.cache.length = 16384
    with torch.no_grad():
        assert choose(layer, call)[0] == "decode"
        x = torch.randn(1, 2, C)
        assert choose(layer, call._replace(x=x, routing=layer.route(x)[0]))[0] == "masked"
        layer.train()
        assert choose(layer, call)[0] == "masked"
        layer.eval()
    assert choose(layer, call)[0] == "masked"


def test_auto_equals_masked_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    layer = big((2, 4), kv_heads=16)
    say.cache_clear()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="moh_vision.attention"):
        call = cached_call(layer, 2500, 1)
        for _ in range(2):
            got = layer.execute(call, "auto")
            call.cache.crop(2500)
        assert_near(got, layer.execute(call, "masked"))
    assert [r.getMessage() for r in caplog.records if "decode" in r.getMessage()] == [
        "auto picked decode: one token, and much of the cache need not be read"
    ]
