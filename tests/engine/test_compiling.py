"""The key `compile`: which blocks are compiled, that they learn as without it, and what is refused."""

import inspect
import json
from functools import partialmethod
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from moh_vision.attention import load_balance_loss
from moh_vision.classification import train as train_cls
from moh_vision.engine.compiling import blocks_of, check_compilation, compile_task
from tests.support.families import FAMILIES, awake
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, script


@pytest.fixture
def graphs(monkeypatch):
    """The names of the operators of each graph that `Module.compile` makes from here on; nothing is compiled by inductor."""
    found = []

    def backend(graph, inputs):
        found.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=8):
        yield found


# Model -> names of its blocks. All are of one class in a list or a sequence; TransNeXt's are in stages, which are such too.
BLOCKS = {
    "vit": "blocks.0 blocks.1",
    "transnext": "stages.0.blocks.0 stages.1.blocks.0 stages.1.blocks.1 stages.2.blocks.0 "
    "stages.3.blocks.0 stages.3.blocks.1",
    "dit": "blocks.0 blocks.1",
    "translation": "encoder.layers.0 encoder.layers.1 decoder.layers.0 decoder.layers.1",
    "masked": "layers.0 layers.1",
    "causal": "layers.0 layers.1",
    "llama": "model.layers.0 model.layers.1",
}


def router_of(family):
    if family == "llama":
        return "query_norm"
    return "moh"


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_every_family(family):
    model, _ = FAMILIES[family](router_of(family))
    found = set(blocks_of(model))
    assert " ".join(name for name, m in model.named_modules() if m in found) == BLOCKS[family]


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "dit_small_patch2"]
)
def test_blocks_of_a_dense_model(name):
    model = timm.create_model(name, depth=3)
    assert blocks_of(model) == list(model.blocks)


def test_a_model_without_blocks_is_refused():
    task = nn.Module()
    task.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse(
        "compile blocks Sequential true false",
        compile_task,
        task,
        "blocks",
    )


def attends(graph):
    """Whether the graph has the C++ operator that attends for pairs alone."""
    return any(target.startswith("moh_vision.attend.") for target in graph)


def loss_and_gradients(model, inputs):
    named = dict(zip(inspect.signature(model.forward).parameters, inputs))
    output, stats = model.forward_routed(**named)
    loss = output.float().square().mean() + load_balance_loss(stats)
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return [loss, *(gradient for gradient in gradients if gradient is not None)]


def with_equal_blocks(family):
    """Return a model whose layers have one budget, if they can, and its inputs."""
    if family in ("vit", "dit"):
        return FAMILIES[family]("moh", head_budget="uniform:0.5")
    if family in ("masked", "causal", "translation"):
        return FAMILIES[family](dict(router="moh", head_budget="uniform:0.5"))
    return FAMILIES[family](router_of(family))


# Family -> graphs of its blocks: a decoder's layers have two attentions, TransNeXt's stages differ in their widths, and
# LLaMA's layers know their numbers.
GRAPHS = dict(vit=1, dit=1, masked=1, causal=1, transnext=4, translation=2, llama=2)
SKIPPING = (
    "vit",
    "dit",
    "masked",
    "causal",
    "translation",
)  # a TransNeXt computes all heads in training
FAST = ("vit", "dit", "masked")


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in GRAPHS],
)
def test_blocks_learn_as_eager_ones_and_skip_heads(family, path, graphs):
    model, inputs = with_equal_blocks(family)
    awake(model).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "executor"):
            module.executor = "packed"
    names = list(model.state_dict())
    want = loss_and_gradients(model, inputs)
    task = nn.Module()
    task.model = model
    compile_task(task, "blocks")
    for _ in range(2):
        got = loss_and_gradients(model, inputs)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
    assert len(graphs) == GRAPHS[family]
    if family in SKIPPING:
        assert all(attends(graph) for graph in graphs)


@pytest.mark.parametrize(
    "task, decay, compiled",
    [
        pytest.param(
            "cls", 0, dict(training={True}, inference={True}), marks=pytest.mark.slow, id="cls"
        ),
        pytest.param("dit", 0.9, dict(training={True}, inference={True, False}), id="dit"),
    ],
)
def test_attention_is_measured_in_the_mode_that_runs(
    task, decay, compiled, graphs, skipping_takes, tmp_path
):
    """An EMA is evaluated, and draws previews, as a copy that is not compiled; the last weights may be evaluated too."""
    skipping_takes(0.5)
    options = ["--compile", "blocks", "--ema.decay", decay, "--model.executor", "auto"]
    script(task).main(arguments(task, tmp_path / "run", 2, 100, *options))
    rows = json.loads((tmp_path / "run/attention.json").read_text())["table"]["rows"]
    of_mode = {}
    for words, *_ in rows:
        of_mode.setdefault(words.split()[1], set()).add("compiled" in words)
    assert of_mode == compiled
    assert any(attends(graph) for graph in graphs)


# What accelerate is launched with, compile, accumulation -> what the refusal says; "" where the run begins.
LAUNCHES = {
    "nothing": ({}, True, 2, ""),
    "the mode alone compiles nothing": (dict(MODE="reduce-overhead"), False, 2, ""),
    "inductor": (dict(BACKEND="inductor"), False, 2, ""),
    "reduce-overhead": (dict(BACKEND="inductor", MODE="reduce-overhead"), False, 1, ""),
    "reduce-overhead, accumulation": (
        dict(BACKEND="inductor", MODE="reduce-overhead"),
        False,
        2,
        "dynamo_mode reduce-overhead optim.accumulation 2 1",
    ),
    "max-autotune, accumulation": (
        dict(BACKEND="inductor", MODE="max-autotune"),
        False,
        4,
        "dynamo_mode max-autotune optim.accumulation 4 1",
    ),
    "cudagraphs, accumulation": (
        dict(BACKEND="cudagraphs"),
        False,
        2,
        "dynamo_backend cudagraphs optim.accumulation 2 1",
    ),
    "compiled twice": (
        dict(BACKEND="inductor"),
        "blocks",
        1,
        "accelerate dynamo_backend inductor compile blocks",
    ),
}


@pytest.mark.parametrize("launched, compiles, accumulation, facts", LAUNCHES.values(), ids=LAUNCHES)
def test_what_accelerate_compiles(launched, compiles, accumulation, facts, monkeypatch):
    for name, value in launched.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    accelerator = SimpleNamespace(state=SimpleNamespace(dynamo_plugin=TorchDynamoPlugin()))
    if facts:
        refuse(facts, check_compilation, accelerator, compiles, accumulation)
    else:
        check_compilation(accelerator, compiles, accumulation)


@pytest.mark.parametrize("compiles", ["true", "blocks"])
def test_inductor_is_told_to_use_graphs(compiles, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", "1")
    argv = arguments("cls", tmp_path / "run", 1, 1, "--compile", compiles)
    error = refused(capsys, train_cls.main, *argv, "--optim.accumulation", 2)
    assert_says(error, "TORCHINDUCTOR_CUDAGRAPHS 1 optim.accumulation 2")
    assert not (tmp_path / "run").exists()


def test_gates_are_not_compiled_by_accelerate_either(
    monkeypatch, capsys, tmp_path, forget_precision
):
    forget_precision()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    argv = arguments("text", tmp_path / "run", 1, 1)
    error = refused(capsys, script("text").main, *argv)
    assert_says(error, "compile inductor mae")
