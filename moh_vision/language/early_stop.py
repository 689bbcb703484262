"""Stopping where the loss on held-out data no longer falls."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Dict, Iterable, List, Tuple


class Patience:
    """Count the validations since the lowest loss, `best`, after `best_step` steps; a resumed run replays its log.

    Args:
        limit: validations in a row without a lower loss that end the run; 0: it never ends.
        earlier: (steps done, loss) of the run until now, in order.
    """

    def __init__(self, limit: int, earlier: Iterable[Tuple[int, float]] = ()):
        self.limit, self.best, self.best_step, self.waited = limit, math.inf, 0, 0
        for step, loss in earlier:
            self(step, loss)

    def __call__(self, step: int, loss: float) -> bool:
        """Note the loss after `step` steps, and return whether it is the lowest."""
        lowest = loss < self.best
        if lowest:
            self.best, self.best_step, self.waited = loss, step, 0
        else:
            self.waited += 1
        return lowest

    @property
    def exhausted(self) -> bool:
        """Whether the run should end."""
        return bool(self.limit) and self.waited >= self.limit

    def about(self) -> Dict[str, float]:
        """The lowest loss and its step; empty if there was none."""
        return dict(best_step=self.best_step, best_loss=self.best) if self.best_step else {}


def earlier_losses(metrics: Path, start: int) -> List[Tuple[int, float]]:
    """(steps done, validation loss) in a run's metrics.jsonl up to step `start`."""
    if not metrics.exists():
        return []
    losses = []
    for line in metrics.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a torn last line
        if "validation" in entry and entry["step"] <= start:
            losses.append((entry["step"], entry["validation"]["loss"]))
    return losses
