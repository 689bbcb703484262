"""Metrics and pictures in tensorboard or wandb, beside metrics.jsonl; accelerate's trackers do the work."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Optional

from torch import Tensor


class Tracker:
    """Writes to one of accelerate's trackers.

    Args:
        tracker: a `GeneralTracker` with log, log_images and finish.
    """

    def __init__(self, tracker):
        self.tracker = tracker

    def log(self, step: int, values: dict) -> None:
        """The numbers in `values`; those in a dict inside as "outer/inner". Lists and texts are in metrics.jsonl only."""
        self.tracker.log(numbers(values), step=step)

    def images(self, step: int, name: str, images: Tensor) -> None:
        """Images [N, C, h, w] uint8."""
        self.tracker.log_images({name: images.permute(0, 2, 3, 1).numpy()}, step=step, **self._layout())

    def _layout(self) -> dict:
        return dict(dataformats="NHWC") if self.tracker.name == "tensorboard" else {}

    def close(self) -> None:
        self.tracker.finish()


def check_tracker(name: Optional[str]) -> None:
    """Raise ValueError if the package is not installed."""
    if name is not None and find_spec(name) is None:
        raise ValueError(f"tracker {name}: the package is not installed (pip install {name}); or leave tracker out")


def open_tracker(
    name: Optional[str], run: Path, start: int, title: str, config: dict, enabled: bool
) -> Optional[Tracker]:
    """The tracker of a run; None without a name, or on processes other than the main one.

    Args:
        name: "tensorboard" (events in RUN/tensorboard) or "wandb" (a resumed run goes on under its id).
        start: steps done; tensorboard drops what an interrupted run wrote behind them.
        title: the project in wandb.
        config: nested dict; wandb shows it.
    """
    if name is None or not enabled:
        return None
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    if name == "tensorboard":
        tracker = TensorBoardTracker("tensorboard", run, purge_step=start + 1)
        tracker.start()
        return Tracker(tracker)
    which = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    tracker = WandBTracker(title, dir=str(run), name=run.name, id=which, resume="allow")
    tracker.start()
    tracker.store_init_configuration(config)
    return Tracker(tracker)


def numbers(values: dict, prefix: str = "") -> dict:
    """{"a": 1, "b": {"c": 2.0}, "d": [...]} -> {"a": 1, "b/c": 2.0}."""
    result = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result[prefix + name] = value
    return result
