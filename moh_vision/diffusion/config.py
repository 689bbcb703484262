"""The configurations of a diffusion run and of sampling from one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Literal, Optional, Tuple, Union

from moh_vision.diffusion.sampling import sampler_for
from moh_vision.engine.config import (
    HeadBudgets,
    ImageRunConfig,
    ModelConfig,
    check,
    check_seed,
    read_head_budget,
)

Sampler = Literal["ddpm", "ddim", "dpm-solver++", "euler", "heun", "sde"]
Classes = Optional[List[str]]  # numbers too are texts, or a class called 007 would be number 7
# What --protocol stands for; another value of these keys is refused. "adm": how DiT and MoH-DiT draw the images that ADM's
# evaluator scores (defaults of their sample_ddp.py; the guidance scale is told with each figure).
PROTOCOLS = dict(
    adm=dict(
        num_images=50_000, labels="random", weights="ema", sampler="ddpm", steps=250, guide_channels=3, cfg_interval=(0.0, 1.0),
        mixed_precision="no", extractor="inception", classes=None,
    ),
)  # fmt: skip


def check_classes(key: str, classes: Classes, images: int) -> None:
    """Raise ValueError unless there is one class at least, and an image for each."""
    check(key, classes, classes is None or len(classes) >= 1, "at least one class")
    if classes and images < len(classes):
        raise ValueError(f"{key} names {len(classes)} classes, more than the {images} images that are drawn")


@dataclass
class DrawConfig:
    """How samples are drawn while a diffusion model trains: always of the same noise and labels, with the EMA if any.

    Args:
        every: steps between them, and one at the end of a run of at least so many; 0: never.
        images: how many; image i has class i modulo the number of classes.
        sampler: as in sample.py; left out: "ddim", or with objective flow "euler".
        steps: denoising steps.
        cfg_scale: classifier-free guidance; 1: none.
        seed: of the noise.
    """

    every: int = 0
    images: int = 40
    sampler: Optional[Sampler] = None
    steps: int = 50
    cfg_scale: float = 1.5
    seed: int = 0

    section = "preview"
    classes = None  # all
    default_sampler = dict(noise="ddim", flow="euler")

    def __post_init__(self):
        check(f"{self.section}.every", self.every, self.every >= 0, "0 or more")
        check(f"{self.section}.images", self.images, self.images >= 1, "at least 1")
        check(f"{self.section}.steps", self.steps, 1 <= self.steps <= 1000, "1 to 1000")
        check(f"{self.section}.cfg_scale", self.cfg_scale, self.cfg_scale >= 0, "0 or more")
        check(f"{self.section}.seed", self.seed, 0 <= self.seed < 2**63, "0 to 2**63 - 1")


@dataclass
class PreviewConfig(DrawConfig):
    """Pictures: OUTPUT/previews/step_N.png.

    Args:
        columns: images a row, in their order; left out: one class a row with its name, if these are at most ten rows of ten
            images, and else ten images a row.
        classes: numbers or names of the classes that are drawn, one a row with its name: image i has the class in place
            i modulo their number; left out: all classes.
    """

    columns: Optional[int] = None
    classes: Classes = None

    def __post_init__(self):
        super().__post_init__()
        check("preview.columns", self.columns, self.columns is None or self.columns >= 1, "at least 1")
        check_classes("preview.classes", self.classes, self.images)


@dataclass
class ScoreConfig(DrawConfig):
    """Fidelity scores while training, into metrics.jsonl; see docs/guides/scores.md.

    Args:
        reference: what samples are compared with, as `score` of sample.py; left out: data.root.
        split: split of a data set: "train" (the default) or "val".
        extractor: whose features are compared: "inception", "timm:NAME", "timm:local-dir:FOLDER", or a classification run.
        inception_weights: torch-fidelity's .pth file; left out: fetched once.
        allow_biased: also with no more images than features, labelled FID@N.
    """

    images: int = 5000
    cfg_scale: float = 1.0
    reference: Optional[str] = None
    split: Optional[Literal["train", "val"]] = None
    extractor: str = "inception"
    inception_weights: Optional[str] = None
    allow_biased: bool = False

    section = "score"

    def scoring(self, root: str) -> dict:
        """Keyword arguments of `scores.make_scorer`; `root` is the reference if none is given."""
        return dict(
            key="score.reference", reference=self.reference or root, split=self.split, default_split="train",
            extractor=self.extractor, inception_weights=self.inception_weights, allow_biased=self.allow_biased,
            num_images=self.images,
        )  # fmt: skip


@dataclass
class FlowConfig:
    """Flow matching; see `moh_vision.diffusion.objectives.FlowMatchingLoss`.

    Args:
        timesteps: how times are drawn from 0 (clean) to 1 (noise): "uniform", or "logit-normal", more of them in between.
        shift: above 1, moves the times of training and sampling towards the noise, for larger latents (Esser 2024,
            eq. 23): about the side over the side at which 1 was right.
    """

    timesteps: Literal["uniform", "logit-normal"] = "uniform"
    shift: float = 1.0

    def __post_init__(self):
        check("flow.shift", self.shift, self.shift > 0, "above 0")


@dataclass
class RepaConfig:
    """Representation alignment (Yu 2024); see `moh_vision.diffusion.alignment`.

    Args:
        teacher: a frozen model with features of patches: one of timm with its weights (NAME, hf-hub:OWNER/NAME or
            local-dir:FOLDER), or the folder of a classification run. The data must be images.
        block: of the model, from 1 on, whose tokens come near the teacher's features of the clean image.
        weight: of one minus the mean cosine similarity.
    """

    teacher: Optional[str] = None
    block: int = 8
    weight: float = 0.5

    def __post_init__(self):
        check("repa.block", self.block, self.block >= 1, "at least 1")
        check("repa.weight", self.weight, self.weight > 0, "above 0")


@dataclass
class DitConfig(ImageRunConfig):
    """Diffusion.

    Args:
        vae: diffusion on the latents of this VAE: its name on the Hugging Face hub, or a local folder. "none" or left
            out: on pixels, or on latents where data.root holds them, whose own VAE decodes previews.
        objective: what the model predicts: the "noise" of 1000 steps, as DiT, or the velocity of a "flow", as SiT.
        learn_sigma: with objective noise, learn the variance too (hybrid loss).
        min_snr_gamma: with objective noise, weigh its squared error by min(SNR, gamma) / SNR, with gamma 5 in Hang 2023.
        flow: with objective flow.
        label_drop: share of labels replaced by "no class", for guidance.
        repa: learn from a frozen model, too.
        preview: pictures while training.
        score: fidelity scores while training.
    """

    vae: Optional[str] = None
    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="moh_dit_small_patch2_75"))
    objective: Literal["noise", "flow"] = "noise"
    learn_sigma: bool = True
    min_snr_gamma: Optional[float] = None
    flow: FlowConfig = field(default_factory=FlowConfig)
    label_drop: float = 0.1
    repa: RepaConfig = field(default_factory=RepaConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)

    def __post_init__(self):
        super().__post_init__()
        self.vae = self.vae or "none"  # as it stands in the config.yaml of earlier runs
        check("label_drop", self.label_drop, 0 <= self.label_drop < 1, "0 <= drop < 1")
        gamma = self.min_snr_gamma
        check("min_snr_gamma", gamma, gamma is None or gamma > 0, "above 0")
        for draw in (self.preview, self.score):
            if not draw.every:
                draw.sampler = None  # it has no effect; earlier runs saved one
            else:
                sampler_for(self.objective, draw.sampler, draw.default_sampler, f"{draw.section}.sampler")
            if draw.every and draw.cfg_scale != 1 and not self.label_drop:
                raise ValueError(
                    f"{draw.section}.cfg_scale {draw.cfg_scale:g} needs label_drop above 0, or 1 for no guidance"
                )


@dataclass
class SampleConfig:
    """Sampling from a trained run.

    Args:
        checkpoint: folder of a diffusion run, one of its checkpoints (RUN/checkpoints/step_N), or a .safetensors file
            in either; the folder of a saved pipeline, ours or diffusers' DiTPipeline; with --model other weights.
        model: name of a model, such as moh_dit_xlarge_patch2_90, for weights that `load_checkpoint` reads: the published
            .pt files of MoH-DiT and DiT, .safetensors, folders of diffusers' models.
        head_budget: share of active heads such as 0.5, as `set_head_budget` takes it; left out: the run's.
        weights: "ema" (falls back to "model" where the run or the file has none) or "model".
        protocol: "adm": as published FIDs are made (docs/guides/scores.md): 50,000 images, random labels, EMA weights, 250 steps
            of ddpm, guidance of the first 3 channels in all steps, no mixed precision, ADM's statistics as the reference.
        num_images: how many; left out: 100, or those of the protocol.
        classes: numbers or names of the classes that are drawn, such as 207 360 (in a file ["207", "360"]); left out:
            all. A name goes before a number: in a data set with a class called 10, 10 is that class.
        labels: "balanced": the classes in turn, image i has the class in place i modulo their number; "random": drawn
            from (seed, i); left out: random where the reference holds ADM's statistics, else balanced.
        sampler: "ddpm" (left out), "ddim" or "dpm-solver++"; of a model trained with objective flow "sde" (left out),
            "euler" or "heun".
        steps: denoising steps.
        cfg_scale: classifier-free guidance; 1: none.
        guide_channels: how many channels are guided, from the first, or "all"; left out: 3 of 4, as the official DiT does on
            latents, and all of any other number.
        cfg_interval: two fractions of the timesteps, from 0 (clean) to 1 (noise), between which guidance is applied.
        seed: the noise of image i depends on (seed, i) alone.
        batch_size: images at a time on each process; equal sizes give equal bits.
        mixed_precision: "no", "bf16" or "fp16".
        vae: of latent models: name or folder of a VAE; left out: the one that the run was trained with.
        save_pipeline: a folder for model, scheduler and VAE, which `MoHDiTPipeline.from_pretrained` reads; with
            num_images 0 that is all.
        out: a folder for PNGs, or a .npz file (arr_0 uint8 [N, h, w, channels], arr_1 labels).
        grid: PNG with one class a row: those of `classes`, or the first ten.
        grid_columns: images a row.
        denoising: how noise becomes the first eight images, that is what the sampler holds after some of its steps, noise
            and all, decoded by the VAE if there is one: .png, an image a row and eight moments; .gif, an animation.
        head_usage: PNG of head usage per layer and class while sampling.
        head_load: JSON of which heads the tokens of each class, and of each timestep, ran; for
            `python -m moh_vision.analysis.head_load`.
        score: the reference: a folder of images, a .npz (images, or ADM's statistics) or saved statistics
            (.safetensors); or a data set as in data.root.
        score_split: split of a data set: "val" (the default) or "train".
        extractor: "inception" (left out), "timm:NAME", "timm:local-dir:FOLDER", or a classification run; with a data set
            of the run's classes that also tells how many samples are recognised.
        inception_weights: torch-fidelity's .pth file; left out: fetched once.
        allow_biased: score also with no more images than features, labelled FID@N.
        score_file: where the scores go; left out: scores.json in the run (of a checkpoint: scores_step_N.json).
        overwrite: replace what is at the output paths.
    """

    checkpoint: str
    model: Optional[str] = None
    weights: Literal["ema", "model"] = "ema"
    head_budget: Optional[HeadBudgets] = None
    protocol: Optional[Literal["adm"]] = None
    num_images: Optional[int] = None
    classes: Classes = None
    labels: Optional[Literal["balanced", "random"]] = None
    sampler: Optional[Sampler] = None
    steps: int = 250
    cfg_scale: float = 1.0
    guide_channels: Optional[Union[int, Literal["all"]]] = None
    cfg_interval: Tuple[float, float] = (0.0, 1.0)
    seed: int = 0
    batch_size: int = 100
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    vae: Optional[str] = None
    save_pipeline: Optional[str] = None
    out: Optional[str] = None
    grid: Optional[str] = None
    grid_columns: int = 10
    denoising: Optional[str] = None
    head_usage: Optional[str] = None
    head_load: Optional[str] = None
    score: Optional[str] = None
    score_split: Optional[Literal["train", "val"]] = None
    extractor: Optional[str] = None
    inception_weights: Optional[str] = None
    allow_biased: bool = False
    score_file: Optional[str] = None
    overwrite: bool = False

    default_sampler = dict(noise="ddpm", flow="sde")

    def __post_init__(self):
        for name, value in PROTOCOLS.get(self.protocol, {}).items():
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name} {getattr(self, name)}: protocol {self.protocol} stands for {'all' if value is None else value}"
                )
            setattr(self, name, value)  # where it was left out
        self.num_images = 100 if self.num_images is None else self.num_images
        for name in ("batch_size", "grid_columns"):
            check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        least = 0 if self.save_pipeline else 1
        check("num_images", self.num_images, self.num_images >= least, f"at least {least}")
        out = Path(self.out or "")
        is_folder = out.is_dir() or not out.suffix[1:2].isalpha()  # "cfg1.25" is one too
        allowed = 'a path that ends in ".npz", or a folder without an ending such as ".zip"'
        check("out", self.out, is_folder or out.suffix == ".npz", allowed)
        written = self.out or self.grid or self.denoising or self.counts_heads or self.score
        if not self.num_images and written:
            raise ValueError(
                "num_images 0 leaves nothing for --out, --grid, --denoising, --head-usage, --head-load and --score"
            )
        if self.num_images:
            check_classes("classes", self.classes, self.num_images)
        self.head_budget = read_head_budget(self.head_budget, "head_budget")
        check("steps", self.steps, 1 <= self.steps <= 1000, "1 to 1000")
        check("cfg_scale", self.cfg_scale, self.cfg_scale >= 0, "0 or more")
        guided = self.guide_channels
        check("guide_channels", guided, guided in (None, "all") or guided >= 1, 'at least 1, or "all"')
        low, high = self.cfg_interval
        check("cfg_interval", [low, high], 0 <= low <= high <= 1, "0 <= low <= high <= 1")
        check_seed(self.seed)
        for name, endings in (("grid", (".png",)), ("head_usage", (".png",)), ("denoising", (".png", ".gif"))):
            path = getattr(self, name)
            check(name, path, path is None or path.endswith(endings), f"a path that ends in {' or '.join(endings)}")
        if self.num_images and not written:
            raise ValueError(
                f"num_images {self.num_images}: nothing would be written; give --out, --grid, --denoising, --head-usage, --head-load or --score, or "
                "--save-pipeline with --num-images 0"
            )

    @property
    def counts_heads(self) -> bool:
        return bool(self.head_usage or self.head_load)

    def scoring(self) -> dict:
        """Keyword arguments of `scores.make_scorer`."""
        return dict(
            key="--score", reference=self.score, split=self.score_split, default_split="val",
            extractor=self.extractor or "inception", inception_weights=self.inception_weights,
            allow_biased=self.allow_biased, num_images=self.num_images,
        )  # fmt: skip
