"""Decoding step by step, with caches, equals one call on whole sequences."""

import pytest
import torch

from moh_vision.attention import ContextCache, HeadBudget, HeadMixtureAttention, KeyValueCache
from tests.support import layers
from tests.support.layers import CASES, ROUTERS, C, D, H
from tests.support.refusals import refuse

B = 2
N = 9  # tokens of a sequence
M = 7  # tokens of a context
WITH_SELF = {
    **ROUTERS,
    "query_norm": dict(**ROUTERS["query_norm"], kv_heads=3),
    "query_norm, groups": dict(**ROUTERS["query_norm"], kv_heads=3, router_kwargs=dict(group=2)),
    "dense": dict(**ROUTERS["dense"], qk_norm=True),
    "separate": dict(**ROUTERS["moh"], **CASES["separate projections"]),
    "mae running, one expert": dict(
        router="mae", budget=(6, 0), router_kwargs=dict(pool="running", mode="argmax")
    ),
    "mae window, two left out": dict(
        router="mae", budget=(6, 0), router_kwargs=dict(pool="window", leave_out=2, mode="argmax")
    ),
}
BY_CONTEXT = dict(router="mae", budget=(6, 0), route_by="context")
EXECUTORS = ["masked", "packed", "auto", "reference"]
PADDING = {
    "none": None,
    "left": torch.arange(N) < torch.tensor([[0], [2]]),  # as for generation
    "right": torch.arange(N) >= torch.tensor([[7], [5]]),
}
SPLITS = [(3, 1, 2, 1, 1, 1), (1,) * N, (5, 4), (N,)]


def build(dtype=torch.float64, **options):
    return layers.build(dtype=dtype, **options).eval()


def goes_on(options):
    """Return whether a layer's choices for a token leave out later ones, as a cache needs."""
    return not build(**options).routes_by_all(None)


SELF = {name: options for name, options in WITH_SELF.items() if goes_on(options)}
CROSS = {
    **{name: SELF[name] for name in (*ROUTERS, "separate") if name in SELF},
    "mae by context": BY_CONTEXT,
    "mae by context, one expert": dict(**BY_CONTEXT, router_kwargs=dict(mode="argmax")),
    "mae by context, uniform": dict(**BY_CONTEXT, router_kwargs=dict(mode="uniform")),
}


def tokens(batch=B, count=N, dtype=torch.float64):
    return torch.randn(batch, count, C, dtype=dtype)


def context_and_padding():
    return tokens(count=M), torch.arange(M) >= torch.tensor([[M], [4]])


def assert_near(got, want):
    tolerance = 1e-10 if want.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def assert_the_same_step_by_step(layer, padding, dtype=torch.float64, width=D):
    x = tokens(dtype=dtype)
    rotary = layers.angles(N, 0, dtype, width)
    whole, stats = layer(x, is_causal=True, rotary=rotary, padding_mask=padding)
    for split in SPLITS:
        cache = KeyValueCache()
        start = 0
        counts = 0
        for step in split:
            end = start + step
            rotary = layers.angles(step, start, dtype, width)
            named = dict(is_causal=True, rotary=rotary, cache=cache)
            real = slice(None)  # the outputs that count
            if padding is not None:
                named["padding_mask"] = padding[:, :end]
                real = ~padding[:, start:end]
            y, part = layer(x[:, start:end], **named)
            assert_near(y[real], whole[:, start:end][real])
            assert_near(part.probs, stats.probs[:, start:end])
            counts = counts + part.counts
            start = end
        assert cache.length == N
        torch.testing.assert_close(counts, stats.counts)


@pytest.mark.parametrize("name", SELF)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING.keys())
def test_token_by_token_is_the_whole_sequence(name, executor, padding):
    dtype = torch.float32 if executor == "auto" else torch.float64
    layer = build(executor=executor, dtype=dtype, **SELF[name])
    assert_the_same_step_by_step(layer, padding, dtype)


@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize("name", ["query_norm", "query_norm, groups"])
def test_token_by_token_on_triton(name, path):
    layer = build(torch.float32, executor="packed", width=16, **SELF[name])
    assert_the_same_step_by_step(layer, None, torch.float32, 16)


@pytest.mark.parametrize(
    "crosses, name", [*((False, name) for name in SELF), *((True, name) for name in CROSS)]
)
@torch.no_grad()
def test_beams(crosses, name):
    """A prompt is repeated, then rows are swapped, doubled and dropped: each goes on from the past that it has now."""
    layer = build(**CROSS[name] if crosses else SELF[name])
    x = tokens(count=5)
    rows = torch.arange(B)
    if crosses:
        cache = ContextCache()
        context, padding = context_and_padding()
    else:
        cache = KeyValueCache()
        padding = PADDING["left"][:, :5]

    def whole():
        """Arguments of a call on whole sequences."""
        if crosses:
            return dict(context=context[rows], context_padding=padding[rows])
        longer = torch.nn.functional.pad(padding[rows], (0, x.shape[1] - 5))
        return dict(is_causal=True, padding_mask=longer)

    layer(x, cache=cache, **whole())
    cache.repeat(3)
    rows = rows.repeat_interleave(3)
    x = x[rows]
    for indices in ([1, 1, 0, 5, 3, 3], [0, 2, 1, 4, 4, 5], [5, 3]):
        x = torch.cat([x, tokens(len(x), 1)], dim=1)
        got = layer(x[:, -1:], cache=cache, **({} if crosses else whole()))[0]
        assert_near(got, layer(x, **whole())[0][:, -1:])
        indices = torch.tensor(indices)
        cache.reorder(indices)
        x = x[indices]
        rows = rows[indices]


@pytest.mark.parametrize("executor", EXECUTORS)
@torch.no_grad()
def test_a_condition_routes_every_step(executor):
    """It is known before the first token; the mean token is not, and is refused."""
    layer = build(executor=executor, scope="sample", **SELF["moh"])
    x = tokens()
    condition = tokens(count=1).squeeze(1)
    whole, _ = layer(x, is_causal=True, condition=condition)
    for split in SPLITS:
        cache = KeyValueCache()
        parts = []
        for part in x.split(split, 1):
            parts.append(layer(part, is_causal=True, condition=condition, cache=cache)[0])
        assert_near(torch.cat(parts, 1), whole)
    refuse("cache MoHRouter scope 'sample'", layer, x, cache=KeyValueCache())


@torch.no_grad()
def test_crop():
    layer = build(**SELF["moh"])
    x = tokens()
    cache = KeyValueCache()
    whole = layer(x, is_causal=True)[0]
    layer(torch.cat([x[:, :4], tokens(count=3)], 1), is_causal=True, cache=cache)
    cache.crop(4)
    torch.testing.assert_close(layer(x[:, 4:], is_causal=True, cache=cache)[0], whole[:, 4:])
    for length in (-1, N + 1):
        refuse(f"crop {length} 0 {N}", cache.crop, length)

    # A filled cache refuses another batch and dtype, an emptied one takes them.
    refuse("KeyValueCache 2 1 torch.float64 crop 0", layer, x[:1], cache=cache)
    refuse("KeyValueCache 2 torch.float64 torch.float32", layer.float(), x.float(), cache=cache)
    cache.crop(0)
    cache.reorder(torch.tensor([1, 0]))  # of nothing
    cache.repeat(4)
    x = tokens(1, dtype=torch.float32)
    y = layer(x, is_causal=True, cache=cache)[0]
    torch.testing.assert_close(y, layer(x, is_causal=True)[0])


@torch.no_grad()
def test_a_running_gate_cannot_be_cropped_but_started_again():
    layer = build(**SELF["mae running"])
    x = tokens()
    cache = KeyValueCache()
    first = layer(x, is_causal=True, cache=cache)[0]
    cache.crop(N)  # nothing
    refuse("crop 4 9 router", cache.crop, 4)
    assert cache.length == N
    cache.crop(0)
    torch.testing.assert_close(layer(x, is_causal=True, cache=cache)[0], first)


@torch.no_grad()
def test_the_windows_state_does_not_grow():
    layer = build(**SELF["mae window"])
    cache = KeyValueCache()
    for step in (2, 1, 6, 3):
        layer(tokens(count=step), is_causal=True, cache=cache)
    assert [t.shape for t in cache.router_state] == [(B, 3, C), (B, 3, 1)]


def test_cache_grows_by_doubling_and_copies_only_what_is_new():
    cache = KeyValueCache()
    where = set()
    k = torch.randn(1, 2, 40, 3)
    for n in range(40):
        keys, values = cache.update(k[:, :, n : n + 1], -k[:, :, n : n + 1])
        where.add(keys.data_ptr())
    assert torch.equal(keys, k) and torch.equal(values, -k)
    assert len(where) <= 7  # 1, 2, 4, .. 64


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_context_cache_changes_nothing(name, executor, padded):
    layer = build(executor=executor, **CROSS[name])
    x = tokens()
    context, padding = context_and_padding()
    if not padded:
        padding = None
    whole, stats = layer(x, context, context_padding=padding)
    got, cached_stats = layer(x, context, context_padding=padding, cache=ContextCache())
    assert_near(got, whole)
    torch.testing.assert_close(tuple(cached_stats), tuple(stats))
    cache = ContextCache()
    start = 0
    # The context is projected once: afterwards it need not be given, and a given one is not read.
    unread = torch.full_like(context, torch.nan)
    for step, given, given_padding in (
        (2, context, padding),
        (1, None, padding),
        (1, None, None),
        (5, unread, None),
    ):
        end = start + step
        y = layer(x[:, start:end], given, context_padding=given_padding, cache=cache)[0]
        assert_near(y, whole[:, start:end])
        start = end
    assert cache.length == M


@torch.no_grad()
def test_the_expert_of_a_context_is_drawn_once():
    layer = build(**BY_CONTEXT, router_kwargs=dict(mode="random"))
    x = tokens(count=1)
    context, padding = context_and_padding()
    cache = ContextCache()
    first = layer(x, context, context_padding=padding, cache=cache)[0]
    for _ in range(8):
        assert torch.equal(layer(x, cache=cache)[0], first)
    weights = cache.routing.weights
    cache.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(cache.routing.weights, weights[[1, 1, 0]])
    assert (cache.routing.weights == 0).sum(-1).tolist() == [[1]] * 3


@pytest.mark.parametrize("training", [False, True])
def test_mae_by_context_reads_the_unpadded_context_and_no_query(training):
    layer = build(**BY_CONTEXT, router_kwargs=dict(dropout=0.0)).train(training)
    x = tokens()
    context, padding = context_and_padding()

    def probs(x, context):
        return layer(x, context, context_padding=padding)[1].probs

    before = probs(x, context)
    assert before.shape == (B, 1, H)
    assert torch.equal(probs(tokens(count=3), context), before)
    noise = context.masked_scatter(padding.unsqueeze(-1), torch.randn(3 * C, dtype=torch.float64))
    torch.testing.assert_close(probs(x, noise), before)
    other = context.clone()
    other[:, 0] += 1
    assert (probs(x, other) - before).abs().max() > 1e-4
    compiled = torch.compile(layer.eval(), fullgraph=True, backend="aot_eager")
    got = compiled(x, context, context_padding=padding)[0]
    assert_near(got, layer(x, context, context_padding=padding)[0])


BAD_ROUTE_BY = {
    "keys": (dict(route_by="keys"), "route_by 'keys' context query"),
    "moh": (
        dict(route_by="context"),
        "route_by 'context' 'moh' scope 'token' mae pool 'sequence'",
    ),
    "moh, sample": (
        dict(route_by="context", scope="sample"),
        "route_by 'context' 'moh' scope 'sample' mae pool 'sequence'",
    ),
    "mae running": (
        dict(route_by="context", **SELF["mae running"]),
        "route_by 'context' 'mae' scope 'token' 'running' 'sequence'",
    ),
    "mae, sample": (
        dict(scope="sample", **BY_CONTEXT),
        "route_by 'context' 'mae' scope 'sample' 'sequence'",
    ),
}


@pytest.mark.parametrize("options, facts", BAD_ROUTE_BY.values(), ids=BAD_ROUTE_BY)
def test_bad_route_by(options, facts):
    options = dict(options)
    shared, routed = options.pop("budget", (2, 2))
    refuse(facts, HeadMixtureAttention, C, HeadBudget(H, D, shared, routed), **options)


def test_bad_calls():
    x = tokens()
    context, padding = context_and_padding()
    moh = build(**SELF["moh"])
    mae = build(**BY_CONTEXT)
    cache = KeyValueCache()
    contexts = ContextCache()
    moh(x[:, :3], cache=cache)
    moh(x, context, cache=contexts)
    for layer, call, facts in (
        (
            build(**ROUTERS["mae"]),
            dict(cache=KeyValueCache()),
            "cache MAERouter scope 'token'",
        ),
        (
            build(scope="sample", **SELF["moh"]),
            dict(context=x, cache=ContextCache()),
            "cache MoHRouter scope 'sample'",
        ),
        (
            mae,
            dict(),
            "route_by 'context' context_padding cross-attention context",
        ),
        (moh, dict(context_padding=padding), "context_padding cross-attention context"),
        (
            moh,
            dict(context=context, context_padding=padding[:, :3]),
            "context_padding 3 columns 7",
        ),
        (
            moh,
            dict(context=context, cache=KeyValueCache()),
            "KeyValueCache self-attention context ContextCache",
        ),
        (moh, dict(cache=ContextCache()), "ContextCache first context"),
        (
            moh,
            dict(context=context, rotary=layers.angles(N)),
            "rotary self-attention context",
        ),
        (
            moh,
            dict(cache=cache, padding_mask=padding[:, :1]),
            "padding_mask 1 columns 12 3 cached 9",
        ),
    ):
        refuse(facts, layer, x, **call)
    refuse("ContextCache 2 3", moh, x[:1].expand(3, -1, -1), cache=contexts)
