"""Second derivatives (autograd with create_graph) are right for every router, scope and way to skip heads."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from moh_vision.attention import EXECUTORS
from moh_vision.attention.executors import Reference
from tests.support.layers import ROUTERS, C, build

B, N = 2, 5
LAYERS = {
    **{name: ROUTERS[name] for name in ("moh", "query_norm", "moa", "gated", "dense")},
    "moa, plain probabilities": dict(
        router="moa", budget=(0, 2), router_kwargs=dict(renormalise=False)
    ),
    "mae": dict(router="mae", budget=(6, 0), router_kwargs=dict(dropout=0.0)),
    "mae, one expert": ROUTERS["mae"],
    "one shared head alone": dict(router="moh", budget=(1, 0), heads=1),  # its gate is constant
    "two shared heads alone": dict(router="moh", budget=(2, 0), heads=2),
    "one routed head alone": dict(router="moh", budget=(0, 1), heads=1),
}
# A sum hands backward a gradient without a graph; there once_differentiable dropped terms without a word.
LOSSES = {"sum": torch.Tensor.sum, "squares": lambda y: y.square().sum()}


def twice(layer, x, loss, **call):
    """Gradients of the squared norm of the gradients of a loss, for x and every parameter; 0 where there is none."""
    inputs = [x, *layer.parameters()]
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # the fused kernels of PyTorch refuse second derivatives themselves
        y, stats = layer(x, **call)
        total = loss(y) + loss(stats.probs) + loss(stats.logits)
        first = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
        norm = sum(g.square().sum() for g in first if g is not None)
        second = torch.autograd.grad(norm, inputs, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, second)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("router", LAYERS)
def test_equal_to_the_reference(router, scope, dtype, loss, path):
    layer = build(dtype=dtype, scope=scope, **LAYERS[router]).eval()
    x = torch.randn(B, N, C, dtype=dtype, requires_grad=True)
    results = {}
    for executor in EXECUTORS:
        layer.executor = executor
        results[executor] = twice(layer, x, LOSSES[loss])
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    for name, got in results.items():
        for a, b in zip(got, results["reference"], strict=True):
            assert (a - b).norm() <= tolerance * (1 + b.norm()), name


@pytest.mark.parametrize("scope", ["token", "sample"])
def test_of_the_output_alone(scope, path):
    """No output of the router that is differentiated has a graph."""
    layer = build(scope=scope, **LAYERS["one shared head alone"])
    x = torch.randn(B, N, C, requires_grad=True)
    norms = []
    for executor in EXECUTORS:
        layer.executor = executor
        with sdpa_kernel(SDPBackend.MATH):
            loss = layer(x)[0].square().sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
        norms.append(second.norm())
    torch.testing.assert_close(norms, [norms[0]] * len(norms), rtol=1e-4, atol=0)
    assert norms[0] > 0


@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("router", ["moh", "mae", "dense", "moa, plain probabilities"])
def test_the_reference_against_differences(router, scope):
    """gradgradcheck; the other routers stop gradients on purpose, which differences do not see."""
    layer = build(dtype=torch.float64, scope=scope, executor="reference", **LAYERS[router]).eval()
    x = torch.randn(1, 3, C, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize("executor", ["packed", "masked"])
@pytest.mark.parametrize(
    "case, loss",
    [("plain", "sum"), ("causal", "squares"), ("mask", "sum"), ("longer list", "squares")],
)
def test_triton_equals_the_reference(case, loss, executor, path):
    """A list of pairs is longer than what runs where sequences choose."""
    scope = "sample" if case == "longer list" else "token"
    layer = build(scope=scope, width=16, kv_heads=3, executor=executor, **ROUTERS["moh"]).eval()
    x = torch.randn(B, N, C, requires_grad=True)
    calls = dict(causal=dict(is_causal=True), mask=dict(attn_mask=torch.rand(B, 1, N, N) < 0.6))
    got = twice(layer, x, LOSSES[loss], **calls.get(case, {}))
    layer.executor = Reference
    for a, b in zip(got, twice(layer, x, LOSSES[loss], **calls.get(case, {})), strict=True):
        assert (a - b).norm() <= 1e-3 * (1 + b.norm())
