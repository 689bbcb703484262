"""One optimiser step: learning rate, phases, micro-batches, update, and numbers that are not finite."""

import contextlib
import math
from collections.abc import Callable, Iterable
from itertools import islice

import torch
from accelerate.utils import gather_object

from moh_vision.engine.block_descent import GATES, BlockDescent
from moh_vision.engine.ranks import greatest
from moh_vision.engine.seeds import derive_seed

MAX_BAD_STEPS = 10


class Step:
    """Does one optimiser step of a task: every phase of `descent`, every micro-batch, the update."""

    def __init__(
        self,
        config,
        *,
        descent: BlockDescent,
        task,
        optimizer,
        learning_rate: Callable,
        signals=None,
        unreadable=None,
    ):
        self.descent, self.accelerator, self.learning_rate = (
            descent,
            descent.accelerator,
            learning_rate,
        )
        self.accumulation, self.seed = config.optim.accumulation, config.seed
        self.updater = Updater(self.accelerator, config.optim.clip_norm, signals, unreadable)
        self.task, self.optimizer = descent.prepare(task, optimizer)
        self.losses: list[dict] = []  # of the micro-batches of the last phase
        self.norms: dict[str, float] = {}  # of the gradients, by phase

    def __call__(self, number: int, batches: Iterable[dict], epoch: int, **more) -> bool:
        """Do step `number`, whose micro-batches and `more` the task takes; return whether weights were updated."""
        set_learning_rate(self.optimizer, self.learning_rate(number))
        self.task.train()
        accelerator, last = self.accelerator, self.accumulation - 1
        self.norms.clear()
        for phase in self.descent.phases(epoch, islice(batches, self.accumulation)):
            self.losses = []
            for micro, batch in enumerate(phase.batches):
                # After the fetch, which draws too: dropout depends on seed, step, rank and phase alone.
                torch.manual_seed(
                    derive_seed(self.seed, number, micro, accelerator.process_index, *phase.salt)
                )
                with contextlib.nullcontext() if micro == last else accelerator.no_sync(phase.task):
                    self.losses.append(phase.task(**batch, **more))
                    accelerator.backward(self.losses[-1]["loss"] / self.accumulation)
            assert len(self.losses) == self.accumulation, "the batches ended within a step"
            self.norms[phase.name], updated = phase.update(self.updater, number, self.losses)
        return updated

    def values(self) -> dict:
        """Return the last step's learning rate, gradient norms and skipped steps for the log."""
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        norm, gate_norm = list(self.norms.values())[-1], self.norms.get(GATES)
        values = dict(lr=lr, grad_norm=round(norm, 4), skipped=self.updater.skipped)
        if gate_norm is not None:
            values["gate_grad_norm"] = float(f"{gate_norm:.4g}")
        if self.updater.unreadable is not None:
            values["unreadable"] = len(self.updater.unreadable.seen)
        return values


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

    Linear warm-up from `warmup_lr` over `warmup_steps`, then "constant"; half a "cosine" or a "linear" fall to
    `floor` at `max_steps`; or "inverse_sqrt": with 1 / sqrt(steps done), at least `floor` (Vaswani 2017, eq. 3).
    With `as_timm` step 0 has `warmup_lr` itself, and the fall counts from step 0, as in timm.
    """
    if step < warmup_steps and as_timm:
        return warmup_lr + step * ((peak - warmup_lr) / warmup_steps)
    if step < warmup_steps:
        return warmup_lr + (peak - warmup_lr) * (step + 1) / warmup_steps
    warmup_steps = 0 if as_timm else warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return max(floor, peak * math.sqrt(max(1, warmup_steps) / (step + 1)))
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    left = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return floor + (peak - floor) * left


def set_learning_rate(optimizer, lr: float) -> None:
    """Set every group's learning rate, times its `lr_scale` if any."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def average_over_step(accelerator, losses: list[dict]) -> dict:
    """Average a task's results over micro-batches and processes; every process calls it.

    Added: balance_share, of the auxiliary losses in the loss; head_usage, the share of tokens that ran each head.
    """
    names = [name for name in losses[0] if name != "head_runs"]  # a list of [H + 1] tensors
    layers = [len(runs) for runs in losses[0]["head_runs"]]
    rows = [
        torch.cat([torch.stack([r[n].detach().float() for n in names]), *r["head_runs"]])
        for r in losses
    ]
    mean = accelerator.reduce(torch.stack(rows).mean(0), "mean").cpu().double()
    scalars, *runs = mean.split([len(names), *layers])
    values = dict(zip(names, scalars))
    # Of the means: a mean of the micro-batches' ratios would be another number.
    values["balance_share"] = 1 - values["task_loss"] / values["loss"]
    usage = [(layer[:-1] / layer[-1]).tolist() for layer in runs]
    return dict(
        {name: round(value.item(), 6) for name, value in values.items()},
        head_usage=[[round(share, 3) for share in layer] for layer in usage],
    )


class Updater:
    """Applies gradients unless loss or gradient is not finite; gives up after ten such steps in a row.

    One all-reduce an update tells all processes whether any had a loss that is not finite, got a signal (its number is
    `stop`), or met an unreadable sample of `unreadable`, a `BadSamples`.
    """

    def __init__(self, accelerator, clip_norm: float, signals=None, unreadable=None):
        self.accelerator, self.clip_norm = accelerator, clip_norm
        self.signals, self.unreadable = signals, unreadable
        self.skipped = self.in_a_row = self.stop = 0
        self.last_bad: int | None = None  # step

    def __call__(
        self, task, optimizer, step: int, losses: list[dict], clip_norm=None
    ) -> tuple[float, bool]:
        """Clip, check, step, zero; return the unclipped gradient norm, and whether weights were updated."""
        clip_norm = self.clip_norm if clip_norm is None else clip_norm  # 0: no clipping
        norm = self.accelerator.clip_grad_norm_(task.parameters(), clip_norm or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)  # FSDP
        loss = torch.stack([entry["loss"].detach().float() for entry in losses]).mean()
        received = self.signals.received if self.signals else 0
        met = self.unreadable.new if self.unreadable else False
        flags = torch.stack([~torch.isfinite(loss), ~torch.isfinite(norm.to(loss.device))]).float()
        agreed = greatest(torch.cat([flags, flags.new_tensor([received, met])]))
        bad_loss, bad_norm, self.stop, met = map(int, agreed)
        if met:
            self.unreadable.share(gather_object)
        scaler = self.accelerator.scaler
        if (
            not bad_loss and not bad_norm or scaler is not None and bad_norm
        ):  # a scaler skips by itself
            optimizer.step()
        elif scaler is not None:
            scaler.update()  # it has unscaled these gradients, and expects the step's end
        optimizer.zero_grad(set_to_none=True)
        finite = not (bad_loss or bad_norm)
        if step != self.last_bad:  # a step of several updates counts once
            if finite:
                self.in_a_row = 0
            elif (
                scaler is None or bad_loss or scaler.get_scale() < 1
            ):  # above 1 it still seeks its scale
                self._count(step, optimizer, norm.item(), loss.item())
        return norm.item(), finite

    def stop_after_all(self) -> int:
        """Return a signal that any process got, or 0; for every process after the last step."""
        received = max(self.stop, self.signals.received if self.signals else 0)
        return int(greatest(torch.tensor([float(received)], device=self.accelerator.device))[0])

    def _count(self, step: int, optimizer, norm: float, loss: float) -> None:
        self.last_bad = step
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= MAX_BAD_STEPS:
            lr = max(group["lr"] for group in optimizer.param_groups)
            raise FloatingPointError(
                f"step {step}: {self.in_a_row} steps in a row without finite loss and gradient (gradient norm {norm:g}, "
                f"loss {loss:g}, lr {lr:g}); the last one with both was step {step - self.in_a_row}"
            )
