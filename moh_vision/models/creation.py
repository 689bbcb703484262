"""Create the registered models of images by name, and refuse names and sizes that make none."""

import re
from pathlib import Path
from typing import Any

import timm
from torch import nn

from moh_vision.common.cli import near_folder
from moh_vision.common.errors import closest, nearest, reason_of
from moh_vision.common.wings import WINGS

# Arguments of `timm.create_model` that say which weights it reads.
FETCHING = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
)
# Wing -> modules that register its models; `timm.list_models` filters names by module.
FAMILIES = dict(classification=("vit", "transnext"), diffusion=("dit",))


def create(name: str, wing: str | None, **arguments: Any) -> nn.Module:
    """Create a model with head routing through timm, of wing "classification", "diffusion" or either (None)."""
    check_name(name, wing)
    try:
        model = timm.create_model(name, **arguments)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ValueError(f"{name}: {error}; look at model.kwargs") from None
        raise
    except (RuntimeError, MemoryError) as error:
        # Sizes that make no model, or one that torch has no memory for.
        raise ValueError(f"{name} cannot be made: {reason_of(error)}") from None
    # Models from other packages need no base class of ours: look for the method.
    if not hasattr(model, "forward_routed"):
        raise ValueError(f"model.name '{name}' has no head routing (no forward_routed)")
    if hasattr(model, "get_classifier"):
        actual = "classification"
    else:
        actual = "diffusion"
    if wing not in (None, actual):
        raise ValueError(f"model.name '{name}' {_of_another_wing(actual, wing)}")
    return model


def check_side(model: nn.Module, side: int | None) -> None:
    """Refuse an image side that is not a multiple of the model's patch side.

    side: data.img_size; None: the classifier's own, which needs no check.
    """
    embed = getattr(model, "patch_embed", None)
    patch = getattr(embed, "patch_size", (1,))[0]
    if not side or side % patch == 0 or embed.dynamic_img_pad:
        return
    # The side that the model was made for is accepted, too.
    if side != model.pretrained_cfg["input_size"][-1]:
        raise ValueError(
            f"data.img_size {side}: not a multiple of {patch}, the side of a patch of the model"
        )


def check_name(name: str, wing: str | None, key: str = "model.name") -> None:
    """Refuse the name of an unknown model, of one without head routing, or of one of another wing.

    Args:
        wing: "classification", "diffusion", or None: either.
        key: key or option that gave the name, for the message.
    """
    problem = name_problem(name, wing)
    if problem:
        raise ValueError(f"{key} '{name}' {problem}")


def name_problem(name: str, wing: str | None) -> str:
    """Return why a model's name is refused, and similar names, as the end of a sentence; "" if it is accepted."""
    wings = image_models()
    fitting = [known for known in wings if wing in (None, wings[known])]
    base = name.split(".")[0]
    if not timm.is_model(base):
        problem = "is not a registered model"
    elif base in wings and base not in fitting:
        problem = _of_another_wing(wings[base], wing)
    elif timm.models.model_entrypoint(base).__module__.startswith("timm."):
        problem = "has no head routing"
        if wing == "classification":
            problem += "; a dense ViT is moh_vit_* with model.router dense"
    else:
        return ""
    # DiT-S/2 is dit_small_patch2.
    sizes = dict(s="small", b="base", l="large", xl="xlarge", h="huge")
    asked = re.sub(r"-(s|b|l|xl|h)/", lambda size: f"_{sizes[size[1]]}_patch", name.lower())
    return f"{problem}, {closest(asked, fitting)}"


def _of_another_wing(actual: str, needed: str) -> str:
    return f"is a {WINGS[actual].title} model, a {WINGS[needed].title} model is needed"


def image_models() -> dict[str, str]:
    """Return the wing of each of our image models: "classification" or "diffusion"."""
    return {
        name: wing
        for wing, modules in FAMILIES.items()
        for module in modules
        for name in timm.list_models(module=module)
    }


def arguments_of(name: str, arguments: dict) -> dict:
    """Return the arguments of a registered model of ours with those of its variant, which they override."""
    base = name.split(".")[0]
    of_variant: dict = {}
    if timm.is_model(base):
        of_variant = getattr(timm.models.model_entrypoint(base), "variant_arguments", {})
    return {**of_variant, **arguments}


def refuse_fetch(arguments: dict, where: str) -> None:
    """Refuse arguments, found in `where`, by which timm would read other weights."""
    for key in FETCHING:
        if key in arguments:
            raise ValueError(f"{key} in {where} would read other weights than its own")


def near_model(source: str) -> str:
    """Return the end of a message that suggests a similar folder or model name; "" if there is none."""
    if ":" in source or "/" in source or Path(source).exists():
        return ""
    near = near_folder(source)
    if near is None:
        names = timm.list_models(pretrained="." in source)
        near = next(iter(nearest(source, names, 1)), source)
    if near == source:
        return ""
    return f", did you mean {near}?"
