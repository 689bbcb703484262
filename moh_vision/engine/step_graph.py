"""Forward, losses and backward of a micro-batch: eagerly, or replayed as a CUDA graph.

Outside of the graph stay clipping, the look for numbers that are not finite, the optimiser, the learning rate and the EMA.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moh_vision.attention.measure import as_it_was
from moh_vision.attention.routed_layer import routed_layers
from moh_vision.attention.trial import check_same, own_random_numbers
from moh_vision.common.errors import class_and_message
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.config import RunConfig
from moh_vision.engine.cuda_graphs import (
    RECORD,
    Captured,
    CudaGraphs,
    Decision,
    equal_in_words,
    in_words,
    shapes_of,
    times_in_words,
    tolerance_of,
)
from moh_vision.engine.logging import RunLog
from moh_vision.engine.ranks import say

KEY = "cuda_graph"  # of the configuration, and the name for --allow-change
EAGER_STEPS = 3  # steps before the graph is tried; their micro-batches are what it is compared on
ROUNDS = 5  # timed passes of each kind; the shortest counts


class EagerPasses:
    """Does forward, losses and backward of micro-batches.

    Args:
        accelerator: accelerate's Accelerator.
        accumulation: micro-batches of a step.
    """

    def __init__(self, accelerator: Accelerator, accumulation: int):
        self.accelerator = accelerator
        self.accumulation = accumulation

    @property
    def capturing(self) -> CudaGraphs | None:
        """What captures passes, if they run as graphs or that is not decided yet."""
        return None

    def __call__(self, task: nn.Module, inputs: dict, seed: int) -> dict:
        """Add the gradients of a micro-batch, and return what the task returned.

        Args:
            task: the task, as accelerate wraps it.
            inputs: its arguments.
            seed: of dropout and what else the task draws.
        """
        torch.manual_seed(seed)
        return self.compute(task, inputs)

    def compute(self, task: nn.Module, inputs: dict) -> dict:
        """Do `__call__` with the random numbers as they are."""
        losses = task(**inputs)
        # Gradients add up over micro-batches; dividing the loss makes their sum the mean.
        self.accelerator.backward(losses["loss"] / self.accumulation)
        # Only the loss has a gradient. Its graph of autograd, which backward has used up, would tie a later capture to the
        # stream of this pass.
        return dict(losses, loss=losses["loss"].detach())


class StepGraph(NamedTuple):
    """The graph of the micro-batches of one signature."""

    captured: Captured[dict]
    # The parameters that it gives gradients to, and the memory that it adds these to.
    gradients: list[tuple[nn.Parameter, Tensor]]


class GraphedPasses(EagerPasses):
    """Does forward, losses and backward of micro-batches as CUDA graphs, if a trial of them succeeds.

    The first `EAGER_STEPS` steps are eager. Then the graph of a micro-batch is captured, compared with the eager run on the
    micro-batches of these steps, and timed. There is a graph for every signature: shapes, mode and what the routed layers
    run. Micro-batches of other sizes, such as a last smaller one, run eagerly. Whatever fails ends in the eager run, with
    gradients, buffers and random numbers as they were.

    Gradients are added to memory that stays. As in the eager run they are None between steps, and where a pass gives none.

    Args:
        accelerator, accumulation: see `EagerPasses`.
        task: the unwrapped task, whose parameters learn.
        mode: "on" takes the graph if its results are equal, "auto" if it is also faster.
        record: the file for the decision; None: it is not written.
        graphs: captures.
        pause: called after a trial, whose time is none of a step.

    Attributes:
        decision: whether steps run as graphs.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        accumulation: int,
        task: nn.Module,
        mode: str,
        graphs: CudaGraphs,
        record: Path | None,
        pause: Callable[[], None],
    ):
        super().__init__(accelerator, accumulation)
        self.module = task
        self.mode = mode
        self.graphs = graphs
        self.decision = Decision("steps", record)
        self.pause = pause
        self.layers = routed_layers(task)
        self.seen: list[dict] = []  # micro-batches of the steps before the trial
        self.by_signature: dict[tuple, StepGraph] = {}
        self.memory: dict[nn.Parameter, Tensor] = {}  # for gradients; graphs share it

    @property
    def capturing(self) -> CudaGraphs | None:
        if self.decision.taken is False:
            return None
        return self.graphs

    def __call__(self, task: nn.Module, inputs: dict, seed: int) -> dict:
        if self.decision.taken is None:
            self._try(task, inputs)
        if self.decision.taken:
            graph = self._graph_of(task, inputs)
            if graph is not None:
                return self._replay(graph, inputs, seed)
        return super().__call__(task, inputs, seed)

    # ------------------------------------------------------------------ the trial

    def _try(self, task: nn.Module, inputs: dict) -> None:
        """Decide whether steps run as graphs, once there have been enough eager ones."""
        if len(self.seen) < EAGER_STEPS * self.accumulation:
            self.seen.append(inputs)
            return
        if not self._step_begins():
            return
        sizes = {shapes_of(batch) for batch in self.seen}
        why = ""
        if len(sizes) > 1:
            why = "micro-batches have different sizes"
        why = why or self.graphs.lacks_room()
        taken = False
        if not why:
            try:
                taken, why = self._trial(task)
            except Exception as error:  # whatever a driver or a compiler raises
                why = class_and_message(error)
        # Outside of the handler the tensors of a failed capture are free: the traceback held them.
        self._decide(taken, why)
        self.seen.clear()
        self.pause()

    def _trial(self, task: nn.Module) -> tuple[bool, str]:
        """Compare the graph with the eager run, then time both; return whether it is taken, and why."""
        with self._as_it_was():
            graph = self._graph_of(task, self.seen[0])
            equal_bits = self._compare(graph, task)
            eager_times = []
            graph_times = []
            for index in range(ROUNDS):
                inputs = self.seen[index % len(self.seen)]
                self._clear_gradients()
                eager_times.append(self.graphs.time(partial(super().__call__, task, inputs, 0)))
                self._clear_gradients()
                graph_times.append(self.graphs.time(partial(self._replay, graph, inputs, 0)))
        eager = min(eager_times)
        replayed = min(graph_times)
        times = times_in_words("a micro-batch", eager, replayed)
        equal = (
            f"losses and gradients of {len(self.seen)} micro-batches {equal_in_words(equal_bits)}"
        )
        return self.mode == "on" or replayed < eager, f"{times}; {equal}"

    def _compare(self, graph: StepGraph, task: nn.Module) -> bool:
        """Return whether all results have equal bits; raise RuntimeError if losses or gradients differ by more than rounding."""
        equal_bits = True
        for seed, inputs in enumerate(self.seen):
            self._clear_gradients()
            losses = super().__call__(task, inputs, seed)
            want = [losses["loss"]]
            parameters = [p for p in self.module.parameters() if p.grad is not None]
            want += [p.grad for p in parameters]
            self._clear_gradients()
            replayed = self._replay(graph, inputs, seed)
            got = [replayed["loss"]]
            got += [p.grad for p in parameters]
            try:
                check_same(want, got, tolerance_of(want[0], self.accelerator.mixed_precision))
            except AssertionError as error:
                problem = "its losses or gradients differ from the eager ones"
                raise RuntimeError(f"{problem}: {error}") from None
            pairs = zip([*tree_leaves(losses), *want], [*tree_leaves(replayed), *got])
            equal_bits = equal_bits and all(torch.equal(one, other) for one, other in pairs)
        return equal_bits

    def _decide(self, taken: bool, why: str) -> None:
        """Note and say a decision; give the graphs up if it is against them."""
        if not taken:
            self.by_signature.clear()
            self.memory.clear()
            self.graphs.release()
        self.decision.decide(taken, why)

    # ------------------------------------------------------------------ graphs

    def _graph_of(self, task: nn.Module, inputs: dict) -> StepGraph | None:
        """Return the graph for a micro-batch, captured at its first one; None: it runs eagerly."""
        shapes = shapes_of(inputs)
        budgets = tuple(layer.budget for layer in self.layers)
        signature = (shapes, task.training, budgets)
        graph = self.by_signature.get(signature)
        if graph is not None:
            return graph
        known_sizes = {shapes for shapes, *_ in self.by_signature}
        if (known_sizes and shapes not in known_sizes) or not self._step_begins():
            return None
        if self.decision.taken is None:  # `_try` handles failures
            graph = self._capture(task, inputs)
        else:
            try:
                with self._as_it_was():
                    graph = self._capture(task, inputs)
            except Exception as error:  # whatever a driver or a compiler raises
                why = class_and_message(error)
            if graph is None:
                self._decide(False, why)
                return None
        self.by_signature[signature] = graph
        return graph

    def _capture(self, task: nn.Module, inputs: dict) -> StepGraph:
        """Capture the pass of a micro-batch. Gradients are lost, and buffers and random numbers change."""
        self._clear_gradients()
        self.compute(task, inputs)
        gradients = []
        for p in self.module.parameters():
            if p.grad is not None:
                gradients.append((p, self.memory.setdefault(p, torch.zeros_like(p))))
        self._clear_gradients()
        for p, memory in gradients:
            p.grad = memory

        graph = StepGraph(Captured(self.graphs, partial(self.compute, task), inputs), gradients)
        self._clear_gradients()
        return graph

    def _replay(self, graph: StepGraph, inputs: dict, seed: int) -> dict:
        """Do a micro-batch by its graph, as `__call__` of the eager passes does."""
        unset = []
        for p, memory in graph.gradients:
            if p.grad is None:
                unset.append(memory)
            elif p.grad is not memory:  # an eager micro-batch of the same step came first
                memory.copy_(p.grad)
            p.grad = memory
        if unset:
            torch._foreach_zero_(unset)
        torch.manual_seed(seed)
        losses = graph.captured(inputs)
        if self.accumulation > 1:  # else the step is over before the next replay overwrites them
            losses = tree_map(Tensor.clone, losses)
        return losses

    # ------------------------------------------------------------------ details

    def _step_begins(self) -> bool:
        """Return whether no micro-batch of the step has been done: there are no gradients."""
        return all(p.grad is None for p in self.module.parameters())

    def _clear_gradients(self) -> None:
        for p in self.module.parameters():
            p.grad = None

    def _as_it_was(self):
        """Return a context that restores buffers and random numbers, and leaves no gradients."""
        held = contextlib.ExitStack()
        held.enter_context(as_it_was(self.module))
        held.enter_context(own_random_numbers())
        held.callback(self._clear_gradients)
        return held


def why_not(config: RunConfig, accelerator: Accelerator, descent: BlockDescent) -> str:
    """Return why the steps of a run cannot be captured, or ""."""
    if accelerator.num_processes > 1 or accelerator.distributed_type == "FSDP":
        return "several processes exchange gradients in the backward (DDP, FSDP)"
    if config.checkpointing:
        return "checkpointing computes parts of the forward again"
    if accelerator.scaler is not None:
        return "the gradient scaler of fp16 changes the loss's scale"
    if descent.in_turns:
        return "MAE's gates and experts learn in turns"
    if config.compile:
        return "the model is compiled"
    return ""


def make_passes(
    config: RunConfig,
    accelerator: Accelerator,
    task: nn.Module,
    descent: BlockDescent,
    folder: Path,
    start: int,
    log: RunLog,
) -> EagerPasses:
    """Return what does the passes of a run: graphs if `cuda_graph` asks for them and they can be captured.

    Args:
        config: the run's configuration.
        accelerator: accelerate's Accelerator.
        task: the unwrapped task.
        descent: the phases of a step.
        folder: of the run.
        start: steps that the run has done before.
        log: of the run.
    """
    accumulation = config.optim.accumulation
    if config.cuda_graph == "off":
        return EagerPasses(accelerator, accumulation)
    graphs = CudaGraphs()
    reason = graphs.why_not(accelerator.device) or why_not(config, accelerator, descent)
    if reason:
        say(in_words("steps", False, reason))
        return EagerPasses(accelerator, accumulation)
    record = folder / RECORD
    if config.estimate:  # it writes nothing
        record = None
    passes = GraphedPasses(
        accelerator, accumulation, task, config.cuda_graph, graphs, record, log.pause
    )
    if start > 0 and KEY not in config.allow_change:
        passes.decision.follow(folder / RECORD, f"--allow-change {KEY}")
    return passes
