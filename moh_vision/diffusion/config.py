"""The configurations of a diffusion run, of sampling from one, and of opening one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from moh_vision.common.errors import nearest
from moh_vision.common.io import composed
from moh_vision.data.imagenet import numbers_by_name
from moh_vision.diffusion.objectives import (
    FlowConfig,
    NoiseKeys,
    Objective,
    names_by_keys,
    objective_class,
)
from moh_vision.diffusion.schedulers import (
    check_sampler,
    few_steps,
    sampler_for,
    sampler_in_words,
)
from moh_vision.engine.config import (
    MAX_SEED,
    HeadBudgets,
    ImageRunConfig,
    ImagesConfig,
    ModelConfig,
    OpenedConfig,
)
from moh_vision.engine.keys import Idle, Section, key
from moh_vision.models.prediction import Prediction

Classes = list[str] | None  # as text, so that a class with the name 007 is not taken for number 7
DRAWS = "num_images!=0"  # the condition of keys that only have an effect if images are drawn
# The keys that --protocol sets; other values of these keys are refused. "adm" is how DiT and MoH-DiT draw the images
# that ADM's evaluator scores: the defaults of their sample_ddp.py. Published scores name their guidance scale.
PROTOCOLS = dict(
    adm=dict(
        num_images=50_000, labels="random", weights="ema", sampler="ddpm", steps=250, guide_channels=3, guide_scale=1.0,
        cfg_interval=(0.0, 1.0), mixed_precision="no", cache="none", extractor="inception", classes=None,
    ),
)  # fmt: skip


def class_numbers(
    key: str, asked: Sequence[str], names: Mapping[int, str], count: int
) -> list[int]:
    """Return the number of each class in `asked`: its name, a word of an ImageNet name, or a number as text.

    A name is preferred to a number.

    Args:
        key: the key or option that classes were given with, for messages.
        asked: the classes to find.
        names: names of all classes, by number.
        count: number of classes.
    """
    if asked and not names:
        raise ValueError(f"{key} {asked[0]}: the model was trained without classes")
    by_name = numbers_by_name(names)
    chosen = []
    for text in asked:
        numbers = by_name.get(composed(text), [])
        if not numbers and text.isdecimal() and int(text) < count:
            numbers = [int(text)]
        if len(numbers) > 1:
            raise ValueError(
                f"{key} {text}: classes {', '.join(map(str, numbers))} are called so; give a number"
            )
        if not numbers:
            near = list(by_name)[:5]
            if not text.isdecimal():
                near = nearest(text, by_name, 1) or near
            allowed = f"there are {count}, such as {', '.join(near)}, or 0 to {count - 1}"
            raise ValueError(f"{key} {text}: no such class; {allowed}")
        chosen += numbers
    return chosen


def chosen_classes(key: str, asked: Sequence[str] | None, names: list[str]) -> list[int]:
    """Return the numbers of the classes in `asked`, and refuse a class that is named twice.

    Without `asked`, return the numbers of all `names`, or [0], "no class", if the model has no classes.
    """
    if asked is None:
        return list(range(len(names))) or [0]
    numbers = class_numbers(key, asked, dict(enumerate(names)), len(names))
    for index, number in enumerate(numbers):
        if number in numbers[:index]:
            raise ValueError(
                f"{key} {asked[index]}: class {number} ({names[number]}) is named twice"
            )
    return numbers


def check_classes(name: str, classes: Classes, images: int) -> None:
    """Raise ValueError unless there is an image for each class."""
    if classes and images < len(classes):
        raise ValueError(
            f"{name} names {len(classes)} classes, more than the {images} images that are drawn"
        )


class Guided(Section):
    """Keys of guidance, whatever their defaults."""

    @property
    def guidance(self) -> str:
        """The guidance in words."""
        text = f"guidance {self.cfg_scale:g}"
        if self.guide:
            text += f", {self.guide_scale:g} away from {self.guide}"
        low, high = self.cfg_interval
        is_guided = self.cfg_scale != 1 or self.guide
        if is_guided and (low, high) != (0, 1):
            text += f" between {low:g} and {high:g} of the timesteps"
        return text


@dataclass
class DrawConfig(Guided, needs=".every", free=True):
    """How samples are drawn while a diffusion model trains: always of the same noise and labels, with the EMA if any."""

    every: int = key(0, ge=0)
    """Steps between two previews (or scores); one is also at the end of a run of at least so many steps; 0: never."""
    images: int = key(40, ge=1)
    """Number of images; image i has class i modulo the number of classes."""
    sampler: str | None = key(None)
    """Sampler, as in sample.py; left out: "ddim", or for a velocity "euler"."""
    steps: int = key(50, ge=1, le=1000, needs=".sampler!=dopri5")
    """Denoising steps."""
    cfg_scale: float = key(1.5, ge=0)
    """Scale of classifier-free guidance; 1: none."""
    guide: str | None = key(None, needs=".guide_scale!=1")
    """A weak model to guide away from; see sample.py."""
    guide_scale: float = key(1.0, ge=0, needs=".guide")
    """Scale of autoguidance; 1: none."""
    cfg_interval: tuple[float, float] = key(
        (0.0, 1.0), ge=0, le=1, rising=True, needs=".cfg_scale!=1 or .guide"
    )
    """The fractions of the timesteps between which guidance is applied; see sample.py."""
    seed: int = key(0, ge=0, le=MAX_SEED)
    """Seed of the noise."""

    def agree(self) -> None:
        check_sampler(f"{self.section}.sampler", self.sampler)

    def sampler_for(self, prediction: Prediction) -> str:
        """Return the sampler for a model with this prediction: the one asked for, or one that draws no noise."""
        return sampler_for(prediction, self.sampler, f"{self.section}.sampler", draws_noise=False)


@dataclass
class PreviewConfig(DrawConfig, section="preview"):
    """Pictures: OUTPUT/previews/step_N.png."""

    columns: int | None = key(None, ge=1, needs="not .classes")
    """Images a row; left out: one class a row with its name, for at most ten rows of ten, else ten images a row."""
    classes: Classes = key(None)
    """Numbers or names of the classes that are drawn, one a row with its name; left out: all classes."""

    def agree(self) -> None:
        super().agree()
        check_classes("preview.classes", self.classes, self.images)


@dataclass
class ScoreConfig(DrawConfig, section="score"):
    """Fidelity scores while training, into metrics.jsonl; see docs/guides/sampling.md."""

    classes = None  # not a key here: all classes are drawn
    reads = dict(key="score.reference", default_split="train")  # arguments of `make_scorer`

    images: int = key(5000)
    cfg_scale: float = key(1.0)
    reference: str | None = key(None)
    """What samples are compared with, as `score` of sample.py; left out: data.root."""
    split: Literal["train", "val"] | None = key(None)
    """Split of a data set: "train" (the default) or "val"."""
    extractor: str = key("inception")
    """Network whose features are compared: "inception", "timm:NAME", "timm:local-dir:FOLDER", or a classification run."""
    inception_weights: str | None = key(None)
    """The .pth file of torch-fidelity; left out: fetched once."""
    allow_biased: bool = key(False)
    """Score also with no more images than features, labelled FID@N."""

    def sampled(self, checkpoint: str, root: str, prediction: Prediction) -> "SampleConfig":
        """Return the keys of sample.py for these scores.

        Args:
            checkpoint: the run.
            root: data.root, the reference if none is given.
            prediction: what the model predicts.
        """
        same = (
            "steps",
            "cfg_scale",
            "guide",
            "guide_scale",
            "cfg_interval",
            "seed",
            "extractor",
            "inception_weights",
            "allow_biased",
        )
        return SampleConfig(
            checkpoint=checkpoint,
            num_images=self.images,
            sampler=self.sampler_for(prediction),
            score=self.reference or root,
            score_split=self.split,
            **{name: getattr(self, name) for name in same},
        )


@dataclass
class DitModelConfig(ModelConfig):
    """The model; what is left out keeps the registered model's own value."""

    name: str = key("moh_dit_small_patch2_75")
    patch_bottleneck: int | None = key(None, ge=1, needs="not .pretrained")
    """Width of a linear map between a patch and the embedding, for large patches (Li and He 2025: 128)."""


@dataclass
class RepaConfig(Section, section="repa", needs=".teacher"):
    """Representation alignment (Yu 2024); see `moh_vision.diffusion.task.Alignment`."""

    teacher: str | None = key(None)
    """A frozen model with features of patches: one of timm (NAME, hf-hub:OWNER/NAME or local-dir:FOLDER) or the folder of a
    classification run. The data must be images."""
    block: int = key(8, ge=1)
    """Block of the model, counted from 1, whose tokens come near the teacher's features of the clean image."""
    weight: float = key(0.5, gt=0)
    """Weight of one minus the mean cosine similarity."""


@dataclass
class DitConfig(NoiseKeys, ImageRunConfig):
    """Diffusion."""

    # After as many steps as a classifier takes, samples of 100 pictures are blurred patches: docs/getting-started.md.
    images_per_root: ClassVar[int] = 4 * ImageRunConfig.images_per_root

    kind: Literal["diffusion"] = key("diffusion")
    vae: str | None = key(None)
    """Name on the Hugging Face hub, or folder, of the VAE of the latents; "none" or left out: on pixels, or on latents
    where data.root holds them, whose own VAE decodes previews."""
    model: DitModelConfig = field(default_factory=DitModelConfig)
    objective: str = key("noise")
    """What the model predicts: the "noise" of 1000 steps, as DiT, or the velocity of a "flow", as SiT; or the name of an
    objective in a file of `imports`."""
    objective_kwargs: dict[str, Any] | None = key(None)
    """Options of an objective of your own."""
    flow: FlowConfig = field(default_factory=FlowConfig)
    label_drop: float = key(0.1, ge=0, lt=1)
    """Share of labels replaced by "no class", for guidance."""
    repa: RepaConfig = field(default_factory=RepaConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)

    @property
    def objective_class(self) -> type[Objective]:
        """The class of the objective; ValueError for an unknown name."""
        return objective_class(vars(self))

    def agree(self) -> None:
        super().agree()
        objective = self.objective_class
        self.vae = self.vae or "none"
        for draw in (self.preview, self.score):
            if not draw.every:
                continue
            draw.sampler_for(objective.prediction)
            if draw.cfg_scale != 1 and not self.label_drop:
                said = f"{draw.section}.cfg_scale {draw.cfg_scale:g}"
                raise ValueError(f"{said} needs label_drop above 0, or 1 for no guidance")

    def idle(self) -> Iterator[Idle]:
        yield from super().idle()
        for keys, names in names_by_keys().items():
            needed = f"objective {' or '.join(names) or 'of your own'}"
            yield Idle(keys, keys == self.objective_class.keys, needed, "objective")

    def sampling_options(self) -> str:
        return few_steps(self.objective_class.prediction)


@dataclass(kw_only=True)
class SampleConfig(Guided):
    """Sampling from a trained run."""

    checkpoint: str = key(also="ckpt")
    """Folder of a diffusion run, one of its checkpoints (RUN/checkpoints/step_N), or a .safetensors file in either; the
    folder of a pipeline, ours or diffusers' DiTPipeline; with --model other weights. The name of a model, such as
    moh_dit_xlarge_patch2_90, fetches its published weights."""
    model: str | None = key(None)
    """Name of a model, such as moh_dit_xlarge_patch2_90, for weights that `load_checkpoint` reads. SiT's have the layout of
    DiT's: the name, such as sit_xlarge_patch2, says which they are."""
    weights: Literal["ema", "ema2", "model"] = key("ema", needs="checkpoint!=*.safetensors")
    """"ema" (falls back to "model" where the run or the file has none), "model", or "ema2": the second EMA, of a shorter
    memory, in files of JiT's training script."""
    head_budget: HeadBudgets | None = key(None, ge=0)
    """Share of active heads such as 0.5, as `set_head_budget` takes it; left out: the run's."""
    mlp_budget: HeadBudgets | None = key(None, ge=0)
    """Share of active groups of routed MLPs, likewise."""
    protocol: Literal["adm"] | None = key(None)
    """"adm": as published FIDs are made (docs/guides/sampling.md): 50,000 images, random labels, EMA weights, 250 steps of
    ddpm, guidance of the first 3 channels in all steps, no mixed precision, ADM's statistics."""
    num_images: int | None = key(None, ge=0)
    """Number of images; left out: 100, or those of the protocol."""
    classes: Classes = key(None, needs=DRAWS)
    """Numbers or names of the classes that are drawn, such as 207 360 (in a file ["207", "360"]); left out: all. A name
    goes before a number."""
    labels: Literal["balanced", "random"] | None = key(None, needs=DRAWS)
    """"balanced": the classes in turn; "random": drawn from (seed, i); left out: random where the reference holds ADM's
    statistics, else balanced."""
    sampler: str | None = key(None)
    """"ddpm" (left out), "ddim" or "dpm-solver++"; of a model trained with objective flow "sde" (left out), "sit-sde",
    "euler", "heun" or "dopri5", which chooses its own steps. The last three sample from any velocity."""
    steps: int = key(250, ge=1, le=1000, needs="sampler!=dopri5")
    """Denoising steps."""
    cfg_scale: float = key(1.0, ge=0, needs=DRAWS)
    """Scale of classifier-free guidance; 1: none."""
    guide: str | None = key(None, needs="guide_scale!=1")
    """A weak model to guide away from: another run, checkpoint or pipeline of the same images and classes, such as an
    earlier checkpoint, of its EMA if any; or "heads:SHARE", the same model with fewer heads (and groups of routed MLPs), such
    as heads:0.5."""
    guide_scale: float = key(1.0, ge=0, needs=f"guide; {DRAWS}")
    """Scale of autoguidance, away from what `guide` predicts; 1: none."""
    guide_channels: int | Literal["all"] | None = key(None, ge=1, needs="cfg_scale!=1 or guide")
    """Number of channels that are guided, from the first, or "all"; left out: 3 of 4, as in the official DiT, and all of any
    other number."""
    cfg_interval: tuple[float, float] = key(
        (0.0, 1.0), ge=0, le=1, rising=True, needs="cfg_scale!=1 or guide"
    )
    """Guidance is applied strictly between these fractions of the timesteps, from 0 (clean) to 1 (noise); 0 and 1
    themselves are no bounds."""
    seed: int = key(0, ge=0, le=MAX_SEED, needs=DRAWS)
    """The noise of image i depends on (seed, i) alone."""
    batch_size: int = key(100, ge=1, needs=DRAWS)
    """Images at a time on each process; equal sizes give equal bits."""
    mixed_precision: Literal["no", "bf16", "fp16"] = key("no")
    """"no", "bf16" or "fp16"."""
    cuda_graph: Literal["off", "on", "auto"] = key("off", needs=DRAWS)
    """Replay the model's predictions as a CUDA graph (docs/guides/gpu.md): "on" if its results equal the eager ones, "auto" if
    it is also faster. "off" until it has run on a card."""
    cache: str = key("none", needs=DRAWS)
    """Reuse what earlier steps computed, by a cache of diffusers (docs/guides/sampling.md): "taylorseer:3" computes the blocks in
    every third step and extrapolates between, "first_block:0.1" skips the blocks after the first where that one's change of
    the tokens is, in the mean of a batch, within a tenth of what it was in the last step that ran all."""
    vae: str | None = key(None)
    """Name or folder of the VAE of a latent model; left out: the one that the run was trained with."""
    save_pipeline: str | None = key(None)
    """A folder for model, scheduler and VAE, as `MoHDiTPipeline.from_pretrained` reads it; with num_images 0 that is
    all."""
    out: str | None = key(None)
    """A folder for PNGs, or a .npz file (arr_0 uint8 [N, h, w, channels], arr_1 labels)."""
    grid: str | None = key(None, ends=(".png",))
    """PNG with one class a row: those of `classes`, or the first ten."""
    grid_columns: int = key(10, ge=1, needs="grid")
    """Images a row."""
    denoising: str | None = key(None, ends=(".png", ".gif"), needs="sampler!=dopri5")
    """What the sampler holds after some of its steps, of the first eight images: .png, an image a row and eight moments;
    .gif, an animation."""
    head_load: str | None = key(None, needs="sampler!=dopri5")
    """JSON of which heads the tokens of each class and timestep ran, for `python -m moh_vision head-load`."""
    score: str | None = key(None)
    """The reference: a folder of images, a .npz (images, or ADM's or saved statistics), or a data set as in
    data.root."""
    score_split: Literal["train", "val"] | None = key(None, needs="score")
    """Split of a data set: "val" (the default) or "train"."""
    score_colour_space: Literal["keep", "srgb"] | None = key(None, needs="score")
    """How the reference's colours are read, as data.colour_space; left out: as those of the training."""
    score_value_range: tuple[float, float] | None = key(
        None, ge=-(2**31), le=2**32 - 1, rising=True, needs="score"
    )
    """Values of black and white in the reference, as data.value_range; left out: those of the training."""
    extractor: str | None = key(None, needs="score")
    """Network whose features are compared: "inception" (left out), "timm:NAME", "timm:local-dir:FOLDER", or a classification run; of the same classes as the
    data set it also tells how many samples are recognised."""
    inception_weights: str | None = key(None, needs="score")
    """The .pth file of torch-fidelity; left out: fetched once."""
    allow_biased: bool = key(False, needs="score")
    """Score also with no more images than features, labelled FID@N."""
    score_file: str | None = key(None, needs="score")
    """Where the scores go; left out: scores.json in the run (of a checkpoint: scores_step_N.json)."""
    imports: list[str] = key([])
    """Python files of your own that add routers, objectives, samplers or data sets, as the run imported them."""
    overwrite: bool = key(False)
    """Replace what is at the output paths; in a folder the samples that sample.py wrote there, other files stay."""

    @property
    def sampling_in_words(self) -> str:
        """Sampler, steps, guidance and cache in words, for messages and records."""
        text = f"{sampler_in_words(self.sampler, self.steps)}, {self.guidance}"
        if self.cache != "none":
            text += f", cache {self.cache}"
        return text

    def agree(self) -> None:
        check_sampler("sampler", self.sampler)
        if parse_cache(self.cache):
            for name, idle in (("cuda_graph", "off"), ("head_load", None)):
                if getattr(self, name) != idle:
                    raise ValueError(
                        f"cache {self.cache} leaves blocks out, which {name} {getattr(self, name)} needs: give one of them"
                    )
        for name, value in PROTOCOLS.get(self.protocol, {}).items():
            if getattr(self, name) not in (None, value):
                shown = "all" if value is None else value
                meant = f"protocol {self.protocol} stands for {shown}"
                raise ValueError(f"{name} {getattr(self, name)}: {meant}")
            setattr(self, name, value)
        if self.num_images is None:
            self.num_images = 100
        if not self.num_images and not self.save_pipeline:
            raise ValueError("num_images 0 is out of range: at least 1")
        out = Path(self.out or "")
        # An ending begins with a letter: "cfg1.25" is the name of a folder.
        is_folder = out.is_dir() or not out.suffix[1:2].isalpha()
        if not is_folder and out.suffix != ".npz":
            allowed = 'a path that ends in ".npz", or a folder without an ending such as ".zip"'
            raise ValueError(f"out {self.out!r} is out of range: {allowed}")
        written = self.out or self.grid or self.denoising or self.head_load or self.score
        if not self.num_images and written:
            raise ValueError(
                "num_images 0 leaves nothing for --out, --grid, --denoising, --head-load and --score"
            )
        if self.num_images:
            check_classes("classes", self.classes, self.num_images)
        if self.num_images and not written:
            outputs = "--out, --grid, --denoising, --head-load or --score, or --save-pipeline with --num-images 0"
            raise ValueError(
                f"num_images {self.num_images}: nothing would be written; give {outputs}"
            )


def parse_cache(text: str) -> tuple[str, float] | None:
    """Return the name and the number of a cache, None for "none"; ValueError for what is no cache."""
    name, _, number = text.partition(":")
    try:
        if text == "none":
            return None
        if name == "taylorseer" and int(number) > 1:
            return name, int(number)
        if name == "first_block" and 0 < float(number) < math.inf:
            return name, float(number)
    except ValueError:
        pass
    expected = "none, taylorseer:N with N of 2 or more, or first_block:T with T above 0"
    raise ValueError(f"cache {text!r} is out of range: {expected}")


@dataclass(kw_only=True)
class OpenedDitConfig(OpenedConfig, runs=DitConfig):
    """A diffusion run that a command opens, and its images."""

    vae: str | None = key(None)
    """Name or folder of the VAE; left out: the one that the run was trained with."""
    data: ImagesConfig = field(default_factory=ImagesConfig)
