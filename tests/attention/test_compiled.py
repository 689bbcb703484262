"""torch.compile with sizes that are fixed, found out, and free from the beginning: every routed layer and every choice."""

import itertools

import pytest
import torch
from torch import nn

from moh_vision.attention import GroupMixtureMlp, HeadBudget, SeparateHeadMixtureAttention
from tests.support.families import FAMILIES, awake
from tests.support.layers import ROUTERS, C, build, is_possible

DYNAMIC = {"dynamic": True, "automatic": None, "static": False}
# On the operators, and in plain PyTorch, which "reference" is on any path.
EXECUTORS = [("auto", "cpp"), ("packed", "cpp"), ("packed", "torch"), ("reference", "torch")]
SIZES = ((3, 7), (2, 9))  # of two calls: sequences and tokens
BUDGETS = {"moh": (1, 2), "moa": (0, 2), "gated": (4, 0), "dense": (4, 0)}  # of an MLP
# Choice -> scope, and how many conditions there are.
CHOICES = {
    "tokens": ("token", None),
    "the mean token": ("sample", None),
    "a condition of each": ("sample", "each"),
    "one condition for all": ("sample", "one"),
}
OF_SEQUENCES = tuple(CHOICES)[1:]


def attention(router, scope):
    if router == "separate":
        return build((2, 2), layer_class=SeparateHeadMixtureAttention, scope=scope)
    return build(**ROUTERS[router], scope=scope)


def mlp(router, scope):
    layer = GroupMixtureMlp(C, HeadBudget(4, 5, *BUDGETS[router]), router, scope)
    for weight in layer.router.parameters():
        nn.init.normal_(weight)
    return layer


LAYERS = [
    (attention, router, choice)
    for router, choice in itertools.product((*ROUTERS, "separate"), CHOICES)
    if is_possible(ROUTERS.get(router, {}), scope=CHOICES[choice][0])
]
LAYERS += [(mlp, *rest) for rest in itertools.product(BUDGETS, OF_SEQUENCES)]


def assert_compiles(layer, conditions, dynamic):
    """The compiled layer gives the outputs and gradients of the layer, for calls of two sizes."""
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="eager")
    for batch, tokens in SIZES:
        x = torch.randn(batch, tokens, C, requires_grad=True)
        given = {}
        if conditions is not None:
            shape = dict(each=(batch, C), one=(C,))[conditions]
            given["condition"] = torch.randn(shape)
        results = []
        for run in (layer, compiled):
            y = run(x, **given)[0]
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", DYNAMIC.values(), ids=DYNAMIC)
def test_one_choice_of_groups_for_all(dynamic):
    assert_compiles(mlp("moh", "sample").eval(), "one", dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", DYNAMIC.values(), ids=DYNAMIC)
@pytest.mark.parametrize("executor, path", EXECUTORS, indirect=["path"])
@pytest.mark.parametrize("make, router, choice", LAYERS)
def test_every_layer(make, router, choice, executor, dynamic, path):
    scope, conditions = CHOICES[choice]
    layer = make(router, scope).eval()
    layer.executor = executor
    assert_compiles(layer, conditions, dynamic)


# Name -> family and further arguments. The last one has every kind of choice.
MODELS = {name: (name, {}) for name in FAMILIES}
MODELS["vit, groups"] = "vit", dict(scope="sample", mlp_budget=0.5)
MODELS["dit, groups"] = "dit", dict(scope="sample", route_by="timestep", mlp_budget=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", DYNAMIC.values(), ids=DYNAMIC)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_model(name, dynamic):
    family, options = MODELS[name]
    router = "query_norm" if family == "llama" else "moh"
    model, inputs = FAMILIES[family](router, **options)
    awake(model.eval())
    compiled = torch.compile(model, dynamic=dynamic, backend="eager")
    for repeats in (1, 3):
        batch = [None if x is None else x.repeat(repeats, *[1] * (x.dim() - 1)) for x in inputs]
        torch.testing.assert_close(first(compiled(*batch)), first(model(*batch)))


def first(output):
    """Return the tensor that a model's output is, or begins with."""
    return output if isinstance(output, torch.Tensor) else output[0]
