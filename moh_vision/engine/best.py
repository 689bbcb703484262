"""Keep the weights with the best validation score, and stop a run that no longer improves."""

import math
from pathlib import Path
from typing import Self

from moh_vision.common.errors import reason_of
from moh_vision.common.io import TensorFiles
from moh_vision.engine.logging import logged

BEST = "best.safetensors"


class Best:
    """The best validation of a run so far, by one score.

    Args:
        key: name of the score. For "loss" the lowest value is best, for any other score the highest.
        patience: number of validations in a row without improvement after which the run ends; 0: never.
        write: whether to keep the weights of the best validation in OUTPUT/best.safetensors.
    """

    def __init__(self, key: str, patience: int = 0, write: bool = True):
        self.key = key
        self.patience = patience
        self.write = write
        self.value: float | None = None
        self.step = 0  # of the best validation
        self.waited = 0  # validations since then

    def better(self, value: float) -> bool:
        """Return whether a score, see `value_of`, is better than the best so far; NaN never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        if self.key == "loss":
            return value < self.value
        return value > self.value

    def take(self, step: int, value: float, better: bool) -> None:
        """Note the score after `step` steps; `better` says whether it is the best so far.

        After a resume from a checkpoint that is older than the best validation, validations up to the best one do not
        count against patience.
        """
        if better:
            self.value = value
            self.step = step
            self.waited = 0
        elif step > self.step:
            self.waited += 1

    def replay(self, run: Path, start: int) -> Self:
        """Restore the state after `start` steps, from the run's log and with `write` also from best.safetensors."""
        file = run / BEST
        if self.write and file.exists():
            try:
                metadata = TensorFiles(file).metadata
                self.value = metadata[f"best_{self.key}"]
                self.step = metadata["step"]
            except Exception as error:  # a damaged header raises any of many exceptions
                problem = f"not a readable .safetensors file of a run ({reason_of(error)})"
                raise ValueError(f"{file}: {problem}") from None
        for step, value in earlier_scores(run / "metrics.jsonl", self.key, start):
            # With `write` the best score is that of best.safetensors, whatever the log says.
            better = not self.write and self.better(value)
            self.take(step, value, better)
        return self

    @property
    def exhausted(self) -> bool:
        """Whether patience is exhausted and the run should end."""
        return 0 < self.patience <= self.waited

    def results(self) -> dict[str, float]:
        """Return the best score and its step for results.json, if there was a validation."""
        if self.value is None:
            return {}
        return {f"best_{self.key}": self.value, "best_step": self.step}


def value_of(scores: dict, key: str) -> float:
    """Return a score of a validation; NaN if the loss is not finite: then the model's other scores say nothing either.

    The log writes NaN as null, which is None here.
    """
    for name in (key, "loss"):
        value = scores.get(name, 0.0)
        if value is None or not math.isfinite(value):
            return math.nan
    return scores[key]


def earlier_scores(metrics: Path, key: str, start: int) -> list[tuple[int, float]]:
    """Return (steps done, score) of validations in metrics.jsonl up to step `start`."""
    scores = []
    for entry in logged(metrics):
        if "validation" not in entry or entry["step"] > start:
            continue
        try:
            value = value_of(entry["validation"], key)
        except (AttributeError, KeyError, TypeError):
            value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{metrics}: the validation after step {entry['step']} has no {key}")
        scores.append((entry["step"], value))
    return scores
