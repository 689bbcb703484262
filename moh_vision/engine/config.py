"""The sections of a configuration that all runs share. `command_line` fills these dataclasses."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, List, Literal, Optional, Set, Tuple, Union

from moh_vision.engine.optimizers import OPTIONS, check_name, own_value

SHIPPED = Path(__file__).parents[1] / "configs"  # the configurations of the package


def config_file(name: str) -> str:
    """The file that --config names: a path, or a configuration that ships with the package, as cls/NAME."""
    shipped = SHIPPED / f"{name.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return str(shipped) if shipped.is_file() and not Path(name).exists() else name


def shipped_configs() -> List[str]:
    """Names of the configurations that ship with the package, such as cls/NAME."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in SHIPPED.glob("*/*.yaml"))


def check(name: str, value: object, ok: bool, allowed: str) -> None:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not ok or not finite:
        raise ValueError(f"{name} {value!r} is out of range: {allowed}")


def check_seed(seed: int) -> None:
    check("seed", seed, 0 <= seed < 2**63, "0 to 2**63 - 1")


HeadBudgets = Union[float, str, List[Tuple[int, int]]]  # see ModelConfig; shares are the model's to refuse


def read_head_budget(budget: Optional[HeadBudgets], key: str = "model.head_budget") -> Optional[HeadBudgets]:
    """The budget; pairs as Python writes them, "[(1, 2), (2, 2)]", which are a text to YAML, become a list."""
    if isinstance(budget, str) and budget.startswith("["):
        try:
            pairs = json.loads(budget.replace("(", "[").replace(")", "]"))
        except ValueError:
            pairs = None
        if pairs and all(isinstance(pair, list) and all(type(n) is int for n in pair) for pair in pairs):
            budget = pairs  # any other text is the model's to refuse
    if isinstance(budget, list):
        fine = len(budget) > 0 and all(number >= 0 for pair in budget for number in pair)
        check(key, budget, fine, "one [shared, routed] per layer, each 0 or more")
    return budget


def keep_budget(section: Any, pairs: Callable[[], List[List[int]]]) -> bool:
    """Let a run remember the budget itself where a key says `searched:FILE`: the file may change, or go.

    Args:
        section: `model` of a configuration, or one of sampling.
        pairs: makes [shared, routed] of every layer.

    Returns:
        whether a key said so.
    """
    places = (vars(section), *(getattr(section, name, None) or {} for name in ("kwargs", "convert")))
    named = [place for place in places if str(place.get("head_budget")).startswith("searched:")]
    for place in named:
        place["head_budget"] = pairs()
    return bool(named)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


@dataclass
class ModelConfig:
    """The model; what is left out keeps the registered model's own value.

    Args:
        name: model name in timm's registry.
        head_budget: share of active heads such as 0.75, "ramp:0.75" or "uniform:0.75"; also with the share of shared
            heads among them, such as "uniform:0.75:0.4"; or a list with one [shared, routed] per layer; or
            "searched:FILE", written by moh_vision.analysis.search.
        router: who chooses the heads.
        scope: "token" or "sample".
        executor: how attention is computed.
        router_kwargs: options of the router, such as {gate_scale: paper}.
        embed_dim: width.
        depth: layers.
        num_heads: heads per layer.
        patch_size: side of a patch.
        kwargs: further arguments of the model.
        pretrained: start from a dense model with its weights, and name must be "pretrained". Classification: a ViT of timm
            by name, such as deit3_small_patch16_224.fb_in1k, "hf-hub:OWNER/NAME", or a folder that timm's save_for_hf
            has written ("local-dir:FOLDER"). Diffusion: a registered DiT, or the folder of a DiT of diffusers, or of its pipeline.
            Both: a run of ours, or what publish made of it.
        convert: arguments of moh_vision.convert for it, such as {router: moh, scope: token}; a share is then uniform; left
            out, without head_budget: it stays as it is.
    """

    name: str = "moh_vit_small_patch16_224"
    head_budget: Optional[HeadBudgets] = None
    router: Optional[str] = None
    scope: Optional[str] = None
    executor: Optional[str] = None
    router_kwargs: Optional[Dict[str, Any]] = None
    embed_dim: Optional[int] = None
    depth: Optional[int] = None
    num_heads: Optional[int] = None
    patch_size: Optional[int] = None
    kwargs: Optional[Dict[str, Any]] = None
    pretrained: Optional[str] = None
    convert: Optional[Dict[str, Any]] = None

    def __post_init__(self):
        for name in ("embed_dim", "depth", "num_heads", "patch_size"):
            value = getattr(self, name)
            check(f"model.{name}", value, value is None or value >= 1, "at least 1")
        self.head_budget = read_head_budget(self.head_budget)
        if self.pretrained and self.name != "pretrained":
            raise ValueError(f"model.pretrained needs model.name pretrained, not {self.name}: it brings its model")
        if self.name == "pretrained" and not self.pretrained:
            raise ValueError("model.name pretrained needs model.pretrained, which says where the model comes from")

    def arguments(self) -> dict:
        """Keyword arguments for timm.create_model, without what was left out; of a pre-trained model those that it changes."""
        other = ("name", "kwargs", "pretrained", "convert")
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in other}
        return {**{k: v for k, v in own.items() if v is not None}, **(self.kwargs or {}), **(self.convert or {})}

    def decided(self, **values: Any) -> dict:
        """The arguments of the model that the data and other keys decide, such as num_classes.

        Raises:
            ValueError: if model.kwargs has another value for one of these.
        """
        for name, value in values.items():
            said = (self.kwargs or {}).get(name, value)
            if said != value:
                raise ValueError(
                    f"model.kwargs.{name} {said!r} has no effect: the data and other keys make it {value!r}"
                )
        return values


@dataclass
class DataConfig:
    """The images.

    Args:
        root: where the images are: "digits"; a folder of webdataset shards (train-*.tar and val-*.tar with images and
            .cls); a folder with train/CLASS/*.jpg and val/CLASS/*.jpg; or hfds/NAME for a Hugging Face data set. For
            diffusion also a folder of latents.
        exact_order: read samples in the seed's order; false: read the training shards as a stream, which promises less:
            docs/guides/streaming.md. data.root is then a folder with classes.txt and the validation split, and with the shards
            where data.stream names none.
        stream: URLs of the training shards, such as "https://HOST/train-{000000..001023}.tar"; several between "::". Also
            paths, and "pipe:COMMAND" where that is on the command line.
        samples: images of an epoch of a stream; left out: those that train.shards.jsonl in data.root counts.
        img_size: side in pixels; left out: that of the data (digits, latents) or of the model, with a VAE 256.
        augment: "none", "affine" (small rotation, shift, scale), "crop_flip" (padded crop, mirror) or "flip".
        shuffle_shards: shards that are shuffled together.
        workers: loader processes of each rank.
        max_bad_fraction: share of the images that may be unreadable; each is replaced by the next one that is not.
    """

    root: str = "digits"
    exact_order: bool = True
    stream: Optional[str] = None
    samples: Optional[int] = None
    img_size: Optional[int] = None
    augment: Literal["none", "affine", "crop_flip", "flip"] = "none"
    shuffle_shards: int = 8
    workers: int = 2
    max_bad_fraction: float = 0.0

    def __post_init__(self):
        check("data.samples", self.samples, self.samples is None or self.samples >= 1, "at least 1")
        check("data.img_size", self.img_size, self.img_size is None or self.img_size >= 1, "at least 1")
        check("data.shuffle_shards", self.shuffle_shards, self.shuffle_shards >= 1, "at least 1")
        check("data.workers", self.workers, self.workers >= 0, "0 or more")
        check("data.max_bad_fraction", self.max_bad_fraction, 0 <= self.max_bad_fraction < 1, "0 <= fraction < 1")


@dataclass
class OptimConfig:
    """Optimiser and schedule.

    Args:
        name: one of timm's optimisers, such as adamw, nadamw, lion, lamb, sgd or muon (docs/guides/optimisers.md).
        lr: peak learning rate.
        weight_decay: not applied to biases, norms and what the model's no_weight_decay() names.
        betas: of Adam, Lion and the like; left out: the optimiser's own.
        eps: added to the denominator; left out: the optimiser's own.
        momentum: of SGD, Muon and the like; left out: the optimiser's own, or 0.9.
        batch_size: images per step over all processes and accumulation.
        accumulation: micro-batches that make up a step.
        clip_norm: largest gradient norm; 0: no clipping.
        schedule: "cosine" down to min_lr at max_steps, or "constant".
        warmup_steps: linear warm-up.
        min_lr: end of the cosine.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: Optional[Tuple[float, float]] = None
    eps: Optional[float] = None
    momentum: Optional[float] = None
    batch_size: int = 128
    accumulation: int = 1
    clip_norm: float = 0.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self):
        check_name(self.name)
        check("optim.lr", self.lr, self.lr > 0, "above 0")
        check("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        check("optim.betas", self.betas, all(0 <= b < 1 for b in self.betas or ()), "0 <= beta < 1")
        check("optim.eps", self.eps, self.eps is None or self.eps > 0, "above 0")
        check("optim.momentum", self.momentum, self.momentum is None or 0 < self.momentum < 1, "between 0 and 1")
        check("optim.batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        check("optim.accumulation", self.accumulation, self.accumulation >= 1, "at least 1")
        check("optim.clip_norm", self.clip_norm, self.clip_norm >= 0, "0 or more")
        check("optim.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 or more")
        check("optim.min_lr", self.min_lr, 0 <= self.min_lr <= self.lr, "from 0 to optim.lr")


@dataclass
class EmaConfig:
    """Exponential moving average of the weights.

    Args:
        decay: share of the average that stays in a step; 0: no average; the DiT papers use 0.9999.
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
        train_only: what learns: "all" weights; for fine-tuning MAE its "gates", or "gates_and_outputs": with the output
            matrices of attention (Peng 2020, section 5.2). What is left out stays as it is, a head that init_from makes anew too.
        budget_range: smallest and largest share of active heads, such as [0.5, 1.0] or ["uniform:0.5", "uniform:1.0"].
            Every step runs a share in this range, drawn from the seed, and the model can be used at any of them
            afterwards. model.head_budget then says only how many heads are shared; give the smallest share there.
        balance_weight: weight of MoH's load-balance loss (0.01 in Jin 2024). As in the released code, the loss is eq. 7
            times the number of candidate heads, averaged over the layers that route.
        moa_balance_weight: weight of MoA's (0.01 in Zhang 2022).
        z_weight: weight of MoA's z-loss (0.001 in Zhang 2022).
        checkpointing: keep only what goes into each layer, and compute the rest again for its gradient: less memory, a third
            more time.
        compile: torch.compile the model and its losses.
        tf32: let NVIDIA GPUs multiply float32 matrices in TF32.
        tracker: logs to "tensorboard" (events in OUTPUT/tensorboard) or "wandb" too, beside metrics.jsonl.
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
    budget_range: Optional[Tuple[Union[float, str], Union[float, str]]] = None
    balance_weight: float = 0.01
    moa_balance_weight: float = 0.01
    z_weight: float = 0.001
    checkpointing: bool = False
    compile: bool = False
    tf32: bool = False
    tracker: Optional[Literal["tensorboard", "wandb"]] = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    block_descent: BlockDescentConfig = field(default_factory=BlockDescentConfig)
    least_steps: ClassVar[int] = 1

    def __post_init__(self):
        for name in ("log_every", "save_every", "keep_checkpoints"):
            check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        least = self.least_steps
        check("max_steps", self.max_steps, self.max_steps is None or self.max_steps >= least, f"at least {least}")
        check_seed(self.seed)
        for name in OPTIONS:  # here, because the parser takes its defaults from an OptimConfig of the default name
            if getattr(self.optim, name) is None:
                setattr(self.optim, name, own_value(self.optim.name, name))
        for name in ("balance_weight", "moa_balance_weight", "z_weight"):
            check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")

    def moa_weights(self) -> dict:
        """Keyword arguments of a `RoutedTask`."""
        return dict(moa_balance_weight=self.moa_balance_weight, z_weight=self.z_weight)

    def tree(self) -> dict:
        """The configuration as nested plain values, as it is saved."""
        return plain(dataclasses.asdict(self))


@dataclass
class ImageRunConfig(RunConfig):
    """What runs on images share.

    Args:
        calibrate_images: with init_from or model.pretrained of a dense model: how many training images judge its heads, so
            that the strongest ones of each layer become the shared ones and the first to run; 0: those that come first.
    """

    calibrate_images: int = 0
    ema: EmaConfig = field(default_factory=EmaConfig)

    def __post_init__(self):
        super().__post_init__()
        check("calibrate_images", self.calibrate_images, self.calibrate_images >= 0, "0 or more")
        if self.init_from and self.model.pretrained:
            raise ValueError("init_from and model.pretrained both bring weights: give one")


@dataclass
class Flags:
    """What one call of a script does, and a run does not remember."""

    dry_run: bool = False
    fresh: bool = False
    allow_change: List[str] = field(default_factory=list)
    given: Set[str] = field(default_factory=set)  # names of the options on the command line
    checkpoint: Optional[str] = None  # to validate
    head_load: Optional[str] = None  # files that a validation writes
    score_file: Optional[str] = None
    predictions: Optional[str] = None
    labels: Optional[str] = None  # whose images and labels it takes


# Differences in these keys, or sections, do not make a run another run.
FREE_KEYS = (
    "output",
    "max_steps",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "keep_weights_every",
    "eval_every",
    "tracker",
    "preview",
    "score",
    "data.workers",
    "data.max_bad_fraction",
    "data.eval_batch_size",
    "data.test",
    "generate",
    "average",
    "patience",
    "checkpointing",
)

# Not keys of a configuration: what a run keeps in attention.json, see `AttentionRecord`. --allow-change takes them.
KEPT_KEYS = ("attention.path", "attention.table")

# Keys that the config.yaml of earlier runs does not have, and what those did.
LATER_KEYS = {
    "train_only": "all",
    "optim.name": "adamw",
    "optim.eps": 1e-8,
    "moa_balance_weight": RunConfig.moa_balance_weight,
    "z_weight": RunConfig.z_weight,
    "data.exact_order": True,
    "calibrate_images": ImageRunConfig.calibrate_images,
    **{f"block_descent.{f.name}": f.default for f in dataclasses.fields(BlockDescentConfig)},
    "objective": "noise",
}

# Defaults of earlier versions: their runs saved them, also where they had no effect.
FORMER_DEFAULTS = {"preview.sampler": "ddim", "score.sampler": "ddim", "preview.columns": 10}
