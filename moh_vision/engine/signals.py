"""SIGTERM and SIGINT: a run finishes its step, saves a checkpoint, and exits."""

import os
import signal
import time
from typing import Self

# Ctrl-C reaches every process, and the launcher passes it on to each again. Within these seconds it is the same signal.
SAME_SECONDS = 1.0


class StopSignals:
    """Handles SIGTERM and SIGINT inside its `with` block.

    Outside of the loop over steps a signal ends the process with exit code 128 + its number. Inside the loop the
    first signal is noted in `received`, and a second one ends the process at once.

    Attributes:
        received: number of the signal that this process received, or 0.
        stopped: number of the signal that ended the run, received by any process, or 0.
        begun: whether the loop over steps is running.
        done: number of steps of a finished run; None until it is finished.
    """

    def __init__(self):
        self.received = 0
        self.stopped = 0
        self.begun = False
        self.done: int | None = None
        self._since = 0.0  # when the signal was received
        self._before: dict = {}  # earlier handlers by signal, restored on exit

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Leave ignored signals alone: a shell ignores SIGINT for background jobs.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        """End the process, or note the signal if a step is running; the handler of both signals."""
        name = signal.Signals(number).name
        now = time.monotonic()
        if not self.begun:
            if self.done is not None:
                saved = f"{name}: stopped after all {self.done} steps, which are saved"
                os.write(2, f"{saved}; the same command goes on with what follows\n".encode())
            raise SystemExit(128 + number)
        if not self.received:
            self.received = number
            self._since = now
            finishing = f"{name}: finishing this step and saving; once more leaves at once\n"
            os.write(2, finishing.encode())
        elif now - self._since > SAME_SECONDS:
            os.write(2, f"{name} again: left without saving\n".encode())
            # Skip all clean-up: it might wait for dead processes.
            os._exit(128 + number)
