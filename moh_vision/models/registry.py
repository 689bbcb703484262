"""Converters by class of model: what `moh_vision.convert` calls."""

import importlib
from collections.abc import Callable

from torch import nn

# Qualified name of a model's class -> "module:function". The import happens on use: diffusers and transformers
# take seconds.
CONVERTERS: dict[str, str] = {}


def converter_for(
    model: nn.Module, otherwise: Callable[..., nn.Module]
) -> Callable[..., nn.Module]:
    """Return the converter of the model's class or its nearest base; `otherwise` without one."""
    for base in type(model).__mro__:
        converter = CONVERTERS.get(f"{base.__module__}.{base.__qualname__}", "")
        module, _, function = converter.partition(":")
        if function:
            return getattr(importlib.import_module(module), function)
    return otherwise
