"""How near the features of a diffusion model's blocks are to those of a teacher, as REPA measures it (Yu 2024, figures 2 and 3).

    python -m moh_vision alignment RUN [RUN ...] --teacher hf-hub:OWNER/NAME --output alignment.png
    python -m moh_vision alignment SiT-XL-2-256x256.pt --model sit_xlarge_patch2 --data.root IMAGENET --vae stabilityai/sd-vae-ft-ema \\
        --teacher vit_base_patch14_dinov2 --images 10000 --output alignment.png

RUN comes first: a run of a diffusion model, or other weights with --model. The score of a block is CKNNA
(Huh 2024): how far images that are neighbours by the block's tokens of a noisy image are neighbours by the
teacher's tokens of the clean one; 1 is full agreement. Tokens are averaged over the patches, and the label is
"no class". --at says how noisy: 0 is the image, 1 noise. For a run with repa.teacher, of which checkpoints are
there, the mean cosine behind its projector is printed too. Images are those of the validation split.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import Line, draw_lines
from moh_vision.common.io import TensorFiles
from moh_vision.common.progress import Progress, say
from moh_vision.common.wings import DIFFUSION
from moh_vision.data.batches import BadSamples, evaluation_loader, evenly_spread
from moh_vision.data.decode import Decoding
from moh_vision.diffusion.config import OpenedDitConfig
from moh_vision.diffusion.inputs import PixelInputs, open_inputs
from moh_vision.diffusion.loading import open_model
from moh_vision.diffusion.objectives import NUM_TIMESTEPS, OBJECTIVES, Objective, make_objective
from moh_vision.diffusion.task import Alignment
from moh_vision.engine.accelerator import make_accelerator
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.step_folders import latest_checkpoint
from moh_vision.evaluation.representations import NEIGHBOURS, cknna
from moh_vision.models.describe import aligned
from moh_vision.models.teachers import Teacher
from moh_vision.models.weights import Weights, find_weights

REST = "RUN"
AT = (
    0.1,
    0.25,
    0.5,
    0.75,
)  # noise of the images, of which REPA's figures show the first and the last but one


class Compared(NamedTuple):
    """A model that is compared with the teacher.

    Attributes:
        name: the run, as it was given.
        found: its weights.
        model: in eval mode, on the device.
        inputs: the images.
        objective: adds noise to them.
        teacher: has a feature for each of the model's patches.
        projector: of a run that learnt with a teacher, or None.
    """

    name: str
    found: Weights
    model: nn.Module
    inputs: PixelInputs
    objective: Objective
    teacher: Teacher
    projector: Alignment | None


def options(add) -> None:
    add("runs", nargs="+", metavar="RUN", help="a run, or a file of weights; they come first")
    add(
        "--teacher",
        required=True,
        metavar="NAME",
        help="as repa.teacher: a model of timm, or a classification run",
    )
    add(
        "--model",
        metavar="NAME",
        help="the model of weights that do not say it, such as sit_xlarge_patch2",
    )
    add(
        "--images",
        type=int,
        default=1000,
        metavar="N",
        help="evenly spread (%(default)s; REPA: 10000)",
    )
    add("--neighbours", type=int, default=NEIGHBOURS, metavar="K", help="of an image (%(default)s)")
    add(
        "--at",
        type=float,
        nargs="+",
        default=AT,
        metavar="T",
        help=f"fractions of the timesteps ({' '.join(map(str, AT))})",
    )


def figure(options) -> Drawn:
    for t in options.at:
        if not 0 <= t <= 1:
            raise ValueError(f"--at {t:g}: expected 0 (the image) to 1 (noise)")
    if not 2 <= options.neighbours < options.images:
        raise ValueError(
            f"--neighbours {options.neighbours}: expected 2 or more, and fewer than --images {options.images}"
        )
    found = [find(run, options.model) for run in options.runs]
    configs = [config_of(one, options.rest) for one in found]
    accelerator = make_accelerator(configs[0].mixed_precision)
    compared = [open_compared(*pair, options, accelerator.device) for pair in zip(found, configs)]
    lines = []
    numbers = []
    text = []
    for one, config in zip(compared, configs):
        say(
            f"{one.name}: weights of {one.found.said}; {options.images} images of {config.data.root}"
        )
        scores, cosines = compare(one, options, accelerator, config.data)
        for t, of_blocks in zip(options.at, scores):
            name = f"{Path(one.name).name}, t = {t:g}"
            lines.append(Line(name, {block: [score] for block, score in enumerate(of_blocks, 1)}))
        text += [f"{one.name}:", *in_words(options.at, scores, cosines)]
        numbers.append(
            dict(
                run=one.name,
                weights=one.found.said,
                model=one.found.architecture,
                teacher=options.teacher,
                data=config.data.root,
                at=list(options.at),
                cknna=scores,
                cosine=cosines,
            )
        )
    drawn = draw_lines(lines, "block", f"CKNNA with {options.teacher}")
    drawn.axes[0].xaxis.get_major_locator().set_params(integer=True)
    about = dict(images=options.images, neighbours=options.neighbours, torch=torch.__version__)
    return Drawn(drawn, dict(about, lines=numbers), "\n" + "\n".join(text))


def find(run: str, model: str | None) -> Weights:
    """Find the weights of a diffusion model; refuse those that do not say of which model they are."""
    found = find_weights(run, model, wing=DIFFUSION.name, key="RUN")
    if found.architecture is None:
        raise ValueError(
            f"{run} does not say of which model it is: give --model, such as sit_xlarge_patch2"
        )
    return found


def config_of(found: Weights, rest: Sequence[str]) -> OpenedDitConfig:
    """Return the keys of the data that a model is compared on: the run's own, changed by the options."""
    return parse_config(OpenedDitConfig, ["--checkpoint", found.source, *rest], "alignment")


def open_compared(found: Weights, config: OpenedDitConfig, options, device) -> Compared:
    """Open a model, its validation images, its objective and a teacher; refuse what does not fit, and too few images."""
    model, metadata = open_model(found, device)
    if metadata["label_drop"] == 0:
        raise ValueError(
            f'{found.source} was trained with label_drop 0: it knows no label "no class", with which models are compared'
        )
    data = config.data
    vae = config.vae or "none"
    inputs = open_inputs(
        data.root, vae, data.img_size, "none", device, split="val", decoding=Decoding.of(data)
    )
    if inputs.colours is None:
        raise ValueError(
            f"data.root {data.root} holds stored latents: the teacher needs images; give them, and vae"
        )
    total = len(inputs.source)
    if total <= options.neighbours:
        raise ValueError(
            f"--neighbours {options.neighbours}: data.root {data.root} has {total} validation images, more are needed"
        )
    takes = [model.config.sample_size, model.config.in_channels]
    given = [inputs.img_size, inputs.channels]
    if takes != given:
        raise ValueError(
            f"data.root {data.root} has side and channels {given}, the model of {found.source} takes {takes}"
        )
    half = [0.5] * inputs.colours  # images are normalised to -1 .. 1
    teacher = Teacher("--teacher", options.teacher, half, half)
    width = teacher.match_grid(model.config.sample_size // model.config.patch_size)
    objective = objective_of(found, model)
    projector = projector_of(found, model, width)
    return Compared(found.source, found, model, inputs, objective, teacher.to(device), projector)


def objective_of(found: Weights, model: nn.Module) -> Objective:
    """Return the objective that a model was trained with, or of other weights one with the same path to noise."""
    if found.config:
        return make_objective(found.config)
    prediction = model.prediction
    for objective_class in OBJECTIVES.values():
        if objective_class.prediction.path == prediction.path:
            objective = objective_class()
            objective.prediction = prediction
            return objective
    raise ValueError(
        f"{found.source}: path {prediction.path} of its prediction is of no objective that is known here"
    )


def projector_of(found: Weights, model: nn.Module, teacher_width: int) -> Alignment | None:
    """Return the projector of a run with repa.teacher, from its newest checkpoint; None where there is none."""
    repa = found.config.get("repa") or {}
    if not found.run or not repa.get("teacher"):
        return None
    newest = latest_checkpoint(found.run, say)
    if newest is None:
        return None
    _, folder = newest
    alignment = Alignment(repa["block"], repa["weight"], model.config.hidden_size, teacher_width)
    tensors = TensorFiles(folder / "beside.safetensors")
    state = {name: tensors.read(f"alignment.{name}") for name in alignment.state_dict()}
    alignment.load_state_dict(state)
    return alignment.to(next(model.parameters()).device).eval()


@torch.no_grad()
def compare(
    one: Compared, options, accelerator, data
) -> tuple[list[list[float]], list[float] | None]:
    """Return the CKNNA of every block at each of --at, and the mean cosine behind the projector at each, if there is one."""
    device = accelerator.device
    slices = evenly_spread(len(one.inputs.source), options.images)
    unreadable = BadSamples(len(one.inputs.source), data.max_bad_fraction)
    images = one.inputs.dataset(seed=0, draw=one.objective.draw, label_drop=0.0)
    batches = evaluation_loader(images, slices, data.workers, unreadable)
    of_teacher: list[Tensor] = []
    of_blocks: list[list[list[Tensor]]] = [
        [] for _ in options.at
    ]  # at each t, batch by batch, of every block
    losses: list[list[float]] = [[] for _ in options.at]
    with Progress("comparing", len(slices), "batch") as progress:
        for batch in batches:
            batch = send_to_device(batch, device)
            with accelerator.autocast():
                targets = one.teacher.tokens(batch["images"])  # [B, N, D]
                batch = one.inputs.encode(batch)
            of_teacher.append(targets.float().mean(1))
            none = torch.full_like(batch["labels"], one.model.config.num_classes)
            for number, t in enumerate(options.at):
                # The path of 1000 steps has no step 1000.
                step = min(round(t * NUM_TIMESTEPS), NUM_TIMESTEPS - 1)
                timesteps = torch.full_like(batch["labels"], step)
                noisy = one.objective.add_noise(batch["images"], batch["noise"], timesteps)
                tokens: list[Tensor] = []
                with accelerator.autocast():
                    one.model.forward_routed(noisy, timesteps, none, tokens=tokens)
                    if one.projector:
                        loss = one.projector(tokens, targets)
                        losses[number].append(loss.item() * len(targets))
                of_blocks[number].append([of_block.float().mean(1) for of_block in tokens])
            progress.add()
    targets = torch.cat(of_teacher)
    scores = []
    for by_batch in of_blocks:
        features = [torch.cat(of_block) for of_block in zip(*by_batch)]
        scores.append([cknna(of_block, targets, options.neighbours) for of_block in features])
    cosines = None
    if one.projector:
        cosines = [1 - sum(of_t) / len(targets) for of_t in losses]
    return scores, cosines


def in_words(
    at: Sequence[float], scores: Sequence[Sequence[float]], cosines: Sequence[float] | None
) -> list[str]:
    """Return a table of scores, a row a block, as lines."""
    rows = [("block", *(f"t = {t:g}" for t in at))]
    for block, of_block in enumerate(zip(*scores), 1):
        rows.append((str(block), *(f"{score:.4f}" for score in of_block)))
    if cosines:
        rows.append(("cosine", *(f"{cosine:.4f}" for cosine in cosines)))
    return aligned(rows)
