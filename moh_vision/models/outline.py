"""Models without memory: tensors on the meta device, which have shapes and no values."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

# The steps of a truncated normal distribution. torch works out their shapes in Python on the meta device, which took four
# fifths of the time of building a ViT.
TRUNCATED_NORMAL = {
    torch.Tensor.erfinv_,
    torch.Tensor.mul_,
    torch.Tensor.add_,
    torch.Tensor.clamp_,
}


class _Uninitialised(TorchFunctionMode):
    """Leave out what changes values of tensors that have none."""

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        if function in TRUNCATED_NORMAL and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Make the tensors of this context on the meta device, and do not initialise them."""
    with torch.device("meta"), _Uninitialised():
        yield
