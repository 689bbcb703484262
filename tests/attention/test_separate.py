"""Separate projections are the one product of `HeadMixtureAttention`, cut apart: equal output and gradients everywhere."""

import pytest
import torch
from torch import nn

from moh_vision.attention import EXECUTORS, ContextCache, HeadBudget, HeadMixtureAttention, KeyValueCache
from moh_vision.attention import SeparateHeadMixtureAttention as Separate

B, N, M, C, H, D = 2, 6, 5, 24, 6, 4
OPTIONS = {
    "moh": dict(router="moh", budget=(2, 2)),
    "query_norm": dict(router="query_norm", budget=(2, 3)),
    "dense": dict(router="dense", budget=(6, 0)),
    "sample": dict(router="moh", budget=(2, 2), scope="sample"),
    "grouped": dict(router="moh", budget=(2, 2), kv_heads=3),
    "grouped query_norm": dict(router="query_norm", budget=(2, 2), kv_heads=2),
    "grouped sample": dict(router="moh", budget=(1, 2), kv_heads=2, scope="sample"),
    "norms, no biases": dict(router="moh", budget=(2, 2), qk_norm=True, qkv_bias=False, proj_bias=False),
}


def twins(dtype=torch.float64, **options):
    """A layer with one product, and one with separate projections of the same weights."""
    options = {**options, "budget": HeadBudget(H, D, *options["budget"])}
    one, cut = HeadMixtureAttention(C, dtype=dtype, **options), Separate(C, dtype=dtype, **options)
    for p in one.router.parameters():
        nn.init.normal_(p)
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


def calls():
    rotary = torch.linspace(0, 3, N).unsqueeze(1) * torch.tensor([1.0, 0.3]).repeat(2)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 4:] = True
    return {
        "self": {},
        "causal, rotary": dict(is_causal=True, rotary=(rotary.cos(), rotary.sin())),
        "padding": dict(padding_mask=padding),
        "cross": dict(context=torch.randn(B, M, C, dtype=torch.float64)),
    }


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize("kind", OPTIONS)
def test_equal_to_one_product(kind, executor):
    one, cut = twins(**OPTIONS[kind])
    x = torch.randn(B, N, C, dtype=torch.float64)
    for call in calls().values():
        grads = []
        for layer in (one, cut):
            layer.executor = executor
            layer.zero_grad()
            own = x.clone().requires_grad_()
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
