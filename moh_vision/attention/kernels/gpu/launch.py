"""Launch kernels: the first time through Triton, and then directly.

At each call Triton's own launcher binds the arguments by name, describes every one of them and makes a key of text, to find
out which compiled kernel fits. That takes 10 to 40 us on the host, and a layer has nine launches in training. `launch` finds
the compiled kernel by a key of its own. For numbers and constants it has their values, which is more than what Triton compiles a
kernel for, and for tensors their dtype and alignment.
"""

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# Bytes. Triton compiles another kernel for tensors that do not begin at a multiple of them.
ALIGNMENT = 16
MOST_KEPT = 4096  # texts of every length have a key each
# On AMD's cards a kernel also depends on whether a tensor is larger than 2 GiB, which the key does not have.
KEEPS = torch.version.hip is None

# Key -> a compiled kernel, and the values of its constants in their order.
_kept: dict[tuple, tuple[Any, tuple]] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | TensorDescriptor | None, ...],
    numbers: tuple,
    **constants: Any,
) -> None:
    """Launch a kernel on the current device and stream.

    Args:
        kernel: a function under triton.jit, whose parameters are tensors, then numbers, then constants.
        programs: size of the grid.
        tensors: first arguments, all on the current device.
        numbers: further arguments: int, float and tuples of them.
        **constants: the tl.constexpr parameters, which must be hashable; num_warps and num_stages.
    """
    # The interpreter's functions are of another class.
    if not KEEPS or not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
        kernel[(programs,)](*tensors, *numbers, **constants)
        return
    device = tensors[0].get_device()
    # Triton's switches for debugging and for profilers, which change what is compiled.
    switches = (knobs.runtime.debug, knobs.compilation.instrumentation_mode)
    key = (kernel.fn, device, switches, numbers, describe(tensors), tuple(constants.items()))
    kept = _kept.get(key)
    if kept is not None:
        compiled, values = kept
        compiled[(programs, 1, 1)](*tensors, *numbers, *values)
        return
    compiled = kernel[(programs,)](*tensors, *numbers, **constants)
    if not isinstance(compiled, CompiledKernel):  # it is not compiled yet
        return
    if len(_kept) >= MOST_KEPT:
        _kept.clear()
    _kept[key] = (compiled, in_order(kernel, len(tensors) + len(numbers), constants))


def describe(tensors: tuple[Tensor | TensorDescriptor | None, ...]) -> tuple:
    """Return all of the tensors that decides which compiled kernel takes them."""
    forms: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            forms.append(None)
        elif isinstance(tensor, TensorDescriptor):
            forms.append((tensor.base.dtype, *tensor.block_shape))
        else:
            forms.append(tensor.dtype)
            forms.append(tensor.data_ptr() % ALIGNMENT)
    return tuple(forms)


def in_order(kernel: Any, given: int, constants: dict[str, Any]) -> tuple:
    """Return the values of constants in the order of the kernel's parameters.

    Args:
        kernel: see `launch`.
        given: number of parameters before the constants.
        constants: see `launch`.
    """
    names = [parameter.name for parameter in kernel.params[given:]]
    return tuple(constants[name] for name in names)
