"""Time several passes in turns, so that a slow phase of the machine falls on all alike."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch

VISIT = 0.1  # in a round a pass is timed for at least so many seconds


class Timed(NamedTuple):
    """A pass that is timed.

    Attributes:
        milliseconds: one per round; in the end `take_turns` leaves their quartiles.
        run: does the pass once.
        context: returns a context in which the pass runs; entering it is not timed.
    """

    milliseconds: list[float]
    run: Callable[[], object]
    context: Callable[[], AbstractContextManager]


def take_turns(timed: Sequence[Timed], rounds: int) -> None:
    """Time passes in so many rounds of random order; write the quartiles into each `milliseconds`."""
    # Imported here because the import warns where there is a CUDA toolkit but no GPU.
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    for number in range(rounds + 1):
        for one in random.Random(number).sample(timed, len(timed)):
            timer = Timer("run()", globals={"run": one.run}, num_threads=threads)
            with one.context():
                seconds = timer.blocked_autorange(min_run_time=VISIT).mean  # waits for a GPU
            if number:  # the first round warms up
                one.milliseconds.append(1000 * seconds)
    for one in timed:
        one.milliseconds[:] = np.quantile(one.milliseconds, [0.25, 0.5, 0.75]).tolist()
