"""How processes of a run exchange results; every process calls these functions together."""

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, reduce
from safetensors import SafetensorError
from torch import Tensor

from moh_vision.common import progress
from moh_vision.common.errors import MISTAKES

T = TypeVar("T")


def say(text: str) -> None:
    """Print a line, on one process of each machine."""
    if PartialState().is_local_main_process:
        progress.say(text)


def attempt(call: Callable[[], object], kinds=(OSError, SafetensorError), group=None) -> str | None:
    """Call it on every process and wait for the others; return None, or the first failed process's message.

    Exceptions other than `kinds` are raised here. A thread needs a process `group` of its own.
    """
    problem = None
    try:
        call()
    except kinds as error:
        problem = str(error) or repr(error)
    return next((text for text in from_all(problem, group) if text), None)


def from_all(value: T, group=None) -> list[T]:
    """Return the value of every process."""
    if group is None:
        return gather_object([value])
    values: list = [None] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def by_main(call: Callable[[], None], accelerator) -> None:
    """Let the main process do `call`; if it raises one of MISTAKES, all raise ValueError."""

    def work():
        if accelerator.is_main_process:
            call()

    problem = attempt(work, MISTAKES)
    if problem:
        raise ValueError(problem)


def from_first(make: Callable[[], T]) -> T:
    """Return make() of the main process on every one; a mistake there ends all."""
    shared: list = [False, None]
    try:
        if PartialState().is_main_process:
            shared = [True, make()]
    finally:
        broadcast_object_list(shared)
    if not shared[0]:
        raise SystemExit(2)  # the main process says why
    return shared[1]


def first(make: Callable[[], T]) -> T:
    """Call make() on every process, on the main one first; a mistake there ends all."""
    results: list = []  # stays empty on all but the main process
    from_first(lambda: results.append(make()))
    if results:
        return results[0]
    return make()


def total(tensor: Tensor) -> Tensor:
    """Sum a tensor in main memory over all processes."""
    return reduce(tensor.to(PartialState().device), "sum").cpu()


def greatest(values: Tensor) -> list[float]:
    """Return the elementwise maximum of values [N] over all processes."""
    return gather(values[None]).amax(0).tolist()


@torch.no_grad()
def average_over_processes(tensors: list[Tensor]) -> None:
    """Replace tensors by their mean over all processes, all in one message."""
    if tensors:
        flat = reduce(torch.cat([tensor.flatten() for tensor in tensors]), "mean")
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(mean.view_as(tensor))
