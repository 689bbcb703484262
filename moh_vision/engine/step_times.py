"""Measure where the time of a step goes: to data, a teacher, forward and backward, and the optimiser."""

import time
from itertools import pairwise
from typing import NamedTuple

import torch

# Part of a step -> what the log calls it. Only runs that learn from a teacher have its part.
PARTS = dict(data="data", teacher="teacher", compute="forward and backward", optimiser="optimiser")
CPU = torch.device("cpu")


class Pace(NamedTuple):
    """The mean of some steps.

    Attributes:
        rate: images or tokens per second, over all processes.
        step: seconds of a step.
        parts: seconds of a step by part, a key of PARTS; a part that no step has is not there.
    """

    rate: float
    step: float
    parts: dict[str, float]

    def share(self, part: str) -> float:
        """Return the percentage of a step that a part takes."""
        return 100 * self.parts[part] / self.step

    def line(self, unit: str) -> str:
        """Return one line for the log; `unit` is what `rate` counts."""
        parts = [
            f"{name} {1000 * self.parts[part]:.1f} ms ({self.share(part):.0f} %)"
            for part, name in PARTS.items()
            if part in self.parts
        ]
        return f"{self.rate:.0f} {unit}/s, {1000 * self.step:.1f} ms a step: {', '.join(parts)}"


class StepTimes:
    """Adds up the seconds of each part of the steps.

    A GPU works while the process goes on. There the marks are events in the GPU's own queue: they cost no
    synchronisation, and "data" is the time that the GPU waits for data.

    Args:
        device: where the model is trained.

    Attributes:
        on: whether marks are taken.
        steps: number of steps since `restart`.
        count: images or tokens of these steps.
        seconds: seconds of these steps by part.
    """

    def __init__(self, device: torch.device = CPU):
        self.on_gpu = device.type == "cuda"
        self.on = True
        self.restart()

    def restart(self) -> None:
        """Forget all steps; the next one begins now."""
        self.steps = 0
        self.count = 0
        self.seconds: dict[str, float] = {}
        self.last_step: list[tuple] = []  # marks that are not added up yet: of the last whole step,
        self.marks: list[tuple] = []  # and of the step that runs
        if self.on:
            self.mark("")

    def mark(self, part: str) -> None:
        """Note that the time since the mark before belongs to `part`."""
        if not self.on:
            return
        if self.on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.monotonic()
        self.marks.append((part, now))

    def end_step(self, count: int) -> None:
        """Note that a step of `count` images or tokens is done."""
        if not self.on:
            return
        self.steps += 1
        self.count += count
        # The step just done has read a loss from the GPU. So the events of the step before it are over.
        self._add(self.last_step)
        self.last_step = self.marks
        self.marks = self.marks[-1:]

    def pace(self) -> Pace:
        """Return the mean of the steps since `restart`; there must be one."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self._add(self.last_step)
        self.last_step = []
        parts = {part: seconds / self.steps for part, seconds in self.seconds.items()}
        step = max(sum(parts.values()), 1e-9)
        return Pace(self.count / self.steps / step, step, parts)

    def _add(self, marks: list[tuple]) -> None:
        for (_, begin), (part, end) in pairwise(marks):
            if self.on_gpu:
                seconds = begin.elapsed_time(end) / 1000
            else:
                seconds = end - begin
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
