"""Linear layers that are changed from outside (adapters, hooks, parametrisations, pruning, quantisation), and separate ones."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from moh_vision.attention import (
    EXECUTORS,
    HeadBudget,
    HeadMixtureAttention,
    SeparateHeadMixtureAttention,
)
from tests.support import layers
from tests.support.layers import ROUTERS, C

B = 2
N = 6
LAYERS = {
    **{name: ROUTERS[name] for name in ("moh", "query_norm", "mae")},
    "moh, sample": dict(**ROUTERS["moh"], scope="sample"),
    "moh, separate": dict(**ROUTERS["moh"], layer_class=SeparateHeadMixtureAttention),
    "query_norm, separate": dict(**ROUTERS["query_norm"], layer_class=SeparateHeadMixtureAttention),
    "query_norm, grouped": dict(**ROUTERS["query_norm"], kv_heads=3),
    "moa": dict(router="moa", budget=(0, 3), kv_heads=1, router_kwargs=dict(noisy=True)),
}


class Adapter(nn.Module):
    """W x + B x around a layer, with the attributes that peft's layers pass through."""

    def __init__(self, base, delta):
        super().__init__()
        self.base = base
        self.B = nn.Parameter(delta)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + x @ self.B.to(x.dtype).t()


class Plus(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = nn.Parameter(delta)

    def forward(self, weight):
        return weight + self.delta


def replaced_forward(linear, delta):
    forward = linear.forward
    linear.forward = lambda x: forward(x) + x @ delta.t()
    return linear


def parametrised(linear, delta):
    parametrize.register_parametrization(linear, "weight", Plus(delta))
    return linear


def hooked(linear, delta):
    linear.register_forward_hook(lambda module, args, y: y + args[0] @ delta.t())
    return linear


def pruned(linear, delta):
    """By a hook that makes the weight anew before every call."""
    prune.identity(linear, "weight").weight_orig.data += delta
    return linear


WRAPPERS = [Adapter, parametrised, hooked, replaced_forward, pruned]


def build(**options):
    return layers.build(**options).eval()


def linears(layer):
    return [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("crosses", [False, True], ids=["self", "cross"])
def test_what_stands_around_a_linear_layer_counts(name, wrapper, crosses):
    x = torch.randn(B, N, C)
    context = torch.randn(B, N + 1, C) if crosses else None
    for linear in linears(build(**LAYERS[name])):
        layer = build(**LAYERS[name])
        want = copy.deepcopy(layer)
        weight = want.get_submodule(linear).weight
        delta = torch.randn_like(weight)
        weight.data += delta
        parent, _, leaf = linear.rpartition(".")
        setattr(layer.get_submodule(parent), leaf, wrapper(layer.get_submodule(linear), delta))
        for executor in EXECUTORS:
            layer.executor = want.executor = executor
            with torch.no_grad():
                y, stats = layer(x, context)
                y_want, stats_want = want(x, context)
            got = (y, *stats)
            expected = (y_want, *stats_want)
            message = f"{linear}, {executor}"
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=message)
        if wrapper is Adapter and linear != "router.noise":  # noise is for training
            y, stats = layer(x, context)
            (y.square().sum() + stats.logits.square().sum()).backward()
            # In mode "argmax" nothing is trained through the gate.
            if name != "mae" or "router" not in linear:
                assert layer.get_submodule(linear).B.grad.norm() > 0, linear


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", LAYERS)
def test_dynamic_quantisation_leaves_routers_in_float(name):
    options = dict(LAYERS[name])
    if options["router"] == "query_norm":
        options["budget"] = (2, 4)  # queries are rounded, so its choice may differ
    layer = build(**options)
    quantised = torch.ao.quantization.quantize_dynamic(
        copy.deepcopy(layer), {nn.Linear}, dtype=torch.qint8
    )
    x = torch.randn(B, N, C)
    with torch.no_grad():
        y = quantised(x)[0]
        want = layer(x)[0]
    assert 0 < (y - want).norm() < 0.1 * want.norm()
    assert all(
        isinstance(linear, torch.ao.nn.quantized.dynamic.Linear) for linear in quantised.projections
    )
    assert all(
        torch.equal(p, q)
        for p, q in zip(layer.router.parameters(), quantised.router.parameters(), strict=True)
    )


@pytest.mark.parametrize("executor", ["masked", "packed"])
def test_hooks_on_all_modules_see_every_module(executor):
    """Such as those of tools that list what a model calls."""
    layer = HeadMixtureAttention(24, HeadBudget(6, 4, 2, 2), executor=executor).eval()
    seen = []
    with torch.no_grad():
        y = layer(torch.ones(1, 3, 24))[0]
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append(module)
        )
        try:
            torch.testing.assert_close(layer(torch.ones(1, 3, 24))[0], y)
        finally:
            handle.remove()
    if executor == "masked":
        assert {layer, layer.qkv, layer.proj, layer.proj_drop, layer.q_norm} <= set(seen)
    assert layer.proj_drop in seen


def test_a_bias_that_is_no_parameter():
    """The layer is called: its class adds whatever `bias` is."""
    layer = HeadMixtureAttention(24, HeadBudget(6, 4, 2, 2), executor="masked")
    x = torch.randn(1, 3, 24)
    want = layer(x)[0]
    bias = layer.proj.bias.detach().clone()
    del layer.proj.bias
    layer.proj.register_buffer("bias", bias)
    torch.testing.assert_close(layer(x)[0], want)
