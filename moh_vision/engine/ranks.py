"""Collectives, with which the processes of a run exchange results and errors. Every process must call them."""

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, reduce
from safetensors import SafetensorError
from torch import Tensor

from moh_vision.common import progress
from moh_vision.common.errors import MISTAKES, message_of

T = TypeVar("T")


def say(text: str) -> None:
    """Print a line once per machine, on its local main process; not a collective."""
    if PartialState().is_local_main_process:
        progress.say(text)


def attempt(call: Callable[[], object], kinds=(OSError, SafetensorError), group=None) -> str | None:
    """Do `call` on every process; then return on each the message of the first process that failed, or None.

    The message names the process, unless it is the main one. Only exceptions of `kinds` count as failures; others are
    raised at once. A thread needs its own process `group`.
    """
    problem = None
    try:
        call()
    except kinds as error:
        problem = message_of(error)
    for rank, text in enumerate(from_all(problem, group)):
        if text is None:
            continue
        if rank > 0:
            return f"process {rank}: {text}"
        return text
    return None


def from_all(value: T, group=None) -> list[T]:
    """Return a list of the values of all processes, by rank."""
    if group is None:
        return gather_object([value])
    values: list = [None] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def by_all(make: Callable[[], T]) -> T:
    """Do `make` on every process, and return each process's result.

    If it raises one of MISTAKES on any process, every process raises ValueError with the message of `attempt`.
    """
    results: list = []
    problem = attempt(lambda: results.append(make()), MISTAKES)
    if problem:
        raise ValueError(problem)
    return results[0]


def by_main(call: Callable[[], object], accelerator) -> None:
    """Do `call` on the main process only; if it raises one of MISTAKES, every process raises ValueError."""

    def work():
        if accelerator.is_main_process:
            call()

    by_all(work)


def from_first(make: Callable[[], T]) -> T:
    """Do `make` on the main process, and return its result on every process; if it raises, all processes end."""
    shared: list = [False, None]
    try:
        if PartialState().is_main_process:
            shared = [True, make()]
    finally:
        broadcast_object_list(shared)
    if not shared[0]:
        raise SystemExit(2)  # silently: the main process prints the error
    return shared[1]


def first(make: Callable[[], T]) -> T:
    """Do `make` on the main process, then on all others; return each process's result.

    If the main process raises, all processes end.
    """
    results: list = []  # stays empty except on the main process
    from_first(lambda: results.append(make()))
    if results:
        return results[0]
    return make()


def total(tensor: Tensor) -> Tensor:
    """Return the sum of a CPU tensor over all processes."""
    return reduce(tensor.to(PartialState().device), "sum").cpu()


def greatest(values: Tensor) -> Tensor:
    """Return the elementwise maximum of values [N] over all processes."""
    return gather(values[None]).amax(0)


@torch.no_grad()
def average_over_processes(tensors: list[Tensor]) -> None:
    """Replace tensors in place by their mean over all processes, in one all-reduce."""
    if tensors:
        flat = reduce(torch.cat([tensor.flatten() for tensor in tensors]), "mean")
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(mean.view_as(tensor))
