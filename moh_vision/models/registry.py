"""Find the converter of a model's class, for `moh_vision.convert`."""

import importlib
from collections.abc import Callable

from torch import nn

# Qualified name of a model's class -> "module:function". The module is imported when a model is converted,
# because importing diffusers and transformers takes seconds.
CONVERTERS: dict[str, str] = {}


def converter_for(
    model: nn.Module, otherwise: Callable[..., nn.Module]
) -> Callable[..., nn.Module]:
    """Return the converter of the model's class or its nearest base class; `otherwise` if none is registered."""
    for base in type(model).__mro__:
        converter = CONVERTERS.get(f"{base.__module__}.{base.__qualname__}", "")
        module, _, function = converter.partition(":")
        if function:
            return getattr(importlib.import_module(module), function)
    return otherwise
