"""Make accelerate's Accelerator for a run or a command, and end its processes."""

import gc
import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

from moh_vision.engine.logging import check_tracker


def make_accelerator(
    mixed_precision: str, tf32: bool = False, tracker: str | None = None
) -> Accelerator:
    """Return accelerate's Accelerator for a configuration.

    The Accelerator accumulates no gradients: the training loop does.
    """
    check_tracker(tracker)
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", mixed_precision):
        raise ValueError(
            f"accelerate was launched with {launched}, but mixed_precision is {mixed_precision}: set both"
        )
    if "WORLD_SIZE" in os.environ and not torch.accelerator.is_available():
        # Without this, accelerate on a CPU takes each process of torchrun for a run of its own.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides the plain argument, but not a plugin.
    accumulation = GradientAccumulationPlugin(num_steps=1)
    # While the main process indexes shards or encodes text, the others may wait longer than the default 10 minutes.
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=4))
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        gradient_accumulation_plugin=accumulation,
        kwargs_handlers=[patient],
    )
    # On a CPU accelerate would compute in float32 instead.
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError('mixed_precision fp16 needs a GPU; on a CPU it is "no" or "bf16"')
    return accelerator


def finish(accelerator, signum: int = 0) -> None:
    """End a run: wait for all processes, destroy the process group, and after a signal exit with 128 + signum.

    Before the call, drop all references to the wrapped task and optimiser: with them, gloo with
    DistributedDataParallel aborts at exit in about one run of four.
    """
    accelerator.wait_for_everyone()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        accelerator.free_memory()
        gc.collect()
        torch.distributed.destroy_process_group()
    if signum:
        raise SystemExit(128 + signum)
