"""SIGTERM and SIGINT: a run finishes its step, saves it, and leaves."""

import os
import signal
import time
from typing import Self

# A launcher passes on a signal that every process already got: that is no second signal.
SAME_SECONDS = 1.0


class StopSignals:
    """Takes note of SIGTERM and SIGINT from `with` on.

    Where no step is `begun`, a signal ends the process, exit code 128 + its number. Else it is noted, as `received`.
    """

    def __init__(self):
        self.received = 0  # by this process; 0: none
        self.stopped = 0  # what ended the run: a signal that any process received; 0: none
        self.begun = False
        self.done: int | None = None  # steps of a finished run
        self._since = 0.0  # time of `received`
        self._before: dict = {}  # handlers by signal, to put back

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGINT by nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
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
            # To clean up might wait for dead processes.
            os._exit(128 + number)
