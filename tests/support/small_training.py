"""A small training whose state is a function of the step."""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from unittest import mock

import torch
from accelerate import Accelerator

from moh_vision.engine import saver
from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.step_folders import record_text
from moh_vision.engine.weights import ModelEma

CALLS = [(os, name) for name in ("mkdir", "rename", "link", "fsync", "unlink", "rmdir")]
CALLS += [(pathlib.Path, "write_text"), (saver, "save_tensors")]


class Task(torch.nn.Module):
    """What accelerate wraps; `beside` is trained too, and not the model's."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.beside = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.beside(self.model(x)).square().mean()


@contextlib.contextmanager
def watched(at):
    """Call `at` with "NAME FILE" after every call of CALLS, whichever thread makes it."""

    def then_at(call, name, file, *args, **more):
        done = call(file, *args, **more)
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        at(f"{name} {os.path.basename(path)}")
        return done

    with contextlib.ExitStack() as patches:
        for owner, name in CALLS:
            call = getattr(owner, name)
            patches.enter_context(
                mock.patch.object(
                    owner, name, lambda *a, c=call, n=name, **m: then_at(c, n, *a, **m)
                )
            )
        yield


class SmallTraining:
    def __init__(self, width=32):
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
        )
        self.ema = ModelEma(self.model, decay=0.9)
        task = Task(self.model)
        self.task, self.optimizer = self.accelerator.prepare(
            task, torch.optim.AdamW(task.parameters(), lr=0.1)
        )
        self.saved = TrainingState(self.task, [self.optimizer], self.ema)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
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

    def state(self):
        """Sum of weights, EMA and optimiser."""
        moments = [
            v
            for _, s in sorted(self.optimizer.state_dict()["state"].items())
            for _, v in sorted(s.items())
        ]
        tensors = [
            *self.task.state_dict().values(),
            *self.ema.module.state_dict().values(),
            *moments,
        ]
        return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def at_point(number, act):
    """A hook for `SmallTraining.save` that calls `act` with the number-th point."""
    count = itertools.count()
    return lambda point: act(point) if next(count) == number else None


def seal(folder, **more):
    """Change the record of a checkpoint, and its sum of itself with it."""
    record = json.loads((folder / "step.json").read_text())
    del record["own_sha256"]
    (folder / "step.json").write_text(record_text(record | more))


def hidden(run):
    return sorted(str(p.relative_to(run)) for p in run.rglob(".*"))


def sums(folder):
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def again(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
