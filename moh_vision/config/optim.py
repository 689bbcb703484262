"""Optimiser, schedule, and the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional, Tuple

from moh_vision.config.checks import check


@dataclass
class OptimConfig:
    """AdamW and its schedule.

    Args:
        lr: peak learning rate.
        weight_decay: not applied to biases, norms and what the model's no_weight_decay() names.
        betas: of AdamW.
        batch_size: images per step over all processes and accumulation.
        accumulation: micro-batches that make up a step.
        clip_norm: largest gradient norm; 0: no clipping.
        schedule: "cosine" down to min_lr at max_steps, or "constant".
        warmup_steps: linear warm-up.
        min_lr: end of the cosine.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: Tuple[float, float] = (0.9, 0.999)
    batch_size: int = 128
    accumulation: int = 1
    clip_norm: float = 0.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self):
        check("optim.lr", self.lr, self.lr > 0, "above 0")
        check("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        check("optim.betas", self.betas, all(0 <= b < 1 for b in self.betas), "0 <= beta < 1")
        check("optim.batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        check("optim.accumulation", self.accumulation, self.accumulation >= 1, "at least 1")
        check("optim.clip_norm", self.clip_norm, self.clip_norm >= 0, "0 or more")
        check("optim.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 or more")
        check("optim.min_lr", self.min_lr, 0 <= self.min_lr <= self.lr, "from 0 to optim.lr")


@dataclass
class ClsOptimConfig(OptimConfig):
    """AdamW with timm's schedule: warm-up and cosine both count from step 0, as in timm.

    Args:
        epochs: length of the schedule; an epoch is as many images as there are, whatever data.repeats.
        warmup_epochs: linear warm-up, instead of warmup_steps.
        cooldown_epochs: at min_lr, after `epochs`.
        warmup_lr: where the warm-up begins.
        eps: of AdamW.
        layer_decay: factor of the learning rate from each layer to the one before, for fine-tuning (timm's).
    """

    epochs: Optional[float] = None
    warmup_epochs: float = 0.0
    cooldown_epochs: float = 0.0
    warmup_lr: float = 0.0
    eps: float = 1e-8
    layer_decay: Optional[float] = None

    def __post_init__(self):
        super().__post_init__()
        check("optim.epochs", self.epochs, self.epochs is None or self.epochs > 0, "above 0")
        check("optim.warmup_epochs", self.warmup_epochs, self.warmup_epochs >= 0, "0 or more")
        check("optim.cooldown_epochs", self.cooldown_epochs, self.cooldown_epochs >= 0, "0 or more")
        check("optim.warmup_lr", self.warmup_lr, 0 <= self.warmup_lr <= self.lr, "from 0 to optim.lr")
        check("optim.eps", self.eps, self.eps > 0, "above 0")
        check(
            "optim.layer_decay",
            self.layer_decay,
            self.layer_decay is None or 0 < self.layer_decay <= 1,
            "0 < factor <= 1",
        )
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError("optim.warmup_epochs and optim.warmup_steps are the same thing: give one")


@dataclass
class EmaConfig:
    """Exponential moving average of the weights.

    Args:
        decay: 0: none; the DiT papers use 0.9999.
        warmup: let the decay grow as 1 - (1 + step) ** (-2 / 3) until it reaches `decay`, for short runs.
    """

    decay: float = 0.0
    warmup: bool = False

    def __post_init__(self):
        check("ema.decay", self.decay, 0 <= self.decay < 1, "0 <= decay < 1")


@dataclass
class BlockDescentConfig:
    """How a model with MAE's gates learns (router mae with mode soft); any other model is trained as usual.

    Args:
        mode: "bcd": gates and experts in turns, as in Peng 2020; or "joint": together (the paper's NoBCD).
        period: with bcd, the gates learn in every period-th epoch, from the first one on.
        gate_lr: learning rate of the gates, in both modes by SGD without momentum or schedule (Peng 2020, appendix A).
    """

    mode: Literal["bcd", "joint"] = "bcd"
    period: int = 5
    gate_lr: float = 1.0

    def __post_init__(self):
        check("block_descent.period", self.period, self.period >= 1, "at least 1")
        check("block_descent.gate_lr", self.gate_lr, self.gate_lr > 0, "above 0")
