"""The model of a run on images, from its configuration to its first step."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import nn

from moh_vision.models.describe import describe, in_short
from moh_vision.models.elastic import ElasticBudget, elastic_budget
from moh_vision.models.head_budgets import budget_pairs
from moh_vision.models.mae import train_only
from moh_vision.models.pretrained import load_source
from moh_vision.models.weights import check_side, create, keep_shared_heads


def set_up_model(
    run, kind: str, name: str, arguments: dict, classes: Sequence[str], steps: int
) -> Optional[Tuple[nn.Module, Optional[ElasticBudget]]]:
    """Make the model of a run and load what it starts from; lock the run of so many steps, if there is one.

    Args:
        run: a `Run`.
        kind: "classifier" or "diffusion".
        name, arguments: of the model, for `create`. The size of its images and the budget that is trained are added.
        classes: of the data.
        steps: of the whole run.

    Returns:
        (model, its elastic budget or None); None after a dry run, which has printed the model.
    """
    config = run.config
    torch.manual_seed(config.seed)
    model = create(name, kind, **arguments)
    check_side(model, arguments.get("img_size"))
    side = arguments.setdefault("img_size", getattr(model, "pretrained_cfg", {}).get("input_size", [None])[-1])
    checkpoint = run.take_up(steps)
    if checkpoint:
        keep_shared_heads(model, checkpoint)
    elif config.init_from or not config.dry_run:  # weights of model.pretrained fit, and may have to be fetched
        load_source(model, config, classes, run.say)
    elastic = elastic_budget(model, config)
    if config.dry_run:  # of an elastic budget it shows the largest share
        inputs = [torch.zeros(1, arguments["in_chans"], side, side)]
        if kind == "diffusion":
            inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
        return run.say(describe(name, model, *inputs))
    train_only(model, config.train_only)
    if config.checkpointing:
        enable = getattr(model, "set_grad_checkpointing", None) or model.enable_gradient_checkpointing
        enable()
    if elastic:
        arguments["head_budget"] = budget_pairs(model)
    run.say(in_short(name, model))
    return model, elastic
