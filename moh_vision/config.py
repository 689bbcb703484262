"""The dataclasses behind configs/*.yaml; `command_line` fills them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Literal, Optional, Tuple, Union


def _check(name: str, value, ok: bool, allowed: str) -> None:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not ok or not finite:
        raise ValueError(f"{name} {value!r} is out of range: {allowed}")


def _check_seed(seed: int) -> None:
    _check("seed", seed, 0 <= seed < 2**63, "0 to 2**63 - 1")


def _plain(value):
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


@dataclass
class ModelConfig:
    """The model; what is left out keeps the registered model's own value.

    Args:
        name: model name in timm's registry.
        head_budget: share such as 0.75, "ramp:0.75", "uniform:0.75", or a list with one [shared, routed] per layer.
        router: who chooses the heads.
        scope: "token" or "sample".
        executor: how attention is computed.
        router_kwargs: options of the router, such as {gate_scale: paper}.
        embed_dim: width.
        depth: layers.
        num_heads: heads per layer.
        patch_size: side of a patch.
        kwargs: further arguments of the model.
    """

    name: str = "moh_vit_small_patch16_224"
    head_budget: Optional[Union[float, str, List[Tuple[int, int]]]] = None
    router: Optional[str] = None
    scope: Optional[str] = None
    executor: Optional[str] = None
    router_kwargs: Optional[Dict[str, Any]] = None
    embed_dim: Optional[int] = None
    depth: Optional[int] = None
    num_heads: Optional[int] = None
    patch_size: Optional[int] = None
    kwargs: Optional[Dict[str, Any]] = None

    def __post_init__(self):
        for name in ("embed_dim", "depth", "num_heads", "patch_size"):
            value = getattr(self, name)
            _check(f"model.{name}", value, value is None or value >= 1, "at least 1")
        budget = self.head_budget
        if isinstance(budget, list):  # shares are the model's to refuse
            fine = len(budget) > 0 and all(number >= 0 for pair in budget for number in pair)
            _check("model.head_budget", budget, fine, "one [shared, routed] per layer, each 0 or more")

    def arguments(self) -> dict:
        """Keyword arguments for timm.create_model, without what was left out."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("name", "kwargs")}
        return {**{k: v for k, v in own.items() if v is not None}, **(self.kwargs or {})}


@dataclass
class DataConfig:
    """The images.

    Args:
        root: "digits"; a folder of webdataset shards (train-*.tar and val-*.tar with images and .cls); a folder with
            train/CLASS/*.jpg and val/CLASS/*.jpg; or hfds/NAME for a Hugging Face data set. For diffusion also a
            folder of latents.
        img_size: side in pixels; left out: that of the data (digits, latents) or of the model, with a VAE 256.
        augment: "none", "affine" (small rotation, shift, scale), "crop_flip" (padded crop, mirror) or "flip".
        shuffle_shards: shards that are shuffled together.
        workers: loader processes of each rank.
        max_bad_fraction: share of the images that may be unreadable; each is replaced by the next one that is not.
    """

    root: str = "digits"
    img_size: Optional[int] = None
    augment: Literal["none", "affine", "crop_flip", "flip"] = "none"
    shuffle_shards: int = 8
    workers: int = 2
    max_bad_fraction: float = 0.0

    def __post_init__(self):
        _check("data.img_size", self.img_size, self.img_size is None or self.img_size >= 1, "at least 1")
        _check("data.shuffle_shards", self.shuffle_shards, self.shuffle_shards >= 1, "at least 1")
        _check("data.workers", self.workers, self.workers >= 0, "0 or more")
        _check("data.max_bad_fraction", self.max_bad_fraction, 0 <= self.max_bad_fraction < 1, "0 <= fraction < 1")


@dataclass
class ClsDataConfig(DataConfig):
    """The images of a classifier; from `repeats` on: the ImageNet recipe, with timm's transforms.

    Args:
        augment: as above, or "imagenet": random resized crop, mirror, and what the keys below add.
        repeats: repeated augmentation: copies of an image in an epoch, which covers as much less of the images.
        crop_scale: area of the random crop, as a share of the image's.
        auto_augment: timm's string, such as rand-m9-mstd0.5-inc1; timm leaves color_jitter out where it is given.
        color_jitter: of brightness, contrast and saturation.
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
        _check("data.repeats", self.repeats, self.repeats >= 1, "at least 1")
        _check("data.crop_scale", self.crop_scale, 0 < low <= high <= 1, "0 < smallest <= largest <= 1")
        _check("data.color_jitter", self.color_jitter, self.color_jitter >= 0, "0 or more")
        _check("data.erase_prob", self.erase_prob, 0 <= self.erase_prob <= 1, "0 to 1")
        _check("data.crop_pct", self.crop_pct, self.crop_pct is None or 0 < self.crop_pct <= 1, "0 < share <= 1")
        _check("data.eval_batch_size", self.eval_batch_size, self.eval_batch_size >= 1, "at least 1")
        for name in ("auto_augment", "color_jitter", "erase_prob"):
            if getattr(self, name) and self.augment != "imagenet":
                raise ValueError(
                    f"data.{name} {getattr(self, name)!r} needs data.augment imagenet; it is {self.augment}"
                )

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
        _check("optim.lr", self.lr, self.lr > 0, "above 0")
        _check("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("optim.betas", self.betas, all(0 <= b < 1 for b in self.betas), "0 <= beta < 1")
        _check("optim.batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        _check("optim.accumulation", self.accumulation, self.accumulation >= 1, "at least 1")
        _check("optim.clip_norm", self.clip_norm, self.clip_norm >= 0, "0 or more")
        _check("optim.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 or more")
        _check("optim.min_lr", self.min_lr, 0 <= self.min_lr <= self.lr, "from 0 to optim.lr")


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
        _check("optim.epochs", self.epochs, self.epochs is None or self.epochs > 0, "above 0")
        _check("optim.warmup_epochs", self.warmup_epochs, self.warmup_epochs >= 0, "0 or more")
        _check("optim.cooldown_epochs", self.cooldown_epochs, self.cooldown_epochs >= 0, "0 or more")
        _check("optim.warmup_lr", self.warmup_lr, 0 <= self.warmup_lr <= self.lr, "from 0 to optim.lr")
        _check("optim.eps", self.eps, self.eps > 0, "above 0")
        _check(
            "optim.layer_decay",
            self.layer_decay,
            self.layer_decay is None or 0 < self.layer_decay <= 1,
            "0 < factor <= 1",
        )
        if self.warmup_epochs and self.warmup_steps:
            raise ValueError("optim.warmup_epochs and optim.warmup_steps are the same thing: give one")
        if self.cooldown_epochs and self.epochs is None:
            raise ValueError(f"optim.cooldown_epochs {self.cooldown_epochs:g} needs optim.epochs")


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
            _check(f"mix.{name}", getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("prob", "switch_prob"):
            _check(f"mix.{name}", getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")

    @property
    def on(self) -> bool:
        return bool((self.mixup or self.cutmix) and self.prob)


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
        _check("ema.decay", self.decay, 0 <= self.decay < 1, "0 <= decay < 1")


@dataclass
class DrawConfig:
    """How samples are drawn while a diffusion model trains: always of the same noise and labels, with the EMA if any.

    Args:
        every: steps between them; 0: never.
        images: how many; image i has class i modulo the number of classes.
        sampler: as in sample.py.
        steps: denoising steps.
        cfg_scale: classifier-free guidance; 1: none.
        seed: of the noise.
    """

    every: int = 0
    images: int = 40
    sampler: Literal["ddpm", "ddim", "dpm-solver++"] = "ddim"
    steps: int = 50
    cfg_scale: float = 1.5
    seed: int = 0

    section = "preview"

    def __post_init__(self):
        _check(f"{self.section}.every", self.every, self.every >= 0, "0 or more")
        _check(f"{self.section}.images", self.images, self.images >= 1, "at least 1")
        _check(f"{self.section}.steps", self.steps, 1 <= self.steps <= 1000, "1 to 1000")
        _check(f"{self.section}.cfg_scale", self.cfg_scale, self.cfg_scale >= 0, "0 or more")
        _check(f"{self.section}.seed", self.seed, 0 <= self.seed < 2**63, "0 to 2**63 - 1")


@dataclass
class PreviewConfig(DrawConfig):
    """Pictures: OUTPUT/previews/step_N.png.

    Args:
        columns: images a row.
    """

    columns: int = 10

    def __post_init__(self):
        super().__post_init__()
        _check("preview.columns", self.columns, self.columns >= 1, "at least 1")


@dataclass
class ScoreConfig(DrawConfig):
    """Fidelity scores while training, into metrics.jsonl; see docs/fidelity.md.

    Args:
        reference: what samples are compared with, as `score` of sample.py; left out: data.root.
        split: "train" or "val", of a data set.
        extractor: "inception", "timm:NAME", or a classification run.
        inception_weights: torch-fidelity's .pth file; left out: fetched once.
        allow_biased: also with no more images than features, labelled FID@N.
    """

    images: int = 5000
    cfg_scale: float = 1.0
    reference: Optional[str] = None
    split: Literal["train", "val"] = "train"
    extractor: str = "inception"
    inception_weights: Optional[str] = None
    allow_biased: bool = False

    section = "score"


@dataclass
class RunConfig:
    """What all runs share.

    Args:
        output: folder of the run; the same command run again resumes what is in it.
        max_steps: optimiser steps.
        seed: of weights, order, augmentation, noise.
        log_every: steps between lines of metrics.jsonl.
        save_every: steps between checkpoints.
        keep_checkpoints: how many checkpoints stay.
        mixed_precision: "no", "bf16" or "fp16".
        init_from: weights to start from: a run folder, a file of weights, or a timm model name.
        balance_weight: weight of the load-balance loss (0.01 in Jin 2024).
        compile: torch.compile the model and its losses.
        tf32: let NVIDIA GPUs multiply float32 matrices in TF32.
        tracker: "tensorboard" (events in OUTPUT/tensorboard) or "wandb", beside metrics.jsonl.
    """

    output: str = "runs/run"
    max_steps: int = 1000
    seed: int = 0
    log_every: int = 20
    save_every: int = 1000
    keep_checkpoints: int = 2
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    init_from: Optional[str] = None
    balance_weight: float = 0.01
    compile: bool = False
    tf32: bool = False
    tracker: Optional[Literal["tensorboard", "wandb"]] = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)

    def __post_init__(self):
        for name in ("log_every", "save_every", "keep_checkpoints"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _check("max_steps", self.max_steps, self.max_steps is None or self.max_steps >= 1, "at least 1")
        _check_seed(self.seed)
        _check("balance_weight", self.balance_weight, self.balance_weight >= 0, "0 or more")

    def tree(self) -> dict:
        """The configuration as nested plain values, as it is saved."""
        return _plain(dataclasses.asdict(self))


@dataclass
class ClsConfig(RunConfig):
    """Classification.

    Args:
        max_steps: optimiser steps; left out: optim.epochs, or 1000. With optim.epochs, the schedule stays theirs and
            max_steps only stops sooner.
        label_smoothing: of the cross-entropy.
        calibrate_images: with init_from of a dense ViT: how many training images judge its heads, so that the strongest
            ones of each layer become the shared ones and the first to run; 0: those that come first.
        eval_every: steps between validations; 0: only at the end.
        channels_last: keep convolutions' weights and images in that memory format, which their GPU kernels prefer.
    """

    max_steps: Optional[int] = None
    label_smoothing: float = 0.0
    calibrate_images: int = 0
    eval_every: int = 0
    channels_last: bool = False
    data: ClsDataConfig = field(default_factory=ClsDataConfig)
    optim: ClsOptimConfig = field(default_factory=ClsOptimConfig)
    mix: MixConfig = field(default_factory=MixConfig)

    def __post_init__(self):
        super().__post_init__()
        _check("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "0 <= smoothing < 1")
        _check("calibrate_images", self.calibrate_images, self.calibrate_images >= 0, "0 or more")
        if self.calibrate_images and not self.init_from:
            raise ValueError(f"calibrate_images {self.calibrate_images} needs init_from, the dense model to judge")
        _check("eval_every", self.eval_every, self.eval_every >= 0, "0 or more")

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
            end = min(cosine + count(o.cooldown_epochs), self.max_steps or 2**62)
        return end, cosine, warmup

    def check_micro_batch(self, processes: int) -> None:
        """Raise ValueError if mixing cannot pair the images of a micro-batch."""
        size, rest = divmod(self.optim.batch_size, self.optim.accumulation * processes)
        if self.mix.on and not rest and size % 2:
            raise ValueError(
                f"optim.batch_size {self.optim.batch_size} over accumulation {self.optim.accumulation} x processes "
                f"{processes} makes micro-batches of {size}; mixup and cutmix pair images and need an even number"
            )


@dataclass
class DitConfig(RunConfig):
    """Diffusion.

    Args:
        vae: diffusion on the latents of this VAE: its name on the Hugging Face hub, or a local folder. "none" or left
            out: on pixels, or on latents where data.root holds them.
        learn_sigma: learn the variance too (hybrid loss).
        label_drop: share of labels replaced by "no class", for guidance.
        preview: pictures while training.
        score: fidelity scores while training.
    """

    vae: Optional[str] = None
    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="moh_dit_small_patch2_75"))
    learn_sigma: bool = True
    label_drop: float = 0.1
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)

    def __post_init__(self):
        super().__post_init__()
        self.vae = self.vae or "none"  # as it stands in the config.yaml of earlier runs
        _check("label_drop", self.label_drop, 0 <= self.label_drop < 1, "0 <= drop < 1")
        for draw in (self.preview, self.score):
            if draw.every and draw.cfg_scale != 1 and not self.label_drop:
                raise ValueError(
                    f"{draw.section}.cfg_scale {draw.cfg_scale:g} needs label_drop above 0, or 1 for no guidance"
                )


@dataclass
class Flags:
    """What one call of a script does, and a run does not remember."""

    dry_run: bool
    fresh: bool
    allow_change: List[str]
    validate_only: bool = False
    checkpoint: Optional[str] = None


# Differences in these keys, or sections, do not make a run another run.
FREE_KEYS = (
    "output",
    "max_steps",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "eval_every",
    "tracker",
    "preview",
    "score",
    "data.workers",
    "data.eval_batch_size",
)


@dataclass
class SampleConfig:
    """Sampling from a trained run.

    Args:
        checkpoint: folder of a diffusion run, or one of its .safetensors files.
        weights: "ema" (falls back to "model" where the run has none) or "model".
        num_images: how many.
        labels: "balanced": image i has class i modulo the number of classes; "random": drawn from (seed, i).
        sampler: "ddpm", "ddim" or "dpm-solver++".
        steps: denoising steps.
        cfg_scale: classifier-free guidance; 1: none.
        guide_channels: how many channels are guided, from the first; 3 as the official DiT does on latents, or "all".
        cfg_interval: two fractions of the timesteps, from 0 (clean) to 1 (noise), between which guidance is applied.
        seed: the noise of image i depends on (seed, i) alone.
        batch_size: images at a time on each process; equal sizes give equal bits.
        mixed_precision: "no", "bf16" or "fp16".
        vae: of latent models: name or folder of an AutoencoderKL; left out: the one that the run was trained with.
        save_pipeline: a folder for model, scheduler and VAE, which `MoHDiTPipeline.from_pretrained` reads; with
            num_images 0 that is all.
        out: a folder for PNGs, or a .npz file (arr_0 uint8 [N, h, w, channels], arr_1 labels).
        grid: PNG with one class a row.
        grid_columns: images a row.
        head_usage: PNG of head usage per layer and class while sampling.
        score: the reference: a folder of images, a .npz (images, or ADM's statistics) or saved statistics
            (.safetensors); or a data set as in data.root.
        score_split: "train" or "val", of a data set.
        extractor: "inception" (left out), "timm:NAME", or a classification run; with a data set of the run's classes
            that also tells how many samples are recognised.
        inception_weights: torch-fidelity's .pth file; left out: fetched once.
        allow_biased: score also with no more images than features, labelled FID@N.
        score_file: where the scores go; left out: scores.json beside the weights.
        overwrite: replace what is at the output paths.
    """

    checkpoint: str
    weights: Literal["ema", "model"] = "ema"
    num_images: int = 100
    labels: Literal["balanced", "random"] = "balanced"
    sampler: Literal["ddpm", "ddim", "dpm-solver++"] = "ddpm"
    steps: int = 250
    cfg_scale: float = 1.0
    guide_channels: Union[int, Literal["all"]] = 3
    cfg_interval: Tuple[float, float] = (0.0, 1.0)
    seed: int = 0
    batch_size: int = 100
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    vae: Optional[str] = None
    save_pipeline: Optional[str] = None
    out: Optional[str] = None
    grid: Optional[str] = None
    grid_columns: int = 10
    head_usage: Optional[str] = None
    score: Optional[str] = None
    score_split: Literal["train", "val"] = "val"
    extractor: Optional[str] = None
    inception_weights: Optional[str] = None
    allow_biased: bool = False
    score_file: Optional[str] = None
    overwrite: bool = False

    def __post_init__(self):
        for name in ("batch_size", "grid_columns"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        least = 0 if self.save_pipeline else 1
        _check("num_images", self.num_images, self.num_images >= least, f"at least {least}")
        if not self.num_images and (self.out or self.grid or self.head_usage or self.score):
            raise ValueError("num_images 0 leaves nothing for --out, --grid, --head-usage and --score")
        _check("steps", self.steps, 1 <= self.steps <= 1000, "1 to 1000")
        _check("cfg_scale", self.cfg_scale, self.cfg_scale >= 0, "0 or more")
        guided = self.guide_channels
        _check("guide_channels", guided, guided == "all" or guided >= 1, 'at least 1, or "all"')
        low, high = self.cfg_interval
        _check("cfg_interval", [low, high], 0 <= low <= high <= 1, "0 <= low <= high <= 1")
        if self.cfg_scale == 1 and (low, high) != (0, 1):
            raise ValueError(f"cfg_interval {[low, high]} needs a cfg_scale other than 1")
        _check_seed(self.seed)
        for name in ("grid", "head_usage"):
            path = getattr(self, name)
            _check(name, path, path is None or path.endswith(".png"), "a path that ends in .png")
        for name in ("extractor", "inception_weights", "score_file"):
            if getattr(self, name) is not None and self.score is None:
                raise ValueError(f"{name} {getattr(self, name)} needs --score REFERENCE")
