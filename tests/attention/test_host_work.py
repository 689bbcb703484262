"""How many operators and kernels a layer, the losses and a step launch: what a GPU waits for on the host.

Kernels are counted and not run, so that outputs are arbitrary numbers.
"""

import pytest
import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moh_vision.attention import GroupMixtureMlp, HeadBudget, HeadMixtureAttention
from moh_vision.attention.executors import Sequences
from moh_vision.attention.losses import RoutedTask
from moh_vision.classification.task import ClassificationTask
from tests.support.attend_backends import TRITON

C = 64
# Of a call of a layer: the most operators, and exactly how many kernels of Triton. (executor, scope, training).
LAYERS = {
    ("packed", "token", False): (3, 4),
    ("packed", "token", True): (29, 9),
    ("masked", "token", False): (10, 2),
    ("masked", "token", True): (43, 5),
    ("packed", "sample", False): (4, 4),
    ("packed", "sample", True): (33, 9),
}
# The same of a layer whose choice is one for all sequences, in inference: operators that launch something.
ONE_CHOICE = {"attention": (7, 4), "mlp": (7, 4)}
# They return a part of a tensor or another shape of it, and launch nothing.
VIEWS = {
    "_unsafe_view",
    "alias",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}


class Count(TorchDispatchMode):
    """Keep the names of the operators that a block calls, forward and backward."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))

    @property
    def launches(self):
        return [name for name in self.names if name not in VIEWS]


@pytest.fixture
def kernels_launched(monkeypatch):
    """Kernels of Triton are counted and not run: a list that grows by each."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        pytest.skip(
            "a GPU runs Triton's kernels without the interpreter, in which they are counted"
        )
    launched = []

    def count(self, *args, **kwargs):
        launched.append(self.fn.__name__)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", count)
    with TRITON.running():
        yield launched


def layer_of(executor, scope):
    budget = HeadBudget(heads=4, head_dim=C // 4, shared=1, routed=1)
    return HeadMixtureAttention(C, budget, scope=scope, executor=executor)


@pytest.mark.parametrize("executor, scope, training", LAYERS)
def test_a_layer_launches_few_kernels(executor, scope, training, kernels_launched):
    layer = layer_of(executor, scope).train(training)
    x = torch.randn(2, 16, C, requires_grad=True)

    def call():
        if training:
            layer(x)[0].sum().backward()
        else:
            with torch.inference_mode():
                layer(x)

    call()
    kernels_launched.clear()
    with Count() as count:
        call()
    operators, kernels = LAYERS[executor, scope, training]
    assert len(count.names) <= operators + 2 * training, count.names  # the sum, and its gradient
    assert len(kernels_launched) == kernels, kernels_launched


@pytest.mark.parametrize("name", ONE_CHOICE)
def test_one_choice_launches_few_operators(name, kernels_launched):
    budget = HeadBudget(heads=4, head_dim=C // 4, shared=1, routed=1)
    if name == "mlp":
        layer = GroupMixtureMlp(C, budget, executor="packed").eval()
    else:
        layer = layer_of("packed", "sample").eval()
    x, condition = torch.randn(2, 16, C), torch.randn(C)

    def call():
        with torch.no_grad():
            layer(x, condition=condition)

    call()
    kernels_launched.clear()
    with Count() as count:
        call()
    operators, kernels = ONE_CHOICE[name]
    assert len(count.launches) <= operators, count.launches
    assert len(kernels_launched) == kernels, kernels_launched


def test_a_call_is_planned_once_whoever_projects_it(kernels_launched):
    """With 128 tokens `Sequences` takes heads chosen per sample in inference; no operator begins that call."""
    layer = layer_of("packed", "sample").eval()
    x = torch.randn(2, 128, C)
    with torch.inference_mode():
        layer(x)
    (plan,) = layer.plans.values()
    assert plan.executor is Sequences and not plan.operator


def test_a_profile_shows_operators(kernels_launched):
    """Outside of one, operators are called without torch's dispatcher."""
    layer = layer_of("packed", "token")
    x = torch.randn(2, 16, C)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)[0].sum().backward()
    seen = {event.name for event in profile.events()}
    name = "moh_vision_triton::route_and_attend"
    assert {name, f"{name}_backward"} <= seen


@pytest.mark.parametrize("router", ["moh", "moa"])
def test_losses_of_many_layers_launch_as_many_kernels_as_of_two(router):
    counts = []
    for depth in (2, 12):
        budget = HeadBudget(heads=8, head_dim=8, shared=0, routed=2)
        layers = nn.ModuleList(HeadMixtureAttention(C, budget, router) for _ in range(depth))
        stats = [layer(torch.randn(2, 9, C))[1] for layer in layers]
        with Count() as count:
            RoutedTask(layers, 0.01).losses(torch.ones(()), stats)
        counts.append(len(count.launches))
    assert counts[0] == counts[1] <= 44


@pytest.mark.parametrize("executor, most", [("packed", 175), ("masked", 177)])
def test_a_step_of_two_layers(executor, most, kernels_launched):
    """Under autocast, with the losses."""
    model = timm.create_model(
        "moh_vit_tiny_patch16_224",
        depth=2,
        img_size=32,
        num_classes=5,
        head_budget="uniform:0.67",
        executor=executor,
    )
    task = ClassificationTask(model, 0.01)
    batch = dict(images=torch.randn(2, 3, 32, 32), labels=torch.tensor([1, 3]))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = task(**batch)["loss"]
        loss.backward()
        task.zero_grad()

    step()
    kernels_launched.clear()
    with Count() as count:
        step()
    assert len(count.launches) + len(kernels_launched) <= most
