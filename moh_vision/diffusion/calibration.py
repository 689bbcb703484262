"""A diffusion model and its training images for `moh_vision.analysis.search`; its samples for `budget_curve`."""

import tempfile
from pathlib import Path
from typing import List

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from moh_vision.analysis.budget_curve import Scored
from moh_vision.analysis.search import CONVERTED, Calibration, mean_over
from moh_vision.data.batches import BadSamples, calibration_halves
from moh_vision.diffusion.config import CalibrationConfig, SampleConfig
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.diffusion.inputs import open_inputs
from moh_vision.diffusion.latents.vae import LatentSpace
from moh_vision.diffusion.objectives import NUM_TIMESTEPS, make_objective
from moh_vision.diffusion.opening import open_pipeline
from moh_vision.diffusion.sample import draw, draw_labels, open_scorer, settle
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.run import index_dir, make_accelerator
from moh_vision.models.convert import convert
from moh_vision.models.pretrained import is_dense
from moh_vision.models.weight_files import weights_said
from moh_vision.models.weights import from_run


def open_calibration(argv: List[str], images: int) -> Calibration:
    """Open the model of the run --checkpoint, converted if dense, and its diffusion loss on training images.

    There are `images` for the search, and as many others to compare. Image i always has the timestep
    and the noise that (0, i) draws; no label is dropped and no image mirrored.
    """
    config = parse_config(CalibrationConfig, argv, "search")
    accelerator = make_accelerator(config.mixed_precision, config.tf32)
    d = config.data
    model, about = from_run(config.checkpoint, "diffusion")
    objective = make_objective(about["config"])
    inputs = open_inputs(d.root, config.vae, d.img_size, "none", index_dir(config.output), accelerator.device)
    sizes = [about["arguments"][key] for key in ("img_size", "in_chans", "num_classes")]
    given = [inputs.img_size, inputs.channels, len(inputs.source.classes)]
    if sizes != given:
        raise ValueError(
            f"data.root {d.root} has side, channels and classes {given}, the model of {config.checkpoint} takes {sizes}"
        )
    trained, made = about.get("vae") and LatentSpace(**about["vae"]), inputs.space
    if (trained and trained.sha256) != (made and made.sha256):
        raise ValueError(
            f"data.root {d.root}: latents of the VAE {made}, {config.checkpoint} was trained on those of {trained}"
        )
    unreadable = BadSamples(len(inputs.source), d.max_bad_fraction)
    halves = calibration_halves(inputs.dataset(0, objective.draw, 0.0), images, d.workers, unreadable)
    device = accelerator.device
    searched, others = (
        [send_to_device(inputs.encode(send_to_device(batch, device), accelerator.autocast()), "cpu") for batch in half]
        for half in halves
    )
    dense = is_dense(model)
    if dense:
        noisy = [
            (objective.add_noise(b["images"], b["noise"], b["timesteps"]), b["timesteps"], b["labels"])
            for b in searched
        ]
        model = convert(model, CONVERTED, calibrate=noisy)
    task = DiffusionTask(model, 0.0, objective).to(device).eval()

    def loss(batch: dict) -> Tensor:
        with accelerator.autocast():
            return task(**send_to_device(batch, device))["task_loss"]

    of = dict(weights=about["weights"], model=about["architecture"], data=d.root, split="train")
    of.update(images=images, converted=dense, loss="diffusion loss at fixed timesteps and noise")
    return Calibration(model, mean_over(searched, loss), mean_over(others, loss), of)


def open_scored(argv: List[str]) -> Scored:
    """Open the model of the run --checkpoint, and the scores of its samples.

    The samples come from the same noise, whatever heads run.
    """
    given = {
        argument.partition("=")[0].replace("-", "_").removeprefix("__") for argument in argv if argument[:2] == "--"
    }
    for name in ("out", "grid", "denoising", "head_usage", "head_load", "save_pipeline", "score_file", "overwrite"):
        if name in given:
            raise ValueError(f"{name} has no effect: the samples are scored and not kept")
    if "head_budget" in given:
        raise ValueError("head_budget has no effect: --shares says how many heads run")
    if "score" not in given:
        raise ValueError("--score REFERENCE is needed, as sample.py takes it")
    config = parse_config(SampleConfig, argv, "budget_curve")
    accelerator = make_accelerator(config.mixed_precision)
    pipe, about = open_pipeline(config)
    classes, device = about["classes"], accelerator.device
    chosen, _ = settle(config, about)
    scorer = open_scorer(config, pipe, about, about["run"] or "samples")
    pipe.to(device).set_progress_bar_config(disable=True)
    model, labels = pipe.transformer, draw_labels(config, chosen)

    def scores() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            parts = ImageParts(Path(folder), config.num_images, config.batch_size, {})
            draw(config, accelerator, pipe, parts, labels, classes)
            found, _ = scorer(parts, labels, device, config.batch_size)
        for key in ("recognised", "recognised_real"):
            if found.get(key) is not None:
                found[key] *= 100  # percent, as in tables
        return found

    generator, count = torch.Generator().manual_seed(config.seed), min(config.batch_size, config.num_images)
    noise = torch.randn(count, model.config.in_channels, *[model.config.sample_size] * 2, generator=generator)
    timesteps = torch.randint(NUM_TIMESTEPS, (count,), generator=generator)
    inputs = send_to_device((noise, timesteps, labels[:count]), device)

    def forward() -> None:
        with accelerator.autocast():
            model(*inputs)

    how = f"{config.num_images} samples, {config.sampler} {config.steps} steps, guidance {config.cfg_scale:g}"
    said = weights_said(about["weights"], config.weights)
    of = dict(weights=said, model=about["architecture"], data=f"{how}; reference {config.score}")
    return Scored(model, scores, forward, dict(of, batch_size=count))
