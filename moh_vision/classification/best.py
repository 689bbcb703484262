"""The best weights of a run, by the top-1 of its validations."""

from __future__ import annotations

from pathlib import Path
from typing import Dict

from torch import nn

from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.ranks import attempt, from_first
from moh_vision.models.weight_files import read_safetensors

BEST = "best.safetensors"


class Best:
    """RUN/best.safetensors: the weights with the highest top-1 of all validations so far; of equal ones the first.

    The metadata of the file hold top-1 and step, so a resumed run needs no other record. Every
    process makes and calls one.
    """

    def __init__(self, run: Path):
        self.file = run / BEST
        self.top1, self.step = from_first(self._read)

    def __call__(self, step: int, top1: float, model: nn.Module, metadata: Dict[str, object], main: bool) -> str:
        """Write `model`, unwrapped, if `top1`, in percent, is the highest so far; return what failed, or ""."""
        if top1 <= self.top1:
            return ""
        about = dict(metadata, step=step, best_top1=top1)
        problem = attempt(lambda: export_weights(model, self.file, about, write=main))
        if problem:
            return f"{self.file} could not be written: {problem}"
        self.top1, self.step = top1, step
        return ""

    def about(self) -> Dict[str, float]:
        """Return the best score and its step for results.json; empty before the first validation."""
        return dict(best_top1=self.top1, best_step=self.step) if self.step else {}

    def _read(self) -> tuple:
        if not self.file.exists():
            return -1.0, 0
        metadata = read_safetensors(self.file, lambda name: False)[1]
        top1, step = metadata.get("best_top1"), metadata.get("step")
        if not isinstance(top1, float) or not isinstance(step, int):
            raise ValueError(f"{self.file}: best_top1 and step in its metadata are not the score and the step of a run")
        return top1, step
