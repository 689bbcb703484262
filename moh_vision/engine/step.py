"""Parts of an optimiser step: learning rate, clipping, and what processes must agree on before an update.

`training_loop.TrainingLoop.step` puts them together.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moh_vision.engine.ranks import greatest

MAX_BAD_STEPS = 10


def learning_rate(
    step: int,
    peak: float,
    schedule: str,
    warmup_steps: int,
    max_steps: int,
    floor: float,
    warmup_lr=0.0,
    as_timm=False,
) -> float:
    """Return the learning rate of a step, a pure function: resuming needs no scheduler state.

    Args:
        step: from 0.
        peak: the rate after the warm-up.
        schedule: what follows the warm-up. "constant"; half a "cosine" or a "linear" fall to `floor` at `max_steps`;
            or "inverse_sqrt": with 1 / sqrt(steps done), at least `floor` (Vaswani 2017, eq. 3).
        warmup_steps: steps of the linear warm-up.
        max_steps: steps of the run.
        floor: the smallest rate after the warm-up.
        warmup_lr: where the warm-up starts.
        as_timm: step 0 has `warmup_lr` itself, and the fall counts from step 0, as in timm.
    """
    if step < warmup_steps and as_timm:
        return warmup_lr + step * ((peak - warmup_lr) / warmup_steps)
    if step < warmup_steps:
        return warmup_lr + (peak - warmup_lr) * (step + 1) / warmup_steps
    if as_timm:
        warmup_steps = 0
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return max(floor, peak * math.sqrt(max(1, warmup_steps) / (step + 1)))
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    if schedule == "linear":
        left = 1 - done
    else:
        left = 0.5 * (1 + math.cos(math.pi * done))
    return floor + (peak - floor) * left


def set_learning_rate(optimizer, lr: float) -> None:
    """Set every group's learning rate, times its `lr_scale` if any."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def largest_learning_rate(optimizer) -> float:
    """Return the largest learning rate of an optimiser's groups."""
    return max(group["lr"] for group in optimizer.param_groups)


def average_over_step(accelerator, losses: list[dict]) -> dict:
    """Average a task's results over micro-batches and processes; every process calls it.

    Adds balance_share, the share of the auxiliary losses in the loss, and head_usage, the share of tokens that ran each
    head.
    """
    names = [name for name in losses[0] if name != "head_runs"]  # a list of [H + 1] tensors
    layers = [len(runs) for runs in losses[0]["head_runs"]]
    rows = []  # a micro-batch each: its scalars, then the runs of each layer's heads
    for results in losses:
        scalars = torch.stack([results[name].detach().float() for name in names])
        rows.append(torch.cat([scalars, *results["head_runs"]]))
    mean = accelerator.reduce(torch.stack(rows).mean(0), "mean").cpu().double()
    scalars, *runs = mean.split([len(names), *layers])
    values = dict(zip(names, scalars))
    # Of the means: a mean of the micro-batches' ratios would be another number.
    values["balance_share"] = 1 - values["task_loss"] / values["loss"]
    usage = [(layer[:-1] / layer[-1]).tolist() for layer in runs]
    averages = {name: round(value.item(), 6) for name, value in values.items()}
    averages["head_usage"] = [[round(share, 3) for share in layer] for layer in usage]
    return averages


def clip_gradients(accelerator, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a norm of `max_norm` (0: not at all); return their norm before, whole under FSDP."""
    norm = accelerator.clip_grad_norm_(parameters, max_norm or math.inf)
    if hasattr(norm, "full_tensor"):  # of gradients that FSDP shards
        return norm.full_tensor()
    return torch.as_tensor(norm)


class Agreement(NamedTuple):
    """What all processes know before an update, the same on each; a process that acted alone would block the others.

    bad_loss and bad_norm: a process had a loss or a gradient that is not finite. signal: the greatest number of a
    signal that a process got, or 0. bad_samples: a process met an unreadable sample that the others do not know of.
    """

    bad_loss: bool
    bad_norm: bool
    signal: int
    bad_samples: bool

    @property
    def finite(self) -> bool:
        """Whether the update can be made."""
        return not (self.bad_loss or self.bad_norm)


def agree(loss: Tensor, norm: Tensor, signal: int = 0, bad_samples: bool = False) -> Agreement:
    """Let processes agree on what each has met, by one collective; every process calls it.

    Args:
        loss: of this process's micro-batches, a number.
        norm: of the gradients.
        signal: number of a signal that this process got, or 0.
        bad_samples: whether this process has met samples that cannot be read since the last call.
    """
    bad = torch.stack([~torch.isfinite(loss), ~torch.isfinite(norm.to(loss.device))]).float()
    bad_loss, bad_norm, signal, bad_samples = greatest(
        torch.cat([bad, bad.new_tensor([signal, bad_samples])])
    )
    return Agreement(bool(bad_loss), bool(bad_norm), int(signal), bool(bad_samples))


class SkippedSteps:
    """Counts steps without finite loss and gradient, and ends a run after ten in a row.

    A step of several phases counts once, and its other phases do not make up for it.

    Attributes:
        total: such steps since the process started.
        in_a_row: such steps since the last good one.
        last: the last such step, or None.
    """

    def __init__(self):
        self.total = 0
        self.in_a_row = 0
        self.last: int | None = None

    def count(
        self, step: int, agreed: Agreement, scaler, norm: Tensor, loss: Tensor, lr: float
    ) -> None:
        """Count an update; raise FloatingPointError, with its numbers, after ten bad steps in a row.

        Args:
            step: the step of the update.
            agreed: what the processes know of it.
            scaler: fp16's, or None. Where it still seeks its scale, by gradients that overflow, nothing is counted:
                above a scale of 1 it is not yet the model that is broken.
            norm: norm of the gradients.
            loss: mean loss of this process.
            lr: learning rate.
        """
        if step == self.last:
            return
        if agreed.finite:
            self.in_a_row = 0
            return
        if scaler is not None and not agreed.bad_loss and scaler.get_scale() >= 1:
            return
        self.last = step
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= MAX_BAD_STEPS:
            raise FloatingPointError(
                f"step {step}: {self.in_a_row} steps in a row without finite loss and gradient (gradient norm {norm:g}, "
                f"loss {loss:g}, lr {lr:g}); the last one with both was step {step - self.in_a_row}"
            )
