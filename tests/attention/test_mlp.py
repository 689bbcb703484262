"""`GroupMixtureMlp`: its equation in a loop, the dense MLP, gradients, and which executor takes a call."""

import copy
import math

import pytest
import torch
from timm.layers import Mlp
from torch import nn

from moh_vision.attention import GroupMixtureMlp, HeadBudget, HeadMixtureAttention, kernels
from moh_vision.attention.executors.groups import AllGroups, GroupPairs, GroupsOfSequences
from moh_vision.attention.losses import RoutedTask, load_balance_loss
from moh_vision.attention.routing import Call
from tests.support.refusals import refuse

B = 3
N = 7
C = 24
G = 4  # groups
D = 5  # hidden channels of a group


def build(shared=1, routed=2, dtype=torch.float64, **options):
    """A layer whose router chooses otherwise for every sequence."""
    layer = GroupMixtureMlp(C, HeadBudget(G, D, shared, routed), dtype=dtype, **options)
    for p in layer.router.parameters():
        nn.init.normal_(p, std=0.3)  # larger logits saturate the gates
    return layer


# What the router reads -> shape of the condition.
CONDITIONS = {"the mean token": None, "a condition of each": (B, C), "one condition for all": (C,)}
ROUTERS = {
    "moh": dict(),
    "moh, routed alone": dict(shared=0, routed=2),
    "moa": dict(router="moa", shared=0, routed=2),
    "dense": dict(router="dense", shared=G, routed=0),
}
EXECUTORS = ("reference", "masked", "packed", "auto")


def draw(shape, dtype=torch.float64):
    x = torch.randn(B, N, C, dtype=dtype, requires_grad=True)
    condition = None
    if shape is not None:
        condition = torch.randn(shape, dtype=dtype, requires_grad=True)
    return x, condition


def in_a_loop(layer, x, condition):
    """The equation, one group of one sequence at a time."""
    read = x.mean(1) if condition is None else condition.expand(B, -1)
    routing = layer.router(read.unsqueeze(1))
    outputs = []
    for b in range(B):
        y = layer.fc2.bias.expand(N, C)
        for g in range(G):
            channels = slice(g * D, (g + 1) * D)
            if routing.active is not None and not routing.active[b, 0, g]:
                continue
            hidden = x[b] @ layer.fc1.weight[channels].t() + layer.fc1.bias[channels]
            weight = 1.0 if routing.weights is None else routing.weights[b, 0, g]
            y = y + weight * layer.act(hidden) @ layer.fc2.weight[:, channels].t()
        outputs.append(y)
    return torch.stack(outputs)


def values_and_gradients(layer, y, x, condition):
    inputs = [t for t in (x, condition, *layer.parameters()) if t is not None]
    slope = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    grads = torch.autograd.grad(y, inputs, slope, allow_unused=True, materialize_grads=True)
    return [y.detach(), *grads]


@pytest.mark.parametrize("path", ["cpp", "torch"])
@pytest.mark.parametrize("conditions", CONDITIONS)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_executor_equals_the_equation(router, conditions, path):
    """Values and gradients; in float32 the operators of C++ too."""
    if path == "cpp" and not kernels.build.load():
        pytest.skip("the C++ operators are not built")
    layer = build(**ROUTERS[router])
    x, condition = draw(CONDITIONS[conditions])
    want = values_and_gradients(layer, in_a_loop(layer, x, condition), x, condition)
    single = copy.deepcopy(layer).float()
    for executor in EXECUTORS:
        for tested, dtype, tolerance in ((layer, None, 1e-10), (single, torch.float32, 1e-5)):
            tested.executor = executor
            tokens = x if dtype is None else x.detach().to(dtype).requires_grad_()
            read = condition
            if condition is not None and dtype is not None:
                read = condition.detach().to(dtype).requires_grad_()
            with kernels.using(path):
                y, _ = tested(tokens, read)
                got = values_and_gradients(tested, y, tokens, read)
            for number, (have, exactly) in enumerate(zip(got, want, strict=True)):
                size = max(exactly.abs().max().item(), 1e-2)
                assert (have - exactly).abs().max() <= tolerance * size, (executor, dtype, number)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("routing", ["half", "all"])
def test_zero_weights_are_the_dense_mlp(routing, executor):
    """All groups with a router of zeros: timm's Mlp, bit for bit where all groups are computed."""
    dense = Mlp(C, G * D, act_layer=lambda: nn.GELU(approximate="tanh"))
    shared, routed = {"half": (1, 1), "all": (1, G - 1)}[routing]
    layer = GroupMixtureMlp(
        C,
        HeadBudget(G, D, shared, routed),
        act_layer=lambda: nn.GELU(approximate="tanh"),
        executor=executor,
    )
    missing = layer.load_state_dict(dense.state_dict(), strict=False).missing_keys
    assert missing and all(name.startswith("router.") for name in missing)
    for p in layer.router.parameters():
        nn.init.zeros_(p)
    x = torch.randn(B, N, C)
    got = layer(x)[0]
    if routing == "half":  # the first groups, each with weight 1
        assert not torch.allclose(got, dense(x))
        with torch.no_grad():
            dense.fc2.weight[:, 2 * D :] = 0
    torch.testing.assert_close(got, dense(x), rtol=0, atol=1e-6)
    if routing == "all" and executor in ("masked", "auto"):
        assert torch.equal(got, dense(x))


@pytest.mark.parametrize("conditions", CONDITIONS)
def test_gradients_are_differentiated_again(conditions):
    """By finite differences of the first gradients along random directions, on both paths."""
    layer = build()
    x, condition = draw(CONDITIONS[conditions])
    layer.executor = "packed"

    def run(x, *read):
        return layer(x, *read)[0]

    inputs = [x] if condition is None else [x, condition]
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_one_choice_for_all_counts_for_every_sequence():
    layer = build(dtype=torch.float32)
    x, condition = draw((C,), torch.float32)
    _, one = layer(x, condition)
    _, each = layer(x, condition.expand(B, -1))
    assert one.counts.shape == (B, G)
    for name in one._fields:
        torch.testing.assert_close(getattr(one, name), getattr(each, name))
    torch.testing.assert_close(load_balance_loss([one]), load_balance_loss([each]))


@pytest.mark.parametrize(
    "shape, path, dtype, executor",
    [
        (None, "cpp", torch.float32, GroupPairs),
        (None, "cpp", torch.float64, GroupsOfSequences),
        (None, "torch", torch.float32, GroupsOfSequences),
        ((B, C), "cpp", torch.float32, GroupPairs),
        ((C,), "cpp", torch.float32, GroupsOfSequences),
        ((C,), "cpp", torch.bfloat16, GroupsOfSequences),
    ],
    ids=str,
)
def test_what_packed_takes(shape, path, dtype, executor):
    if path == "cpp" and not kernels.build.load():
        pytest.skip("the C++ operators are not built")
    layer = build(dtype=dtype, executor="packed")
    x, condition = draw(shape, dtype)
    with kernels.using(path):
        taken = layer.make_executor(Call(x, layer.route(x, condition)))
    assert type(taken) is executor


@pytest.mark.parametrize(
    "groups, batch, shape, executor",
    [
        ((1, 2), 300, (C,), GroupsOfSequences),  # slices are known to pay
        ((1, 2), 1, None, AllGroups),  # too few numbers
        ((4, 0), 300, (C,), AllGroups),  # nothing to skip
    ],
    ids=str,
)
def test_auto_without_measurements(groups, batch, shape, executor):
    layer = build(*groups, dtype=torch.float32)
    x = torch.randn(batch, N, C)
    condition = None
    if shape is not None:
        condition = torch.randn(shape)
    assert type(layer.make_executor(Call(x, layer.route(x, condition)))) is executor


class Both(nn.Module):
    def __init__(self, attn, mlp):
        super().__init__()
        self.attn = attn
        self.mlp = mlp

    def forward(self, x):
        y, first = self.attn(x)
        y, second = self.mlp(x + y)
        return y, [first, second]


def test_the_balance_loss_has_groups_beside_heads():
    """One mean over all routed layers, in the order of the modules."""
    attention = HeadMixtureAttention(C, HeadBudget(4, 6, 1, 1))
    task = RoutedTask(Both(attention, build(dtype=torch.float32)), balance_weight=0.01)
    _, stats = task.model(torch.randn(2, N, C))
    losses = task.losses(torch.zeros(()), stats)
    mean = (load_balance_loss(stats[:1]) + load_balance_loss(stats[1:])) / 2
    assert math.isclose(losses["balance_loss"].item(), mean.item(), rel_tol=1e-6)
    losses["loss"].backward()
    assert task.model.mlp.router.routed.weight.grad.abs().sum() > 0


def test_dropout_acts_on_hidden_channels_and_outputs():
    layer = build(drop=0.5)
    assert layer.drop1.p == layer.drop2.p == 0.5
    x, _ = draw(None)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


REFUSED = {
    "per token": (dict(scope="token"), "scope 'token' 'sample' MLP"),
    "a router that reads queries": (
        dict(router="query_norm"),
        "router 'query_norm' groups moh moa gated dense",
    ),
    "a router that reads the sequence": (
        dict(router="mae"),
        "router 'mae' groups moh moa gated dense",
    ),
    "an executor that is none": (
        dict(executor="fast"),
        "executor 'fast' auto masked packed reference",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    options, facts = REFUSED[case]
    refuse(facts, build, **options)
