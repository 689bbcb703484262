"""Make optimisers by their names in timm, with the parameter groups that they need."""

import functools
import inspect
import re
from collections.abc import Collection
from fnmatch import fnmatch

import torch
from timm.optim import (
    Muon,
    create_optimizer_v2,
    get_optimizer_info,
    list_optimizers,
    param_groups_weight_decay,
)
from torch import nn

from moh_vision.common.errors import closest

# Optimisers of timm that a run cannot use. bnb* and fused* need a GPU. adahessian needs second derivatives. kron* draws
# random numbers that are not in its state, so that a resumed run would differ. madgrad* keeps the first weights, and
# puts them back where a gradient is zero: that is the case for MAE's gates.
LEFT_OUT = ("bnb*", "fused*", "adahessian", "kron*", "madgrad*")
NOT_SHARDED = ("*adafactor*", "*adamuon")  # use operations that torch's DTensor lacks
# Muon divides a sharded matrix by its norm in place: torch 2.10's DTensor refuses that, 2.14's does it. Versions between
# were not tried.
MUON_SHARDED_FROM = (2, 14)
OPTIONS = dict(  # options of optim.*, each with words for the optimisers that take it
    betas="two betas, such as adamw",
    eps="eps, such as adamw",
    momentum="momentum, such as sgd",
)
LAYER = re.compile(r"(^|\.)(blocks|layers)\.\d+\.")  # prefix of a layer's parameters


def names() -> list[str]:
    """Return the names that optim.name may have."""
    return list_optimizers(exclude_filters=list(LEFT_OUT))


def check_name(name: str) -> None:
    """Raise ValueError, naming the nearest name, for an optim.name that is not one of `names`."""
    if name not in names():
        raise ValueError(
            f"optim.name {name!r} is not one of timm's optimisers: {closest(name.lower(), names())}"
        )


def takes(name: str, option: str) -> bool:
    """Return whether an optimiser takes an option: "betas" (a pair), "eps" or "momentum"."""
    info = get_optimizer_info(name)
    return getattr(info, f"has_{option}") and (option != "betas" or info.num_betas == 2)


def check_sharded(name: str) -> None:
    """Raise ValueError for an optimiser that cannot train weights that FSDP shards."""
    if any(fnmatch(name, pattern) for pattern in NOT_SHARDED):
        raise ValueError(
            f"optim.name {name!r} does not work with FSDP: launch with DDP, or take muon, adamw or lion"
        )
    if fnmatch(name, "*muon") and torch.__version__ < MUON_SHARDED_FROM:
        raise ValueError(
            f"optim.name {name!r} with FSDP needs torch 2.14, this is {torch.__version__}: launch with DDP, or take adamw or lion"
        )


@functools.cache
def own_value(name: str, option: str):
    """Return an optimiser's default for `option`; None if it has no such option, or if its own default is None."""
    if not takes(name, option):
        return None
    info = get_optimizer_info(name)
    class_default = inspect.signature(info.opt_class).parameters[option].default
    value = (info.defaults or {}).get(option, class_default)
    if option == "momentum" and not value:
        return 0.9  # timm's default, also for classes whose own is 0
    return value


def make_optimizer(
    model: nn.Module, optim, undecayed: Collection[str] | None = None
) -> torch.optim.Optimizer:
    """Make timm's optimiser for the parameters that require a gradient.

    Muon (Jordan 2024) updates the matrices inside the layers by itself, and all other parameters by AdamW.

    Args:
        model: the model.
        optim: section optim of a configuration.
        undecayed: names of parameters without weight decay, in addition to biases and norms; None: those that the
            model's no_weight_decay() names.
    """
    options = {name: getattr(optim, name) for name in OPTIONS if takes(optim.name, name)}
    options = {name: value for name, value in options.items() if value is not None}
    groups = dict(weight_decay=optim.weight_decay)
    if get_optimizer_info(optim.name).opt_class is Muon:
        by_adamw = [
            parameter_name
            for parameter_name, parameter in model.named_parameters()
            if parameter.ndim != 2
            or ".router." in parameter_name
            or not LAYER.search(parameter_name)
        ]
        groups.update(fallback_list=by_adamw, fallback_no_weight_decay=True)
    if undecayed is not None:
        model = param_groups_weight_decay(model, no_weight_decay_list=undecayed, **groups)
        groups = {}
    else:
        groups["layer_decay"] = getattr(optim, "layer_decay", None)
    return create_optimizer_v2(model, optim.name, lr=optim.lr, **groups, **options)
