"""Stopping where the loss on held-out data no longer falls."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Iterable, List


class Patience:
    """Counts looks at held-out data since the lowest loss. It holds no state of its own: a resumed run replays its log.

    Args:
        limit: so many in a row without a lower loss are enough; 0: never.
        earlier: losses of the run until now, in order.
    """

    def __init__(self, limit: int, earlier: Iterable[float] = ()):
        self.limit, self.best, self.waited = limit, math.inf, 0
        for loss in earlier:
            self(loss)

    def __call__(self, loss: float) -> bool:
        """Take note of a loss; whether the run should end."""
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self.exhausted

    @property
    def exhausted(self) -> bool:
        """Whether the run should end."""
        return bool(self.limit) and self.waited >= self.limit


def earlier_losses(metrics: Path, start: int) -> List[float]:
    """The validation losses in a run's metrics.jsonl from before step `start`."""
    if not metrics.exists():
        return []
    losses = []
    for line in metrics.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a torn last line
        if "validation" in entry and entry["step"] < start:
            losses.append(entry["validation"]["loss"])
    return losses
