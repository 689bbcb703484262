"""A `TrainingLoop` without a folder, for tests of single steps."""

import contextlib
from types import SimpleNamespace

from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.config import BlockDescentConfig
from moh_vision.engine.run_setup import Span
from moh_vision.engine.signals import StopSignals
from moh_vision.engine.step_times import StepTimes
from moh_vision.engine.training_loop import TrainingLoop


def small_loop(
    accelerator, task, optimizer, descent=None, *, accumulation=1, clip_norm=0.0, lr=0.1, seed=0
) -> TrainingLoop:
    """Return a loop for any number of steps at a constant learning rate, without a log and checkpoints.

    descent: a `BlockDescent` of the task's model, before its `prepare`. None: block descent for a model without gates.
    """
    if descent is None:
        descent = BlockDescent(accelerator, task, False, BlockDescentConfig())
    task, optimizer = descent.prepare(task, optimizer)
    optim = SimpleNamespace(accumulation=accumulation, clip_norm=clip_norm)
    setup = SimpleNamespace(
        config=SimpleNamespace(seed=seed, optim=optim),
        accelerator=accelerator,
        signals=StopSignals(),
        attention=None,
        errors=lambda *classes, **options: contextlib.nullcontext(),
    )
    return TrainingLoop(
        setup=setup,
        span=Span(0, 10**6),
        folder=None,
        model=getattr(task, "model", task),
        task=task,
        optimizer=optimizer,
        descent=descent,
        schedule=lambda step: lr,
        metadata={},
        log=SimpleNamespace(step=lambda count: None, say=lambda line: None, times=StepTimes()),
        saver=None,
    )
