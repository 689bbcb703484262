"""Training runs in processes of their own, whose every loss is recorded."""

import functools
import os
import time
from types import SimpleNamespace

from processes import Command
from small_runs import script

from moh_vision.engine import run
from moh_vision.engine.logging import RunLog
from moh_vision.engine.saver import Saver


class Runs:
    """Starts runs; those that are left at the end are killed."""

    def __enter__(self):
        self.started = []
        return self

    def __exit__(self, *error):
        for command in self.started:
            command.kill()

    def start(self, kind, argv, folder, slow_save=0.0) -> Command:
        """A new run; its output goes to folder/KIND.log, its losses to folder/KIND.losses."""
        main = functools.partial(recorded, kind, str(folder / f"{kind}.losses"), slow_save)
        self.started.append(Command(main, argv, folder / f"{kind}.log"))
        return self.started[-1]


def recorded(kind, file, slow_save, argv):
    """The real main(); each step's loss, as a hexadecimal number, is appended by one write, which a kill cannot tear."""
    losses = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    real, exact = SimpleNamespace(average=run.average_over_step, metrics=RunLog.metrics, save=Saver.save), []

    def average(accelerator, values):
        exact[:] = [float(v["loss"].detach()).hex() for v in values]
        return real.average(accelerator, values)

    def metrics(self, step, values, show):
        os.write(losses, f"{step} {' '.join(exact)}\n".encode())
        real.metrics(self, step, values, show)

    def save(*args, **kwargs):
        time.sleep(slow_save)
        return real.save(*args, **kwargs)

    run.average_over_step, RunLog.metrics, Saver.save = average, metrics, save
    script(kind).main(argv)
