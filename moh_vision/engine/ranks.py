"""What the processes of a run tell each other; every process calls these functions together."""

from __future__ import annotations

from typing import Callable, List, Optional

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor

from moh_vision.engine.commands import MISTAKES


def attempt(part: Callable[[], None], kinds=(OSError, SafetensorError)) -> Optional[str]:
    """Do one process's part of a write and wait for the others; every process calls it.

    Args:
        part: the work of this process.
        kinds: exceptions that are told to all processes; others are raised here.

    Returns:
        None if all did theirs, else what the first of those that did not says, the same on every process.
    """
    problem = None
    try:
        part()
    except kinds as error:
        problem = str(error) or repr(error)
    return next((p for p in gather_object([problem]) if p), None)


def by_main(part: Callable[[], None], accelerator) -> None:
    """Let the main process do `part`. If it raises one of MISTAKES, every process raises a ValueError."""
    problem = attempt(part if accelerator.is_main_process else lambda: None, MISTAKES)
    if problem:
        raise ValueError(problem)


def total_over_processes(accelerator) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that sums a tensor in main memory over all processes; every process calls it."""

    def total(tensor: torch.Tensor) -> torch.Tensor:
        if accelerator.num_processes == 1:
            return tensor
        return accelerator.reduce(tensor.to(accelerator.device), "sum").cpu()

    return total


def greatest(values: torch.Tensor) -> List[float]:
    """Elementwise maximum over all processes; every process calls it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return values.tolist()


@torch.no_grad()
def average_over_processes(tensors: List[Tensor]) -> None:
    """Replace tensors by their mean over all processes, all in one message; every process calls it."""
    if not tensors or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view_as(tensor))
