"""Decoding step by step, with caches, equals one call on whole sequences."""

import layers
import pytest
import torch
from layers import ROUTERS, C, D, H
from refusals import each_refused, refuse

from moh_vision.attention import ContextCache, HeadBudget, HeadMixtureAttention, KeyValueCache

B, N, M = 2, 9, 7
SELF = {
    **ROUTERS,
    "query_norm": dict(**ROUTERS["query_norm"], kv_heads=3),
    "dense": dict(**ROUTERS["dense"], qk_norm=True),
    "mae running, one expert": dict(router="mae", budget=(6, 0), router_kwargs=dict(pool="running", mode="argmax")),
    "mae window, two left out": dict(
        router="mae", budget=(6, 0), router_kwargs=dict(pool="window", leave_out=2, mode="argmax")
    ),
}
del SELF["mae"]  # whose gates read the whole sequence
BY_CONTEXT = dict(router="mae", budget=(6, 0), route_by="context")
CROSS = {
    **{name: SELF[name] for name in ("moh", "query_norm", "moa", "dense", "mae running", "mae window")},
    "mae by context": BY_CONTEXT,
    "mae by context, one expert": dict(**BY_CONTEXT, router_kwargs=dict(mode="argmax")),
    "mae by context, uniform": dict(**BY_CONTEXT, router_kwargs=dict(mode="uniform")),
}
EXECUTORS = ["masked", "packed", "auto", "reference"]
PADDING = {
    "none": None,
    "left": torch.arange(N) < torch.tensor([[0], [2]]),  # as for generation
    "right": torch.arange(N) >= torch.tensor([[7], [5]]),
}
SPLITS = [(3, 1, 2, 1, 1, 1), (1,) * N, (5, 4), (N,)]


def build(dtype=torch.float64, **options):
    return layers.build(dtype=dtype, **options).eval()


def real(padding, start, end):
    """Which outputs count: those of no padding."""
    return torch.ones(B, end - start, dtype=torch.bool) if padding is None else ~padding[:, start:end]


def tolerance(dtype):
    return dict(rtol=1e-10, atol=1e-10) if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SELF)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING.keys())
def test_token_by_token_is_the_whole_sequence(name, executor, padding):
    dtype = torch.float32 if executor == "auto" else torch.float64
    layer = build(executor=executor, dtype=dtype, **SELF[name])
    x = torch.randn(B, N, C, dtype=dtype)
    with torch.no_grad():
        whole, stats = layer(x, is_causal=True, rotary=layers.angles(N, 0, dtype), padding_mask=padding)
        for split in SPLITS:
            cache, start, counts = KeyValueCache(), 0, 0
            for step in split:
                end = start + step
                part, part_stats = layer(
                    x[:, start:end],
                    is_causal=True,
                    rotary=layers.angles(step, start, dtype),
                    cache=cache,
                    padding_mask=None if padding is None else padding[:, :end],
                )
                keep = real(padding, start, end)
                torch.testing.assert_close(part[keep], whole[:, start:end][keep], **tolerance(dtype))
                torch.testing.assert_close(part_stats.probs, stats.probs[:, start:end], **tolerance(dtype))
                counts = counts + part_stats.counts
                start = end
            assert cache.length == N
            torch.testing.assert_close(counts, stats.counts)


@pytest.mark.parametrize("name", SELF)
def test_beams(name):
    """A prompt is repeated, then rows are swapped, doubled and dropped: each goes on from the past that it has now."""
    layer = build(**SELF[name])
    prompt, padding = torch.randn(B, 5, C, dtype=torch.float64), PADDING["left"][:, :5]
    cache = KeyValueCache()
    with torch.no_grad():
        layer(prompt, is_causal=True, cache=cache, padding_mask=padding)
        cache.repeat(3)
        x, padding = prompt.repeat_interleave(3, 0), padding.repeat_interleave(3, 0)
        for indices in ([1, 1, 0, 5, 3, 3], [0, 2, 1, 4, 4, 5], [5, 3]):
            x = torch.cat([x, torch.randn(len(x), 1, C, dtype=torch.float64)], dim=1)
            padding = torch.nn.functional.pad(padding, (0, 1))
            got = layer(x[:, -1:], is_causal=True, cache=cache, padding_mask=padding)[0]
            want = layer(x, is_causal=True, padding_mask=padding)[0]
            torch.testing.assert_close(got, want[:, -1:], rtol=1e-10, atol=1e-10)
            indices = torch.tensor(indices)
            cache.reorder(indices)
            x, padding = x[indices], padding[indices]


def test_crop():
    layer = build(**SELF["moh"])
    x = torch.randn(B, N, C, dtype=torch.float64)
    cache = KeyValueCache()
    with torch.no_grad():
        whole = layer(x, is_causal=True)[0]
        layer(torch.cat([x[:, :4], torch.randn(B, 3, C, dtype=torch.float64)], 1), is_causal=True, cache=cache)
        cache.crop(4)
        torch.testing.assert_close(layer(x[:, 4:], is_causal=True, cache=cache)[0], whole[:, 4:])
    for length in (-1, N + 1):
        refuse(f"crop to {length} tokens is out of range: 0 to {N}", cache.crop, length)


def test_a_running_gate_cannot_be_cropped_but_started_again():
    layer = build(**SELF["mae running"])
    x = torch.randn(B, N, C, dtype=torch.float64)
    cache = KeyValueCache()
    with torch.no_grad():
        first = layer(x, is_causal=True, cache=cache)[0]
        cache.crop(N)  # nothing
        refuse("crop to 4 of 9 tokens: the running state of this layer's router", lambda: cache.crop(4))
        assert cache.length == N
        cache.crop(0)
        torch.testing.assert_close(layer(x, is_causal=True, cache=cache)[0], first)


def test_an_emptied_cache_takes_another_batch_and_dtype_and_a_filled_one_refuses_them():
    layer, cache = build(**SELF["moh"]), KeyValueCache()
    x = torch.randn(1, N, C)
    with torch.no_grad():
        layer(torch.randn(B, N, C, dtype=torch.float64), is_causal=True, cache=cache)
        with pytest.raises(
            ValueError, match="keeps a batch of 2 in torch.float64, not of 1 in torch.float64: crop it to 0"
        ):
            layer(x.double(), is_causal=True, cache=cache)
        layer.float()
        with pytest.raises(ValueError, match="a batch of 2 in torch.float64, not of 2 in torch.float32"):
            layer(x.expand(B, -1, -1), is_causal=True, cache=cache)
        cache.crop(0)
        torch.testing.assert_close(layer(x, is_causal=True, cache=cache)[0], layer(x, is_causal=True)[0])


def test_a_filled_context_cache_refuses_another_batch():
    layer, cache = build(**CROSS["moh"]), ContextCache()
    x, context = torch.randn(B, N, C, dtype=torch.float64), torch.randn(B, M, C, dtype=torch.float64)
    with torch.no_grad():
        layer(x, context, cache=cache)
        refuse("keeps a batch of 2, not of 3", lambda: layer(x[:1].expand(3, -1, -1), cache=cache))


def test_an_empty_cache_may_be_reordered():
    for cache in (KeyValueCache(), ContextCache()):
        cache.reorder(torch.tensor([1, 0]))
        cache.repeat(4)
        assert cache.length == 0


def test_the_windows_state_does_not_grow():
    layer = build(**SELF["mae window"])
    cache = KeyValueCache()
    with torch.no_grad():
        for step in (2, 1, 6, 3):
            layer(torch.randn(B, step, C, dtype=torch.float64), is_causal=True, cache=cache)
    assert [t.shape for t in cache.router_state] == [(B, 3, C), (B, 3, 1)]


def test_cache_grows_by_doubling_and_copies_only_what_is_new():
    cache = KeyValueCache()
    k = torch.randn(1, 2, 40, 3)
    where = []
    for n in range(40):
        keys, values = cache.update(k[:, :, n : n + 1], -k[:, :, n : n + 1])
        where.append(keys.data_ptr())
    assert torch.equal(keys, k) and torch.equal(values, -k)
    assert len(set(where)) <= 7  # 1, 2, 4, .. 64


@pytest.mark.parametrize("kind", [KeyValueCache, ContextCache])
@pytest.mark.parametrize(
    "kwargs, words",
    [
        (
            dict(budget=(6, 0), router="mae"),
            "cannot be routed by all of them together .router MAERouter, scope 'token'",
        ),
        (dict(budget=(2, 2), router="moh", scope="sample"), "all of them together .router MoHRouter, scope 'sample'"),
    ],
)
def test_a_cache_is_refused_where_routing_needs_all_tokens(kind, kwargs, words):
    x = torch.randn(B, 1, C, dtype=torch.float64)
    refuse(words, lambda: build(**kwargs)(x, x if kind is ContextCache else None, cache=kind()))


def test_padding_of_the_wrong_length_is_refused():
    cache = KeyValueCache()
    layer = build(**SELF["moh"])
    layer(torch.randn(B, 3, C, dtype=torch.float64), cache=cache)
    with pytest.raises(ValueError, match="padding_mask has 1 columns, not 4: 3 cached tokens and 1 new ones"):
        layer(torch.randn(B, 1, C, dtype=torch.float64), cache=cache, padding_mask=torch.zeros(B, 1, dtype=torch.bool))


def context_and_padding(dtype=torch.float64):
    return torch.randn(B, M, C, dtype=dtype), torch.arange(M) >= torch.tensor([[M], [4]])


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_context_cache_changes_nothing(name, executor, padded):
    layer = build(executor=executor, **CROSS[name])
    x, (context, padding) = torch.randn(B, N, C, dtype=torch.float64), context_and_padding()
    padding = padding if padded else None
    with torch.no_grad():
        whole, stats = layer(x, context, context_padding=padding)
        cache = ContextCache()
        got, cached_stats = layer(x, context, context_padding=padding, cache=cache)
        torch.testing.assert_close(got, whole, **tolerance(got.dtype))
        torch.testing.assert_close(tuple(cached_stats), tuple(stats))
        cache, start = ContextCache(), 0
        for step in (2, 1, 1, 5):
            # The context is projected once: afterwards it need not be there, and what is there is not looked at.
            given = context if start == 0 else None if step == 1 else torch.full_like(context, torch.nan)
            part = layer(x[:, start : start + step], given, context_padding=padding if start < 3 else None, cache=cache)
            torch.testing.assert_close(part[0], whole[:, start : start + step], **tolerance(got.dtype))
            start += step
    assert cache.length == M


@pytest.mark.parametrize("name", CROSS)
def test_beams_over_a_context(name):
    layer = build(**CROSS[name])
    x, (context, padding) = torch.randn(B, 1, C, dtype=torch.float64), context_and_padding()
    cache = ContextCache()
    rows = torch.arange(B).repeat_interleave(3)
    with torch.no_grad():
        layer(x, context, context_padding=padding, cache=cache)
        cache.repeat(3)
        x = x.repeat_interleave(3, 0)
        for indices in ([1, 1, 0, 5, 3, 3], [5, 3, 1, 0], [2]):
            x = torch.cat([x, torch.randn(len(x), 1, C, dtype=torch.float64)], dim=1)
            got = layer(x[:, -1:], cache=cache)[0]
            want = layer(x, context[rows], context_padding=padding[rows])[0]
            torch.testing.assert_close(got, want[:, -1:], rtol=1e-10, atol=1e-10)
            indices = torch.tensor(indices)
            cache.reorder(indices)
            rows, x = rows[indices], x[indices]


def test_the_gate_of_a_context_is_computed_once_and_its_expert_drawn_once():
    layer = build(**BY_CONTEXT, router_kwargs=dict(mode="random"))
    calls = []
    layer.router.register_forward_hook(lambda *args: calls.append(1))
    x, (context, padding) = torch.randn(B, 1, C, dtype=torch.float64), context_and_padding()
    cache = ContextCache()
    with torch.no_grad():
        first = layer(x, context, context_padding=padding, cache=cache)[0]
        for _ in range(8):
            assert torch.equal(layer(x, cache=cache)[0], first)
        assert len(calls) == 1
        weights = cache.routing.weights
        cache.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(cache.routing.weights, weights[[1, 1, 0]])
    assert (cache.routing.weights == 0).sum(-1).tolist() == [[1]] * 3


def test_context_padding_is_a_key_mask():
    layer = build(**SELF["moh"])
    x, (context, padding) = torch.randn(B, N, C, dtype=torch.float64), context_and_padding()
    want = layer(x, context, attn_mask=~padding[:, None, None])[0]
    got = layer(x, context, context_padding=padding)[0]
    assert torch.equal(got, want)
    torch.testing.assert_close(got[1:], layer(x[1:], context[1:, :4])[0])
    additive = torch.randn(N, M, dtype=torch.float64)
    got = layer(x, context, attn_mask=additive, context_padding=padding)[0]
    torch.testing.assert_close(got[1:], layer(x[1:], context[1:, :4], attn_mask=additive[:, :4])[0])


@pytest.mark.parametrize("training", [False, True])
def test_mae_by_context_reads_the_unpadded_context_and_no_query(training):
    layer = build(**BY_CONTEXT, router_kwargs=dict(dropout=0.0)).train(training)
    context, padding = context_and_padding()

    def probs(x, context, padding):
        return layer(x, context, context_padding=padding)[1].probs

    x = torch.randn(B, N, C, dtype=torch.float64)
    before = probs(x, context, padding)
    assert before.shape == (B, 1, H)
    assert torch.equal(probs(torch.randn(B, 3, C, dtype=torch.float64), context, padding), before)
    noise = context.masked_scatter(padding.unsqueeze(-1), torch.randn(3 * C, dtype=torch.float64))
    torch.testing.assert_close(probs(x, noise, padding), before)
    other = context.clone()
    other[:, 0] += 1
    assert (probs(x, other, padding) - before).abs().max() > 1e-4


@pytest.mark.parametrize("executor", EXECUTORS)
def test_gradient_of_the_gate_in_cross_attention(executor):
    """Soft: the G step trains the gate. Sampled: the F step trains all but the gate (Peng 2020, algorithms 1 and 2)."""
    layer = build(**BY_CONTEXT, executor=executor, router_kwargs=dict(dropout=0.0)).train()
    x, (context, padding) = torch.randn(B, N, C, dtype=torch.float64), context_and_padding()
    weight = torch.randn(C, dtype=torch.float64)
    (layer(x, context, context_padding=padding)[0] * weight).sum().backward()
    for name, p in layer.router.named_parameters():
        # With two sequences batch norm leaves a sign of each channel, on which its scale and all before it act.
        assert p.grad is not None and p.grad.norm() > 1e-6, name
    layer.zero_grad()
    layer.router.set_mode("sampled")
    y, stats = layer(x, context, context_padding=padding)
    (y * weight).sum().backward()
    assert all(p.grad is None for p in layer.router.parameters()) and not stats.probs.requires_grad
    assert layer.qkv.weight.grad.norm() > 0 and layer.proj.weight.grad.norm() > 0


def test_mae_by_context_compiled():
    layer = build(**BY_CONTEXT)
    x, (context, padding) = torch.randn(B, N, C, dtype=torch.float64), context_and_padding()
    want = layer(x, context, context_padding=padding)[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, context, context_padding=padding)[0], want)


test_bad_route_by = each_refused(
    lambda kwargs: HeadMixtureAttention(C, HeadBudget(H, D, *kwargs.pop("budget", (2, 2))), **kwargs),
    (dict(route_by="keys"), "route_by 'keys' is not one of context, query"),
    (dict(route_by="context"), "route_by 'context' needs a router that chooses once for a sequence, which 'moh'"),
    (dict(route_by="context", scope="sample"), "which 'moh' with scope 'sample' and its defaults does not"),
    (dict(route_by="context", **SELF["mae running"]), "which 'mae' with scope 'token' and .'pool': 'running'"),
    (dict(scope="sample", **BY_CONTEXT), "which 'mae' with scope 'sample'"),
)


def test_bad_calls():
    x, (context, padding) = torch.randn(B, N, C, dtype=torch.float64), context_and_padding()
    moh, mae = build(**SELF["moh"]), build(**BY_CONTEXT)
    for call, words in (
        (lambda: mae(x), "route_by 'context' and context_padding are for cross-attention: give a context"),
        (lambda: moh(x, context_padding=padding), "are for cross-attention: give a context"),
        (lambda: moh(x, context, context_padding=padding[:, :3]), "context_padding has 3 columns, not 7"),
        (lambda: moh(x, context, cache=KeyValueCache()), "a KeyValueCache is for self-attention, not with a context"),
        (lambda: moh(x, cache=ContextCache()), "the first call with a ContextCache needs the context"),
        (
            lambda: moh(x, context, cache=ContextCache(), rotary=layers.angles(N)),
            "rotary positions are for self-attention",
        ),
    ):
        refuse(words, call)
