"""Find the model of a new run, from `model.pretrained` or the configuration's own keys, and load its first weights."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from moh_vision.attention import attention_layers, mlp_layers
from moh_vision.attention.budget import shape_of
from moh_vision.common.errors import closest, reason_of
from moh_vision.common.io import tensor_files
from moh_vision.common.wings import CLASSIFICATION, DIFFUSION
from moh_vision.models.convert import convert
from moh_vision.models.creation import check_name, create, near_model
from moh_vision.models.fitting import advise_on_model_name
from moh_vision.models.outline import without_values
from moh_vision.models.weights import Form, find_weights

# Arguments of `convert` that model.convert may set.
CONVERT_OPTIONS = [
    name
    for name in inspect.signature(convert).parameters
    if name not in ("model", "calibrate", "group")
]


def name_and_arguments(config, wing: str, fresh: bool = False) -> tuple[str, dict]:
    """Return (name, arguments) of an `ImageRunConfig`'s model, without the sizes that follow from the data.

    Unless `fresh`, a resumed run takes both from its own weights file, because the pre-trained source may be gone.
    """
    section = config.model
    if not section.pretrained:
        check_name(section.name, wing)
        return section.name, section.arguments()
    options = section.convert or {}
    check_options(section, options)
    saved = Path(config.output, "model.safetensors")
    if not fresh and tensor_files(saved):
        earlier = find_weights(saved)
        if earlier.config.get("model", {}).get("pretrained") == section.pretrained:
            return earlier.architecture, earlier.arguments
    found = find_weights(section.pretrained, wing=wing, key="model.pretrained")
    if found.form == Form.FOREIGN:
        writer = {
            CLASSIFICATION.name: "timm.models.save_for_hf",
            DIFFUSION.name: "save_pretrained of diffusers",
        }
        raise ValueError(
            f"{found.title}: a file of weights does not say of which model it is; --init-from takes it for a --model.name, "
            f"or give the folder that {writer[wing]} writes"
        )
    try:
        found = found.with_routing()
        with without_values():
            routed = not is_dense(create(found.architecture, wing, **found.arguments))
    except Exception as error:  # files of others may hold anything
        near = near_model(section.pretrained)
        reason = reason_of(error).removeprefix(f"{found.title}: ")
        raise ValueError(f"{found.title}: {reason}{near}") from None
    name = found.architecture
    arguments = found.arguments
    if routed and section.convert is not None:
        raise ValueError(
            f"model.convert: model.pretrained {section.pretrained} has routed heads or groups already; leave it out"
        )
    if routed:
        # A number in model.head_budget or model.mlp_budget keeps the shape of the source's budget.
        for key in ("head_budget", "mlp_budget"):
            shape = shape_of(arguments.get(key))
            if shape:
                arguments.setdefault(f"{key}_shape", shape)
        return name, {**arguments, **section.arguments()}
    check_groups(section, options)
    arguments = {key: value for key, value in arguments.items() if key != "head_budget"}
    if section.convert is None and section.head_budget is None:
        arguments["router"] = "dense"
    else:
        arguments["router"] = "moh"
        arguments["head_budget_shape"] = "uniform"  # as `convert` spreads a share
    if section.mlp_budget is not None or options.get("mlp_budget") is not None:
        arguments["mlp_budget_shape"] = "uniform"
    return name, {**arguments, **section.arguments()}


def check_options(section, options: dict) -> None:
    """Raise ValueError for options of model.convert that `convert` does not have, or that the section says too."""
    for key in options:
        if key not in CONVERT_OPTIONS:
            raise ValueError(f"model.convert: there is no {key!r}: {closest(key, CONVERT_OPTIONS)}")
    for key in ("head_budget", "mlp_budget"):
        if getattr(section, key) is not None and key in options:
            raise ValueError(f"model.{key} and model.convert.{key} are the same thing: give one")


def check_groups(section, options: dict) -> None:
    """Raise ValueError for groups of MLPs that a dense source cannot get, or that have no effect."""
    mlp_budget = options.get("mlp_budget", section.mlp_budget)
    if mlp_budget is None and "mlp_groups" in options:
        groups = options["mlp_groups"]
        raise ValueError(
            f"model.convert.mlp_groups {groups!r} needs model.mlp_budget, and has no effect otherwise"
        )
    if mlp_budget is not None and options.get("scope") != "sample":
        raise ValueError(f"model.mlp_budget {mlp_budget!r} needs model.convert.scope sample")


def load_source(
    model: nn.Module, config, wing: str, classes: Sequence[str], say: Callable[[str], None]
) -> None:
    """Load the weights of init_from or model.pretrained, if given, into the model of a new run.

    Args:
        model, config, wing, classes, say: see `moh_vision.models.set_up.set_up_model`.
    """
    if config.model.pretrained:
        key = "model.pretrained"
        source = config.model.pretrained
        advice = contextlib.nullcontext()
    else:
        key = "init_from"
        source = config.init_from
        advice = advise_on_model_name(config.model.name)
    dense = False
    if source:
        with advice:
            found = find_weights(source, wing=wing, key=key)
            taken = found.start(model, classes)
        dense = taken.dense
        for line in (*taken.resized, *taken.changed):
            say(f"{key}: {line}")
        if found.form != Form.NAME:
            say(f"{key}: weights of {found.said}")
    asked = f"calibrate_images {config.calibrate_images}"
    if config.calibrate_images and not dense:
        raise ValueError(f"{asked}: the routers of {key} are trained already")
    if config.calibrate_images and runs_all_heads(model) and not mlp_layers(model):
        raise ValueError(f"{asked} needs a model that routes its heads or MLPs: model.convert")


def is_dense(model: nn.Module) -> bool:
    """Return whether every layer is plain attention, all heads with gate 1, and no MLP has groups."""
    plain = all(layer.router.plain_attention for layer in attention_layers(model))
    return plain and not mlp_layers(model)


def runs_all_heads(model: nn.Module) -> bool:
    """Return whether every layer always runs all its heads, whatever their gates."""
    return all(layer.router.all_heads for layer in attention_layers(model))
