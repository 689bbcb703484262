"""The average of a run's last checkpoints (Vaswani 2017, section 6.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Tuple

import torch
from safetensors import safe_open
from torch import Tensor

from moh_vision.engine.manifest import damage
from moh_vision.engine.step_folders import by_age

STATE = "model.safetensors"  # accelerate's name for the state of what it wraps
PREFIX = "model."  # of the model in it; what else is there is left out


def average_checkpoints(run: Path, count: int, every: int = 1) -> Tuple[Dict[str, Tensor], List[int]]:
    """The mean weights of the newest `count` checkpoints, one tensor at a time in float64.

    Where the run was stopped between two saves is left out: it ends with the weights of a run without a stop.

    Args:
        run: folder of a run.
        count: how many, or fewer if the run has not kept so many whole ones.
        every: steps between saves; the others are left out, but for the newest.

    Returns:
        (state dict of the model, steps of the checkpoints, newest first). Counters such as batch norm's are the newest's.
    """
    whole: Dict[int, Path] = {}
    for step, folder in by_age(run / "checkpoints"):
        regular = not whole or step % every == 0
        if regular and len(whole) < count and step not in whole and damage(folder, step) is None:
            whole[step] = folder
    if not whole:
        raise ValueError(f"{run / 'checkpoints'}: no whole checkpoint to average")
    files = [folder / STATE for folder in whole.values()]
    missing = next((file for file in files if not file.exists()), None)
    if missing:
        raise ValueError(f"{missing}: no such file; the weights of sharded runs are not averaged")
    averages = {}
    with safe_open(files[0], "pt") as newest:
        names = [name for name in newest.keys() if name.startswith(PREFIX)]
    opened = [safe_open(file, "pt") for file in files]
    for name in names:
        values = [file.get_tensor(name) for file in opened]
        mean = values[0]
        if mean.is_floating_point():
            mean = torch.stack(values).double().mean(0).to(values[0].dtype)
        averages[name.removeprefix(PREFIX)] = mean
    return averages, list(whole)
