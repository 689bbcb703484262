"""One optimiser step: its learning rate, its random numbers, its safety."""

from __future__ import annotations

import math
from typing import List

import torch

MAX_BAD_STEPS = 10


def learning_rate(step: int, peak: float, schedule: str, warmup_steps: int, max_steps: int, floor: float) -> float:
    """The learning rate of a step: a pure function, so that resuming needs no scheduler state.

    Linear warm-up over `warmup_steps`, then constant, or half a cosine that reaches `floor` at `max_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def set_learning_rate(optimizer, lr: float) -> None:
    """Set every group's learning rate, times the group's own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def average_over_step(accelerator, losses: List[dict]) -> dict:
    """Mean of the losses of a step over its micro-batches and all processes; every process calls it.

    Args:
        accelerator: accelerate's Accelerator.
        losses: what the task returned for each micro-batch: scalars, and head_usage as a list of [H] tensors.

    Returns:
        dict of floats, and head_usage as lists.
    """
    names = [name for name in losses[0] if name != "head_usage"]
    layers = [len(usage) for usage in losses[0]["head_usage"]]
    rows = [torch.cat([torch.stack([r[n].detach().float() for n in names]), *r["head_usage"]]) for r in losses]
    mean = accelerator.reduce(torch.stack(rows).mean(0), "mean").cpu()
    scalars, *usage = mean.split([len(names), *layers])
    values = {name: round(value, 6) for name, value in zip(names, scalars.tolist())}
    return dict(values, head_usage=[[round(share, 3) for share in layer.tolist()] for layer in usage])


class Updater:
    """Applies gradients, except where they are not finite; gives up after ten such steps in a row.

    After DistributedDataParallel has averaged gradients, a NaN of one rank is in all of them, so all ranks decide
    alike.
    """

    def __init__(self, accelerator, clip_norm: float):
        self.accelerator = accelerator
        self.clip_norm = clip_norm
        self.skipped = 0
        self.in_a_row = 0

    def __call__(self, task, optimizer, step: int) -> tuple[float, bool]:
        """Clip, check, step, zero. Returns the gradient norm before clipping, and whether the weights were updated.

        Raises:
            FloatingPointError: naming step, learning rate and gradient norm, after ten bad steps in a row.
        """
        norm = self.accelerator.clip_grad_norm_(task.parameters(), self.clip_norm or math.inf)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # of FSDP's shards
        finite = math.isfinite(norm)
        if finite or self.accelerator.scaler is not None:  # a gradient scaler skips the step and lowers its scale
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if finite:
            self.in_a_row = 0
        else:
            self._count(step, optimizer, norm)
        return norm, finite

    def _count(self, step: int, optimizer, norm: float) -> None:
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= MAX_BAD_STEPS:
            lr = optimizer.param_groups[0]["lr"]
            raise FloatingPointError(
                f"step {step}: {self.in_a_row} steps in a row without finite gradients (norm {norm}, lr {lr:g})"
            )
