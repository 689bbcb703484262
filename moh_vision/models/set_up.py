"""Set up the model of a run on images."""

from collections.abc import Sequence

import torch
from torch import nn

from moh_vision.engine.io import memory_limit
from moh_vision.models.counts import least_activations
from moh_vision.models.describe import describe, full_name, in_short
from moh_vision.models.elastic import ElasticBudget, elastic_budget, with_elastic
from moh_vision.models.head_budgets import saved_budget
from moh_vision.models.mae import train_only
from moh_vision.models.pretrained import load_source
from moh_vision.models.weights import check_side, create, keep_shared_heads


def set_up_model(
    run, wing: str, name: str, arguments: dict, classes: Sequence[str], steps: int
) -> tuple[nn.Module, ElasticBudget | None]:
    """Create the model of a run and load its weights; lock the run, if there is one.

    Args:
        run: a `Run`.
        wing: "classification" or "diffusion".
        name, arguments: for `create`; the image size and the trained budget are added.
        classes: of the data.
        steps: of the whole run.

    Returns:
        (model, elastic budget or None). Of a dry run, `run.description` describes the model.
    """
    config = run.config
    torch.manual_seed(config.seed)
    model = create(name, wing, **arguments)
    check_side(model, arguments.get("img_size"))
    side = arguments.setdefault(
        "img_size", getattr(model, "pretrained_cfg", {}).get("input_size", [None])[-1]
    )
    checkpoint = run.take_up(steps)
    if checkpoint:
        keep_shared_heads(model, checkpoint)
    elif (
        config.init_from or not config.dry_run
    ):  # model.pretrained weights fit, and may need a download
        load_source(model, config, classes, run.say)
    elastic = elastic_budget(model, config)
    inputs = [torch.zeros(1, arguments["in_chans"], side, side)]
    if wing == "diffusion":
        inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
    refuse_what_exceeds_memory(run, model, inputs)
    if config.dry_run:  # shows an elastic budget's largest share
        shown = describe(full_name(name, arguments), model, *inputs)
        run.description = with_elastic(shown, elastic, "\n")
    train_only(model, config.train_only)
    if config.checkpointing:
        enable = (
            getattr(model, "set_grad_checkpointing", None) or model.enable_gradient_checkpointing
        )
        enable()
    if elastic:
        arguments.update(saved_budget(model))
    if not config.dry_run:
        shown = in_short(full_name(name, arguments), model)
        run.say(with_elastic(shown, elastic, "; "))
    return model, elastic


def refuse_what_exceeds_memory(run, model: nn.Module, inputs: list[torch.Tensor]) -> None:
    """Refuse a run whose first step needs more memory than there is: the system would kill it without a word.

    A dry run says so and goes on: it describes runs of larger machines.
    """
    config, limit = run.config, memory_limit(run.accelerator.device)
    if config.checkpointing or config.train_only != "all":  # then much less is kept
        return
    if limit is None:
        return
    bytes_each = 4 if config.mixed_precision == "no" else 2
    needed = run.micro_batch * least_activations(model, *inputs) * bytes_each
    if needed <= limit:
        return
    side = inputs[0].shape[-1]
    problem = (
        f"a step of {run.micro_batch} images of {side} x {side} pixels or latents keeps at least "
        f"{needed / 2**30:.1f} GiB for backward, and there are {limit / 2**30:.1f} GiB: take a smaller "
        "optim.batch_size, a larger optim.accumulation or model.patch_size, smaller images, or --checkpointing"
    )
    if not config.dry_run:
        raise ValueError(problem)
    run.say(f"refused on this machine: {problem}")
