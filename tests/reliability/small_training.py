"""A small training whose state is a function of the step, and processes to lose it in."""

import hashlib
import itertools
import os
import random
import shutil
import signal
import time
import traceback

import torch
from accelerate import Accelerator

from moh_vision.engine.checkpoint import load_training, save_training
from moh_vision.engine.ema import ModelEma


class HookedAdamW(torch.optim.AdamW):
    """Tells when accelerate asks for its state, which is after the weights are written."""

    at = staticmethod(lambda point: None)

    def state_dict(self):
        self.at("wrote the weights, not the optimiser")
        return super().state_dict()


class SmallTraining:
    def __init__(self, width=32):
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
        self.ema = ModelEma(self.model, decay=0.9)
        self.task, self.optimizer = self.accelerator.prepare(self.model, HookedAdamW(self.model.parameters(), lr=0.1))

    def step(self, number, variant=0):
        generator = torch.Generator().manual_seed(1000 * variant + number)
        self.task(torch.randn(4, 8, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.model, number)

    def save(self, run, step, keep, at=lambda point: None):
        self.optimizer.optimizer.at = at
        try:
            return save_training(self.accelerator, run, step, self.model, self.ema, {"name": "small"}, keep, at)
        finally:
            self.optimizer.optimizer.at = lambda point: None

    def load(self, folder):
        load_training(self.accelerator, folder, self.model, self.ema)

    def state(self):
        """Sum of weights, EMA and optimiser."""
        moments = [v for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        tensors = [*self.model.state_dict().values(), *self.ema.module.state_dict().values(), *moments]
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
    """A hook for `save_training` that calls `act` with the number-th point."""
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
