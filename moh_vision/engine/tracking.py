"""Metrics and pictures in tensorboard or wandb, by accelerate's trackers."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Optional

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker


def check_tracker(name: Optional[str]) -> None:
    """Raise ValueError if the package is not installed."""
    if name is not None and find_spec(name) is None:
        raise ValueError(f"tracker {name}: the package is not installed (pip install {name}); or leave tracker out")


def open_tracker(
    name: Optional[str], run: Path, start: int, title: str, config: dict, enabled: bool
) -> Optional[GeneralTracker]:
    """Open accelerate's tracker for a run; None without a name, or if not `enabled`.

    Tensorboard drops what an interrupted run wrote after `start` steps. In wandb a run resumes under its id, in
    the project `title`.
    """
    if name is None or not enabled:
        return None
    if name == "tensorboard":
        tracker = TensorBoardTracker("tensorboard", run, purge_step=start + 1)
        tracker.start()
        return tracker
    which = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    tracker = WandBTracker(title, dir=str(run), name=run.name, id=which, resume="allow")
    tracker.start()
    tracker.store_init_configuration(config)
    return tracker


def numbers(values: dict, prefix: str = "") -> dict:
    """Flatten {"a": 1, "b": {"c": 2.0}, "d": [...]} to {"a": 1, "b/c": 2.0}."""
    result = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result[prefix + name] = value
    return result
