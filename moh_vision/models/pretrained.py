"""Find the model of a new run, from `model.pretrained` or the configuration's own keys, and load its first weights."""

import contextlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import timm
import torch
from timm.layers import to_2tuple
from timm.models import is_model_pretrained, load_model_config_from_hf, parse_model_name
from timm.models._hub import load_model_config_from_path
from torch import nn

from moh_vision.attention import attention_layers, mlp_layers
from moh_vision.attention.budget import shape_of
from moh_vision.common.cli import refuse_missing_source
from moh_vision.common.errors import closest, reason_of
from moh_vision.common.io import tensor_files
from moh_vision.models.convert import convert
from moh_vision.models.dit_weights import settings_of
from moh_vision.models.outline import without_values
from moh_vision.models.weight_files import read_metadata, weights_file, weights_said
from moh_vision.models.weights import (
    advise_on_model_name,
    check_name,
    create,
    described_by,
    init_from,
    near_model,
    refuse_fetch,
    say_other_heads,
)

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
        metadata = read_metadata(saved)
        saved_config = metadata.get("config") or {}
        if saved_config.get("model", {}).get("pretrained") == section.pretrained:
            return metadata["architecture"], metadata["arguments"]
    refuse_missing_source("model.pretrained", section.pretrained)
    try:
        name, arguments, _ = of_source(section.pretrained, wing)
        with without_values():
            routed = not is_dense(create(name, wing, **arguments))
    except Exception as error:  # files of others may hold anything
        near = ""
        # For diffusion the error is from `check_name`, which has suggested a name already.
        if wing == "classification":
            near = near_model(section.pretrained)
        raise ValueError(
            f"model.pretrained {section.pretrained}: {reason_of(error)}{near}"
        ) from None
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
            dense = init_from(model, source, say, key, classes)
        path = Path(source.removeprefix("local-dir:"))
        if path.exists():
            say(f"{key}: weights of {weights_said(weights_file(str(path)))}")
    if config.init_from:
        say_other_heads(model, config.init_from, outline_of(config.init_from, wing), say)
    asked = f"calibrate_images {config.calibrate_images}"
    if config.calibrate_images and not dense:
        raise ValueError(f"{asked}: the routers of {key} are trained already")
    if config.calibrate_images and runs_all_heads(model) and not mlp_layers(model):
        raise ValueError(f"{asked} needs a model that routes its heads or MLPs: model.convert")


def outline_of(source: str, wing: str) -> nn.Module | None:
    """Return the model that a source of weights is of, without its weights; None: the source does not say which."""
    path = Path(source.removeprefix("local-dir:"))
    try:
        metadata = {}
        if path.exists():
            file = weights_file(str(path))
            if tensor_files(file):
                metadata = read_metadata(file)
        if "architecture" in metadata:
            name = metadata["architecture"]
            arguments = metadata["arguments"]
        elif path.is_file():
            return None
        else:
            name, arguments, _ = of_source(source, wing)
        with without_values():
            return create(name, wing, **arguments)
    except Exception:  # files of others may hold anything
        return None


def is_dense(model: nn.Module) -> bool:
    """Return whether every layer is plain attention, all heads with gate 1, and no MLP has groups."""
    plain = all(layer.router.plain_attention for layer in attention_layers(model))
    return plain and not mlp_layers(model)


def runs_all_heads(model: nn.Module) -> bool:
    """Return whether every layer always runs all its heads, whatever their gates."""
    return all(layer.router.all_heads for layer in attention_layers(model))


def of_source(source: str, wing: str) -> tuple[str, dict, dict]:
    """Return (name, arguments, pretrained_cfg) of a saved or published model, or of a run.

    For a ViT of timm's that is "moh_vit", with its timm name as `base` and router "dense". The pretrained_cfg is
    timm's, and {} for a registered name or a run. docs/guides/convert.md lists the possible sources.
    """
    local = source.removeprefix("local-dir:")
    metadata = {}
    with contextlib.suppress(FileNotFoundError):  # the folder is not a run
        metadata = described_by(local, wing)
    if "architecture" in metadata:
        return metadata["architecture"], metadata["arguments"], {}
    if Path(local).is_file():
        if wing == "classification":
            writer = "timm.models.save_for_hf"
        else:
            writer = "save_pretrained of diffusers"
        instead = (
            f"--init-from takes it for a --model.name, or give the folder that {writer} writes"
        )
        raise ValueError(f"a file of weights does not say of which model it is; {instead}")
    if wing == "classification":
        return _classifier(source)
    return _diffusion(local)


def _classifier(source: str) -> tuple[str, dict, dict]:
    """Return `of_source`'s answer for a timm model, or for a model of ours that timm has saved."""
    if Path(source).is_dir():
        scheme = "local-dir"
        name = source
    else:
        scheme, name = parse_model_name(source)
    arguments = {}
    cfg = {}
    if scheme is not None:
        if scheme == "local-dir":
            cfg, name, arguments = load_model_config_from_path(name)
        else:
            cfg, name, arguments = load_model_config_from_hf(name)
        refuse_fetch(arguments, "its config.json")
        side, *further_sides = to_2tuple(arguments.get("img_size"))
        if side not in further_sides:
            raise ValueError(f"its images are of {arguments['img_size']}, expected a square")
        arguments = {key: value for key, value in arguments.items() if key != "img_size"}
        if side:
            arguments["img_size"] = side
        arguments = {
            "num_classes": cfg["num_classes"],
            "in_chans": cfg["input_size"][0],
            **arguments,
        }
        # With its tag, the name tells timm the mean and standard deviation of the model's images.
        if is_model_pretrained(f"{name}.{cfg.get('tag')}"):
            name = f"{name}.{cfg['tag']}"
    if not timm.is_model(name):
        raise ValueError(
            "neither a model of timm, hf-hub:OWNER/NAME, nor a folder with a config.json of timm"
        )
    if timm.models.model_entrypoint(name.split(".")[0]).__module__.startswith("timm."):
        arguments = {"base": name, "router": "dense", **arguments}
        with without_values():  # raises if the model cannot be converted
            timm.create_model("moh_vit", **arguments)
        return "moh_vit", arguments, cfg
    check_name(name, "classification")
    return name, arguments, cfg


def _diffusion(source: str) -> tuple[str, dict, dict]:
    """Return `of_source`'s answer for a registered DiT, or for one in a folder of diffusers."""
    if not Path(source).is_dir():
        if source.count("/"):
            raise ValueError(
                "no such folder; download a model of the hub first: hf download NAME --local-dir FOLDER"
            )
        check_name(source, "diffusion")
        return source, {}, {}
    from diffusers import DiTTransformer2DModel

    candidates = [Path(source, "config.json"), Path(source, "transformer", "config.json")]
    file = next(filter(Path.is_file, candidates), None)
    if file is None:
        raise ValueError(
            "no run, nor a folder of diffusers: neither config.json nor transformer/config.json is there"
        )
    settings = json.loads(file.read_text())
    class_name = settings.get("_class_name")
    if class_name == "DiTTransformer2DModel":
        with torch.device("meta"):
            settings = settings_of(DiTTransformer2DModel.from_config(settings))
    elif class_name != "MoHDiTTransformer2DModel":
        raise ValueError(
            f"{file.name} is of {class_name!r}, allowed are DiTTransformer2DModel and ours"
        )
    timm_names = dict(
        hidden_size="embed_dim",
        num_layers="depth",
        num_attention_heads="num_heads",
        attention_head_dim="head_dim",
    )
    sizes = ("sample_size", "in_channels", "out_channels", "num_classes")
    arguments = {}
    for key, value in settings.items():
        if key[0] != "_" and key not in sizes:
            arguments[timm_names.get(key, key)] = value
    refuse_fetch(arguments, "its config.json")
    # A run replaces it by the side of its data; until then the patches must fit.
    arguments["img_size"] = settings.get("sample_size")
    # The arguments replace all those of this variant.
    names = {"sit": "sit_small_patch2", "jit": "jit_base_patch16"}
    return names.get(arguments.get("compat"), "dit_small_patch2"), arguments, {}
