"""A training run from command line to end: folder, lock, resume point, log, saves, signals."""

import contextlib
import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import nn

from moh_vision.attention.executors.measurement_table import processor
from moh_vision.attention.measure import collect, measured_table
from moh_vision.engine.attention_record import keep_settings
from moh_vision.engine.best import BEST, Best
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.checkpoint import TrainingState, export_weights
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.errors import MISTAKES, BadData, lost_a_process, user_errors
from moh_vision.engine.keys import changed_keys
from moh_vision.engine.logging import (
    RunLog,
    check_tracker,
    ending,
    open_tracker,
    record_start,
    write_json,
)
from moh_vision.engine.optimizers import check_sharded
from moh_vision.engine.ranks import attempt, by_main, from_first, say
from moh_vision.engine.run_folder import RunFolder
from moh_vision.engine.saver import SaveError, Saver
from moh_vision.engine.signals import StopSignals
from moh_vision.engine.step import Step, average_over_step, learning_rate
from moh_vision.engine.step_folders import export
from moh_vision.engine.weights import first_weights_left, make_ema, short_enough


class Run:
    """A training run: a context manager that a `train` module uses in this order.

        with Run("train_dit.py", DitConfig, argv) as run:
            checkpoint = run.take_up(steps)         lock the folder, find the checkpoint to go on from
            run.take_model(model, routers)          refuse what cannot be trained
            run.open(record, ...)                   end the set-up: from here on the folder is the run's
            run.prepare(task, optimizer, ...)       wrap, resume, open the log
            for step in run.steps():
                run.step(batches, epoch)            forward, backward, update
                if run.logs(): run.metrics(run.averages(), "loss ...")
                run.save()                          where it is time
            if not run.stopped: ...                 the last evaluation

    A user's mistake during the set-up, and bad data found later, are one line and exit code 2; a loss that stays
    infinite, or saves that fail, one line and exit code 1. A run stopped by a signal saves, and exits with 128 +
    the signal's number.

    `settings` is an `AttentionRecord`, or None on a device without operators; `checkpoint` the folder that the run goes
    on from, or None; `start`, `stop` and `done` count steps; `stopped` is a signal's number, or 0.

    Args:
        name: the script's.
        kind: the class of its configuration, a `RunConfig`.
        argv: the command line without the program; None: that of the process.
    """

    def __init__(self, name: str, kind: type, argv: list[str] | None):
        self.name, self.kind, self.argv = name, kind, argv

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as held:
            self.signals = held.enter_context(StopSignals())
            with user_errors(self.name):
                self.config = parse_config(self.kind, self.argv, self.name)
                c = self.config
                self.accelerator = make_accelerator(c.mixed_precision, c.tf32, c.tracker)
                lock = held.enter_context(contextlib.ExitStack())
                self._place = RunFolder(c.output, c.fresh, self.accelerator, lock, dry=c.dry_run)
                # Before any model runs.
                earlier = Path(c.output) if self._place.goes_on else None
                self.settings = keep_settings(earlier, self.accelerator, held, c.allow_change)
                if self.settings and c.dry_run:
                    say(self.settings.line)
            self._held = held.pop_all()
        self.setting_up, self.stopped, self._ends = True, 0, False
        self.log = self.saver = None
        self.best: Best | None = None
        self.description = ""  # of the model, printed by a dry run
        self._earlier_stop: int | None = None  # max_steps of the resumed config.yaml
        return self

    def __exit__(self, kind, error, traceback) -> None:
        with self._held:
            if lost_a_process(error):
                with self.errors():
                    raise error
            if self.saver:
                self.saver.wait()
            if error is None:
                self._finish()
            elif (
                isinstance(error, (*MISTAKES, ModuleNotFoundError))
                and self.setting_up
                or isinstance(error, BadData)
            ):
                with self.errors():
                    raise error
            elif isinstance(error, (FloatingPointError, SaveError)):
                with self.errors((FloatingPointError, SaveError), code=1):
                    raise error

    def errors(self, kinds: tuple = MISTAKES, **options) -> contextlib.AbstractContextManager:
        """`user_errors` of this script."""
        return user_errors(self.name, kinds, resumes=True, **options)

    def take_up(self, steps: int) -> Path | None:
        """Lock an earlier run in config.output; return the checkpoint to resume from, or None."""
        point = self._place.take_up(steps)
        self.start, self.checkpoint = point or (0, None)
        self.stop, self.done = steps, self.start
        return self.checkpoint

    say = staticmethod(say)

    def portion(self) -> dict:
        """Arguments of a `StepBatches` that say which samples this process takes."""
        o, a = self.config.optim, self.accelerator
        sizes = dict(
            batch_size=o.batch_size,
            accumulation=o.accumulation,
            rank=a.process_index,
            world=a.num_processes,
        )
        return dict(sizes, start=self.start, stop=self.stop)

    @property
    def micro_batch(self) -> int:
        """Samples that a process reads at once."""
        o = self.config.optim
        return max(1, o.batch_size // (o.accumulation * self.accelerator.num_processes))

    def take_model(
        self, model: nn.Module, mae_routers: list[nn.Module], elastic=None, beside=None
    ) -> None:
        """Take the model that is trained: its parameters that require a gradient.

        `elastic` is an `ElasticBudget` or None. The module `beside` is trained too; only checkpoints keep it.
        """
        if self.accelerator.distributed_type == "FSDP":
            check_sharded(self.config.optim.name)
        c, self.model, self.elastic = self.config, model, elastic
        trained = nn.ModuleList([model, beside]) if beside else model
        self.descent = BlockDescent(
            self.accelerator, trained, mae_routers, c.compile, c.block_descent
        )

    def open(self, *records) -> None:
        """Open the folder and write its records; earlier mistakes leave nothing.

        `records`: a `DataRecord`, a `FrozenRecord`; a run that goes on is compared with them.
        A dry run has then met all that the run would refuse, and prints the model's `description`.
        """
        c = self.config

        def changed(earlier: dict) -> list[str]:
            self._earlier_stop = earlier.get("max_steps")
            return changed_keys(earlier, c, c.allow_change)

        self.folder = Path(c.output)
        self._place.open(c.tree(), changed, records, self.settings, resumes=bool(self.checkpoint))
        if c.dry_run:
            return say(self.description)
        command = [self.name, *(sys.argv[1:] if self.argv is None else self.argv)]
        count, device = self.accelerator.num_processes, self.accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
        start = dict(step=self.start, command=shlex.join(command), device=name, processes=count)
        by_main(lambda: record_start(self.folder, **start), self.accelerator)
        say(f"{count} process{'es' * (count > 1)} on {device.type}")
        if self.settings:
            say(self.settings.line)
        self.setting_up = False

    def prepare(
        self,
        task: nn.Module,
        optimizer: torch.optim.Optimizer,
        metadata: dict[str, object],
        *,
        title: str,
        schedule: dict | None = None,
        ema=None,
        unreadable=None,
        **log_options,
    ) -> None:
        """Wrap the task, restore `take_up`'s checkpoint, open the log (`title`, `log_options`: see `RunLog`).

        Args:
            metadata: what exported weights have beside the configuration: of which model they are.
            schedule: arguments of `learning_rate` beyond config.optim.
            ema: an `EmaConfig`, or None.
            unreadable: a `BadSamples`, or None.
        """
        c, accelerator = self.config, self.accelerator
        if c.compile:
            task.compile()
        # Before the model may be sharded.
        self.ema = make_ema(
            self.model, ema.decay if ema else 0.0, bool(ema and ema.warmup), accelerator.device
        )
        self._average = ema if self.ema else None
        self._say_long_average()
        o = c.optim
        usual = dict(
            schedule=o.schedule, warmup_steps=o.warmup_steps, max_steps=self.stop, floor=o.min_lr
        )
        usual["warmup_lr"] = getattr(o, "warmup_lr", 0.0)  # missing in some configurations
        lr = partial(learning_rate, peak=o.lr, **{**usual, **(schedule or {})})
        if 3 * (warmup := lr.keywords["warmup_steps"]) > self.stop > self.start:
            say(
                f"the warm-up takes {warmup} steps, the run has {self.stop}: the learning rate ends at {lr(self.stop - 1):.3g}"
            )
        self._step = Step(
            c, descent=self.descent, task=task, optimizer=optimizer, learning_rate=lr,
            signals=self.signals, unreadable=unreadable,
        )  # fmt: skip
        self.task = self._step.task
        self.model = accelerator.unwrap_model(self.task).model
        state = TrainingState(self.task, self.descent.optimizers, self.ema, accelerator.scaler)
        with self.errors():
            state.check_options(o.name)
        if self.checkpoint:
            with self.errors():
                state.restore(self.checkpoint, say)
                by_main(self._place.write_records, accelerator)
                # A kill may have come before.
                by_main(
                    lambda: export(self.folder, self.checkpoint, join=self.start == self.stop),
                    accelerator,
                )
            say(f"resuming {self.folder} at step {self.start}")
            self._say_new_schedule(lr)
        self.saver = Saver(
            accelerator, self.folder, state, c.keep_checkpoints, c.save_every, c.save_in_background
        )
        self.metadata = dict(architecture=c.model.name, config=c.tree()) | metadata
        accelerator.wait_for_everyone()  # all have read the log that the main process goes on with
        main = accelerator.is_main_process
        tracker = open_tracker(
            c.tracker, self.folder, self.start, f"moh_vision {title}", c.tree(), main
        )
        path = self.folder / "metrics.jsonl"
        self.log = RunLog(path, self.start, self.stop, main, title, tracker, **log_options)
        if self.stop:
            self.descent.announce(self.log, self.start)

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to do: until the last one, a signal, or no patience."""
        self.signals.begun = True  # a step to finish
        while self.done < self.stop and not self._step.updater.stop and not self._ends:
            yield self.done
        self.signals.begun = False
        self.stopped = self._step.updater.stop_after_all()
        if self.stopped:
            self.log.stopped(self.done, self.stopped)
        else:
            self.signals.done = self.done

    def step(self, batches: Iterable[dict], epoch: int, count: int, **more) -> None:
        """Do the next step of `count` images or tokens, for the log's rate. See `Step`."""
        elastic, batches = self.elastic, self._fetched(batches)
        if self.settings and self.settings.table is None:
            batches = self._measured(batches, more)
        with (
            elastic.running(self.model, elastic.share_of(self.done))
            if elastic
            else contextlib.nullcontext()
        ):
            updated = self._step(self.done, batches, epoch, **more)
        self.done += 1
        if self.ema and updated:
            self.ema.update(self.model, self.done)
        self.log.step(count)

    def logs(self) -> bool:
        """Whether the step just done is logged."""
        return (self.done - 1) % self.config.log_every == 0 or self.done == self.stop

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of the step just done."""
        return self._step.values()["lr"]

    def averages(self) -> dict:
        """`average_over_step` of the step just done; every process calls it."""
        return average_over_step(self.accelerator, self._step.losses)

    def metrics(self, values: dict, show: str, **counts) -> None:
        """Log values and counts of the last step, with its learning rate and gradient norm."""
        counts = dict(self._step.values(), failed_saves=self.saver.failed, **counts)
        if self.elastic:
            counts["active_share"] = self.elastic.active_share(self.elastic.share_of(self.done - 1))
        self.log.metrics(self.done, dict(values, **counts), show)

    def due(self, every: int, at_end: bool = False) -> bool:
        """Whether to do now what is done every so many steps (0: never), or `at_end`."""
        if not every or self._step.updater.stop:
            return False
        return self.done % every == 0 or (at_end and self.done == self.stop >= every)

    def save(self) -> None:
        """Save a checkpoint if it is time or the last step; raise SaveError as `Saver` does."""
        last = self.done == self.stop or self._step.updater.stop > 0 or self._ends
        if last or self.done % self.config.save_every == 0:
            left = self._first_weights_left()
            about = dict(first_weights_left=round(left, 4)) if left else {}
            self.saver.save(self.done, self.metadata | about, last)
            self.log.pause()

    def event(self, values: dict, show: str) -> None:
        """Log an evaluation after the last step, and leave its time out of the rate."""
        self.log.event(self.done, values, show)
        self.log.pause()

    def keep_best(self, key: str, patience: int = 0, write: bool = True) -> None:
        """Find the best validation by score `key`, see `Best`; `write` its weights to OUTPUT/best.safetensors."""
        with self.errors():
            self.best = from_first(
                lambda: Best(key, patience).replay(self.folder, self.start, from_file=write)
            )
        self._writes_best, self._ends = write, self.best.exhausted

    def judge(self, scores: dict, model: nn.Module) -> None:
        """Take a validation's scores of the unwrapped model, before they are logged: the file is never behind the
        log. Where patience is exhausted, the last step ends the run.
        """
        best, value = self.best, scores[self.best.key]
        better = best.better(value)
        if better and self._writes_best:
            file, metadata = self.folder / BEST, dict(self.metadata, step=self.done)
            metadata[f"best_{best.key}"], write = value, self.accelerator.is_main_process
            problem = attempt(lambda: export_weights(model, file, metadata, write=write))
            if problem:
                self.log.say(f"{file} could not be written: {problem}")
            better = not problem
        best.take(self.done, value, better)
        self._ends = self._ends or best.exhausted

    def write_results(self, results: dict) -> None:
        """Write OUTPUT/results.json, with the steps that are done."""
        if self.accelerator.is_main_process:
            descent = self.descent.results() if self.done else {}
            write_json(self.folder / "results.json", dict(results, step=self.done, **descent))

    @property
    def averaged(self) -> str:
        """The EMA in words, with the share of the weights of step 1 that it still has."""
        left = self._first_weights_left()
        return f"EMA, {left:.1%} of it still the weights of step 1" if left else "EMA"

    def _first_weights_left(self) -> float:
        return first_weights_left(self._average, self.done) if self._average else 0.0

    def _say_long_average(self) -> None:
        """Say before step 1 if the run is too short for its EMA, and what to set."""
        if self._average and self.start < self.stop:
            left = first_weights_left(self._average, self.stop)
            if left:
                say(
                    f"ema.decay {self._average.decay:g}: after {self.stop} steps {left:.1%} of the EMA are still "
                    f"the weights of step 1; set {short_enough(self._average, self.stop)}"
                )

    def _say_new_schedule(self, lr: Callable[..., float]) -> None:
        """Print how a changed max_steps changes the next step's learning rate, if it does."""
        before, now = self._earlier_stop, self.config.max_steps
        if (
            not isinstance(before, int)
            or before == now
            or lr.keywords["max_steps"] != now
            or self.start == now
        ):
            return
        rates = lr(self.start, max_steps=before), lr(self.start)
        if rates[0] != rates[1]:
            change = f"goes from {rates[0]:.3g} to {rates[1]:.3g}"
            say(f"max_steps {before} -> {now}: the learning rate at step {self.start} {change}")

    def _fetched(self, batches: Iterable[dict]) -> Iterator[dict]:
        with self.errors((BadData,), every_rank=True):
            for batch in batches:  # noqa: UP028  `yield from` would close them after a step
                yield batch

    def _measured(self, batches: Iterator[dict], more: dict) -> Iterator[dict]:
        """Measure on the first batch where skipping heads pays; return all batches."""
        c, calls, elastic = self.config, {}, self.elastic
        first = next(batches)
        size = next(len(value) for value in first.values() if isinstance(value, torch.Tensor))
        evaluated = getattr(getattr(c, "data", None), "eval_batch_size", size) / size
        shares = (
            [elastic.smallest, elastic.between[len(elastic.between) // 2], elastic.largest]
            if elastic
            else [None]
        )
        for training in (True, False):
            compiled = c.compile and (training or not self.ema)
            how = dict(training=training, compiled=compiled, batch=1.0 if training else evaluated)
            with self.descent.drawing_experts() if training else contextlib.nullcontext():
                for share in shares:
                    with (
                        elastic.running(self.model, share) if elastic else contextlib.nullcontext()
                    ):
                        forward = collect(
                            calls, self.task, lambda: self.task(**first, **more), **how
                        )
        make = partial(measured_table, calls, forward * c.optim.accumulation)
        self.settings.measure(make, self.folder, self.accelerator)
        self.log.pause()
        return chain([first], batches)

    def _finish(self) -> None:
        if self.log:
            if not self.stopped:
                self.log.say(
                    ending(self.name, self.folder, getattr(self.config, "objective", None))
                )
            self.log.close()
        for name in ("task", "descent", "saver", "_step"):  # what holds the wrapped task
            self.__dict__.pop(name, None)
        finish(self.accelerator, self.stopped)


def make_accelerator(
    mixed_precision: str, tf32: bool = False, tracker: str | None = None
) -> Accelerator:
    """Return accelerate's Accelerator for a configuration; accumulation is the script's."""
    check_tracker(tracker)
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", mixed_precision):
        raise ValueError(
            f"accelerate was launched with {launched}, but mixed_precision is {mixed_precision}: set both"
        )
    if "WORLD_SIZE" in os.environ and not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = (
            "true"  # else each of torchrun's processes is its own run
        )
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # A plugin: ACCELERATE_GRADIENT_ACCUMULATION_STEPS would override the plain argument.
    accumulation = GradientAccumulationPlugin(num_steps=1)
    # Others wait while the main process indexes shards or encodes text; the default is 10 minutes.
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=4))
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        gradient_accumulation_plugin=accumulation,
        kwargs_handlers=[patient],
    )
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":  # would compute in float32
        raise ValueError('mixed_precision fp16 needs a GPU; on a CPU it is "no" or "bf16"')
    return accelerator


def finish(accelerator, signum: int = 0) -> None:
    """End a run: wait for all, destroy the process group, exit with 128 + signum after a signal.

    The caller has dropped its references to the wrapped task and optimiser: else gloo with DistributedDataParallel
    aborts at exit about once in four times.
    """
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if signum:
        raise SystemExit(128 + signum)
