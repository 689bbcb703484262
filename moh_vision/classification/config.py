"""The configuration of a classification run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional, Sequence, Tuple

from torch import nn

from moh_vision.engine.commands import reason_of
from moh_vision.engine.config import DataConfig, ImageRunConfig, OptimConfig, check


@dataclass
class ClsDataConfig(DataConfig):
    """The images of a classifier; from `repeats` on: the ImageNet recipe, with timm's transforms.

    Args:
        augment: "none", "affine" (small rotation, shift, scale), "crop_flip" (padded crop, mirror), "flip", or "imagenet": random resized crop, mirror, and what the keys below add.
        repeats: repeated augmentation: copies of an image in an epoch, which covers as much less of the images.
        crop_scale: area of the random crop, as a share of the image's.
        auto_augment: timm's string, such as rand-m9-mstd0.5-inc1.
        color_jitter: of brightness, contrast and saturation. timm leaves it out beside an auto_augment other than 3a.
        erase_prob: how often a rectangle is erased.
        erase_mode: what it is filled with: zeros, one random colour, or random pixels.
        crop_pct: validation crops this share of the resized image; left out: the model's own with augment imagenet, else 1.
        crop_mode: validation resizes the shorter side ("center"), both ("squash": nothing is lost at crop_pct 1), or
            the longer ("border"); left out: the model's own with augment imagenet, else "squash".
        eval_batch_size: images at a time in validation, on each process.
    """

    augment: Literal["none", "affine", "crop_flip", "flip", "imagenet"] = "none"
    repeats: int = 1
    crop_scale: Tuple[float, float] = (0.08, 1.0)
    auto_augment: Optional[str] = None
    color_jitter: float = 0.0
    erase_prob: float = 0.0
    erase_mode: Literal["const", "rand", "pixel"] = "pixel"
    crop_pct: Optional[float] = None
    crop_mode: Optional[Literal["center", "squash", "border"]] = None
    eval_batch_size: int = 256

    def __post_init__(self):
        super().__post_init__()
        low, high = self.crop_scale
        check("data.repeats", self.repeats, self.repeats >= 1, "at least 1")
        check("data.crop_scale", self.crop_scale, 0 < low <= high <= 1, "0 < smallest <= largest <= 1")
        check("data.color_jitter", self.color_jitter, self.color_jitter >= 0, "0 or more")
        check("data.erase_prob", self.erase_prob, 0 <= self.erase_prob <= 1, "0 to 1")
        check("data.crop_pct", self.crop_pct, self.crop_pct is None or 0 < self.crop_pct <= 1, "0 < share <= 1")
        check("data.eval_batch_size", self.eval_batch_size, self.eval_batch_size >= 1, "at least 1")

    def train_options(self) -> dict:
        """Keyword arguments of `imagenet_train_transform`."""
        return {k: getattr(self, k) for k in ("crop_scale", "auto_augment", "color_jitter", "erase_prob", "erase_mode")}

    def eval_options(self, pretrained_cfg: dict) -> dict:
        """Keyword arguments of `imagenet_eval_transform`; `pretrained_cfg` is the model's."""
        own = dict(crop_pct=1.0, crop_mode="squash")
        if self.augment == "imagenet":
            own = dict(
                crop_pct=pretrained_cfg.get("crop_pct", 0.875), crop_mode=pretrained_cfg.get("crop_mode") or "center"
            )
        return dict(crop_pct=self.crop_pct or own["crop_pct"], crop_mode=self.crop_mode or own["crop_mode"])

    def prepare(self, model: nn.Module, img_size: Optional[int], classes: Optional[Sequence[str]]) -> None:
        """Let the pretrained_cfg of a classifier say what validation does to an image, as `validation_transform` reads it.

        Args:
            model: with the pretrained_cfg of its registered name, or of the folder it is from.
            img_size: side of the images; None: that of its pretrained_cfg.
            classes: their names, as label_names; None: those of its pretrained_cfg, if it has any.
        """
        cfg, channels = dict(model.pretrained_cfg), model.in_chans
        side = [img_size] * 2 if img_size else cfg["input_size"][1:]
        cfg.update(num_classes=model.num_classes, input_size=(channels, *side), **self.eval_options(cfg))
        cfg.update(mean=tuple(cfg["mean"][:channels]), std=tuple(cfg["std"][:channels]))
        cfg["label_names"] = cfg.get("label_names") if classes is None else list(classes)
        model.pretrained_cfg = model.default_cfg = cfg


def prepared_as_trained(model: nn.Module, about: dict) -> nn.Module:
    """`ClsDataConfig.prepare` of a run's model, as its validation was when the weights were written.

    Args:
        about: see `moh_vision.models.weights.from_run`.

    Raises:
        ValueError: naming the file, if its metadata have other keys or values than a run writes.
    """
    try:
        saved = about.get("config", {}).get("data", {})
        data = ClsDataConfig(**{key: saved[key] for key in ("augment", "crop_pct", "crop_mode") if key in saved})
        data.prepare(model, about["arguments"].get("img_size"), about.get("classes"))
    except (TypeError, ValueError, AttributeError) as error:  # files of others may hold anything
        raise ValueError(
            f"{about['weights']}: data in its metadata are not those of a run ({reason_of(error)})"
        ) from None
    return model


@dataclass
class MixConfig:
    """Mixup and cutmix, timm's, inside a micro-batch.

    Args:
        mixup: alpha of mixup; 0: none.
        cutmix: alpha of cutmix; 0: none.
        prob: how often a micro-batch is mixed.
        switch_prob: how often it is cutmix, where both are on.
        mode: what shares one draw: the "batch", a "pair", or each image ("elem").
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    def __post_init__(self):
        for name in ("mixup", "cutmix"):
            check(f"mix.{name}", getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("prob", "switch_prob"):
            check(f"mix.{name}", getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")

    @property
    def on(self) -> bool:
        return bool((self.mixup or self.cutmix) and self.prob)


@dataclass
class DistillConfig:
    """Distillation (Hinton 2015) from a frozen classifier; names and defaults of timm's `LogitDistillationTask`.

    Args:
        teacher: a model of timm with its weights (NAME, hf-hub:OWNER/NAME or local-dir:FOLDER), or the folder of a
            classification run; of the same classes in the same order.
        task_loss_weight: of the cross-entropy with the labels.
        distill_loss_weight: of the divergence from the teacher's softmax.
        temperature: of both softmaxes.
    """

    teacher: Optional[str] = None
    task_loss_weight: float = 1.0
    distill_loss_weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self):
        check("distill.task_loss_weight", self.task_loss_weight, self.task_loss_weight >= 0, "0 or more")
        for name in ("distill_loss_weight", "temperature"):
            check(f"distill.{name}", getattr(self, name), getattr(self, name) > 0, "above 0")


@dataclass
class ClsOptimConfig(OptimConfig):
    """Optimiser with timm's schedule: warm-up and cosine both count from step 0, as in timm.

    Args:
        epochs: length of the schedule; an epoch is as many images as there are, whatever data.repeats.
        warmup_epochs: linear warm-up, instead of warmup_steps.
        cooldown_epochs: at min_lr, after `epochs`.
        warmup_lr: where the warm-up begins.
        layer_decay: factor of the learning rate from each layer to the one before, for fine-tuning (timm's).
    """

    epochs: Optional[float] = None
    warmup_epochs: float = 0.0
    cooldown_epochs: float = 0.0
    warmup_lr: float = 0.0
    layer_decay: Optional[float] = None

    def __post_init__(self):
        super().__post_init__()
        check("optim.epochs", self.epochs, self.epochs is None or self.epochs > 0, "above 0")
        check("optim.warmup_epochs", self.warmup_epochs, self.warmup_epochs >= 0, "0 or more")
        check("optim.cooldown_epochs", self.cooldown_epochs, self.cooldown_epochs >= 0, "0 or more")
        check("optim.warmup_lr", self.warmup_lr, 0 <= self.warmup_lr <= self.lr, "from 0 to optim.lr")
        check(
            "optim.layer_decay",
            self.layer_decay,
            self.layer_decay is None or 0 < self.layer_decay <= 1,
            "0 < factor <= 1",
        )
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError("optim.warmup_epochs and optim.warmup_steps are the same thing: give one")


@dataclass
class ClsConfig(ImageRunConfig):
    """Classification.

    Args:
        max_steps: optimiser steps; left out: optim.epochs, or 1000. With optim.epochs, the schedule stays theirs and
            max_steps only stops sooner.
        label_smoothing: of the cross-entropy.
        eval_every: steps between validations; OUTPUT/best.safetensors keeps the weights with the highest top-1. 0: only at
            the end, without that file.
        channels_last: keep convolutions' weights and images in that memory format, which their GPU kernels prefer.
    """

    max_steps: Optional[int] = None
    label_smoothing: float = 0.0
    eval_every: int = 0
    channels_last: bool = False
    data: ClsDataConfig = field(default_factory=ClsDataConfig)
    optim: ClsOptimConfig = field(default_factory=ClsOptimConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    def __post_init__(self):
        super().__post_init__()
        check("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "0 <= smoothing < 1")
        check("eval_every", self.eval_every, self.eval_every >= 0, "0 or more")

    def steps(self, images: int) -> Tuple[int, int, int]:
        """(last step, steps of the cosine, of its warm-up) for so many training images."""
        o = self.optim

        def count(epochs: float) -> int:
            return round(epochs * images / o.batch_size)

        warmup = o.warmup_steps or count(o.warmup_epochs)
        if o.epochs is None:
            cosine = end = self.max_steps or 1000
        else:
            cosine = max(1, count(o.epochs))
            end = cosine + count(o.cooldown_epochs)
            if self.max_steps and self.max_steps > end:
                raise ValueError(
                    f"max_steps {self.max_steps} has no effect: optim.epochs {o.epochs:g} of {images} images are {end} steps"
                )
            end = self.max_steps or end
        return end, cosine, warmup

    def check_micro_batch(self, processes: int) -> None:
        """Raise ValueError if mixing cannot pair the images of a micro-batch."""
        size, rest = divmod(self.optim.batch_size, self.optim.accumulation * processes)
        if self.mix.on and not rest and size % 2:
            raise ValueError(
                f"optim.batch_size {self.optim.batch_size} over accumulation {self.optim.accumulation} x processes "
                f"{processes} makes micro-batches of {size}; mixup and cutmix pair images and need an even number"
            )
