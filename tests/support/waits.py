"""A device without values, on which the host can wait for nothing: what would wait on a GPU is recorded or fails.

Tensors on the meta device have shapes alone. A value that is read, or a shape that depends on values, is an error there,
as is a copy to the host; on a GPU each would wait until the device has done its work.
"""

import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
aten = torch.ops.aten

# Methods that read values, and what they return here.
READS = {
    torch.Tensor.item: lambda t: 0.0,
    torch.Tensor.tolist: lambda t: torch.zeros(t.shape).tolist(),
    torch.Tensor.__bool__: lambda t: False,
    torch.Tensor.__int__: lambda t: 0,
    torch.Tensor.__float__: lambda t: 0.0,
    torch.Tensor.cpu: lambda t: torch.zeros(t.shape, dtype=t.dtype),
}


# Functions that make a tensor on the host and copy it to the device.
MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


class Waits(TorchFunctionMode):
    """Record in `at` where the host would wait for the device within the block, as "FILE: WHAT"; values read are zeros."""

    def __init__(self):
        super().__init__()
        self.at: list[str] = []
        self.copies = _Copies(self.at)

    def __enter__(self):
        self.copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.copies.__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            note(self.at, function.__name__)
            return READS[function](args[0])
        result = function(*args, **(kwargs or {}))
        if function in MAKERS and result.is_meta and not isinstance(args[-1], torch.Tensor):
            note(self.at, "copy from the host")
        return result


class _Copies(TorchDispatchMode):
    """Record copies from the host that are not marked `non_blocking`: PyTorch waits for the device after each."""

    def __init__(self, at: list[str]):
        super().__init__()
        self.at = at

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        waits = False
        if function is aten._to_copy.default:
            to_device = args[0].device.type == "cpu" and result.is_meta
            waits = to_device and not kwargs.get("non_blocking")
        if function is aten.copy_.default:
            to, source, *non_blocking = args
            to_device = to.is_meta and source.device.type == "cpu"
            waits = to_device and not (non_blocking or [kwargs.get("non_blocking")])[0]
        if waits:
            note(self.at, "copy from the host")
        return result


def note(at: list[str], what: str) -> None:
    """Append "FILE: WHAT" with the innermost file that is not of torch or of this module."""
    frames = traceback.extract_stack()
    files = [frame.filename for frame in frames if "/torch/" not in frame.filename]
    own = [name for name in files if name != __file__]
    at.append(f"{own[-1].rpartition('site-packages/')[2].rpartition('/moh_vision/')[2]}: {what}")


class NoReads(TorchDispatchMode):
    """Fail where values of tensors on the CPU are read, or decide a shape: on a GPU the same operator would wait."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        by_values = function is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert function not in READERS and not by_values, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


READERS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
