"""Begin and end the work of all processes: accelerate's Accelerator."""

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
    """Return accelerate's Accelerator for a configuration; accumulation is the script's."""
    check_tracker(tracker)
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", mixed_precision):
        raise ValueError(
            f"accelerate was launched with {launched}, but mixed_precision is {mixed_precision}: set both"
        )
    if "WORLD_SIZE" in os.environ and not torch.accelerator.is_available():
        # Otherwise each of torchrun's processes would be a run of its own.
        os.environ["ACCELERATE_USE_CPU"] = "true"
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
