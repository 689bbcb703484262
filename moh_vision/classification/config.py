"""The configurations of a classification run and of validation."""

from dataclasses import dataclass, field
from typing import Literal

from moh_vision.classification.labels import Labels
from moh_vision.engine.config import (
    TRAINS,
    DataConfig,
    DistillConfig,
    ImageRunConfig,
    ImagesConfig,
    ModelConfig,
    OpenedConfig,
    OptimConfig,
)
from moh_vision.engine.keys import Section, key

IMAGENET = ".augment=imagenet"


@dataclass
class EvalDataConfig(ImagesConfig):
    """The images of a classifier, and how they are validated."""

    augment: Literal["none", "affine", "crop_flip", "flip", "imagenet"] = key("none")
    """"none", "affine" (small rotation, shift, scale), "crop_flip" (padded crop, mirror), "flip", or "imagenet": random
    resized crop, mirror, and what further keys add."""
    crop_pct: float | None = key(None, gt=0, le=1)
    """Validation crops this share of the resized image; left out: the model's own with augment imagenet, else 1."""
    crop_mode: Literal["center", "squash", "border"] | None = key(None)
    """Validation resizes the shorter side ("center"), both ("squash": nothing is lost at crop_pct 1) or the longer
    ("border"); left out: the model's own with augment imagenet, else "squash"."""
    val_fraction: float | None = key(None, gt=0, lt=1)
    """About this share of the images is kept for validation where data.root has no split for it, such as CLASS/*.jpg. The
    content of an image decides, so that copies stay together and new images move no others. Left out: such data are
    refused. Refused on the command line for data with a validation split, and for streams."""
    eval_batch_size: int = key(256, ge=1, free=True)
    """Images at a time in validation, on each process."""

    def eval_options(self, pretrained_cfg: dict) -> dict:
        """Return crop_pct and crop_mode of validation for a model's `pretrained_cfg`."""
        crop_pct = 1.0
        crop_mode = "squash"
        if self.augment == "imagenet":
            crop_pct = pretrained_cfg.get("crop_pct", 0.875)
            crop_mode = pretrained_cfg.get("crop_mode") or "center"
        return dict(crop_pct=self.crop_pct or crop_pct, crop_mode=self.crop_mode or crop_mode)


@dataclass
class ClsDataConfig(EvalDataConfig, DataConfig):
    """The images of a classifier; from `repeats` on: the ImageNet recipe, with timm's transforms."""

    repeats: int = key(1, ge=1, needs=".exact_order")
    """Repeated augmentation: copies of an image in an epoch, which covers as much less of the images."""
    crop_scale: tuple[float, float] = key((0.08, 1.0), gt=0, le=1, rising=True, needs=IMAGENET)
    """Area of the random crop, as a share of the image's."""
    auto_augment: str | None = key(None, needs=IMAGENET)
    """String of timm, such as rand-m9-mstd0.5-inc1."""
    color_jitter: float = key(
        0.0, ge=0, needs=f"{IMAGENET}; .auto_augment=null or .auto_augment=*3a*"
    )
    """Strength of the jitter of brightness, contrast and saturation. timm leaves it out beside an auto_augment other than 3a."""
    erase_prob: float = key(0.0, ge=0, le=1, needs=IMAGENET)
    """Share of the images in which a rectangle is erased."""
    erase_mode: Literal["const", "rand", "pixel"] = key("pixel", needs=f"{IMAGENET}; .erase_prob")
    """What the erased rectangle is filled with: zeros, one random colour, or random pixels."""

    def train_options(self) -> dict:
        """Return keyword arguments of `imagenet_train_transform`, by timm's names."""
        return dict(
            scale=self.crop_scale,
            auto_augment=self.auto_augment,
            color_jitter=self.color_jitter or None,
            re_prob=self.erase_prob,
            re_mode=self.erase_mode,
        )


@dataclass
class MixConfig(Section, section="mix", needs=".prob"):
    """Mixup and cutmix, timm's, inside a micro-batch."""

    mixup: float = key(0.0, ge=0)
    """Alpha of mixup; 0: none."""
    cutmix: float = key(0.0, ge=0)
    """Alpha of cutmix; 0: none."""
    prob: float = key(1.0, ge=0, le=1, needs=".mixup or .cutmix")
    """Share of the micro-batches that are mixed."""
    switch_prob: float = key(0.5, ge=0, le=1, needs=".mixup; .cutmix")
    """Share of the mixed micro-batches that take cutmix, where both are on."""
    mode: Literal["batch", "pair", "elem"] = key("batch", needs=".mixup or .cutmix")
    """What one draw of mixing is shared by: the "batch", a "pair", or each image ("elem")."""

    @property
    def on(self) -> bool:
        return bool((self.mixup or self.cutmix) and self.prob)


@dataclass
class ClsDistillConfig(DistillConfig):
    """Distillation of a classifier: of its logits (Hinton 2015) and of its last tokens (Sanh 2019)."""

    temperature: float = key(1.0, gt=0, needs=".distill_loss_weight")
    """Temperature of both softmaxes, the teacher's and the model's."""
    token_loss_weight: float = key(0.0, ge=0)
    """Weight of one minus the mean cosine similarity of the last layer's patch tokens with the teacher's; 0: none. Tokens of
    another width are reached by a linear projector, which learns with the model. With distill_loss_weight 0 the teacher's
    classes do not count."""

    @property
    def teacher_weights(self) -> dict[str, float]:
        return dict(super().teacher_weights, token_loss_weight=self.token_loss_weight)


@dataclass
class ClsOptimConfig(OptimConfig):
    """Optimiser with timm's schedule: warm-up and cosine both count from step 0, as in timm."""

    epochs: float | None = key(None, gt=0, also="num_epochs num_train_epochs")
    """Length of the schedule; an epoch is as many images as there are, whatever data.repeats."""
    warmup_epochs: float = key(0.0, ge=0, needs=TRAINS)
    """Epochs of the linear warm-up, instead of warmup_steps."""
    cooldown_epochs: float = key(0.0, ge=0, needs=".epochs")
    """Epochs at min_lr, after `epochs`."""
    warmup_lr: float = key(
        0.0, ge=0, le="lr", needs=f"{TRAINS}; .warmup_steps or .warmup_epochs or max_steps=auto"
    )
    """Learning rate at which the warm-up begins."""
    layer_decay: float | None = key(None, gt=0, le=1, needs=TRAINS)
    """Factor of the learning rate from each layer to the one before, for fine-tuning (timm's)."""

    def agree(self) -> None:
        super().agree()
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError(
                "optim.warmup_epochs and optim.warmup_steps are the same thing: give one"
            )


@dataclass
class ClsConfig(ImageRunConfig):
    """Classification."""

    kind: Literal["classification"] = key("classification")
    max_steps: int | Literal["auto"] | None = key(None, also="")
    """Optimiser steps; left out: optim.epochs, or 1000. With optim.epochs the schedule stays theirs. "auto": as many as the
    run sees 3,840 sqrt(N) images in, of N training images, and a warm-up of a twentieth of them if none is given."""
    label_smoothing: float = key(0.0, ge=0, lt=1)
    """Label smoothing of the cross-entropy."""
    eval_every: int = key(0, ge=0, free=True)
    """Steps between validations, the best of which is kept in OUTPUT/best.safetensors; 0: only at the end."""
    channels_last: bool = key(False)
    """Keep convolutions' weights and images in that memory format, which GPU kernels prefer."""
    data: ClsDataConfig = field(default_factory=ClsDataConfig)
    optim: ClsOptimConfig = field(default_factory=ClsOptimConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    distill: ClsDistillConfig = field(default_factory=ClsDistillConfig)

    def agree(self) -> None:
        super().agree()
        if self.max_steps == "auto" and (self.optim.epochs or self.optim.warmup_epochs):
            raise ValueError(
                "max_steps auto: leave out optim.epochs and optim.warmup_epochs, which say the same by other numbers"
            )

    def steps(self, images: int) -> tuple[int, int, int]:
        """Return the steps of the run, of the cosine and of the warm-up, for a number of training images.

        max_steps is not "auto" any more, see `settle_steps`.
        """
        optim = self.optim

        def steps_of(epochs: float) -> int:
            return round(epochs * images / optim.batch_size)

        warmup = optim.warmup_steps or steps_of(optim.warmup_epochs)
        if optim.epochs is None:
            end = self.max_steps or 1000
            return end, end, warmup
        cosine = max(1, steps_of(optim.epochs))
        end = cosine + steps_of(optim.cooldown_epochs)
        if self.max_steps and self.max_steps > end:
            why = f"optim.epochs {optim.epochs:g} of {images} images are {end} steps"
            raise ValueError(f"max_steps {self.max_steps} has no effect: {why}")
        return self.max_steps or end, cosine, warmup

    def check_micro_batch(self, processes: int) -> None:
        """Raise ValueError if mixing cannot pair the images of a micro-batch."""
        size, remainder = divmod(self.optim.batch_size, self.optim.accumulation * processes)
        # `PositionSampler` refuses a remainder.
        if self.mix.on and not remainder and size % 2:
            raise ValueError(
                f"optim.batch_size {self.optim.batch_size} over accumulation {self.optim.accumulation} x processes "
                f"{processes} makes micro-batches of {size}; mixup and cutmix pair images and need an even number"
            )


@dataclass
class OpenedDataConfig(EvalDataConfig):
    """The images that a classifier is scored on."""

    root: str | None = key(None)
    """Data as in training; left out: those of the run."""


@dataclass(kw_only=True)
class OpenedClsConfig(OpenedConfig, runs=ClsConfig):
    """A classifier that a command opens, and its images."""

    labels = None  # the images' own labels; `ValidateConfig` makes this a key
    model: ModelConfig = field(default_factory=ModelConfig)
    data: OpenedDataConfig = field(default_factory=OpenedDataConfig)


@dataclass(kw_only=True)
class ValidateConfig(OpenedClsConfig):
    """Validation of a classifier."""

    labels: Labels | None = key(None)
    """Labels of ImageNet's ReaL, V2, A, R or Sketch (docs/guides/classifier.md)."""
    score_file: str | None = key(None)
    """JSON with the scores; must not exist."""
    predictions: str | None = key(None, ends=(".csv",))
    """CSV, each image with its class and the predicted one; must not exist."""
    head_load: str | None = key(None)
    """JSON, which heads the tokens of each class ran; must not exist."""
