"""The router "gated": its equation, its gradients, and zero weights, which are the dense layer to the bit."""

import math

import pytest
import torch

import moh_vision
from moh_vision.attention import HeadBudget, HeadMixtureAttention, attention_layers, default_budget
from moh_vision.attention.losses import RoutedTask
from tests.support.layers import CASES, ROUTERS, B, C, D, H, N, build, call_of
from tests.support.refusals import refuse

ALL = HeadBudget(H, D, H, 0)


def head_output(layer, x, h):
    """Return the output of head h for tokens x [N, C] after its rows of W_O, token by token: [N, C]."""
    rows = slice(h * D, (h + 1) * D)
    q, k, v = (
        x @ weight[rows].T + bias[rows]
        for weight, bias in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3))
    )
    outputs = []
    for token in q:
        matrix = torch.stack([token @ key / math.sqrt(D) for key in k]).softmax(0)  # [N]
        outputs.append(sum(a * value for a, value in zip(matrix, v)) @ layer.proj.weight[:, rows].T)
    return torch.stack(outputs)


def equation(layer, x):
    """Return y [B, N, C] by equation (*) with w_h(x) = 2 / (1 + exp(-W_h x)), head by head."""
    sequences = []
    for tokens in x:
        read = tokens.expand(N, C)
        if layer.scope == "sample":
            read = tokens.mean(0, keepdim=True).expand(N, C)
        y = layer.proj.bias.expand(N, C)
        for h, row in enumerate(layer.router.gate.weight):
            gate = 2 / (1 + torch.exp(-(read @ row)))  # [N]
            y = y + gate.unsqueeze(1) * head_output(layer, tokens, h)
        sequences.append(y)
    return torch.stack(sequences)


def layer_of(**options):
    return build(**ROUTERS["gated"], **options).eval()


def with_gradients(y, layer, x):
    """Return y and the gradients of a weighted sum of y, by x and by every parameter."""
    loss = (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return [y, *torch.autograd.grad(loss, [x, *layer.parameters()])]


@pytest.mark.parametrize("executor", ["auto", "masked", "packed", "reference"])
@pytest.mark.parametrize("scope", ["token", "sample"])
def test_output_and_gradients_follow_the_equation(scope, executor):
    layer = layer_of(scope=scope, dtype=torch.float64, executor=executor)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    want = with_gradients(equation(layer, x), layer, x)
    got = with_gradients(layer(x)[0], layer, x)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    (gradient,) = [g for g in got if g.shape == layer.router.gate.weight.shape]
    assert gradient.norm() > 1e-3


def test_gradients_are_those_of_finite_differences():
    layer = layer_of(dtype=torch.float64)
    x = torch.randn(1, 3, C, dtype=torch.float64, requires_grad=True)
    weight = layer.router.gate.weight
    assert torch.autograd.gradcheck(lambda x, _: layer(x)[0], (x, weight))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_new_layer_is_the_dense_one_to_the_bit(case, dtype):
    """W is zero in a new layer."""
    x, call, options = call_of(CASES[case], dtype)
    layer_class = options.pop("layer_class", HeadMixtureAttention)
    dense = layer_class(C, ALL, router="dense", dtype=dtype, **options)
    gated = layer_class(C, ALL, router="gated", dtype=dtype, **options)
    gated.load_state_dict(dense.state_dict(), strict=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        want = dense(x, **call)
        got = gated(x, **call)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1].counts, want[1].counts)


def test_gates_of_16_bits_are_computed_in_float32():
    layer = layer_of()
    router = layer.router
    x = torch.randn(B, N, C)
    want = router(x).weights
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).weights, want)
        y, _ = layer(x)
    assert y.dtype == torch.bfloat16 and want.dtype == torch.float32
    rounded = x.bfloat16()
    gates = router(rounded).weights
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, router(rounded.float()).weights)


def test_nothing_is_routed_away_and_no_loss_is_added():
    layer = layer_of()
    x = torch.randn(B, N, C)
    routing = layer.router(x)
    assert routing.active is None and routing.count is None
    assert routing.weights.min() > 0 and routing.weights.max() < 2
    assert routing.stats.probs.shape == routing.stats.logits.shape == (B, N, 0)
    losses = RoutedTask(layer, 0.5).losses(torch.tensor(1.5), [layer(x)[1]])
    assert (losses["loss"].item(), losses["balance_loss"].item()) == (1.5, 0)
    assert set(losses) == {"loss", "task_loss", "balance_loss", "head_runs"}
    (runs,) = losses["head_runs"]
    assert runs.tolist() == [B * N] * (H + 1)


def test_no_budget_is_taken():
    assert default_budget("gated") is None
    layer = layer_of()
    refuse(
        "head_budget 'ramp:0.5' no routed moh_vision.convert",
        moh_vision.set_head_budget,
        layer,
        0.5,
    )
    assert moh_vision.head_budget(layer)["share"] == 1
    assert attention_layers(layer)[0].router.all_heads
