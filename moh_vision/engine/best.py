"""The best weights of a run, by its validations, and where it ends because none is better."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Tuple

BEST = "best.safetensors"


class Best:
    """The best validation so far; of equal ones the first.

    `key` names the score: of "loss" the lowest is the best, of any other the highest. `patience` is how many validations
    in a row without a better one end the run; 0: it never ends. `earlier` are (step, score) of the run until now.
    """

    def __init__(self, key: str, patience: int = 0, earlier: Iterable[Tuple[int, float]] = ()):
        self.key, self.patience = key, patience
        self.value: Optional[float] = None
        self.step, self.waited = 0, 0
        for step, value in earlier:
            self.take(step, value)

    def take(self, step: int, value: float) -> bool:
        """Note the score after `step` steps, and return whether it is the best."""
        sign = -1 if self.key == "loss" else 1
        best = not math.isnan(value) and (self.value is None or sign * value > sign * self.value)
        if best:
            self.value, self.step, self.waited = value, step, 0
        else:
            self.waited += 1
        return best

    @property
    def exhausted(self) -> bool:
        """Whether the run should end."""
        return 0 < self.patience <= self.waited

    def about(self) -> Dict[str, float]:
        """Return the best score and its step for results.json; empty before the first validation."""
        return {} if self.value is None else {f"best_{self.key}": self.value, "best_step": self.step}


def earlier_scores(metrics: Path, key: str, start: int) -> List[Tuple[int, float]]:
    """Return (steps done, score) of the validations in a run's metrics.jsonl up to step `start`."""
    found = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a torn last line
        if "validation" in entry and entry["step"] <= start:
            found.append((entry["step"], entry["validation"][key]))
    return found
