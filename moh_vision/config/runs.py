"""A whole run: what all share, classification, diffusion."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import List, Literal, Optional, Set, Tuple

from moh_vision.config.checks import check, check_seed, plain
from moh_vision.config.data import ClsDataConfig, DataConfig, MixConfig
from moh_vision.config.draws import PreviewConfig, ScoreConfig
from moh_vision.config.model import ModelConfig
from moh_vision.config.optim import BlockDescentConfig, ClsOptimConfig, EmaConfig, OptimConfig


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
        init_from: weights to start from: a run folder, a file of weights, or a timm model name. If they have routers,
            an image model takes their shared heads, and model.head_budget says how many heads run.
        train_only: "all" weights; for fine-tuning MAE its "gates", or "gates_and_outputs": with the output matrices of
            attention (Peng 2020, section 5.2). What is left out stays as it is, a head that init_from makes anew too.
        balance_weight: weight of MoH's load-balance loss (0.01 in Jin 2024). As in the released code, the loss is eq. 7
            times the number of candidate heads, averaged over the layers that route.
        moa_balance_weight: weight of MoA's (0.01 in Zhang 2022).
        z_weight: weight of MoA's z-loss (0.001 in Zhang 2022).
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
    train_only: Literal["all", "gates", "gates_and_outputs"] = "all"
    balance_weight: float = 0.01
    moa_balance_weight: float = 0.01
    z_weight: float = 0.001
    compile: bool = False
    tf32: bool = False
    tracker: Optional[Literal["tensorboard", "wandb"]] = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    block_descent: BlockDescentConfig = field(default_factory=BlockDescentConfig)

    def __post_init__(self):
        for name in ("log_every", "save_every", "keep_checkpoints"):
            check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        check("max_steps", self.max_steps, self.max_steps is None or self.max_steps >= 1, "at least 1")
        check_seed(self.seed)
        for name in ("balance_weight", "moa_balance_weight", "z_weight"):
            check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")

    def moa_weights(self) -> dict:
        """Keyword arguments of a `RoutedTask`."""
        return dict(moa_balance_weight=self.moa_balance_weight, z_weight=self.z_weight)

    def tree(self) -> dict:
        """The configuration as nested plain values, as it is saved."""
        return plain(dataclasses.asdict(self))


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
    ema: EmaConfig = field(default_factory=EmaConfig)
    mix: MixConfig = field(default_factory=MixConfig)

    def __post_init__(self):
        super().__post_init__()
        check("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "0 <= smoothing < 1")
        check("calibrate_images", self.calibrate_images, self.calibrate_images >= 0, "0 or more")
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
            end = min(cosine + count(o.cooldown_epochs), self.max_steps or 2**62)
        return end, cosine, warmup

    def check_calibration(self, fresh_routers: bool) -> None:
        """Raise ValueError if there is nothing to calibrate, because the routers of init_from are trained."""
        if self.calibrate_images and not fresh_routers:
            raise ValueError(f"calibrate_images {self.calibrate_images}: the routers of init_from are trained already")

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
    ema: EmaConfig = field(default_factory=EmaConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)

    def __post_init__(self):
        super().__post_init__()
        self.vae = self.vae or "none"  # as it stands in the config.yaml of earlier runs
        check("label_drop", self.label_drop, 0 <= self.label_drop < 1, "0 <= drop < 1")
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
    given: Set[str] = field(default_factory=set)  # names of the options on the command line
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
    "data.test",
    "generate",
    "average",
    "patience",
    "checkpointing",
)

# Keys that the config.yaml of earlier runs does not have, and what those did.
LATER_KEYS = {
    "train_only": "all",
    "moa_balance_weight": RunConfig.moa_balance_weight,
    "z_weight": RunConfig.z_weight,
    **{f"block_descent.{f.name}": f.default for f in dataclasses.fields(BlockDescentConfig)},
}
