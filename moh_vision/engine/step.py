"""Parts of an optimiser step: learning rate, clipping, and what processes must agree on before an update.

`training_loop.TrainingLoop` puts the parts together.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moh_vision.engine.ranks import greatest

MAX_BAD_STEPS = 10
NEXT_LEARNING_RATE = (
    "next_learning_rate"  # entry of step.json: the rate that the schedule has for the step to come
)


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
    """Return the learning rate of a step. The function is pure: resuming needs no scheduler state.

    Args:
        step: index of the step, from 0.
        peak: the rate after the warm-up.
        schedule: what follows the warm-up. "constant" stays at `peak`; "cosine" (half a period) and "linear" fall to
            `floor` at `max_steps`; "inverse_sqrt" falls as 1 / sqrt(step + 1) down to `floor` (Vaswani 2017, eq. 3).
        warmup_steps: steps of the linear warm-up.
        max_steps: steps of the run.
        floor: the smallest rate after the warm-up.
        warmup_lr: the rate from which the warm-up rises.
        as_timm: do as timm: step 0 runs at `warmup_lr` itself, and the later schedule counts its steps from step 0.
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
    """Set the learning rate of every parameter group to `lr`, times the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def largest_learning_rate(optimizer) -> float:
    """Return the largest learning rate of an optimiser's groups."""
    return max(group["lr"] for group in optimizer.param_groups)


def average_over_step(accelerator, losses: list[dict]) -> dict:
    """Average a task's results over micro-batches and processes; every process calls it.

    Adds balance_share, the share of the auxiliary losses in the loss, and head_usage, the share of tokens that ran each
    head.

    Args:
        accelerator: accelerate's Accelerator.
        losses: results of each micro-batch: scalars, and head_runs, which has one tensor [H + 1] per layer: for how
            many tokens each head ran, then the number of tokens.
    """
    names = [name for name in losses[0] if name != "head_runs"]
    layers = [len(runs) for runs in losses[0]["head_runs"]]
    rows = []  # one per micro-batch: its scalars, then head_runs of all layers
    for results in losses:
        scalars = torch.stack([results[name].detach().float() for name in names])
        rows.append(torch.cat([scalars, *results["head_runs"]]))
    mean = accelerator.reduce(torch.stack(rows).mean(0), "mean").cpu().double()
    scalars, *runs = mean.split([len(names), *layers])
    values = dict(zip(names, scalars))
    # A ratio of means, not the mean of the micro-batches' ratios.
    values["balance_share"] = 1 - values["task_loss"] / values["loss"]
    usage = [(layer[:-1] / layer[-1]).tolist() for layer in runs]
    averages = {name: round(value.item(), 6) for name, value in values.items()}
    averages["head_usage"] = [[round(share, 3) for share in layer] for layer in usage]
    return averages


def clip_gradients(accelerator, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a norm of `max_norm` (0: not at all); return the norm before clipping.

    Under FSDP the norm is that of all shards.
    """
    norm = accelerator.clip_grad_norm_(parameters, max_norm or math.inf)
    if hasattr(norm, "full_tensor"):  # a DTensor, because FSDP shards the gradients
        return norm.full_tensor()
    return torch.as_tensor(norm)


class Agreement(NamedTuple):
    """What all processes know before an update.

    It is the same on every process: one that skipped or stopped alone would block the others.

    Attributes:
        bad_loss: whether some process had a loss that is not finite.
        bad_norm: whether some process had a gradient norm that is not finite.
        signal: the greatest number of a signal that some process received, or 0.
        bad_samples: whether some process met an unreadable sample that the others do not know of.
        norm: the gradient norm, which is the same on all processes.
    """

    bad_loss: bool
    bad_norm: bool
    signal: int
    bad_samples: bool
    norm: float

    @property
    def finite(self) -> bool:
        """Whether the update can be made."""
        return not (self.bad_loss or self.bad_norm)


def agree(loss: Tensor, norm: Tensor, signal: int = 0, bad_samples: bool = False) -> Agreement:
    """Tell all processes what each of them has met, in one collective; every process calls it.

    This is the only point of a step at which the host waits for the device: the norm, which the log needs, is read with
    the rest.

    Args:
        loss: mean loss of this process's micro-batches, a scalar.
        norm: norm of the gradients, a scalar.
        signal: number of a signal that this process received, or 0.
        bad_samples: whether this process has met unreadable samples since the last call.
    """
    norm = norm.to(loss.device, torch.promote_types(norm.dtype, torch.float32))
    met = [
        ~torch.isfinite(loss),
        ~torch.isfinite(norm),
        # Filled on the device: the copy of a tensor from the host would wait until the device has done its work.
        norm.new_full((), signal),
        norm.new_full((), bad_samples),
    ]
    shared = greatest(torch.stack([value.to(norm.dtype) for value in met]))
    bad_loss, bad_norm, signal, bad_samples, norm = torch.cat([shared, norm[None]]).tolist()
    return Agreement(bool(bad_loss), bool(bad_norm), int(signal), bool(bad_samples), norm)


class SkippedSteps:
    """Counts bad steps, whose loss or gradient is not finite, and ends a run after ten in a row.

    A step of several phases is bad, and counts once, if one of its phases is bad.

    Attributes:
        total: bad steps since the process started.
        in_a_row: bad steps since the last good one.
        last: the last bad step, or None.
    """

    def __init__(self):
        self.total = 0
        self.in_a_row = 0
        self.last: int | None = None

    def count(
        self, step: int, agreed: Agreement, scaler, norm: Tensor, loss: Tensor, lr: float
    ) -> None:
        """Count an update if it is bad; after ten bad steps in a row raise FloatingPointError, with the numbers below.

        Args:
            step: the step of the update.
            agreed: what the processes know of the update.
            scaler: the gradient scaler of fp16, or None. An overflow at a scale of 1 or more is not counted: the scaler
                is still lowering its scale, and the model may be sound.
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
