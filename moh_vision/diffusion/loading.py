"""Open a diffusion model from a run, a saved pipeline or published weights, and make a pipeline of it."""

from typing import Any

import timm
from diffusers.utils import logging
from torch import nn

from moh_vision.common.cli import refuse_missing
from moh_vision.common.errors import reason_of
from moh_vision.common.io import run_of
from moh_vision.common.wings import DIFFUSION
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.diffusion.config import SampleConfig
from moh_vision.diffusion.latents.vae import (
    LatentSpace,
    fit_vae,
    load_vae,
    sha256_of,
    vae_fingerprint,
)
from moh_vision.diffusion.sampling import Guidance, weak_predict
from moh_vision.diffusion.schedulers import sampler_for
from moh_vision.engine.ranks import say
from moh_vision.models.class_names import unnamed_classes
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.layouts import label_table
from moh_vision.models.weights import OF_RUNS, Form, Weights, find_weights


def find_checkpoint(config: SampleConfig) -> Weights:
    """Find the weights of --checkpoint, which are those of --model if they do not say of which model they are.

    If --checkpoint is the name of a model with published weights, set `config.model` to it.
    """
    checkpoint = config.checkpoint
    asked = None
    if "weights" in config.given:
        asked = config.weights
    found = find_weights(checkpoint, prefer=asked, wing=DIFFUSION.name, key="--checkpoint")
    if found.form != Form.NAME:
        if config.model:
            return found.named(config.model, key="--model")
        if not found.brings_model:
            raise ValueError(
                f"{checkpoint} does not say of which model it is: give --model, such as moh_dit_xlarge_patch2_90"
            )
        return found
    if config.model not in (None, checkpoint):
        refuse_missing("--checkpoint", checkpoint)
    if not timm.is_model_pretrained(checkpoint):
        raise ValueError(
            f"--checkpoint {checkpoint}: no such file or folder, and no weights of this model are published; "
            f"for a file of it: --checkpoint FILE --model {checkpoint}"
        )
    config.model = checkpoint
    return found


def open_pipeline(config: SampleConfig, found: Weights) -> tuple[MoHDiTPipeline, dict]:
    """Make the pipeline of weights that `find_checkpoint` found; also return the metadata of `open_model`."""
    model, metadata = open_model(found)
    return make_pipeline(config, model, metadata), metadata


def make_pipeline(
    config: SampleConfig, model: nn.Module, metadata: dict, vae: nn.Module | None = None
) -> MoHDiTPipeline:
    """Make a pipeline of a model with the VAE and scheduler that sample.py's keys ask for.

    Also sets the model's budgets if `config` has any, and resolves `config.sampler` and `config.guide_channels`.

    Args:
        vae: the VAE that these keys ask for, if it is open already.
    """
    if vae is None:
        vae = open_vae(config, model.config.in_channels, metadata["vae"])
    if vae is not None:
        # Decode one image at a time, so that memory does not grow with the batch.
        vae.enable_slicing()
    if config.head_budget is not None or config.mlp_budget is not None:
        set_head_budget(model, config.head_budget, mlp=config.mlp_budget)
    prediction = model.prediction
    config.sampler = sampler_for(prediction, config.sampler, "--sampler", draws_noise=True)
    guidance = Guidance(channels=config.guide_channels)
    config.guide_channels = guidance.guided(model.config.in_channels)
    on_pixels = vae is None  # only pixels have a range to clip to
    scheduler = make_scheduler(
        config.sampler, config.steps, model.config.learn_sigma, on_pixels, prediction.shift
    )
    label_drop = metadata["label_drop"]
    if config.cfg_scale != 1 and not metadata["classes"]:
        raise ValueError(
            f"--cfg-scale {config.cfg_scale:g} needs a run trained with classes: 1 is no guidance"
        )
    if config.cfg_scale != 1 and label_drop == 0:
        raise ValueError(
            f"--cfg-scale {config.cfg_scale:g} needs a run trained with label_drop above 0"
        )
    return MoHDiTPipeline(model, scheduler, vae, dict(enumerate(metadata["classes"])), label_drop)


def open_vae(config: SampleConfig, channels: int, trained):
    """Open the VAE of --vae, or else the VAE of the training; return None for a model of pixels.

    `channels` are the model's input channels; `trained` is `vae` in the metadata of `open_model`.
    """
    if trained is None:
        if config.vae and not config.model:
            raise ValueError(f"--vae {config.vae}: {config.checkpoint} was trained on pixels")
        if config.model and not config.vae and channels not in (1, 3):
            needed = f"{config.model} works on latents of {channels} channels"
            raise ValueError(f"--vae is needed, such as stabilityai/sd-vae-ft-ema: {needed}")
        if not config.vae:
            return None
        return load_vae(config.vae)
    of_pipeline = isinstance(trained, nn.Module)
    if of_pipeline and not config.vae:
        return trained
    if of_pipeline:
        trained = vars(LatentSpace.of(trained, f"{config.checkpoint}/vae"))
    space = LatentSpace(**trained)
    vae = load_vae(config.vae or space.name)
    if not config.vae and vae_fingerprint(vae) != space.sha256:
        raise ValueError(
            f"the VAE {space.name} is not the one of the run (sha256 {space.sha256[:12]}); "
            "--vae takes another on purpose"
        )
    # Use the scaling factor of the training, even if this VAE's own configuration has another one.
    return fit_vae(vae, config.vae or space.name, space)


def open_model(found: Weights, device: Any = None) -> tuple[nn.Module, dict]:
    """Open a diffusion model in eval mode on a device, see `Weights.build`, without a VAE; also return its metadata.

    In the metadata, `run` is the folder of its scores or None, `label_drop` the share of labels that training dropped or
    None, and `vae` the dict of a `LatentSpace`, the VAE of a pipeline, or None.
    """
    model = found.build(device)
    metadata = dict(
        found.metadata,
        architecture=found.architecture,
        arguments=found.arguments,
        classes=[],
        label_drop=found.config.get("label_drop"),
        run=None,
        vae=found.metadata.get("vae"),
        file=found.file,
        weights=found.said,
    )
    if found.form in OF_RUNS:
        metadata.update(classes=found.metadata["classes"], run=run_of(found.file))
    elif found.form == Form.PIPELINE:
        metadata.update(_of_pipeline(found, model))
    elif found.form == Form.FOREIGN:
        table = label_table(found.file, found.shapes)
        if table.remark:
            say(table.remark)
        metadata["classes"] = table.classes
        if not table.has_no_class:
            metadata["label_drop"] = 0.0
    else:
        metadata["classes"] = found.classes or unnamed_classes(model.config.num_classes)
    return model, metadata


def _of_pipeline(found: Weights, model: nn.Module) -> dict:
    """Return what a saved pipeline knows beside its transformer, which is `model`."""
    logging.disable_progress_bar()  # of little use: a pipeline has only three parts
    try:
        pipe = MoHDiTPipeline.from_pretrained(found.path, transformer=model)
    except Exception as error:  # files of others may hold anything
        raise ValueError(
            f"{found.source}: not a pipeline that can be read ({reason_of(error)})"
        ) from None
    names = pipe.config.id2label or {}
    classes = [str(names.get(str(i), i)) for i in range(model.config.num_classes)]
    return dict(
        architecture=found.path.name,
        classes=classes,
        vae=pipe.vae,
        label_drop=pipe.config.label_drop,
    )


def open_guide(key: str, guide: str | None, model: nn.Module, vae) -> nn.Module | str | None:
    """Open the weak model that guides a sampler, as `weak_predict` takes it; refuse one that does not fit `model`.

    Args:
        key: the key or option that `guide` was given with, for messages.
        guide: a path; "heads:SHARE" and None are returned as they are.
        model: the model to guide.
        vae: the VAE of `model`, as in the metadata of `open_model`.
    """
    opened = guide
    must_agree = []
    if guide and not guide.startswith("heads:"):
        refuse_missing(key, guide)
        opened, metadata = open_model(find_weights(guide, wing=DIFFUSION.name, key=key))
        opened.to(next(model.parameters()).device)
        must_agree = [("VAE", sha256_of(metadata["vae"]), sha256_of(vae))]
    weak_predict(model, opened, f"{key} {guide}", must_agree)  # called for its checks alone
    return opened
