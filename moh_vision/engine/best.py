"""The best weights of a run by its validations, and early stopping."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from safetensors import safe_open

from moh_vision.engine.commands import reason_of

BEST = "best.safetensors"


class Best:
    """The best validation of a run so far; of equal ones the first.

    `key` names the score: the lowest "loss" is best, or the highest of any other. `patience` is how many
    validations in a row without a better one end the run; 0: it never ends.
    """

    def __init__(self, key: str, patience: int = 0):
        self.key, self.patience = key, patience
        self.value: Optional[float] = None
        self.step, self.waited = 0, 0

    def better(self, value: float) -> bool:
        """Return whether a score is better than all until now."""
        sign = -1 if self.key == "loss" else 1
        return not math.isnan(value) and (self.value is None or sign * value > sign * self.value)

    def take(self, step: int, value: float, better: bool) -> None:
        """Note the score after `step` steps; `better`: it is the best so far."""
        if better:
            self.value, self.step, self.waited = value, step, 0
        else:
            self.waited += 1

    def replay(self, run: Path, start: int, from_file: bool) -> Best:
        """Resume from a run's log until step `start`, and with `from_file` from best.safetensors."""
        file = run / BEST
        if from_file and file.exists():
            try:
                with safe_open(file, "pt") as opened:
                    about = opened.metadata()
                self.value = json.loads(about[f"best_{self.key}"])
                self.step = json.loads(about["step"])
            except Exception as error:  # damaged headers make many kinds
                raise ValueError(f"{file}: not a readable .safetensors file of a run ({reason_of(error)})") from None
        for step, value in earlier_scores(run / "metrics.jsonl", self.key, start):
            if step > self.step:
                self.take(step, value, not from_file and self.better(value))
        return self

    @property
    def exhausted(self) -> bool:
        """Whether the run should end."""
        return 0 < self.patience <= self.waited

    def about(self) -> Dict[str, float]:
        """Return the best score and its step for results.json, if there was a validation."""
        return {} if self.value is None else {f"best_{self.key}": self.value, "best_step": self.step}


def earlier_scores(metrics: Path, key: str, start: int) -> List[Tuple[int, float]]:
    """Return (steps done, score) of validations in metrics.jsonl up to step `start`."""
    found = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a torn last line
        if "validation" in entry and entry["step"] <= start:
            found.append((entry["step"], entry["validation"][key]))
    return found
