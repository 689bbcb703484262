"""Weights sharded by FSDP2, gathered for validation, generation, and loading from a file."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator, List

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def is_sharded(model: nn.Module) -> bool:
    """Whether a process holds only parts of the weights at present."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextlib.contextmanager
def whole_weights(task: nn.Module) -> Iterator[None]:
    """Keep all weights gathered, so that each process may call any module as often as it likes.

    Outside, a sharded module's forward gathers its weights and waits for all processes: one with fewer
    batches would block the others forever. Every process enters and leaves. Without FSDP, or in another
    such context, nothing is done. The task is what accelerate wraps, or holds it.
    """
    units: List[FSDPModule] = [m for m in task.modules() if isinstance(m, FSDPModule)] if is_sharded(task) else []
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)  # as configured


def load_whole(model: nn.Module, state: Dict[str, Tensor]) -> None:
    """Load whole weights, tied ones stored once, into a model that may be sharded; for every process."""
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
