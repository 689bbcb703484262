"""A small training whose state depends only on the number of its steps, to test saving and resuming."""

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

# The calls of a save that change files.
CALLS = [(os, name) for name in ("mkdir", "rename", "replace", "link", "fsync", "unlink", "rmdir")]
CALLS += [(pathlib.Path, "write_text"), (saver, "save_tensors")]


class Task(torch.nn.Module):
    """A model and an auxiliary module, `beside`, which is trained and saved but is no part of the model's weights."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.beside = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.beside(self.model(x)).square().mean()


@contextlib.contextmanager
def watched(at):
    """Within the block call `at("NAME FILE")` after each of `CALLS`, in whatever thread it is made."""

    def followed_by_at(call, name):
        def call_then_at(file, *args, **more):
            result = call(file, *args, **more)
            # fsync gets a file descriptor, all others a path.
            is_descriptor = isinstance(file, int)
            path = os.readlink(f"/proc/self/fd/{file}") if is_descriptor else os.fspath(file)
            at(f"{name} {os.path.basename(path)}")
            return result

        return call_then_at

    with contextlib.ExitStack() as patches:
        for owner, name in CALLS:
            call = followed_by_at(getattr(owner, name), name)
            patches.enter_context(mock.patch.object(owner, name, call))
        yield


class SmallTraining:
    """A training on the CPU: step(number) draws its batch from a generator seeded with the number."""

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
        """Save in the background and wait for the end; return the problem of a save that failed, else None.

        at: called with "NAME FILE" after each of `CALLS`; it may raise an error or kill the process.
        """
        writer = self.saver(run, keep)
        with watched(at):
            writer.save(step, {"name": "small"})
            writer.wait()
        return writer.problem

    def state(self):
        """Return a hash of the weights, the EMA and the state of the optimiser."""
        tensors = [*self.task.state_dict().values(), *self.ema.module.state_dict().values()]
        for _, moments in sorted(self.optimizer.state_dict()["state"].items()):
            tensors += [tensor for _, tensor in sorted(moments.items())]
        return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def at_point(number, act):
    """Return an `at` for `SmallTraining.save` that calls `act` at the point with this index, counted from 0."""
    count = itertools.count()
    return lambda point: act(point) if next(count) == number else None


def seal(folder, **more):
    """Change entries of a checkpoint's record, and update the record's sum of itself."""
    record = json.loads((folder / "step.json").read_text())
    del record["own_sha256"]
    (folder / "step.json").write_text(record_text(record | more))


def hidden(run):
    """Return the relative paths of hidden files and folders: temporary ones that a save should not leave behind."""
    return sorted(str(p.relative_to(run)) for p in run.rglob(".*"))


def sums(folder):
    """Return {relative path: sha256} of all files in a folder."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def copy_over(source, target):
    """Replace the folder `target` by a copy of `source`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
