"""The second half of a training run: its steps, and what is logged, averaged and saved after them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from moh_vision.attention.measure import collect, measured_table
from moh_vision.common.errors import BadData, lost_a_process
from moh_vision.common.seeds import derive_seed
from moh_vision.engine.best import BEST, Best
from moh_vision.engine.block_descent import GATES, BlockDescent
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.config import EmaConfig, RunConfig
from moh_vision.engine.logging import RunLog, ending, write_json
from moh_vision.engine.ranks import attempt
from moh_vision.engine.run_setup import RunSetup, Span
from moh_vision.engine.saver import Saver
from moh_vision.engine.step import (
    SkippedSteps,
    agree,
    average_over_step,
    clip_gradients,
    largest_learning_rate,
    set_learning_rate,
)
from moh_vision.engine.weights import ModelEma, first_weights_left


@dataclass(eq=False)
class TrainingLoop:
    """The steps of a run. `loop_start.start_loop` makes one; a `train` module uses it so:

        with start_loop(...) as loop:
            for step in loop.steps():
                loop.step(batches, epoch, count)        forward, backward, update, averages
                if loop.logs():
                    loop.metrics(loop.averages(), "loss ...")
                loop.save()                             where it is time
            if not loop.stopped: ...                    the last evaluation

    Args:
        setup: the first half of the run.
        span: the steps to do.
        folder: the run's folder.
        model: the model, unwrapped.
        task: what accelerate wraps: the model with its losses.
        optimizer: the task's, as accelerate wraps it.
        descent: the phases of a step; one, but for MAE's gates.
        schedule: step -> learning rate.
        metadata: what exported weights say of the model beside the step.
        log: metrics.jsonl, tracker and screen.
        saver: saves checkpoints.
        ema: the average of the model's weights, or None.
        ema_config: how that is averaged; None without it.
        elastic: an `ElasticBudget`, or None.
        best: the best validation, where the run looks for it.
        unreadable: the `BadSamples` of the data, or None.

    Attributes:
        done: steps that are done, earlier starts of the run included.
        losses: what the task returned for each micro-batch of the last phase.
        norms: norm of the gradients, by phase of the last step.
        signal: a signal that some process had got by the last step, or 0.
        skipped: counts the steps without finite loss and gradient.
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

    done: int = field(init=False)
    losses: list[dict] = field(init=False, default_factory=list)
    norms: dict[str, float] = field(init=False, default_factory=dict)
    signal: int = field(init=False, default=0)
    skipped: SkippedSteps = field(init=False, default_factory=SkippedSteps)

    def __post_init__(self):
        self.done = self.span.start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_class, error, traceback) -> None:
        if lost_a_process(error):
            return  # the saver may wait for the process that is no more; the set-up ends this one
        self.saver.wait()
        if error is None:
            if not self.stopped:
                objective = getattr(self.config, "objective", None)
                self.log.say(ending(self.config.kind, self.folder, objective))
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
            epoch: of this step; MAE's gates learn in some epochs only.
            count: images or tokens of the step on all processes, for the log's rate.
            more: further arguments of the task, the same for every micro-batch.
        """
        config = self.config
        accelerator = self.accelerator
        accumulation = config.optim.accumulation
        scaler = accelerator.scaler  # of fp16, else None
        step = self.done
        micro_batches = self._fetched(batches, accumulation)
        micro_batches = self._measured(micro_batches, more)

        # The rate is a function of the step alone: a run that goes on needs no scheduler's state.
        set_learning_rate(self.optimizer, self.schedule(step))
        self.task.train()  # evaluations leave it in another mode
        self.norms.clear()

        with self._heads_of_step(step):
            # One phase, but for MAE: there gates and weights may learn in turns, on the same batch.
            for phase in self.descent.phases(epoch, micro_batches):
                self.losses = []
                for number, batch in enumerate(phase.batches):
                    # Seed after fetching: data loading also consumes random numbers. Dropout then depends on
                    # seed, step, micro-batch, rank and phase alone.
                    rank = accelerator.process_index
                    torch.manual_seed(derive_seed(config.seed, step, number, rank, *phase.salt))
                    # Processes exchange gradients once a step, in the backward of the last micro-batch.
                    exchange = contextlib.nullcontext()
                    if number < accumulation - 1:
                        exchange = accelerator.no_sync(phase.task)
                    with exchange:
                        losses = phase.task(**batch, **more)
                        # Gradients add up: divided, they are those of the micro-batches' mean.
                        accelerator.backward(losses["loss"] / accumulation)
                    self.losses.append(losses)
                assert len(self.losses) == accumulation, "the batches ended within a step"

                # All processes have the mean of their gradients: from backward, but for those of MAE's gates.
                # The norm is that before clipping.
                phase.average_gates()
                max_norm = 0.0
                if phase.clipped:
                    max_norm = config.optim.clip_norm
                norm = clip_gradients(accelerator, phase.task.parameters(), max_norm)
                self.norms[phase.name] = norm.item()

                # One collective tells all processes what any has met: they skip, stop and count together.
                loss = torch.stack([each["loss"].detach().float() for each in self.losses]).mean()
                agreed = agree(loss, norm, self.setup.signals.received, self._new_bad_samples())
                self.signal = agreed.signal
                if agreed.bad_samples:
                    self.unreadable.share(gather_object)

                # The update. A scaler itself skips gradients that are not finite, and lowers its scale.
                if agreed.finite or (scaler is not None and agreed.bad_norm):
                    phase.optimizer.step()
                elif scaler is not None:
                    scaler.update()  # it has unscaled these gradients, and expects the step's end
                phase.optimizer.zero_grad(set_to_none=True)
                if not agreed.finite:
                    phase.restore_statistics()
                lr = largest_learning_rate(phase.optimizer)
                self.skipped.count(step, agreed, scaler, norm, loss, lr)

        self.done += 1
        # After a skipped update the weights are those of the step before: they are not averaged twice.
        if self.ema and agreed.finite:
            self.ema.update(self.model, self.done)
        self.log.step(count)

    # ------------------------------------------------------------------ the loop around it

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps to do: until the last one, a signal, or no patience."""
        signals = self.setup.signals
        signals.begun = True  # a step to finish
        while self.done < self.span.stop and not self.signal and not self._out_of_patience():
            yield self.done
        signals.begun = False
        # A signal may have come to one process after the last step: all ask once more.
        received = max(self.signal, signals.received)
        zero = torch.zeros((), device=self.accelerator.device)
        signals.stopped = agree(zero, zero, received).signal
        if self.stopped:
            self.log.stopped(self.done, self.stopped)
        else:
            signals.done = self.done

    @property
    def stopped(self) -> int:
        """The signal that ended the loop, or 0."""
        return self.setup.signals.stopped

    def due(self, every: int, at_end: bool = False) -> bool:
        """Whether to do now what is done every so many steps (0: never), or `at_end`."""
        if not every or self.signal:
            return False
        return self.done % every == 0 or (at_end and self.done == self.span.stop >= every)

    def save(self) -> None:
        """Save a checkpoint if it is time or the last step; raise SaveError as `Saver` does."""
        last = self.done == self.span.stop or self.signal > 0 or self._out_of_patience()
        if last or self.done % self.config.save_every == 0:
            metadata = dict(self.metadata)
            left = self._first_weights_left()
            if left:
                metadata["first_weights_left"] = round(left, 4)
            self.saver.save(self.done, metadata, last)
            self.log.pause()

    # ------------------------------------------------------------------ what is logged

    def logs(self) -> bool:
        """Whether the step just done is logged."""
        return (self.done - 1) % self.config.log_every == 0 or self.done == self.span.stop

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the optimiser's groups, in the step just done."""
        return largest_learning_rate(self.optimizer)

    def averages(self) -> dict:
        """Return `average_over_step` of the step just done; every process calls it."""
        return average_over_step(self.accelerator, self.losses)

    def metrics(self, values: dict, show: str, **counts) -> None:
        """Log values and counts of the last step, with its learning rate and gradient norm."""
        *_, norm = self.norms.values()
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
        """Log an evaluation after the last step, and leave its time out of the rate."""
        self.log.event(self.done, values, show)
        self.log.pause()

    def judge(self, scores: dict, model: nn.Module) -> None:
        """Take a validation's scores of the unwrapped model, before they are logged: the file is never behind the
        log. Where patience is exhausted, the last step ends the run.
        """
        best = self.best
        value = scores[best.key]
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
        """Write OUTPUT/results.json, with the steps that are done."""
        if self.accelerator.is_main_process:
            results = dict(results, step=self.done)
            if self.done:
                results.update(self.descent.results())
            write_json(self.folder / "results.json", results)

    @property
    def averaged(self) -> str:
        """The EMA in words, with the share of the weights of step 1 that it still has."""
        left = self._first_weights_left()
        if not left:
            return "EMA"
        return f"EMA, {left:.1%} of it still the weights of step 1"

    # ------------------------------------------------------------------ details

    def _first_weights_left(self) -> float:
        if self.ema_config is None:
            return 0.0
        return first_weights_left(self.ema_config, self.done)

    def _out_of_patience(self) -> bool:
        return self.best is not None and self.best.exhausted

    def _new_bad_samples(self) -> bool:
        return self.unreadable is not None and self.unreadable.new

    def _heads_of_step(self, step: int) -> contextlib.AbstractContextManager:
        """Run the share of heads that an elastic budget, if there is one, draws for a step."""
        if self.elastic is None:
            return contextlib.nullcontext()
        return self.elastic.running(self.model, self.elastic.share_of(step))

    def _fetched(self, batches: Iterable[dict], count: int) -> Iterator[dict]:
        """Yield the next `count` micro-batches; bad data among them ends the run with a line on every process."""
        with self.setup.errors((BadData,), every_rank=True):
            for batch in islice(batches, count):  # noqa: UP028  `yield from` would close them after a step
                yield batch

    def _measured(self, batches: Iterator[dict], more: dict) -> Iterator[dict]:
        """Measure once a run, on its first micro-batch, where skipping heads pays; return all micro-batches."""
        attention = self.setup.attention
        if attention is None or attention.table is not None:
            return batches
        first = next(batches)
        calls: dict = {}
        forward = self._collect_calls(calls, first, more)
        make_table = partial(measured_table, calls, forward * self.config.optim.accumulation)
        attention.measure(make_table, self.folder, self.accelerator)
        self.log.pause()
        return chain([first], batches)

    def _collect_calls(self, calls: dict, batch: dict, more: dict) -> float:
        """Add the calls of attention that training and evaluation make; return a forward's seconds.

        Every process calls it: the forward passes may wait for one another.
        """
        config = self.config
        size = next(len(value) for value in batch.values() if isinstance(value, Tensor))
        evaluated = getattr(getattr(config, "data", None), "eval_batch_size", size)
        running = [contextlib.nullcontext]
        if self.elastic:
            middle = self.elastic.between[len(self.elastic.between) // 2]
            shares = (self.elastic.smallest, middle, self.elastic.largest)
            running = [partial(self.elastic.running, self.model, share) for share in shares]
        with self.descent.drawing_experts():
            for at_share in running:
                with at_share():
                    collect(
                        calls,
                        self.task,
                        lambda: self.task(**batch, **more),
                        training=True,
                        compiled=config.compile,
                    )
        for at_share in running:
            with at_share():
                forward = collect(
                    calls,
                    self.task,
                    lambda: self.task(**batch, **more),
                    training=False,
                    compiled=config.compile and self.ema is None,  # the EMA is not compiled
                    batch=evaluated / size,
                )
        return forward
