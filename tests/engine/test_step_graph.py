"""Steps as graphs equal eager steps to the bit, and whatever fails ends in the eager run. A stand-in replays on the CPU."""

import json
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate import Accelerator

import moh_vision
from moh_vision.attention import HeadBudget, HeadMixtureAttention, trial
from moh_vision.classification.task import ClassificationTask
from moh_vision.engine.cuda_graphs import CudaGraphs
from moh_vision.engine.step_graph import (
    EAGER_STEPS,
    ROUNDS,
    EagerPasses,
    GraphedPasses,
    why_not,
)
from moh_vision.models.elastic import ElasticBudget
from tests.support.eager_graphs import EagerGraphs
from tests.support.refusals import refuse
from tests.support.small_loop import small_loop
from tests.support.small_runs import arguments, logged, outcome, script
from tests.support.tiny_vit import TINY

STEPS = 8


def micro_batch(seed, size=4):
    draws = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 16, 16, generator=draws)
    return dict(images=images, labels=torch.randint(5, (size,), generator=draws))


class Training:
    """Some steps of a small ViT; `graphs` None: eager ones."""

    def __init__(
        self, graphs=None, accumulation=1, mode="on", record=None, elastic=False, sizes=None
    ):
        torch.manual_seed(0)
        model = timm.create_model(
            "moh_vit_tiny_patch16_224",
            **TINY,
            head_budget=[(2, 2)] * 2,
            drop_path_rate=0.2,
            proj_drop_rate=0.1,
        )
        task = ClassificationTask(model, 0.01)
        self.parameters = list(task.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, weight_decay=0.1)
        self.addresses = []  # of the gradients that the optimiser sees, by step
        self.optimizer.register_step_pre_hook(self.note_addresses)
        self.loop = small_loop(
            Accelerator(cpu=True),
            task,
            self.optimizer,
            accumulation=accumulation,
            clip_norm=1.0,
            lr=0.01,
        )
        self.passes = EagerPasses(self.loop.accelerator, accumulation)
        self.pauses = []
        if graphs is not None:
            self.passes = GraphedPasses(
                self.loop.accelerator, accumulation, task, mode, graphs, record, self.note_pause
            )
        self.loop.passes = self.passes
        if elastic:
            self.loop.elastic = ElasticBudget(model, [0.5, 1.0], seed=0)
        self.sizes = sizes or {}
        self.losses = []

    def note_addresses(self, *_):
        self.addresses.append([p.grad is not None and p.grad.data_ptr() for p in self.parameters])

    def note_pause(self):
        self.pauses.append(self.loop.done)

    def run(self, steps=STEPS):
        for _ in range(steps):
            step = self.loop.done
            count = self.loop.config.optim.accumulation
            batches = [
                micro_batch(10 * step + number, self.sizes.get(step, 4)) for number in range(count)
            ]
            self.loop.step(iter(batches), epoch=0, count=4)
            self.losses.append([losses["loss"].item() for losses in self.loop.losses])
        return self


def assert_equal(one, other):
    assert one.losses == other.losses
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_as_graphs_equal_eager_steps_to_the_bit(accumulation, capsys):
    graphs = EagerGraphs()
    training = Training(graphs, accumulation).run()
    assert_equal(training, Training(accumulation=accumulation).run())
    said = capsys.readouterr().out
    assert said.count("CUDA graph: taken, ") == 1
    assert (
        f"losses and gradients of {EAGER_STEPS * accumulation} micro-batches equal to the bit"
        in said
    )
    assert graphs.captures == 1
    # The trial compares each micro-batch and times five; then come the steps.
    of_trial = EAGER_STEPS * accumulation + ROUNDS
    assert graphs.replays == of_trial + (STEPS - EAGER_STEPS) * accumulation
    assert training.pauses == [EAGER_STEPS]


def test_gradients_stay_where_they_are():
    training = Training(EagerGraphs(), accumulation=2).run()
    graphed = training.addresses[EAGER_STEPS:]
    assert all(addresses == graphed[0] for addresses in graphed)
    assert all(p.grad is None for p in training.parameters)  # between steps, as in an eager run


def test_a_smaller_batch_runs_eagerly():
    sizes = {EAGER_STEPS + 2: 3, EAGER_STEPS + 4: 3}
    graphs = EagerGraphs()
    training = Training(graphs, sizes=sizes).run()
    assert_equal(training, Training(sizes=sizes).run())
    assert graphs.captures == 1
    assert graphs.replays == EAGER_STEPS + ROUNDS + STEPS - EAGER_STEPS - len(sizes)


def test_an_eager_micro_batch_may_precede_a_graph_in_a_step():
    """Its gradients move into the memory of the graph."""
    training = Training(EagerGraphs(), accumulation=2)
    eager = Training(accumulation=2)
    for each in (training, eager):
        each.run(EAGER_STEPS + 1)
        each.loop.step(iter([micro_batch(1, 3), micro_batch(2, 4)]), epoch=0, count=4)
    assert_equal(training, eager)


def test_each_share_of_an_elastic_budget_has_a_graph(capsys):
    steps = 12
    graphs = EagerGraphs()
    training = Training(graphs, elastic=True).run(steps)
    assert_equal(training, Training(elastic=True).run(steps))
    shares = {training.loop.elastic.share_of(step) for step in range(EAGER_STEPS, steps)}
    assert graphs.captures == len(shares) > 2
    assert len(training.passes.by_signature) == len(shares)


def test_another_head_budget_is_captured_anew():
    graphs = EagerGraphs()
    training = Training(graphs)
    eager = Training()
    for each in (training, eager):
        each.run(EAGER_STEPS + 2)
        moh_vision.set_head_budget(each.loop.model, [(2, 1)] * 2)
        each.run(2)
    assert_equal(training, eager)
    assert graphs.captures == 2
    # Back at the first budget its graph is still there.
    moh_vision.set_head_budget(training.loop.model, [(2, 2)] * 2)
    training.run(1)
    assert graphs.captures == 2


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
INVALID = RuntimeError("operation not permitted when stream is capturing")
# Case -> (the stand-in, what the line says, whether the graph is taken at first).
FAILURES = {
    "a capture that fails": (dict(failures=[INVALID]), "not permitted when stream", False),
    "no memory": (dict(failures=[OUT_OF_MEMORY]), "OutOfMemoryError: CUDA out of memory", False),
    "no room": (dict(room="it needs up to 9.0 GiB more"), "it needs up to 9.0 GiB more", False),
    "other results": (
        dict(off_by=0.25),
        "its losses or gradients differ from the eager ones: Scalars",
        False,
    ),
    "a later capture": (dict(failures=[None, OUT_OF_MEMORY]), "out of memory", True),
}


@pytest.mark.parametrize("stand_in, words, taken", FAILURES.values(), ids=FAILURES)
def test_what_fails_ends_in_the_eager_run(stand_in, words, taken, capsys, tmp_path):
    steps = 12
    graphs = EagerGraphs(**stand_in)
    training = Training(graphs, elastic=True, record=tmp_path / "cuda_graph.json").run(steps)
    assert_equal(training, Training(elastic=True).run(steps))
    lines = [line for line in capsys.readouterr().out.splitlines() if "CUDA graph" in line]
    assert lines[-1].startswith("CUDA graph: not taken, steps run eagerly: ")
    assert words in lines[-1]
    assert len(lines) == 1 + taken
    assert graphs.released and not training.passes.by_signature
    assert json.loads((tmp_path / "cuda_graph.json").read_text())["taken"] is False


def test_micro_batches_of_different_sizes(capsys):
    graphs = EagerGraphs()
    sizes = {1: 3, 5: 2}
    assert_equal(Training(graphs, sizes=sizes).run(), Training(sizes=sizes).run())
    assert (
        "not taken, steps run eagerly: micro-batches have different sizes"
        in capsys.readouterr().out
    )
    assert graphs.captures == 0


def test_work_that_reads_values_is_not_captured(capsys):
    training = Training(EagerGraphs())
    forward = training.loop.task.forward
    training.loop.task.forward = reading(forward)
    training.run()
    assert "_local_scalar_dense" in capsys.readouterr().out
    assert training.passes.decision.taken is False


def reading(forward):
    """Return a `forward` of a task that looks at its labels."""

    def read(**batch):
        if batch["labels"].sum().item() < 0:
            raise AssertionError
        return forward(**batch)

    return read


@pytest.mark.parametrize(
    "mode, faster, taken", [("auto", 1, True), ("auto", 0, False), ("on", 0, True)]
)
def test_auto_takes_the_graph_only_if_it_is_faster(capsys, mode, faster, taken):
    times = [2.0, 1.0] if faster else [1.0, 2.0]
    # Eager and graph are timed in turn.
    graphs = EagerGraphs(times=times * ROUNDS)
    training = Training(graphs, mode=mode).run(EAGER_STEPS + 1)
    assert training.passes.decision.taken is taken
    ratio = (
        "1000.0 ms a micro-batch, 0.50 of the eager 2000.0 ms"
        if faster
        else "2000.0 ms a micro-batch, 2.00 of"
    )
    assert ratio in capsys.readouterr().out


def test_an_unused_parameter_has_no_gradient():
    """A step without its gradient leaves it as it is: zeros would let the optimiser decay it."""
    training = Training(EagerGraphs())
    eager = Training()
    for each in (training, eager):
        each.loop.task.extra = torch.nn.Parameter(torch.ones(3))
        each.optimizer.add_param_group(dict(params=[each.loop.task.extra]))
        each.parameters.append(each.loop.task.extra)
        each.run()
    assert_equal(training, eager)
    assert torch.equal(training.loop.task.extra, torch.ones(3))


# ---------------------------------------------------------------- why not


def settings(**more):
    config = SimpleNamespace(checkpointing=False, compile=False)
    accelerator = SimpleNamespace(num_processes=1, distributed_type="NO", scaler=None)
    descent = SimpleNamespace(in_turns=False)
    for name, value in more.items():
        for owner in (config, accelerator, descent):
            if hasattr(owner, name):
                setattr(owner, name, value)
    return config, accelerator, descent


REASONS = {
    "": {},
    "several processes": dict(num_processes=2),
    "FSDP": dict(distributed_type="FSDP"),
    "checkpointing": dict(checkpointing=True),
    "gradient scaler": dict(scaler=object()),
    "in turns": dict(in_turns=True),
    "compiled": dict(compile=True),
}


@pytest.mark.parametrize("words", REASONS)
def test_why_steps_are_not_captured(words):
    reason = why_not(*settings(**REASONS[words]))
    assert words in reason and bool(words) == bool(reason)


def test_only_a_cuda_device_has_graphs():
    assert CudaGraphs().why_not(torch.device("cpu")) == "it needs a CUDA device, not cpu"
    assert CudaGraphs().why_not(torch.device("cuda")) == ""


# ---------------------------------------------------------------- runs


def train(folder, steps, *more, name="cls"):
    script(name).main(arguments(name, folder, steps, 100, *more))
    return outcome(folder)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_run_on_a_cpu_says_why_once(tmp_path, capsys, mode):
    train(tmp_path / "run", 2, "--cuda_graph", mode)
    said = capsys.readouterr().out
    assert said.count("CUDA graph") == 1
    assert "CUDA graph: not taken, steps run eagerly: it needs a CUDA device, not cpu" in said
    assert not (tmp_path / "run" / "cuda_graph.json").exists()


RUNS = [
    pytest.param("cls", ["--budget_range", "[0.5, 1.0]"], id="cls", marks=pytest.mark.slow),
    pytest.param("dit", ["--optim.accumulation", "2"], id="dit"),
]


@pytest.mark.parametrize("name, more", RUNS)
def test_a_resumed_run_decides_as_it_did(tmp_path, capsys, eager_graphs, name, more):
    made = eager_graphs()
    eager = train(tmp_path / "eager", 6, *more, name=name)
    graph = ["--cuda_graph", "on", *more]
    assert train(tmp_path / "whole", 6, *graph, name=name) == eager
    assert "CUDA graph: taken, " in capsys.readouterr().out
    losses = [entry["loss"] for entry in logged(tmp_path / "whole")]
    assert losses == [entry["loss"] for entry in logged(tmp_path / "eager")]

    train(tmp_path / "resumed", 4, *graph, name=name)
    assert json.loads((tmp_path / "resumed" / "cuda_graph.json").read_text())["taken"] is True
    capsys.readouterr()
    assert train(tmp_path / "resumed", 6, *graph, name=name) == eager
    said = capsys.readouterr().out
    assert said.count("CUDA graph") == 1
    assert "CUDA graph: taken, as they began; --allow-change cuda_graph tries it again" in said
    assert made[-1].replays == 2 * (2 if "accumulation" in str(more) else 1)


def test_a_text_model_of_transformers_is_not_captured(tmp_path, capsys, eager_graphs):
    """Its mask depends on a look at the positions (but on a GPU, where transformers knows that it is captured)."""
    made = eager_graphs()
    eager = train(tmp_path / "eager", 4, name="clm")
    assert train(tmp_path / "run", 4, "--cuda_graph", "auto", name="clm") == eager
    assert "not permitted when stream is capturing" in capsys.readouterr().out
    assert made[0].released


@pytest.mark.parametrize("taken", [True, False])
def test_attention_is_measured_in_the_mode_that_runs(tmp_path, skipping_takes, eager_graphs, taken):
    """Once more if the graph is not taken; calls of inference run eagerly in any case."""
    measured = skipping_takes(0.99)  # all heads are computed
    made = eager_graphs(room="" if taken else "there is no room")
    train(tmp_path / "run", 5, "--cuda_graph", "on", "--model.scope", "sample")
    again = [] if taken else [(True, False)]  # the inference is in the user's cache by then
    modes = [(call.layer.training, call.graphs is made[0]) for call in measured]
    assert modes == [(True, True), (False, False), *again]
    record = json.loads((tmp_path / "run" / "attention.json").read_text())
    calls = [row[0] for row in record["table"]["rows"]]
    assert len(calls) == 2 and not any("CUDA graph" in call for call in calls)


def test_calls_in_a_graph_are_timed_by_replays():
    stand_in = EagerGraphs()
    layer = HeadMixtureAttention(24, HeadBudget(6, 4, 2, 2))
    inputs = ((torch.randn(2, 16, 24),), {})
    call = trial.recorded(layer.all_heads_executor, layer, inputs, "cpu", False, stand_in)
    trial.timed(call, 0.0)
    assert stand_in.captures == 2 and stand_in.replays > 2


def test_a_record_that_cannot_be_read(tmp_path):
    (tmp_path / "cuda_graph.json").write_text('{"taken": 1}')
    decision = Training(EagerGraphs()).passes.decision
    refuse("cuda_graph.json CUDA", decision.follow, tmp_path / "cuda_graph.json", "")
