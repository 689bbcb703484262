"""The training loop of a run: optimiser steps, and the logging, EMA and checkpoints around them.

`run_setup.RunSetup` does what comes before the first step.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from moh_vision.attention.measure import collect, compiled_layers, measured_table
from moh_vision.common.errors import BadData, lost_a_process
from moh_vision.common.seeds import derive_seed
from moh_vision.engine.best import BEST, Best, value_of
from moh_vision.engine.block_descent import GATES, BlockDescent, Phase
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.config import EmaConfig, RunConfig
from moh_vision.engine.cuda_graphs import CudaGraphs
from moh_vision.engine.logging import RunLog, ending, write_json
from moh_vision.engine.ranks import attempt
from moh_vision.engine.run_setup import RunSetup, Span
from moh_vision.engine.saver import Saver
from moh_vision.engine.step import (
    NEXT_LEARNING_RATE,
    Agreement,
    SkippedSteps,
    agree,
    average_over_step,
    clip_gradients,
    largest_learning_rate,
    set_learning_rate,
)
from moh_vision.engine.step_graph import EagerPasses
from moh_vision.engine.weights import ModelEma, first_weights_left


@dataclass(eq=False)
class TrainingLoop:
    """Trains a run step by step. `loop_start.start_loop` makes the loop; a `train` module uses it like this:

        with start_loop(...) as loop:
            for step in loop.steps():
                loop.step(batches, epoch, count)        forward, backward, update, averages
                if loop.step_is_logged():
                    loop.metrics(loop.averages(), "loss ...")
                loop.save()                             if a checkpoint is due
            if not loop.stopped: ...                    the last evaluation

    Args:
        setup: configuration, accelerator and signals of the run.
        span: the steps to do.
        folder: the run's folder.
        model: the model, unwrapped.
        task: the model with its losses, as accelerate wraps it.
        optimizer: the task's optimiser, as accelerate wraps it.
        descent: yields the phases of a step. A step has one phase, unless MAE's gates learn in turns.
        schedule: maps a step to its learning rate.
        metadata: what exported weights store about the model; `save` adds the step.
        log: writes metrics.jsonl, the tracker and the screen.
        saver: saves checkpoints.
        ema: the average of the model's weights, or None.
        ema_config: settings of `ema`, or None without an EMA.
        elastic: an `ElasticBudget`, or None.
        best: keeps the best validation score, or None.
        unreadable: the `BadSamples` of the data, or None.
        passes: does forward, losses and backward of micro-batches; None: eagerly.
        passes_beside: for forwards that the run makes beside its losses, such as those of a teacher or of previews, whose
            attention is measured too: functions of the model
            that evaluates, each of which returns [(all models of such a forward, a function that makes it)].

    Attributes:
        done: number of steps done, including those before the run was resumed.
        losses: what the task returned for each micro-batch of the last phase.
        norms: gradient norm of each phase of the last step, by the phase's name.
        signal: number of a signal that some process had received by the last step, or 0.
        skipped: counts the steps whose loss or gradient was not finite.
    """

    setup: RunSetup
    span: Span
    folder: Path
    model: nn.Module
    task: nn.Module
    optimizer: torch.optim.Optimizer
    descent: BlockDescent
    schedule: Callable[..., float]
    metadata: dict[str, object]
    log: RunLog
    saver: Saver
    ema: ModelEma | None = None
    ema_config: EmaConfig | None = None
    elastic: object | None = None
    best: Best | None = None
    unreadable: object | None = None
    passes: EagerPasses | None = None
    passes_beside: Sequence[Callable] = ()

    done: int = field(init=False)
    losses: list[dict] = field(init=False, default_factory=list)
    norms: dict[str, float] = field(init=False, default_factory=dict)
    signal: int = field(init=False, default=0)
    skipped: SkippedSteps = field(init=False, default_factory=SkippedSteps)
    _epoch: int | None = field(init=False, default=None)  # of the last step
    # What captured the calls of attention whose times the measurement table has; None: they were eager, or not timed here.
    _measured_by: CudaGraphs | None = field(init=False, default=None)
    _left_out_said: set[str] = field(init=False, default_factory=set)  # lines of `_say_left_out`

    def __post_init__(self):
        self.done = self.span.start
        if self.passes is None:
            self.passes = EagerPasses(self.accelerator, self.config.optim.accumulation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_class, error, traceback) -> None:
        if lost_a_process(error):
            return  # `saver.wait` could block on the lost process; `RunSetup.reporting` ends this one
        self.saver.wait()
        if error is None:
            if self.log.enabled and not self.stopped:
                options = self.config.sampling_options()
                imports = self.config.imports
                self.log.say(ending(self.config.kind, self.folder, options, imports))
            self.log.close()

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.setup.config

    @property
    def accelerator(self) -> Accelerator:
        """accelerate's Accelerator."""
        return self.setup.accelerator

    # ------------------------------------------------------------------ one step

    def step(self, batches: Iterable[dict], epoch: int, count: int, **more) -> None:
        """Do the next optimiser step.

        Args:
            batches: an iterator of micro-batches, of which this step takes optim.accumulation.
            epoch: the epoch of this step; MAE's gates learn in some epochs only.
            count: images or tokens of the step over all processes, for the logged rate.
            more: further arguments of the task, the same for every micro-batch.
        """
        step = self.done
        if self._epoch is not None and epoch != self._epoch:
            self._say_left_out(f"epoch {self._epoch + 1}")
        self._epoch = epoch
        micro_batches = self._fetched(batches, self.config.optim.accumulation)
        micro_batches = self._measured(micro_batches, more)

        # The learning rate is a function of the step alone: resuming needs no scheduler state.
        set_learning_rate(self.optimizer, self.schedule(step))
        self.task.train()  # an evaluation may have left the task in eval mode
        self.norms.clear()

        with self._heads_of_step(step):
            # One phase, unless MAE's gates and experts learn in turns: then some steps have two, on the same batch.
            for phase in self.descent.phases(epoch, micro_batches):
                agreed = self._run_phase(phase, step, more)

        self.done += 1
        # A skipped update leaves the weights of the step before, which the EMA has seen already.
        if self.ema and agreed.finite:
            self.ema.update(self.model, self.done)
        self.log.times.mark("optimiser")
        self.log.step(count)

    def _run_phase(self, phase: Phase, step: int, more: dict) -> Agreement:
        """Do forward, backward and update of a phase; return what the processes agreed on before the update.

        All processes skip the update if any of them has a loss or gradient that is not finite.
        """
        config = self.config
        accelerator = self.accelerator
        accumulation = config.optim.accumulation
        scaler = accelerator.scaler  # None without fp16
        times = self.log.times

        self.losses = []
        for number, batch in enumerate(phase.batches):
            times.mark("data")
            # Seed after fetching: data loading also consumes random numbers. Dropout then depends on
            # seed, step, micro-batch, rank and phase alone.
            rank = accelerator.process_index
            seed = derive_seed(config.seed, step, number, rank, *phase.salt)
            # Processes reduce their gradients once a phase, in the backward of its last micro-batch.
            sync = contextlib.nullcontext()
            if number < accumulation - 1:
                sync = accelerator.no_sync(phase.task)
            with sync:
                losses = self.passes(phase.task, {**batch, **more}, seed)
            self.losses.append(losses)
            times.mark("compute")
        assert len(self.losses) == accumulation, "the batches ended within a step"

        # Backward averages gradients over the processes, except those of gates in a phase of their own.
        phase.average_gates()
        max_norm = 0.0
        if phase.clipped:
            max_norm = config.optim.clip_norm
        norm = clip_gradients(accelerator, phase.task.parameters(), max_norm)

        # One collective tells every process what any process has met: all skip, stop and count together.
        loss = torch.stack([each["loss"].detach().float() for each in self.losses]).mean()
        agreed = agree(loss, norm, self.setup.signals.received, self._new_bad_samples())
        self.norms[phase.name] = agreed.norm
        self.signal = agreed.signal
        if agreed.bad_samples:
            self.unreadable.share(gather_object)
        times.mark("compute")

        # If the gradient is not finite, the scaler's own step skips the update and lowers the scale.
        scaler_skips = scaler is not None and agreed.bad_norm
        if agreed.finite or scaler_skips:
            phase.optimizer.step()
        elif scaler is not None:
            scaler.update()  # clipping has unscaled the gradients; the scaler allows that once per update
        phase.optimizer.zero_grad(set_to_none=True)
        if not agreed.finite:
            phase.restore_statistics()
        times.mark("optimiser")
        lr = largest_learning_rate(phase.optimizer)
        self.skipped.count(step, agreed, scaler, norm, loss, lr)
        return agreed

    # ------------------------------------------------------------------ the loop around it

    def steps(self) -> Iterator[int]:
        """Yield the index of each step to do, until the last step, a signal or early stopping."""
        if self.config.estimate:
            with self.setup.errors():
                raise ValueError(f"estimate: {self.setup.name} calls no `estimate_cost`")
        signals = self.setup.signals
        signals.begun = True  # from here on a signal lets the current step finish
        while self.done < self.span.stop and not self.signal and not self._out_of_patience():
            yield self.done
        signals.begun = False
        # One process may have received a signal after its last step: agree once more, so that all end alike.
        received = max(self.signal, signals.received)
        zero = torch.zeros((), device=self.accelerator.device)
        signals.stopped = agree(zero, zero, received).signal
        self._left_out_said.clear()  # the end of the run repeats what ends of epochs have said
        self._say_left_out(f"{self.done} steps")
        if self.stopped:
            self.log.stopped(self.done, self.stopped)
        else:
            signals.done = self.done

    @property
    def stopped(self) -> int:
        """The signal that ended the loop, or 0."""
        return self.setup.signals.stopped

    def due(self, every: int, at_end: bool = False) -> bool:
        """Return whether work that is done every `every` steps (0: never) is due after this step.

        With `at_end` the work is also due after the last step of a run that has at least `every` steps. Nothing is due
        after a signal.
        """
        if not every or self.signal:
            return False
        is_last = self.done == self.span.stop
        return self.done % every == 0 or (at_end and is_last and self.done >= every)

    def save(self) -> None:
        """Save a checkpoint if one is due or the run ends here; raise SaveError as `Saver.save` does."""
        last = self.done == self.span.stop or self.signal > 0 or self._out_of_patience()
        if last or self.done % self.config.save_every == 0:
            metadata = dict(self.metadata)
            left = self._first_weights_left()
            if left:
                metadata["first_weights_left"] = round(left, 4)
            plain = {NEXT_LEARNING_RATE: self.schedule(self.done)}
            self.saver.save(self.done, metadata, last, plain)
            self.log.pause()

    # ------------------------------------------------------------------ what is logged

    def step_is_logged(self) -> bool:
        """Return whether the step just done is logged."""
        return (self.done - 1) % self.config.log_every == 0 or self.done == self.span.stop

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the optimiser's groups, in the step just done."""
        return largest_learning_rate(self.optimizer)

    def averages(self) -> dict:
        """Return losses and head usage of the step just done, see `average_over_step`; a collective."""
        return average_over_step(self.accelerator, self.losses)

    def metrics(self, values: dict, show: str, **counts) -> None:
        """Log values and counts of the step just done, with its learning rate and gradient norm."""
        *_, norm = self.norms.values()  # of the last phase
        entry = dict(values)
        entry.update(lr=self.learning_rate, grad_norm=round(norm, 4), skipped=self.skipped.total)
        if GATES in self.norms:
            entry["gate_grad_norm"] = float(f"{self.norms[GATES]:.4g}")
        if self.unreadable is not None:
            entry["unreadable"] = len(self.unreadable.seen)
        entry.update(failed_saves=self.saver.failed, **counts)
        if self.elastic:
            share = self.elastic.share_of(self.done - 1)
            entry["active_share"] = self.elastic.active_share(share)
        self.log.metrics(self.done, entry, show)

    def event(self, values: dict, show: str) -> None:
        """Log an evaluation of the step just done; its time does not count in the logged rate."""
        self.log.event(self.done, values, show)
        self.log.pause()

    def judge(self, scores: dict, model: nn.Module) -> None:
        """Compare a validation with the best one so far; if it is better, write best.safetensors.

        Call it before `event` logs the validation, so that the file is never older than the log. Where patience is
        exhausted, the run ends after this step.

        Args:
            scores: of the validation.
            model: the model that was scored, unwrapped.
        """
        best = self.best
        value = value_of(scores, best.key)
        better = best.better(value)
        if better and best.write:
            file = self.folder / BEST
            metadata = dict(self.metadata, step=self.done)
            metadata[f"best_{best.key}"] = value
            main = self.accelerator.is_main_process
            problem = attempt(lambda: export_weights(model, file, metadata, write=main))
            if problem:
                self.log.say(f"{file} could not be written: {problem}")
                better = False
        best.take(self.done, value, better)

    def write_results(self, results: dict) -> None:
        """Write OUTPUT/results.json, with the number of steps done."""
        if self.accelerator.is_main_process:
            results = dict(results, step=self.done)
            if self.done:
                results.update(self.descent.results())
            write_json(self.folder / "results.json", results)

    @property
    def ema_name(self) -> str:
        """What messages call the EMA; says which share of the EMA is still the weights of step 1."""
        left = self._first_weights_left()
        if not left:
            return "EMA"
        return f"EMA, {left:.1%} of it still the weights of step 1"

    # ------------------------------------------------------------------ details

    def _say_left_out(self, when: str) -> None:
        """Print how many samples and updates this process has left out so far, if that is new; `when` begins the lines."""
        lines = []
        if self.unreadable is not None:
            lines.append(self.unreadable.line)
        if self.skipped.total:
            lines.append(
                f"{self.skipped.total} updates skipped so far, whose loss or gradient was not finite"
            )
        for line in lines:
            if line and line not in self._left_out_said:
                self.log.say(f"{when}: {line}")
                self._left_out_said.add(line)

    def _first_weights_left(self) -> float:
        if self.ema_config is None:
            return 0.0
        return first_weights_left(self.ema_config, self.done)

    def _out_of_patience(self) -> bool:
        return self.best is not None and self.best.exhausted

    def _new_bad_samples(self) -> bool:
        return self.unreadable is not None and self.unreadable.new

    def _heads_of_step(self, step: int) -> contextlib.AbstractContextManager:
        """Return a context in which the model runs the share of heads that the elastic budget draws for a step."""
        if self.elastic is None:
            return contextlib.nullcontext()
        return self.elastic.running(self.model, self.elastic.share_of(step))

    def _fetched(self, batches: Iterable[dict], count: int) -> Iterator[dict]:
        """Yield the next `count` micro-batches. Bad data ends the run; each process that met it prints a line."""
        with self.setup.errors((BadData,), every_rank=True):
            yield from islice(batches, count)

    def _measured(self, batches: Iterator[dict], more: dict) -> Iterator[dict]:
        """Return the micro-batches; a run without a measurement table first makes one with the first of them.

        It is measured in the mode that will run. If steps then do not run as CUDA graphs, it is measured once more.
        """
        attention = self.setup.attention
        if attention is None:
            return batches
        graphs = self.passes.capturing
        for_graphs_in_vain = self._measured_by is not None and graphs is None
        if attention.table is not None and not for_graphs_in_vain:
            return batches
        self._measured_by = graphs
        first = next(batches)
        calls: dict = {}
        forward_seconds = self._collect_calls(calls, first, more)
        step_seconds = forward_seconds * self.config.optim.accumulation
        make_table = partial(measured_table, calls, step_seconds)
        folder = self.folder
        if self.config.estimate:
            folder = None
        attention.measure(make_table, folder, self.accelerator)
        self.log.pause()
        return chain([first], batches)

    def _collect_calls(self, calls: dict, batch: dict, more: dict) -> float:
        """Add the attention calls that training and evaluation make to `calls`; return seconds of one forward.

        Every process calls it: the forward of a wrapped task may be a collective.
        """
        config = self.config
        size = next(len(value) for value in batch.values() if isinstance(value, Tensor))
        eval_size = getattr(getattr(config, "data", None), "eval_batch_size", size)
        # Steps run every share of an elastic budget, and evaluations three of them.
        training_shares = [contextlib.nullcontext]
        evaluation_shares = training_shares
        if self.elastic:
            at = partial(self.elastic.running, self.model)
            training_shares = [partial(at, share) for share in self.elastic.budgets]
            evaluation_shares = [partial(at, share) for share in self.elastic.scored]
        with self.descent.drawing_experts():
            for at_share in training_shares:
                with at_share():
                    collect(
                        calls,
                        self.task,
                        lambda: self.task(**batch, **more),
                        training=True,
                        graphs=self.passes.capturing,
                    )
        # An EMA is a copy that is not compiled. With an EMA the trained weights too are evaluated, after the last step.
        forms = [self.ema is not None]
        if self.ema is not None and compiled_layers(self.task):
            forms.append(False)
        for at_share in evaluation_shares:
            with at_share():
                for uncompiled in forms:
                    seconds = collect(
                        calls,
                        self.task,
                        lambda: self.task(**batch, **more),
                        training=False,
                        uncompiled=uncompiled,
                        batch=eval_size / size,
                    )
                for passes in self.passes_beside:
                    for models, forward in passes(self.ema.module if self.ema else self.model):
                        collect(calls, models, forward, training=False)
        return seconds
