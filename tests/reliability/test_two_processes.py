"""The real scripts on two gloo processes, started by torchrun: signals, a dead process, a changed number of processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support.paths import ROOT
from tests.support.pictures import write_folder
from tests.support.repeat import cases
from tests.support.small_runs import arguments, checkpoint_steps, logged, outcome, results, same

pytestmark = pytest.mark.reliability

ALTERED = ROOT / "tests" / "support" / "altered_run.py"


class Launched:
    """A training script in processes of its own; what they print goes to FOLDER/log."""

    begun: ClassVar[list["Launched"]] = []  # by the test that runs

    def __init__(self, folder, processes, script_name, argv, alteration=None):
        self.log = folder / "log"
        command = [sys.executable]
        if processes > 1:
            command += "-m torch.distributed.run --standalone --nproc_per_node".split()
            command.append(processes)
        if alteration:
            command += [ALTERED, alteration, script_name]
        else:
            command.append(ROOT / f"train_{script_name}.py")
        command += argv
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        with open(self.log, "a") as file:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=env, stdout=file, stderr=file
            )
        self.begun.append(self)

    def ranks(self):
        """Return rank -> process id of torchrun's workers."""
        workers = psutil.Process(self.process.pid).children()
        return {
            int(worker.environ()["RANK"]): worker.pid
            for worker in workers
            if "RANK" in worker.environ()
        }

    def reach(self, run, steps):
        """Wait until the run has logged `steps` steps, and return self."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            if (run / "metrics.jsonl").exists() and len(logged(run)) >= steps:
                return self
            time.sleep(0.02)
        pytest.fail("the run did not get so far")

    def say(self, text):
        """Wait until `text` is in the log, and return self."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            if text in self.log.read_text():
                return self
            time.sleep(0.02)
        pytest.fail(f"{text!r} was not said: {self.log.read_text()[-3000:]}")

    def kill(self):
        """Kill what still runs of it."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
            self.process.wait()

    def end(self, within=120):
        """Wait for the end and return the exit code."""
        return self.process.wait(within)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A test that fails leaves no training behind, which would go on for days."""
    yield
    while Launched.begun:
        Launched.begun.pop().kill()


def trained(*arguments):
    """Run a training to its end; the arguments are those of `Launched`."""
    launched = Launched(*arguments)
    assert launched.end() == 0, launched.log.read_text()[-3000:]


def largest_difference(one, two):
    """Return the largest relative difference, |a - b| / |a|, over all weights a, b of two runs."""
    one, two = (load_file(run / "model.safetensors") for run in (one, two))
    return max(((one[k] - two[k]).norm() / one[k].norm().clamp_min(1e-30)).item() for k in one)


def test_a_signal_to_the_second_process_stops_both_at_one_step(tmp_path):
    run = tmp_path / "run"
    random = cases(10, "signals to rank 1")
    trained(tmp_path, 2, "dit", arguments("dit", tmp_path / "whole", 600, 10**6))
    argv = arguments("dit", run, 600, 10**6)
    for stop in range(10):
        before = len(logged(run)) if stop else 0
        launched = Launched(tmp_path, 2, "dit", argv).reach(run, before + 1)
        time.sleep(random.uniform(0, 0.3))
        os.kill(launched.ranks()[1], signal.SIGTERM)
        assert launched.end() != 0
        assert checkpoint_steps(run)[-1] == logged(run)[-1]["step"]
    trained(tmp_path, 2, "dit", argv)
    assert outcome(run) == outcome(tmp_path / "whole")
    text = (tmp_path / "log").read_text()
    assert text.count("stopped after") == 10
    assert 'train_dit.py", line' not in text  # the launcher prints a traceback of its own


@pytest.mark.parametrize("script_name", ["cls", "text"])
def test_killed_twice(tmp_path, script_name):
    """SIGKILL ends the launcher and both processes, twice; the resumed run ends with the bits of an undisturbed one."""
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    random = cases(2, f"kills of two processes, {script_name}")
    trained(tmp_path, 2, script_name, arguments(script_name, whole, 200, 10**6))
    argv = arguments(script_name, run, 200, 7)
    for _ in range(2):
        before = len(logged(run)) if (run / "metrics.jsonl").exists() else 0
        launched = Launched(tmp_path, 2, script_name, argv).reach(run, before + 10)
        time.sleep(random.uniform(0, 0.3))
        for pid in [launched.process.pid, *launched.ranks().values()]:
            os.kill(pid, signal.SIGKILL)
        launched.end()
    trained(tmp_path, 2, script_name, argv)
    assert (tmp_path / "log").read_text().count("resuming") == 2
    assert outcome(run) == outcome(whole)
    losses = [[entry["loss"] for entry in logged(folder)] for folder in (run, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 200


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_process_ends_the_other_one(tmp_path, rank):
    run = tmp_path / "run"
    argv = arguments("cls", run, 10**6, 20)
    launched = Launched(tmp_path, 2, "cls", argv).reach(run, 25)
    other = launched.ranks()[1 - rank]
    os.kill(launched.ranks()[rank], signal.SIGKILL)
    begin = time.monotonic()
    while Path(f"/proc/{other}").exists():
        assert time.monotonic() - begin < 30
        time.sleep(0.05)
    print(f"rank {1 - rank} was gone {time.monotonic() - begin:.1f} s after rank {rank}")
    assert launched.end() != 0
    said = launched.log.read_text()
    line = f"train_cls.py: error: (rank {1 - rank}) another process has ended "
    assert said.count(line) == 1 and "the same command resumes the run\n" in said
    assert 'train_cls.py", line' not in said  # the launcher prints a traceback of its own
    again = Launched(tmp_path, 2, "cls", argv).say("resuming")
    os.kill(again.ranks()[0], signal.SIGTERM)
    again.end()


def test_twenty_runs_end_with_0(tmp_path):
    for number in range(20):
        trained(tmp_path, 2, "dit", arguments("dit", tmp_path / str(number), 3, 3))


CHANGING = {
    "cls": ("cls", ""),
    "dit": ("dit", ""),
    "dit with groups": (
        "dit",
        "--model.scope sample --model.head_budget 0.5 --model.mlp_budget 0.5 --model.kwargs.route_by timestep",
    ),
    "cls with an elastic budget": ("cls", "--budget_range 0.5 1 --model.head_budget 0.5"),
}


@pytest.mark.parametrize("case", CHANGING)
def test_one_process_then_two_then_one(tmp_path, case):
    """After 100 steps in float64, the weights agree to 1e-10 with those of a run on one process throughout."""
    script_name, more = CHANGING[case]
    one = tmp_path / "one"
    mixed = tmp_path / "mixed"
    for output, processes, until in (
        (one, 1, 100),
        (mixed, 1, 30),
        (mixed, 2, 70),
        (mixed, 1, 100),
    ):
        argv = arguments(
            script_name, output, until, 10**6, "--optim.schedule", "constant", *more.split()
        )
        trained(tmp_path, processes, script_name, argv, "in_float64")
    worst = largest_difference(one, mixed)
    print(f"{script_name}: largest relative difference of the weights after 100 steps {worst:.1e}")
    weights = load_file(one / "model.safetensors")
    assert weights[next(iter(weights))].dtype == torch.float64 and worst <= 1e-10
    assert [e["step"] for e in logged(mixed)] == list(range(1, 101))


def test_ten_steps_of_text(tmp_path):
    """Two processes do the same steps as one process with twice the accumulation.

    Micro-batches have different numbers of labels, but the loss is the mean over all labels of the step.
    """
    dense = "--model.name mt_transformer_base --model.kwargs.dropout 0 --eval-every 5 --optim.accumulation".split()
    runs = [tmp_path / "1", tmp_path / "2"]
    for processes, run in enumerate(runs, 1):
        trained(tmp_path, processes, "text", arguments("text", run, 10, 10, *dense, 2 // processes))
    worst = largest_difference(*runs)
    print(f"largest relative difference of the weights after 10 steps {worst:.1e}")
    assert worst <= 1e-4
    losses = [[entry["loss"] for entry in logged(run)] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    one, two = map(results, runs)
    assert one["validation"]["tokens"] == two["validation"]["tokens"]
    assert one["validation"]["loss"] == pytest.approx(two["validation"]["loss"], rel=1e-4)
    assert one["bleu"]["soft"]["bleu"]["sentences"] == 40


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_of_one_process_is_skipped_by_both(tmp_path, rank):
    run = tmp_path / "run"
    argv = arguments("dit", run, 6, 1, "--keep-checkpoints", 9)
    trained(tmp_path, 2, "dit", argv, f"overflow:{rank}:3")
    assert [entry["skipped"] for entry in logged(run)] == [0, 0, 0, 1, 1, 1]
    before, after_overflow, after_good_step = (
        run / "checkpoints" / f"step_{n}" / "model.safetensors" for n in (3, 4, 5)
    )
    assert same(before, after_overflow) and not same(after_overflow, after_good_step)


def test_unreadable_images_are_counted_over_both(tmp_path):
    """4 of 24 images are damaged, 2 for each process. The limit holds for both together, exactly."""
    root = write_folder(tmp_path / "images", train=12, val=2, size=(8, 8))
    for name in ("cat/1", "cat/8", "dog/0", "dog/4"):
        file = root / "train" / f"{name}.png"
        file.write_bytes(file.read_bytes()[:40])
    more = f"--data.root {root} --data.augment none --data.img_size 8 --optim.batch_size 4".split()
    codes = []
    for allowed in (3, 4):
        run = tmp_path / str(allowed)
        argv = arguments(
            "cls", run, 6, 6, *more, "--data.max_bad_fraction", f"{allowed / 24 + 1e-9:.9f}"
        )
        codes.append(Launched(tmp_path, 2, "cls", argv).end())
    log = (tmp_path / "log").read_text()
    assert codes[0] != 0 and codes[1] == 0 and "4 unreadable so far" in log, log[-2000:]
    assert logged(tmp_path / "4")[-1]["unreadable"] == 4
