"""Heads and groups chosen once for a sequence: Triton's looked-up products beside gathered weights, and one choice for all."""

import itertools

import pytest
import torch

from moh_vision.attention import (
    GroupMixtureMlp,
    HeadBudget,
    HeadMixtureAttention,
    SeparateHeadMixtureAttention,
    kernels,
)
from moh_vision.attention.executors import Reference
from moh_vision.attention.executors.groups import AllGroups, GroupsOfSequences, ReferenceGroups
from moh_vision.attention.executors.products import (
    GatheredProducts,
    KernelSlicedProducts,
    LookedUpProducts,
    SlicedProducts,
)
from moh_vision.attention.losses import load_balance_loss
from moh_vision.attention.routing import Call
from tests.support import attend_backends as backends
from tests.support.attend_backends import DEVICE, TRITON, Launched
from tests.support.covering import covering
from tests.support.layers import C, H, angles, build


@pytest.fixture
def triton():
    with TRITON.running():
        yield backends.gpu.OPS


def slots_of(active, weights, count):
    """Heads and gates of every sequence by a loop: those that run in rising order, then others with gate 0."""
    heads = []
    gates = []
    for runs, gate in zip(active[:, 0].tolist(), weights[:, 0].tolist()):
        order = [h for h in range(len(runs)) if runs[h]] + [
            h for h in range(len(runs)) if not runs[h]
        ]
        heads.append(order[:count])
        gates.append([gate[h] if runs[h] else 0.0 for h in order[:count]])
    return torch.tensor(heads), torch.tensor(gates)


@pytest.mark.parametrize("cases", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_plan_of_random_choices(cases, triton):
    """Ties of gates, heads of nobody, all heads, and sequences that run fewer heads than others."""
    generator = torch.Generator().manual_seed(0)
    for case in range(cases):
        S, heads = (int(n) for n in torch.randint(1, 10, (2,), generator=generator))
        share = torch.rand((), generator=generator)
        active = torch.rand(S, 1, heads, generator=generator) < share
        if case % 5 == 0:
            active[:] = True
        count = max(1, int(active.sum(-1).max()))
        weights = torch.randint(0, 3, (S, 1, heads), generator=generator) / 2
        width = (3, 8, 16, 200)[case % 4]  # the last one is written in two steps
        got = triton.plan(active.to(DEVICE), weights.to(DEVICE), count, width)
        want, gates = slots_of(active, weights, count)
        assert torch.equal(got[0].cpu().long(), want)
        assert torch.equal(got[1].cpu(), gates)
        places = want.unsqueeze(-1) * width + torch.arange(width)
        assert torch.equal(got[2].cpu().long(), places.flatten(1))


SHAPES = {  # heads, D, tokens
    "blocks divide": (4, 32, 128),
    "72": (2, 72, 130),
    "nothing divides": (5, 20, 7),
    "one token": (3, 16, 1),
}


@pytest.mark.parametrize(
    "shape, dtype, bias",
    covering(itertools.product(SHAPES, [torch.float32, torch.float16], [True, False])),
)
def test_looked_up_products_equal_those_of_gathered_weights(shape, dtype, bias, triton):
    heads, D, tokens = SHAPES[shape]
    layer = HeadMixtureAttention(
        heads * D,
        HeadBudget(heads, D, 1, 1),
        scope="sample",
        qkv_bias=bias,
        proj_bias=bias,
        dtype=dtype,
        device=DEVICE,
    )
    torch.nn.init.normal_(layer.router.routed.weight)
    x = torch.randn(3, tokens, layer.dim, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        call = Call(x, layer.route(x)[0])
        ours = LookedUpProducts(layer, call)
        q, k, v = ours.project(x, x)
        y = ours.combine(v, layer.proj.weight, layer.proj.bias)
        other = GatheredProducts(layer, call)
        wanted = other.project(x, x)
        assert torch.equal(ours.heads, other.heads)
        gates = call.routing.weights.squeeze(1).gather(1, other.heads)[:, None, :, None]
        want = other.combine(wanted[2], layer.proj.weight, layer.proj.bias)
    tolerance = dict(rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-3)
    torch.testing.assert_close(q, wanted[0], **tolerance)
    torch.testing.assert_close(k, wanted[1], **tolerance)
    torch.testing.assert_close(v, (wanted[2] * gates).to(dtype), **tolerance)
    torch.testing.assert_close(y, want, **tolerance)


GROUP_SHAPES = {  # groups, D, C, tokens
    "blocks divide": (4, 32, 64, 128),
    "72": (4, 72, 96, 130),
    "nothing divides": (5, 19, 23, 7),
    "one token": (3, 16, 24, 1),
    "wide": (2, 576, 40, 9),
}


@pytest.mark.parametrize(
    "shape, dtype, bias",
    covering(itertools.product(GROUP_SHAPES, [torch.float32, torch.float16], [True, False])),
)
def test_looked_up_groups_equal_those_of_gathered_weights(shape, dtype, bias, triton):
    """Hidden channels without gates, and the output with them, as no values were weighed before."""
    groups, D, dim, tokens = GROUP_SHAPES[shape]
    budget = HeadBudget(groups, D, 1, 1)
    layer = GroupMixtureMlp(dim, budget, bias=bias, dtype=dtype, device=DEVICE)
    torch.nn.init.normal_(layer.router.routed.weight)
    x = torch.randn(3, tokens, dim, dtype=dtype, device=DEVICE)
    condition = torch.randn(3, dim, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        call = Call(x, layer.route(x, condition))
        assert not torch.allclose(call.routing.weights, call.routing.active.float())
        results = []
        for products in (LookedUpProducts(layer, call), GatheredProducts(layer, call)):
            hidden = products.linear(x, layer.fc1.weight, layer.fc1.bias)
            y = products.combine(layer.act(hidden), layer.fc2.weight, layer.fc2.bias)
            results.append((products.heads.long(), hidden, y))
    tolerance = dict(rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-3)
    torch.testing.assert_close(*results, **tolerance)


def test_sequences_that_run_fewer_groups(triton):
    """Slots are filled up with idle groups, whose weight is 0."""
    layer = GroupMixtureMlp(24, HeadBudget(4, 8, 1, 2), device=DEVICE)
    x = torch.randn(2, 5, 24, device=DEVICE)
    with torch.no_grad():
        routing = layer.route(x)
        active = torch.tensor([[[True, False, False, False]], [[False, True, True, True]]])
        active = active.to(DEVICE)
        weights = torch.rand(2, 1, 4, device=DEVICE) * active
        call = Call(x, routing._replace(active=active, weights=weights, count=None))
        results = []
        for executor in (GroupsOfSequences, ReferenceGroups):
            layer.executor = executor
            steps = layer.make_executor(call._replace(x=torch.cat([x] * 25, 1)))
            results.append(steps.combine(layer.act(steps.project())))
            assert executor is ReferenceGroups or type(steps.products) is LookedUpProducts
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


# Tokens, dtype, whether gradients are recorded, shape of the condition -> form of the products; None: all groups.
GROUPS_TAKEN = {
    "inference": (128, torch.float32, False, None, LookedUpProducts),
    "inference in 16 bits": (120, torch.float16, False, None, LookedUpProducts),
    "a condition of each": (128, torch.float32, False, (2, C), LookedUpProducts),
    "training": (128, torch.float32, True, None, None),
    "float64": (128, torch.float64, False, None, None),
    "tiles half empty": (197, torch.float32, False, None, None),
    "one choice": (7, torch.float32, False, (C,), KernelSlicedProducts),
    "one choice in 16 bits": (7, torch.float16, False, (C,), KernelSlicedProducts),
    "one choice in training": (7, torch.float32, True, (C,), SlicedProducts),
    "one choice in float64": (7, torch.float64, False, (C,), SlicedProducts),
}


@pytest.mark.parametrize("case", GROUPS_TAKEN)
def test_which_products_of_groups_a_gpu_takes(case, triton):
    tokens, dtype, grad, shape, products = GROUPS_TAKEN[case]
    layer = GroupMixtureMlp(
        C, HeadBudget(4, 12, 1, 1), executor="packed", dtype=dtype, device=DEVICE
    )
    torch.nn.init.normal_(layer.router.routed.weight)
    x = torch.randn(2, tokens, C, dtype=dtype, device=DEVICE)
    condition = None
    if shape is not None:
        condition = torch.randn(shape, dtype=dtype, device=DEVICE)
    with torch.set_grad_enabled(grad):
        executor = layer.make_executor(Call(x, layer.route(x, condition)))
        packed = layer(x, condition)[0]
        layer.executor = "reference"
        wanted = layer(x, condition)[0]
    torch.testing.assert_close(packed, wanted, rtol=0, atol=5e-3 if dtype.itemsize == 2 else 1e-5)
    if products is None:
        assert type(executor) is AllGroups
    else:
        assert type(executor.products) is products


def test_groups_under_autocast(triton):
    """Tokens and weights in float32 are cast once for the products in 16 bits."""
    layer = GroupMixtureMlp(C, HeadBudget(4, 12, 1, 1), device=DEVICE)
    x = torch.randn(2, 128, C, device=DEVICE)
    results = []
    for layer.executor in ("packed", "masked"):
        with torch.no_grad(), torch.autocast(DEVICE, torch.float16), Launched() as launched:
            results.append(layer(x)[0])
        assert ("project_groups" in launched.names) == (layer.executor == "packed")
    assert results[0].dtype == torch.float16
    torch.testing.assert_close(*results, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    "tokens, grad, products",
    [(128, False, LookedUpProducts), (128, True, None), (7, False, None)],
    ids=["inference", "training", "tiles half empty"],
)
def test_what_a_gpu_takes(tokens, grad, products, triton):
    layer = build((2, 2), scope="sample", executor="packed").to(DEVICE).train(grad)
    x = torch.randn(2, tokens, C, device=DEVICE)
    with torch.set_grad_enabled(grad):
        executor = layer.make_executor(Call(x, layer.route(x)[0]))
        packed = layer(x)[0]
        layer.executor = Reference
        torch.testing.assert_close(packed, layer(x)[0], rtol=0, atol=1e-5)
    if products is None:
        assert type(executor).__name__ == "InPlace"
    else:
        assert type(executor.products) is products


@pytest.mark.parametrize("options", [{}, dict(qk_norm=True), dict(rotary=True)], ids=str)
def test_looked_up_in_a_layer(options, triton):
    options = dict(options)
    rotary = angles(120) if options.pop("rotary", False) else None
    layer = build((2, 2), scope="sample", **options).to(DEVICE).eval()
    x = torch.randn(3, 120, C, device=DEVICE)
    call = {} if rotary is None else dict(rotary=tuple(t.to(DEVICE) for t in rotary))
    results = []
    for layer.executor in ("packed", "reference"):
        with torch.no_grad():
            results.append(layer(x, **call)[0])
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "dtype, autocast, bias",
    [
        (torch.float32, False, True),
        (torch.float32, False, False),
        (torch.float32, True, True),
        (torch.float16, False, True),
    ],
)
@pytest.mark.parametrize("case", ["joint", "separate", "a context", "groups"])
def test_weights_sliced_by_kernels_are_those_of_pytorch(case, dtype, autocast, bias, triton):
    """Bit for bit, for heads of a width that no block divides, and for a wide MLP."""
    budget = HeadBudget(5, 48, 1, 2)
    dim = 200  # more than one program copies, as are the columns of three heads
    options = dict(dtype=dtype, device=DEVICE)
    if case == "groups":
        layer = GroupMixtureMlp(dim, HeadBudget(5, 200, 1, 2), bias=bias, **options)
    else:
        layer_class = HeadMixtureAttention
        if case == "separate":
            layer_class = SeparateHeadMixtureAttention
        options.update(qkv_bias=bias, proj_bias=bias, scope="sample")
        layer = layer_class(dim, budget, **options)
    for p in layer.router.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 37, dim, dtype=dtype, device=DEVICE)
    condition = torch.randn(dim, dtype=dtype, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, torch.float16, enabled=autocast):
        routing = layer.route(x, condition=condition)
        routing = routing[0] if case != "groups" else routing
        call = Call(x.half() if autocast else x, routing)
        results = []
        for products in (KernelSlicedProducts(layer, call), SlicedProducts(layer, call)):
            tokens = call.x
            if case == "groups":
                hidden = products.linear(tokens, layer.fc1.weight, layer.fc1.bias)
                projected = [hidden]
                output = layer.fc2
            else:
                context = tokens.flip(0) if case == "a context" else tokens
                projected = products.project(tokens, context)
                output = layer.proj
            bias_of_output = output.bias
            if bias_of_output is not None:
                bias_of_output = bias_of_output.to(tokens.dtype)
            y = products.combine(projected[-1], output.weight, bias_of_output)
            results.append((products.heads.long(), *projected, y))
    assert all(map(torch.equal, *results))
    assert results[0][-1].dtype == call.x.dtype and results[0][-1].any()


def test_one_choice_launches_few_kernels(triton):
    """The list of heads, rows and columns of the weights, behind the router."""
    for layer in (
        build((2, 2), scope="sample", executor="packed").to(DEVICE).eval(),
        GroupMixtureMlp(C, HeadBudget(4, 12, 1, 1), executor="packed", device=DEVICE).eval(),
    ):
        with torch.no_grad(), Launched() as launched:
            layer(torch.randn(2, 7, C, device=DEVICE), condition=torch.randn(C, device=DEVICE))
        assert launched.names == ["route", "plan", "slice_rows", "slice_columns"]


def test_opcheck(triton):
    active = torch.tensor([[[True, True, False]], [[False, True, True]]], device=DEVICE)
    weights = torch.rand(2, 1, 3, device=DEVICE) * active
    torch.library.opcheck(triton.plan.default, (active, weights, 2, 8))
    plan = triton.plan(active, weights, 2, 8)
    x = torch.randn(2, 5, 24, device=DEVICE)
    o = torch.randn(2, 5, 2, 8, device=DEVICE)
    weight = torch.randn(72, 24, device=DEVICE)
    bias = torch.randn(72, device=DEVICE)
    torch.library.opcheck(triton.project_heads.default, (x, weight, bias, *plan))
    torch.library.opcheck(triton.project_groups.default, (x, weight[:24], None, plan[0], plan[2]))
    of_one = triton.plan(active[:1], weights[:1], 2, 8)
    for given in (bias, None):
        torch.library.opcheck(triton.slice_rows.default, (weight, given, of_one[2], 3, x))
    torch.library.opcheck(triton.slice_columns.default, (weight[:24], *of_one[1:], x))
    for gates in (None, plan[1]):
        torch.library.opcheck(triton.combine_heads.default, (o, weight[:24], None, gates, plan[2]))


def test_one_condition_is_one_choice_and_counts_for_all():
    """The same output and statistics as the condition repeated; weights are sliced, not gathered for each sequence."""
    layer = build((2, 2), torch.float64, scope="sample", executor="packed")
    x = torch.randn(5, 7, C, dtype=torch.float64)
    one = torch.randn(C, dtype=torch.float64)
    y, stats = layer(x, condition=one)
    want, repeated = layer(x, condition=one.expand(5, -1))
    torch.testing.assert_close(y, want)
    for got, expected in zip(stats, repeated):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(load_balance_loss([stats]), load_balance_loss([repeated]))
    executor = layer.make_executor(Call(x, layer.route(x, condition=one)[0]))
    assert type(executor.products) is SlicedProducts
    assert executor.project()[0].shape == (5, layer.budget.active, 7, layer.head_dim)
    assert layer.budget.active < H


def test_one_condition_asks_the_device_nothing(monkeypatch):
    """The heads of one choice are tensors throughout: no value of them decides a shape."""
    layer = build((2, 2), scope="sample", executor="packed")
    x = torch.randn(3, 7, C)
    one = torch.randn(C)
    for name in ("item", "tolist", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a value was read"))
    with torch.no_grad():
        layer(x, condition=one)


def test_without_operators_one_choice_skips_too():
    kernels.use("torch")
    try:
        layer = build((2, 2), scope="sample", executor="packed")
        executor = layer.make_executor(
            Call(
                torch.randn(3, 7, C),
                layer.route(torch.randn(3, 7, C), condition=torch.randn(C))[0],
            )
        )
        assert type(executor.products) is SlicedProducts
    finally:
        kernels.use(None)
