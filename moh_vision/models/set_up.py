"""Set up the model of a run on images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moh_vision.common.io import memory_limit
from moh_vision.models.counts import least_activations
from moh_vision.models.creation import check_side, create
from moh_vision.models.describe import describe, full_name, in_short
from moh_vision.models.elastic import ElasticBudget, elastic_budget, mean_macs, with_elastic
from moh_vision.models.fine_tuning import train_only
from moh_vision.models.fitting import keep_shared_heads
from moh_vision.models.head_budgets import saved_budget
from moh_vision.models.pretrained import load_source


@dataclass(frozen=True)
class ModelSetup:
    """The model of a run, and what is said and saved of it.

    Args:
        model: the model with its weights; frozen parameters have requires_grad False.
        arguments: arguments with which `create` builds the model again.
        elastic: draws the budget of every step, or None.
        inputs: arguments of one forward of batch 1.
        description: text that a dry run prints; empty in other runs.
        macs: multiply-accumulates of one forward of batch 1, for an estimate; 0 in other runs.
    """

    model: nn.Module
    arguments: dict
    elastic: ElasticBudget | None
    inputs: list[torch.Tensor]
    description: str
    macs: int = 0


def set_up_model(
    config,
    wing: str,
    name: str,
    arguments: dict,
    classes: Sequence[str],
    checkpoint: Path | None,
    say: Callable[[str], None],
) -> ModelSetup:
    """Create the model of a run and load the weights that it starts from.

    Args:
        config: an `ImageRunConfig`.
        wing: "classification" or "diffusion".
        name, arguments: for `create`. `ModelSetup.arguments` adds the image size and the trained budget.
        classes: class names of the data.
        checkpoint: folder of the checkpoint from which the run resumes; the caller loads its weights later. None:
            the weights of config.init_from or config.model.pretrained are loaded, if given.
        say: prints a line.

    Raises:
        ValueError: the configuration does not fit the model or its weights.
    """
    torch.manual_seed(config.seed)
    model = create(name, wing, **arguments)
    check_side(model, arguments.get("img_size"))
    side = arguments.get("img_size")
    if "img_size" not in arguments:
        side = getattr(model, "pretrained_cfg", {}).get("input_size", [None])[-1]
        arguments = dict(arguments, img_size=side)
    if checkpoint:
        # The budget in the configuration may have other shared heads than init_from gave to the run.
        keep_shared_heads(model, checkpoint)
    elif config.init_from or not config.dry_run:
        # A dry run loads only init_from: the weights of model.pretrained always fit, and may need a download.
        load_source(model, config, wing, classes, say)
    elastic = elastic_budget(model, config)
    inputs = [torch.zeros(1, arguments["in_chans"], side, side)]
    if wing == "diffusion":
        inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
    if elastic:
        arguments = arguments | saved_budget(model)
    description = introduce(full_name(name, arguments), model, elastic, config, say, *inputs)
    macs = 0
    if config.estimate:
        macs = mean_macs(model, elastic, *inputs)
    train_only(model, config.train_only)
    if config.checkpointing:
        if hasattr(model, "set_grad_checkpointing"):  # timm's name
            model.set_grad_checkpointing()
        else:  # diffusers' name
            model.enable_gradient_checkpointing()
    return ModelSetup(model, arguments, elastic, inputs, description, macs)


def introduce(
    name: str,
    model: nn.Module,
    elastic: ElasticBudget | None,
    config,
    say: Callable[[str], None],
    *inputs: torch.Tensor,
    **named: torch.Tensor,
) -> str:
    """Return the description of a run's model that a dry run prints at its end; of other runs say one line, and return "".

    A model with an elastic budget is described at its largest share.

    Args:
        name: see `full_name`.
        model: as it is trained.
        elastic: draws the budget of every step, or None.
        config: a `RunConfig`.
        say: prints a line.
        *inputs, **named: arguments of one forward of batch 1.
    """
    if config.dry_run:
        return with_elastic(describe(name, model, *inputs, **named), elastic, "\n")
    say(with_elastic(in_short(name, model), elastic, "; "))
    return ""


def check_memory(
    config,
    model_setup: ModelSetup,
    device: torch.device,
    micro_batch: int,
    say: Callable[[str], None],
) -> None:
    """Refuse a run whose first step needs more memory than there is: the system would kill it without a word.

    A dry run prints the problem and goes on, because it may describe a run for a larger machine.

    Args:
        config: an `ImageRunConfig`.
        model_setup: the model and its inputs.
        device: device on which the model will be trained.
        micro_batch: images in one forward.
        say: prints a line.
    """
    limit = memory_limit(device)
    if limit is None:
        return
    # These options keep fewer activations for backward than the estimate below.
    if config.checkpointing or config.train_only != "all":
        return
    inputs = model_setup.inputs
    bytes_each = 2
    if config.mixed_precision == "no":
        bytes_each = 4
    needed = micro_batch * least_activations(model_setup.model, *inputs) * bytes_each
    if needed <= limit:
        return
    side = inputs[0].shape[-1]
    problem = (
        f"a step of {micro_batch} images of {side} x {side} pixels or latents keeps at least "
        f"{needed / 2**30:.1f} GiB for backward, and there are {limit / 2**30:.1f} GiB: take a smaller "
        "optim.batch_size, a larger optim.accumulation or model.patch_size, smaller images, or --checkpointing"
    )
    if not config.dry_run:
        raise ValueError(problem)
    say(f"refused on this machine: {problem}")
