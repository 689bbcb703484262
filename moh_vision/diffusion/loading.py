"""Opens what `sample.py --checkpoint` takes: runs, saved pipelines, and published weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import List, Optional, Tuple

import timm
from diffusers.utils import logging
from torch import nn

from moh_vision.data.imagenet import unnamed_classes
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.latents.vae import LatentSpace, fit_vae, load_vae, vae_fingerprint
from moh_vision.diffusion.objectives import make_objective
from moh_vision.diffusion.sampling import Guidance, sampler_for
from moh_vision.engine.commands import reason_of, refuse_missing
from moh_vision.engine.io import run_of
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.weight_files import read_tensors, weights_file
from moh_vision.models.weights import FAMILIES, check_name, create, from_run, load_checkpoint

# Sizes come from files that strangers write; these limits bound the memory that a model takes.
LARGEST = dict(img_size=1024, in_chans=1024, num_classes=100_000)


def open_pipeline(config: SampleConfig) -> Tuple[MoHDiTPipeline, dict]:
    """Open the pipeline around the model that --checkpoint means.

    Also return dict(architecture, classes, weights: the file, run: its folder or None).
    """
    if config.model:
        model, vae, about = _published(config)
    elif (Path(config.checkpoint) / "model_index.json").is_file():
        model, vae, about = _saved(config)
    elif Path(config.checkpoint).suffix in (".pt", ".pth", ".bin") or (
        Path(config.checkpoint, "config.json").is_file() and not Path(config.checkpoint, "config.yaml").is_file()
    ):
        raise ValueError(
            f"{config.checkpoint} does not say of which model it is: give --model, such as moh_dit_xlarge_patch2_90"
        )
    else:
        model, about = from_run(config.checkpoint, "diffusion", config.weights)
        if config.vae and not about.get("vae"):
            raise ValueError(f"--vae {config.vae}: {config.checkpoint} was trained on pixels")
        vae = open_vae(config.vae, about.get("vae"))
        objective = make_objective(about["config"])
        about = dict(about, run=run_of(Path(about["weights"])), label_drop=about["config"]["label_drop"])
        about.update(objective=objective.name, shift=getattr(objective, "shift", 1.0))
    if vae is not None:
        vae.enable_slicing()  # one image at a time: memory does not grow with the batch
    if config.head_budget is not None:
        set_head_budget(model, config.head_budget)
    # A prediction is clipped to the range of pixels; latents have none.
    objective, shift = about.pop("objective"), about.pop("shift")
    config.sampler = sampler_for(objective, config.sampler, config.default_sampler, "--sampler")
    config.guide_channels = Guidance(channels=config.guide_channels).guided(model.config.in_channels)
    scheduler = make_scheduler(config.sampler, config.steps, model.config.learn_sigma, vae is None, shift)
    if config.cfg_scale != 1 and about["label_drop"] == 0:
        raise ValueError(f"--cfg-scale {config.cfg_scale:g} needs a run trained with label_drop above 0")
    return MoHDiTPipeline(model, scheduler, vae, dict(enumerate(about["classes"])), about["label_drop"]), about


def _published(config: SampleConfig) -> Tuple[nn.Module, Optional[nn.Module], dict]:
    """Open --model with weights that `load_checkpoint` reads, and the VAE of --vae."""
    path, name = config.checkpoint, config.model
    model = published_model(path, name, config.weights)
    channels, vae = model.config.in_channels, None
    if config.vae:
        vae = load_vae(config.vae)
    elif channels not in (1, 3):
        raise ValueError(
            f"--vae is needed, such as stabilityai/sd-vae-ft-ema: {name} works on latents of {channels} channels"
        )
    classes = unnamed_classes(model.config.num_classes)
    file = weights_file(path, config.weights)
    about = dict(architecture=name, classes=classes, weights=str(file), run=None, label_drop=None)
    about.update(objective="noise", shift=1.0)
    return model, vae, about


def published_model(path: str, name: str, weights: str = "ema") -> nn.Module:
    """Open the diffusion model `name` in eval mode, with weights from a file or folder."""
    refuse_missing("--checkpoint", path)
    try:
        check_name(name, "diffusion")
    except ValueError as error:
        raise ValueError(str(error).replace("model.name", "--model", 1)) from None
    file = weights_file(path, weights)
    if weights == "model" and file.suffix == ".safetensors" and file.name != "model.safetensors":
        raise ValueError(f"--weights {weights} has no effect: {file} holds one kind")
    sizes = _sizes(file, weights)
    try:
        model = create(name, "diffusion", **sizes).eval()
        load_checkpoint(model, path, weights)
    except ValueError as error:
        fitting = [other for other in _of_the_same_size(name) if _fits(other, path, sizes)]
        raise ValueError(f"{error}; --model {fitting[0]} fits" if fitting else str(error)) from None
    return model


def _saved(config: SampleConfig) -> Tuple[nn.Module, Optional[nn.Module], dict]:
    """Open the model and the VAE of a saved pipeline, or of diffusers' DiTPipeline."""
    folder = Path(config.checkpoint)
    if config.weights != "ema":
        raise ValueError(
            f"--weights {config.weights} has no effect: {folder} is a saved pipeline, which holds one kind"
        )
    pipe, classes = read_pipeline(folder)
    if config.vae and pipe.vae is None:
        raise ValueError(f"--vae {config.vae}: {folder} works on pixels")
    about = dict(architecture=folder.name, classes=classes, weights=str(weights_file(str(folder))), run=None)
    vae = pipe.vae
    if config.vae:
        vae = fit_vae(load_vae(config.vae), config.vae, LatentSpace.of(vae, f"{folder}/vae"))
    about.update(label_drop=pipe.config.label_drop, objective=pipe.config.objective)
    scheduled = pipe.scheduler.config  # UniPC and DPM-Solver have another name for it
    return pipe.transformer, vae, dict(about, shift=scheduled.get("shift", scheduled.get("flow_shift", 1.0)))


def read_pipeline(folder: Path) -> Tuple[MoHDiTPipeline, List[str]]:
    """Read a saved pipeline; also return the names of its classes."""
    logging.disable_progress_bar()  # three parts are there at once
    try:
        pipe = MoHDiTPipeline.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: not a pipeline that can be read ({reason_of(error)})") from None
    names = pipe.config.id2label or {}
    return pipe, [str(names.get(str(i), i)) for i in range(pipe.transformer.config.num_classes)]


def _of_the_same_size(name: str) -> List[str]:
    size = name.rpartition("_")[0]
    return [n for module in FAMILIES["diffusion"] for n in timm.list_models(f"{size}_*", module=module) if n != name]


def _sizes(file: Path, weights: str) -> dict:
    """Read what `create` needs from official or diffusers' weights: side, channels, classes, variance.

    The table of positions gives the side; diffusers' DiT saves none, but a config.json beside it.
    """
    state, sizes = read_tensors(file, weights), {}
    kernel = state.get("x_embedder.proj.weight", state.get("pos_embed.proj.weight"))  # [C, in, p, p]
    last = state.get("final_layer.linear.weight", state.get("proj_out_2.weight"))  # [p * p * out, C]
    labels = next((t for name, t in state.items() if name.endswith("embedding_table.weight")), None)  # [classes, C]
    positions = state.get("pos_embed")  # [1, N, C]
    if labels is not None and labels.ndim == 2:
        sizes["num_classes"] = len(labels) - 1
    if kernel is not None and kernel.ndim == 4:
        sizes["in_chans"] = kernel.shape[1]
        if last is not None and last.ndim == 2:
            sizes["learn_sigma"] = len(last) == 2 * kernel[0].numel()
        if positions is not None and positions.ndim == 3:
            sizes["img_size"] = math.isqrt(positions.shape[1]) * kernel.shape[-1]
    about, beside = file, file.with_name("config.json")
    if "transformer_blocks.0.attn1.to_q.weight" in state and beside.is_file():
        about = beside
        try:
            sizes["img_size"] = json.loads(about.read_text())["sample_size"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{about}: no sample_size can be read ({reason_of(error)})") from None
    for key, largest in LARGEST.items():
        size = sizes.get(key, 1)
        if not isinstance(size, int) or not 1 <= size <= largest:
            raise ValueError(f"{about if key == 'img_size' else file}: {key} {size!r} is out of range: 1 to {largest}")
    return sizes


def _fits(name: str, path: str, sizes: dict) -> bool:
    """Return whether the model takes the weights."""
    try:
        load_checkpoint(create(name, "diffusion", **sizes), path)
    except ValueError:
        return False
    return True


def open_vae(override: Optional[str], recorded: Optional[dict]):
    """Load the VAE that --vae names, or the one that the run records; None on pixels."""
    if recorded is None:
        return None
    space = LatentSpace(**recorded)
    vae = load_vae(override or space.name)
    if not override and vae_fingerprint(vae) != space.sha256:
        raise ValueError(
            f"the VAE {space.name} is not the one of the run (sha256 {space.sha256[:12]}); --vae takes another on purpose"
        )
    # Latents were scaled by the factor of the training, whatever this decoder's own is.
    return fit_vae(vae, override or space.name, space)
