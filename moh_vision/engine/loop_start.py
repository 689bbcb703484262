"""Make a run's `TrainingLoop`: wrap the task, restore the checkpoint, open the log."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from moh_vision.engine.best import Best
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.compiling import compile_task
from moh_vision.engine.config import EmaConfig, RunConfig
from moh_vision.engine.keys import flat, keys_of
from moh_vision.engine.logging import RunLog, open_tracker
from moh_vision.engine.ranks import by_all, by_main, from_first, say
from moh_vision.engine.run_folder import OpenFolder
from moh_vision.engine.run_setup import RunSetup, Span
from moh_vision.engine.saver import Saver
from moh_vision.engine.step import NEXT_LEARNING_RATE, learning_rate
from moh_vision.engine.step_folders import RECORD, export
from moh_vision.engine.step_graph import make_passes
from moh_vision.engine.step_times import StepTimes
from moh_vision.engine.training_loop import TrainingLoop
from moh_vision.engine.weights import first_weights_left, make_ema, short_enough

# Keys that the learning rate of a step depends on; which of them a configuration has depends on the wing.
OF_SCHEDULE = (
    "max_steps",
    "optim.epochs",
    "optim.batch_size",
    "optim.lr",
    "optim.schedule",
    "optim.min_lr",
    "optim.warmup_steps",
    "optim.warmup_epochs",
    "optim.warmup_lr",
)


def start_loop(  # noqa: PLR0913
    setup: RunSetup,
    span: Span,
    folder: OpenFolder,
    descent: BlockDescent,
    task: nn.Module,
    optimizer: torch.optim.Optimizer,
    metadata: dict[str, object],
    *,
    title: str,
    schedule: dict | None = None,
    ema: EmaConfig | None = None,
    elastic=None,
    best: Best | None = None,
    unreadable=None,
    passes_beside: Sequence[Callable] = (),
    **log_options,
) -> TrainingLoop:
    """Wrap the task, restore the checkpoint that the run resumes from, open the log; return the training loop.

    Args:
        setup, span, folder: the set-up of the run, see `RunSetup`.
        descent: a `BlockDescent` of the model.
        task: a module with the model as its attribute `model`; its forward returns a dict of losses with "loss".
        optimizer: the optimiser of the model's parameters.
        metadata: what exported weights store beside the configuration, such as the model's arguments.
        title: title of the run in its log.
        schedule: arguments of `learning_rate` that override those from config.optim.
        ema: how weights are averaged; None: no EMA.
        elastic: an `ElasticBudget`, or None.
        best: keeps the best validation score; None: validations are not compared.
        unreadable: a `BadSamples`, or None.
        passes_beside: see `TrainingLoop`.
        log_options: see `RunLog`.
    """
    config = setup.config
    accelerator = setup.accelerator
    if best is not None:
        with setup.errors():
            best = from_first(lambda: best.replay(folder.path, span.start))
    with setup.errors():
        compile_task(task, config.compile)
    # Make the EMA before the model may be sharded, so that it is whole on every process.
    average = make_ema(task.model, ema, accelerator.device)
    if average is None:  # also for a decay of 0
        ema = None
    say_long_average(ema, span)
    rate = make_schedule(config.optim, span, schedule or {})

    task, optimizer = descent.prepare(task, optimizer)
    bare_task = accelerator.unwrap_model(task)
    state = TrainingState(task, descent.optimizers, average, accelerator.scaler)
    with setup.errors():
        state.check_options(config.optim.name)
    if span.checkpoint:
        restore(setup, span, folder, state)
        say_new_schedule(rate, span, folder.earlier, config)
    saver = Saver(
        accelerator,
        folder.path,
        state,
        config.keep_checkpoints,
        config.save_every,
        config.save_in_background,
    )

    log = open_log(setup, span, folder.path, title, **log_options)
    if span.stop:
        descent.announce(log, span.start)
    with setup.errors():
        passes = make_passes(config, accelerator, bare_task, descent, folder.path, span.start, log)
    return TrainingLoop(
        setup=setup,
        span=span,
        folder=folder.path,
        model=bare_task.model,
        task=task,
        optimizer=optimizer,
        descent=descent,
        schedule=rate,
        metadata=dict(architecture=config.model.name, config=config.tree()) | metadata,
        log=log,
        saver=saver,
        ema=average,
        ema_config=ema,
        elastic=elastic,
        best=best,
        unreadable=unreadable,
        passes=passes,
        passes_beside=passes_beside,
    )


def make_schedule(optim, span: Span, changes: dict) -> partial:
    """Return `learning_rate` as a function of the step alone; print a line if the warm-up exceeds a third of the run.

    Args:
        optim: section optim of the configuration.
        span: the steps of the run.
        changes: arguments of `learning_rate` that override those from `optim`.
    """
    arguments = dict(
        peak=optim.lr,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps,
        max_steps=span.stop,
        floor=optim.min_lr,
        warmup_lr=getattr(optim, "warmup_lr", 0.0),  # not every wing has this key
    )
    rate = partial(learning_rate, **(arguments | changes))
    warmup = rate.keywords["warmup_steps"]
    if 3 * warmup > span.stop > span.start:
        ends = f"the learning rate ends at {rate(span.stop - 1):.3g}"
        say(f"the warm-up takes {warmup} steps, the run has {span.stop}: {ends}")
    return rate


def restore(setup: RunSetup, span: Span, folder: OpenFolder, state: TrainingState) -> None:
    """Load the checkpoint that a run resumes from, then write the folder's records."""
    with setup.errors():
        by_all(lambda: state.restore(span.checkpoint, say))
        by_main(folder.write_records, setup.accelerator)
        # Export again: the run may have been killed between writing this checkpoint and exporting its weights.
        finished = span.start == span.stop
        by_main(lambda: export(folder.path, span.checkpoint, join=finished), setup.accelerator)
    say(f"resuming {folder.path} at step {span.start}")


def open_log(setup: RunSetup, span: Span, folder: Path, title: str, **log_options) -> RunLog:
    """Open metrics.jsonl and the configured tracker; see `RunLog`."""
    config = setup.config
    accelerator = setup.accelerator
    main = accelerator.is_main_process and not config.estimate  # an estimate logs nothing
    # Both trackers write into a folder of their own name.
    tracker_goes_on = (folder / str(config.tracker)).is_dir()
    tracker = open_tracker(
        config.tracker, folder, span.start, f"moh_vision {title}", config.tree(), main
    )
    file = folder / "metrics.jsonl"
    times = StepTimes(accelerator.device)
    return RunLog(
        file,
        span.start,
        span.stop,
        main,
        title,
        tracker,
        tracker_goes_on,
        times=times,
        **log_options,
    )


def say_long_average(ema: EmaConfig | None, span: Span) -> None:
    """Print a line if the run is too short for its EMA, with settings that fit."""
    if ema is None or span.start == span.stop:
        return
    left = first_weights_left(ema, span.stop)
    if left:
        say(
            f"ema.decay {ema.decay:g}: after {span.stop} steps {left:.1%} of the EMA are still "
            f"the weights of step 1; set {short_enough(ema, span.stop)}"
        )


def say_new_schedule(rate: partial, span: Span, earlier: dict, config: RunConfig) -> None:
    """Print a line if the next step has another learning rate than the run had for it before it was resumed."""
    record = json.loads((span.checkpoint / RECORD).read_text())
    as_before = f"{record[NEXT_LEARNING_RATE]:.3g}"
    as_now = f"{rate(span.start):.3g}"
    if as_before == as_now or span.start == span.stop:
        return
    keys = keys_of(type(config))
    before = dict(flat(earlier, keys))
    now = dict(flat(config.tree(), keys))
    names = [name for name in OF_SCHEDULE if name in now and before.get(name) != now[name]]
    if now.get("optim.epochs") and "max_steps" in names:
        names.remove("max_steps")  # the schedule ends with the epochs, wherever the run ends
    changes = [f"{name} {before.get(name)} -> {now[name]}" for name in names]
    cause = "; ".join(changes) or "another number of training images"
    say(f"{cause}: the learning rate at step {span.start} goes from {as_before} to {as_now}")
