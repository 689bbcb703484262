"""A small training whose state is a function of the step, and processes to lose it in."""

import contextlib
import hashlib
import itertools
import os
import pathlib
import random
import shutil
import signal
import time
import traceback
from unittest import mock

import torch
from accelerate import Accelerator

from moh_vision.engine import saver
from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.weights import ModelEma

CALLS = [(os, name) for name in ("mkdir", "rename", "link", "fsync", "unlink", "rmdir")]
CALLS += [(pathlib.Path, "write_text"), (saver, "save_tensors")]


class Task(torch.nn.Module):
    """What accelerate wraps; `beside` is trained too, and not the model's."""

    def __init__(self, model):
        super().__init__()
        self.model, self.beside = model, torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.beside(self.model(x)).square().mean()


@contextlib.contextmanager
def watched(at):
    """Call `at` with "NAME FILE" after every call of CALLS, whichever thread makes it."""

    def then_at(call, name, file, *args, **more):
        done = call(file, *args, **more)
        place = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        at(f"{name} {os.path.basename(place)}")
        return done

    with contextlib.ExitStack() as patches:
        for owner, name in CALLS:
            call = getattr(owner, name)
            patches.enter_context(
                mock.patch.object(owner, name, lambda *a, c=call, n=name, **m: then_at(c, n, *a, **m))
            )
        yield


class SmallTraining:
    def __init__(self, width=32):
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
        self.ema = ModelEma(self.model, decay=0.9)
        task = Task(self.model)
        self.task, self.optimizer = self.accelerator.prepare(task, torch.optim.AdamW(task.parameters(), lr=0.1))
        self.saved = TrainingState(self.task, [self.optimizer], self.ema)

    def step(self, number, variant=0):
        generator = torch.Generator().manual_seed(1000 * variant + number)
        self.accelerator.backward(self.task(torch.randn(4, 8, generator=generator)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.model, number)

    def saver(self, run, keep, background=True):
        return saver.Saver(self.accelerator, run, self.saved, keep, background=background)

    def save(self, run, step, keep, at=lambda point: None):
        """Save in a thread, and wait; return what went wrong."""
        writer = self.saver(run, keep)
        with watched(at):
            writer.save(step, {"name": "small"})
            writer.wait()
        return writer.problem

    def load(self, folder):
        self.saved.restore(folder)

    def state(self):
        """Sum of weights, EMA and optimiser."""
        moments = [v for _, s in sorted(self.optimizer.state_dict()["state"].items()) for _, v in sorted(s.items())]
        tensors = [*self.task.state_dict().values(), *self.ema.module.state_dict().values(), *moments]
        return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def one_threaded():
    """For a fixture: a SmallTraining in a process that may fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SmallTraining()
    torch.set_num_threads(threads)


def fork(work):
    """Start `work` in a copy of this process and return its id; it exits with 0, or 99 after an exception."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)  # as in `one_threaded`, whatever was set since: the pool's threads are not in the fork
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def wait(child, seconds=60):
    """Exit code of a child, minus the signal that ended it; one that hangs is killed and fails the test."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"still running after {seconds} s")


def at_point(number, act):
    """A hook for `SmallTraining.save` that calls `act` with the number-th point."""
    count = itertools.count()
    return lambda point: act(point) if next(count) == number else None


def seeded(name, n):
    """Random numbers of a test; its seed is printed, and taken from MOH_VISION_SEED where that is set."""
    seed = int(os.environ.get("MOH_VISION_SEED", random.SystemRandom().randrange(2**32)))
    print(f"{name}: MOH_VISION_SEED={seed} N={n}")
    return random.Random(seed)


def hidden(run):
    return sorted(str(p.relative_to(run)) for p in run.rglob(".*"))


def sums(folder):
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def again(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
