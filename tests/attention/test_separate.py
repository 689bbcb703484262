"""Separate projections are the one product of `HeadMixtureAttention`, cut apart: equal output and gradients everywhere."""

import pytest
import torch
from layers import CASES, ROUTERS, C, D, H, build, call_of

from moh_vision.attention import EXECUTORS, ContextCache, HeadMixtureAttention, KeyValueCache
from moh_vision.attention import SeparateHeadMixtureAttention as Separate

B, N, M = 2, 6, 5
OPTIONS = {
    **{name: ROUTERS[name] for name in ("moh", "query_norm", "dense")},
    "sample": dict(**ROUTERS["moh"], scope="sample"),
    "grouped": dict(**ROUTERS["moh"], kv_heads=3),
    "grouped query_norm": dict(**ROUTERS["query_norm"], kv_heads=2),
    "grouped sample": dict(router="moh", budget=(1, 2), kv_heads=2, scope="sample"),
    "norms, no biases": dict(**ROUTERS["moh"], qk_norm=True, qkv_bias=False, proj_bias=False),
}


def twins(**options):
    """A layer with one product, and one with separate projections of the same weights."""
    one, cut = (build(dtype=torch.float64, kind=kind, **options) for kind in (HeadMixtureAttention, Separate))
    cut.load_state_dict(as_separate(one))
    return one.eval(), cut.eval()


def as_separate(layer, grads=False):
    kv = layer.kv_heads * D
    result = {}
    for name, p in layer.named_parameters():
        p = (torch.zeros_like(p) if p.grad is None else p.grad) if grads else p.detach()
        module, _, kind = name.rpartition(".")
        if module == "qkv":
            for part, rows in zip("qkv", p.split([H * D, kv, kv])):
                result[f"{part}_proj.{kind}"] = rows
        else:
            result[f"o_proj.{kind}" if module == "proj" else name] = p
    return result


CALLS = [CASES[name] for name in ("self", "causal", "padding", "cross", "rotary")]


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize("kind", OPTIONS)
def test_equal_to_one_product(kind, executor):
    one, cut = twins(**OPTIONS[kind])
    for case in CALLS:
        x, call, _ = call_of(case, torch.float64)
        grads = []
        for layer in (one, cut):
            layer.executor = executor
            layer.zero_grad()
            own = x.detach().clone().requires_grad_()
            y, _ = layer(own, **call)
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
            grads.append({"y": y.detach(), "x": own.grad, **as_separate(layer, grads=True)})
        assert grads[0].keys() == grads[1].keys()
        for name, want in grads[0].items():
            torch.testing.assert_close(grads[1][name], want, rtol=1e-9, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(cut(x, **call)[0], grads[0]["y"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("executor", ["masked", "packed"])
def test_token_by_token_and_a_kept_context(executor):
    one, cut = twins(executor=executor, **OPTIONS["grouped"])
    x = torch.randn(B, N, C, dtype=torch.float64)
    with torch.no_grad():
        want = one(x, is_causal=True)[0]
        cache = KeyValueCache()
        got = [cut(x[:, i : i + 1], is_causal=True, cache=cache)[0] for i in range(N)]
        torch.testing.assert_close(torch.cat(got, 1), want)
        context, kept = torch.randn(B, M, C, dtype=torch.float64), ContextCache()
        want = one(x, context)[0]
        for call in (dict(context=context, cache=kept), dict(cache=kept)):
            torch.testing.assert_close(cut(x, **call)[0], want)
