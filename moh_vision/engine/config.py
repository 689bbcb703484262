"""The sections of a configuration that scripts share. `command_line.parse_config` fills them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from moh_vision.attention import ROUTERS
from moh_vision.attention.losses import AUX_LOSSES
from moh_vision.attention.routers import choosing_and_all, is_plain, with_loss
from moh_vision.engine.keys import Idle, Section, key, keys_of, unknown_key
from moh_vision.engine.optimizers import OPTIONS, check_name, own_value, takes

HeadBudgets = float | str | list[tuple[int, int]]  # see ModelConfig
MAX_SEED = 2**63 - 1
SOURCE = "source"  # of distill.teacher: the model that the run starts from
TRAINS = "train_only!=gates"  # need of keys that have no effect if only gates learn

# Settings in attention.json, see `AttentionRecord`. They are not keys, but --allow-change takes their names.
KEPT_KEYS = ("attention.path", "attention.table")


@dataclass
class ModelConfig(Section, section="model"):
    """The model; what is left out keeps the registered model's own value."""

    name: str = key("moh_vit_small_patch16_224")
    """Model name in timm's registry."""
    head_budget: HeadBudgets | None = key(None, ge=0)
    """Share of active heads such as 0.75, "ramp:0.75" or "uniform:0.75"; a number keeps the shape of the model's budget, a
    ramp in a new one; "uniform:0.75:0.4" also says the share of shared
    heads among them; or one [shared, routed] per layer, as `python -m moh_vision search` writes it."""
    mlp_budget: HeadBudgets | None = key(None, ge=0)
    """Share of the MLPs' groups that run, in the forms of head_budget, of a ViT or DiT with scope "sample"; left out: the
    MLPs are dense."""
    mlp_groups: int | None = key(None, ge=1, needs=".mlp_budget; not .pretrained")
    """Groups of each MLP, a divisor of its hidden width; left out: 8."""
    router: str | None = key(None, needs="not .pretrained", names=choosing_and_all)
    """Who chooses or weighs the heads:"""
    scope: str | None = key(None, needs="not .pretrained")
    """"token" or "sample"."""
    executor: str | None = key(None, needs="not .pretrained")
    """How attention is computed."""
    router_kwargs: dict[str, Any] | None = key(None, needs="not .pretrained")
    """Options of the router, such as {gate_scale: paper}."""
    embed_dim: int | None = key(None, ge=1, needs="not .pretrained")
    """Width of the tokens."""
    depth: int | None = key(None, ge=1, needs="not .pretrained")
    """Number of layers."""
    num_heads: int | None = key(None, ge=1, needs="not .pretrained")
    """Number of heads in each layer."""
    patch_size: int | None = key(None, ge=1)
    """Side of a patch, in pixels of the input."""
    kwargs: dict[str, Any] | None = key(None)
    """Further arguments of the model."""
    pretrained: str | None = key(None)
    """Start from a dense model and its weights; name must be "pretrained". Classification: a ViT of timm (NAME,
    hf-hub:OWNER/NAME or local-dir:FOLDER). Diffusion: a registered DiT, or the folder of a DiT of diffusers or of its
    pipeline. Both: a run of ours, or what publish made of it."""
    convert: dict[str, Any] | None = key(None, needs=".pretrained")
    """Arguments of moh_vision.convert, such as {router: moh, scope: token}, where a share is uniform; left out, without
    head_budget: the model stays dense."""

    def agree(self) -> None:
        if self.pretrained and self.name != "pretrained":
            raise ValueError(
                f"model.pretrained needs model.name pretrained, not {self.name}: it brings its model"
            )
        if self.name == "pretrained" and not self.pretrained:
            raise ValueError(
                "model.name pretrained needs model.pretrained, which says where the model comes from"
            )

    def arguments(self) -> dict:
        """Return the keyword arguments of timm.create_model that are set, including those of a conversion."""
        not_arguments = ("name", "kwargs", "pretrained", "convert")
        arguments = {
            name: value
            for name, value in vars(self).items()
            if name not in not_arguments and value is not None
        }
        return {**arguments, **(self.kwargs or {}), **(self.convert or {})}

    def refuse_other(self, **values: Any) -> None:
        """Raise ValueError if model.kwargs gives another value than `values`, which data and other keys decide."""
        for name, value in values.items():
            given = (self.kwargs or {}).get(name, value)
            if given != value:
                why = f"the data and other keys make it {value!r}"
                raise ValueError(f"model.kwargs.{name} {given!r} has no effect: {why}")


@dataclass
class ImagesConfig(Section, section="data"):
    """The images."""

    root: str = key("digits", also="data_path dataset path")
    """"digits"; a folder of webdataset shards (train-*.tar and val-*.tar with images and .cls), or with train/CLASS/*.jpg
    and val/CLASS/*.jpg; hfds/NAME of a Hugging Face data set, or hfds/NAME?label=COLUMN; for diffusion also images
    without classes, or latents; or what another source takes (docs/guides/extend.md)."""
    img_size: int | None = key(None, ge=1, also="resolution")
    """Side in pixels; left out: that of the data (digits, latents) or of the model, with a VAE 256."""
    colour_space: Literal["keep", "srgb"] = key("keep")
    """"keep": colours are the numbers in the file, as published models and scores read them; "srgb": converted to sRGB where
    a file embeds another colour profile (docs/guides/data.md)."""
    value_range: tuple[float, float] | None = key(None, ge=-(2**31), le=2**32 - 1, rising=True)
    """Values that become black and white in images of more than 8 bits, such as 0 4095 of a sensor of 12; left out: those
    that a file states, else 0 65535."""
    workers: int = key(2, ge=0, free=True)
    """Loader processes of each rank."""
    max_bad_fraction: float = key(0.0, ge=0, lt=1, free=True)
    """Share of the images that may be unreadable; each is replaced by the next one that is not."""


@dataclass
class DataConfig(ImagesConfig):
    """The images, and their order."""

    exact_order: bool = key(True)
    """Read samples in the seed's order; false: read the training shards as a stream, which promises less
    (docs/guides/data.md). data.root then has classes.txt, the validation split, and the shards where data.stream names
    none."""
    stream: str | None = key(None, needs="not .exact_order")
    """URLs of the training shards, such as "https://HOST/train-{000000..001023}.tar", joined by "::"; also paths, and
    "pipe:COMMAND" where that is on the command line."""
    samples: int | None = key(None, ge=1, needs="not .exact_order")
    """Images of an epoch of a stream; left out: those that train.shards.json in data.root counts."""
    augment: Literal["none", "affine", "crop_flip", "flip"] = key("none")
    """"none", "affine" (small rotation, shift, scale), "crop_flip" (padded crop, mirror) or "flip"."""
    shuffle_shards: int = key(8, ge=1, needs=".exact_order")
    """Shards that are shuffled together."""


@dataclass
class OptimConfig(Section, section="optim"):
    """Optimiser and schedule."""

    name: str = key("adamw", needs=TRAINS, also="optimizer opt")
    """One of timm's optimisers, such as adamw, nadamw, lion, lamb, sgd or muon (docs/guides/classifier.md)."""
    lr: float = key(1e-3, gt=0, needs=TRAINS, also="learning_rate base_lr")
    """Peak learning rate."""
    weight_decay: float = key(0.05, ge=0, needs=TRAINS, also="wd")
    """Weight decay, which is not applied to biases, norms and what the model's no_weight_decay() names."""
    betas: tuple[float, float] | None = key(None, ge=0, lt=1, needs=TRAINS)
    """Betas of Adam, Lion and the like; left out: the optimiser's own."""
    eps: float | None = key(None, gt=0, needs=TRAINS)
    """Number that the optimiser adds to the denominator; left out: the optimiser's own."""
    momentum: float | None = key(None, gt=0, lt=1, needs=TRAINS)
    """Momentum of SGD, Muon and the like; left out: the optimiser's own, or 0.9."""
    batch_size: int = key(
        128, ge=1, also="data.batch_size train_batch_size per_device_train_batch_size"
    )
    """Images per step over all processes and accumulation."""
    accumulation: int = key(1, ge=1)
    """Micro-batches that make up a step. Its losses are their mean; a load-balance loss counts the load of each, so with
    balance_weight or moa_balance_weight the gradient differs a little from the one of the undivided batch."""
    clip_norm: float = key(
        0.0, ge=0, needs=f"{TRAINS} or block_descent.mode=joint", also="grad_clip max_grad_norm"
    )
    """Largest gradient norm; 0: no clipping."""
    schedule: Literal["cosine", "constant"] = key("cosine", needs=TRAINS)
    """"cosine" down to min_lr at max_steps, or "constant"."""
    warmup_steps: int = key(0, ge=0, needs=TRAINS)
    """Steps of the linear warm-up."""
    min_lr: float = key(0.0, ge=0, le="lr", needs=f"{TRAINS}; .schedule!=constant")
    """Learning rate at the end of the cosine."""

    def agree(self) -> None:
        check_name(self.name)


@dataclass
class EmaConfig(Section, section="ema"):
    """Exponential moving average of the weights."""

    decay: float = key(0.0, ge=0, lt=1)
    """Share of the average that stays in a step; 0: no average; the DiT papers use 0.9999. A run says before step 1 if it
    is too short for it. A classifier is scored with the better of the EMA and the last weights."""
    warmup: bool = key(False, needs=".decay")
    """Let the decay grow as 1 - (1 + step) ** (-2 / 3) until it reaches `decay`, for short runs."""


@dataclass
class DistillConfig(Section, section="distill", needs=".teacher"):
    """Distillation from a frozen teacher. The weights have the names and defaults of timm's `LogitDistillationTask`."""

    teacher: str | None = key(None)
    """"source": the model that the run starts from, model.pretrained or init_from; or another run of the same data. A
    classifier's may be a model of timm (NAME, hf-hub:OWNER/NAME or local-dir:FOLDER), a diffusion model's a pipeline's
    folder or the NAME of published weights."""
    task_loss_weight: float = key(1.0, ge=0)
    """Weight of the loss that a run without a teacher has: of a classifier the cross-entropy, of a diffusion model its
    objective's. The loss of a learnt variance keeps weight 1."""
    distill_loss_weight: float = key(1.0, ge=0)
    """Weight of the distance from the teacher's prediction: of softmaxes (Hinton 2015), or of what a diffusion model
    predicts (Kim 2023)."""

    def agree(self) -> None:
        weights = self.teacher_weights
        if self.teacher and not any(weights.values()):
            keys = " and ".join(f"{self.section}.{name} 0" for name in weights)
            raise ValueError(f"distill.teacher {self.teacher} has no effect with {keys}")

    @property
    def teacher_weights(self) -> dict[str, float]:
        """The weights of the losses that need the teacher, by key."""
        return dict(distill_loss_weight=self.distill_loss_weight)


@dataclass
class BlockDescentConfig(Section, section="block_descent"):
    """How a model with MAE's gates learns (router mae with mode soft); any other model is trained as usual."""

    mode: Literal["bcd", "joint"] = key("bcd")
    """"bcd": gates and experts in turns, as in Peng 2020; or "joint": together (the paper's NoBCD)."""
    period: int = key(5, ge=1, needs=f".mode=bcd; {TRAINS}")
    """The gates learn in every period-th epoch, from the first one on."""
    gate_lr: float = key(1.0, gt=0)
    """Learning rate of the gates, in both modes by SGD without momentum or schedule (Peng 2020, appendix A)."""


@dataclass
class CommonConfig(Section):
    """Keys of all scripts that open data and a model."""

    output: str = key("runs/run", free=True, also="out_dir save_dir resume")
    """Folder of the run; the same command run again resumes what is in it."""
    mixed_precision: Literal["no", "bf16", "fp16"] = key("no", also="fp16 bf16 amp")
    """"no", "bf16" or "fp16"."""
    tf32: bool = key(False)
    """Let NVIDIA GPUs multiply float32 matrices in TF32."""
    imports: list[str] = key([], free=True)
    """Python files of your own that add routers, objectives, samplers or data sets (docs/guides/extend.md). They are code: only
    those on the command line are imported, and every command that opens the run takes the same --imports."""


@dataclass(kw_only=True)
class OpenedConfig(CommonConfig):
    """Keys of all scripts that open a run."""

    checkpoint: str = key(also="ckpt")
    """PATH of a run, its checkpoint, a folder that timm saved, or weights for model.*."""


@dataclass
class RunConfig(CommonConfig):
    """Keys of all training runs."""

    kind: Literal["classification", "diffusion", "text"] = key("")
    """What is trained."""
    dry_run: bool = key(False, kept=False)
    """Print model, budget, parameters and MACs, and stop. What the run would refuse is refused, and nothing is written."""
    estimate: bool | Literal["largest-batch"] = key(False, kept=False)
    """Do twenty steps on the run's data, print speed, memory and the hours of the whole run, and stop; no run is written.
    "largest-batch": also find the largest micro-batch that fits into memory."""
    fresh: bool = key(False, kept=False)
    """Move an earlier run in --output aside and start over."""
    allow_change: list[str] = key([], kept=False)
    """Resume although the key KEY has changed; may be given several times."""
    max_steps: int = key(1000, ge=1, free=True, also="epochs num_epochs num_train_epochs")
    """Optimiser steps."""
    seed: int = key(0, ge=0, le=MAX_SEED)
    """Seed of the weights, the order of samples, augmentation and noise."""
    log_every: int = key(20, ge=1, free=True)
    """Steps between lines of metrics.jsonl."""
    save_every: int = key(1000, ge=1, free=True)
    """Steps between checkpoints."""
    keep_checkpoints: int = key(2, ge=1, free=True)
    """Number of checkpoints that stay."""
    save_in_background: bool = key(True, free=True)
    """Write a checkpoint while training goes on, from a copy in main memory; false: wait for it."""
    init_from: str | None = key(None)
    """Weights to start from: a run folder, a file of weights, or a timm model name. An image model takes the shared heads
    of their routers; model.head_budget says how many heads run."""
    train_only: Literal["all", "gates", "gates_and_outputs"] = key("all")
    """What learns: "all" weights; for fine-tuning MAE its "gates", or "gates_and_outputs": with the output matrices of
    attention (Peng 2020, section 5.2). The rest stays as it is, also a head that init_from makes anew."""
    budget_range: tuple[float | str, float | str] | None = key(None, ge=0)
    """Smallest and largest share of active heads, such as [0.5, 1.0], which keeps the shape of model.head_budget, or
    ["uniform:0.5", "uniform:1.0"]. Every step runs a
    share drawn from it, and the model works at any of them afterwards. model.head_budget, best the smallest share, then
    says only how many heads are shared."""
    balance_weight: float = key(0.01, ge=0)
    """Weight of MoH's load-balance loss (0.01 in Jin 2024): eq. 7 times the number of candidate heads, averaged over the
    layers that route, as released."""
    moa_balance_weight: float = key(0.01, ge=0)
    """Weight of MoA's load-balance loss (0.01 in Zhang 2022)."""
    z_weight: float = key(0.001, ge=0)
    """Weight of MoA's z-loss (0.001 in Zhang 2022)."""
    checkpointing: bool = key(False, free=True)
    """Keep only the inputs of the layers and compute the rest again for the gradient: less memory, a third more time."""
    compile: bool | Literal["blocks"] = key(False)
    """Compile the model and its losses with torch.compile; "blocks": compile the blocks of the model one by one, which
    starts in less time."""
    cuda_graph: Literal["off", "on", "auto"] = key("off")
    """Replay forward and backward of a micro-batch as a CUDA graph, after three eager steps (docs/guides/gpu.md): "on" if its
    results equal the eager ones, "auto" if it is also faster. "off" until it has run on a card."""
    tracker: Literal["tensorboard", "wandb"] | None = key(None, free=True)
    """Also log to "tensorboard" (events in OUTPUT/tensorboard) or "wandb" (its id of the run in
    OUTPUT/wandb_id.txt)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    block_descent: BlockDescentConfig = field(default_factory=BlockDescentConfig)

    def agree(self) -> None:
        if self.estimate and self.dry_run:
            raise ValueError("estimate and dry_run: a dry run does no step; give one of the two")
        for name in OPTIONS:
            if getattr(self.optim, name) is None:
                setattr(self.optim, name, own_value(self.optim.name, name))
        for name in self.allow_change:
            if name == "optim.name":
                why = "a checkpoint keeps the state of its own optimiser; init_from begins a run with its weights"
                raise ValueError(f"--allow-change {name}: {why}")
            if name not in keys_of(type(self)) and name not in KEPT_KEYS:
                raise ValueError(f"--allow-change {name}: {unknown_key(name, keys_of(type(self)))}")

    def sampling_options(self) -> str:
        """Return the options of sample.py that a run of a diffusion model suggests when it ends."""
        return ""

    def routers(self) -> list[tuple[str, dict]]:
        """Return name and options of each router that the model may have, for `idle`."""
        raise NotImplementedError

    def idle(self) -> Iterator[Idle]:
        routers = self.routers()
        model = "model.name model.router model.kwargs model.convert"
        arguments = self.model.arguments() or {}
        # Groups of MLPs are chosen by a router with MoH's loss, whatever chooses the heads. Text models have none.
        groups = arguments.get("mlp_budget")
        of_groups = f"{model} model.mlp_budget"
        routes = "a model that routes its heads"
        names = {name for name, _ in routers}
        # A name that is not registered may be of any router; the layer refuses it.
        unknown = names - ROUTERS.keys()
        known = names & ROUTERS.keys()
        chosen = unknown | {name for name in known if not ROUTERS[name].all_heads}
        weighed = {name for name in names if not is_plain(name)}
        in_turns = [
            name
            for name, options in routers
            if name in known and ROUTERS[name].learns_in_turns_with(options)
        ]
        yield Idle("model.head_budget", chosen, routes, model)
        yield Idle("budget_range", chosen or groups, routes, of_groups)
        yield Idle("model.scope", weighed or groups, routes, of_groups)
        for aux_loss, weights in AUX_LOSSES.items():
            having = with_loss(aux_loss)
            trained = unknown | known.intersection(having)
            words = f"router {' or '.join(having)}"
            deciding = model
            if "balance_weight" in weights:
                trained = trained or groups
                words += ", or model.mlp_budget"
                deciding = of_groups
            yield Idle(" ".join(weights), trained, words, deciding)
        yield Idle(
            "block_descent.*", in_turns, "router mae with mode soft", f"{model} model.router_kwargs"
        )
        for option, words in OPTIONS.items():
            yield Idle(
                f"optim.{option}",
                takes(self.optim.name, option),
                f"an optim.name with {words}",
                "optim.name",
            )

    def moa_weights(self) -> dict:
        """Return the weights of MoA's losses as keyword arguments of a `RoutedTask`."""
        return dict(moa_balance_weight=self.moa_balance_weight, z_weight=self.z_weight)


@dataclass
class ImageRunConfig(RunConfig):
    """Keys of all runs that train on images."""

    # Images that a run with max_steps "auto" sees, over the square root of the number of training images: a classifier
    # sees each of 100 images 384 times, each of 20,000 27 times.
    images_per_root: ClassVar[int] = 3840

    max_steps: int | Literal["auto"] = key(
        1000, ge=1, free=True, also="epochs num_epochs num_train_epochs"
    )
    """Optimiser steps. "auto": as many as the run sees 3,840 sqrt(N) images in, of N training images, a diffusion model four
    times as many, and a warm-up of a twentieth of them if none is given: few images are seen more often."""
    calibrate_images: int = key(0, ge=0, needs="init_from or model.pretrained; data.exact_order")
    """Number of training images that judge the heads of a dense model, and the hidden channels of its MLPs if they are routed,
    so that the strongest ones of each layer become the shared ones and the first to run; 0: those that come first."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    def agree(self) -> None:
        super().agree()
        if self.init_from and self.model.pretrained:
            raise ValueError("init_from and model.pretrained both bring weights: give one")
        if self.distill.teacher == SOURCE and not self.teacher_source:
            raise ValueError(
                f"distill.teacher {SOURCE} is the model that the run starts from: it needs model.pretrained or init_from"
            )

    @property
    def teacher_source(self) -> str | None:
        """The model that distill.teacher stands for, a name or a path; None: no teacher."""
        if self.distill.teacher == SOURCE:
            return self.model.pretrained or self.init_from
        return self.distill.teacher

    def settle_steps(self, images: int) -> tuple[int, str]:
        """Replace max_steps "auto" by the number for so many training images.

        From then on the configuration, as it is saved with the run, has a number there. optim.warmup_steps stays what the
        user gave: so a run may be resumed for more steps, or with more images.

        Returns:
            The steps of the warm-up, and a line that says what "auto" is here; "" if there is nothing to say.
        """
        optim = self.optim
        if self.max_steps != "auto":
            return optim.warmup_steps, ""
        batch = optim.batch_size
        self.max_steps = max(1, round(self.images_per_root * math.sqrt(images) / batch))
        line = f"max_steps auto: {self.max_steps} steps of {batch} for {images} images"
        if optim.warmup_steps or "optim.warmup_steps" in self.given:
            return optim.warmup_steps, line
        warmup = self.max_steps // 20
        return warmup, f"{line}, the first {warmup} are the warm-up"

    def routers(self) -> list[tuple[str, dict]]:
        arguments = self.model.arguments()
        router = arguments.get("router")
        if not router:
            dense = self.model.name.startswith(("dit_", "sit_", "jit_", "transnext_"))
            router = "dense" if dense else "moh"
        return [(router, arguments.get("router_kwargs") or {})]
