"""What a run reports: metrics, a tracker, a line for every start, and the commands that it suggests at its end."""

import contextlib
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from moh_vision import __version__
from moh_vision.classification.train import main
from moh_vision.common.progress import Progress
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.diffusion.objectives import OBJECTIVES
from moh_vision.diffusion.schedulers import SAMPLERS
from moh_vision.engine import logging
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.logging import (
    RunLog,
    check_tracker,
    commit,
    ending,
    open_tracker,
    wandb_id,
    write_json,
)
from tests.support.refusals import refuse
from tests.support.small_runs import arguments, entries


def test_metrics_of_an_interrupted_run_are_replaced_and_a_finished_one_validates_once(
    tmp_path, capsys
):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 4, "loss": 1}\n{"step": 5, "loss": 9}\n{"step": 6, "lo')
    log = RunLog(path, start=4, total=6, enabled=True, title="t")
    log.step(8)
    log.metrics(5, {"loss": 2.0}, "loss 2")
    log.close()
    for _ in range(2):
        log = RunLog(path, start=6, total=6, enabled=True, title="t")
        log.event(6, {"validation": {"top1": 1.0}}, "v")
        log.close()
    before, step, validation = entries(tmp_path)
    assert before == {"step": 4, "loss": 1}
    assert validation == {"step": 6, "validation": {"top1": 1.0}}
    assert (step["step"], step["loss"]) == (5, 2.0)
    assert step["images_per_s"] > 0 and step["peak_memory_mib"] > 0
    assert "t 5/6: loss 2," in capsys.readouterr().out


@pytest.mark.parametrize(
    "every, expected",
    [(1, ["", "8 left", "7 left", "6 left"]), (2, ["8 left", "6 left"])],
    ids=["every step", "every other step"],
)
def test_the_time_left_is_that_of_steps_after_the_first(
    tmp_path, capsys, monkeypatch, every, expected
):
    """The first step is slow because it compiles and fills caches: here it takes a minute, later steps a second."""
    now = 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = RunLog(tmp_path / "metrics.jsonl", start=0, total=10, enabled=True, title="t")
    for step, seconds in enumerate([60, 1, 1, 1]):
        now += seconds
        log.step(8)
        if (step + 1) % every == 0:
            log.metrics(step + 1, {}, "loss 2")
    log.close()
    # The line of the parts of a step has no " MiB".
    lines = [line for line in capsys.readouterr().out.splitlines() if " MiB" in line]
    left = [line.partition(" MiB, 0:00:0")[2] for line in lines]
    assert left == expected


def test_progress_of_a_command_is_a_line_after_ten_seconds_and_every_minute(capsys, monkeypatch):
    now = [0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress("work", 100, "step") as progress:
        for now[0] in range(1, 72):
            progress.add()
    assert capsys.readouterr().out.splitlines() == [
        "work: 10 of 100 steps, 01:30 left",
        "work: 70 of 100 steps, 00:30 left",
    ]


# ---------------------------------------------------------------- a tracker


def test_a_tracker_gets_the_numbers_and_goes_on_under_the_id_in_the_folder(tmp_path, monkeypatch):
    """wandb is not a dependency, so a fake module records the calls."""
    PartialState()  # in a script the accelerator makes it
    started = []
    told = []

    class Run:
        def log(self, values, step):
            told.append((step, values))

        def finish(self):
            told.append("finished")

    class Config:
        def update(self, values, **_):
            started.append(values)

    def init(**options):
        started.append(options)
        return Run()

    wandb = SimpleNamespace(init=init, config=Config(), Image=lambda image: image.shape)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        tracker = open_tracker("wandb", tmp_path / "run", 0, "moh_vision dit", {"seed": 1}, True)
        log = RunLog(tmp_path / "metrics.jsonl", 0, 2, True, "t", tracker)
        log.metrics(0, dict(loss=1.5, grad_norm=float("nan"), head_usage=[[1.0]]), "loss")
        values = dict(validation=dict(top1=50.0, n=[1]), on=True, name="x", none=None)
        log.event(1, values, "validation")
        log.pictures(1, "samples", torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
        log.close()
    first, config, second, _ = started
    assert config == {"seed": 1} and first["id"] == second["id"] and first["resume"] == "allow"
    assert first["id"] == (tmp_path / "run" / "wandb_id.txt").read_text()
    assert first["project"] == "moh_vision dit" and first["name"] == "run"
    (step, values), validation, images, end = told[:4]
    assert step == 0
    assert values["loss"] == 1.5 and "images_per_s" in values
    assert "grad_norm" not in values  # it is NaN
    assert validation == (1, {"validation/top1": 50.0}) and end == "finished"
    assert images == (1, {"samples": [(8, 8, 3)] * 4})


def test_the_id_of_wandb_is_of_the_run_and_not_of_its_path(tmp_path):
    """A run that starts over at the same path is another one; a folder that was moved is the same."""
    run = tmp_path / "run"
    first = wandb_id(run)
    run.rename(tmp_path / "run.1")  # as --fresh does
    assert wandb_id(run) != first == wandb_id(tmp_path / "run.1")


class Tracker:
    """Keeps what it gets, as tensorboard does."""

    name = "tensorboard"

    def __init__(self):
        self.got = []

    def log(self, values, step):
        self.got.append((step, values))

    def finish(self):
        pass


@pytest.mark.parametrize("goes_on", [True, False], ids=["the same tracker", "a new tracker"])
def test_a_finished_run_that_validates_again_sends_no_second_validation(tmp_path, goes_on):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 6, "loss": 1.0}\n{"step": 6, "validation": {"top1": 1.0}}\n')
    tracker = Tracker()
    log = RunLog(path, 6, 6, True, "t", tracker, tracker_goes_on=goes_on)
    log.event(6, {"validation": {"top1": 1.0}}, "v")
    log.close()
    assert tracker.got == [(6, {"validation/top1": 1.0})] * (not goes_on)
    assert [entry["step"] for entry in entries(tmp_path)] == [6, 6]


class Writer:
    """A SummaryWriter of tensorboard; `opened` has all of them."""

    opened: list = []

    def __init__(self, folder, **options):
        Path(folder).mkdir(exist_ok=True)
        self.folder = folder
        self.options = options
        self.scalars = []
        self.opened.append(self)

    def add_scalar(self, name, value, global_step):
        self.scalars.append((name, global_step))

    def flush(self):
        pass

    def close(self):
        pass


@pytest.fixture
def writers(monkeypatch):
    """Install a tensorboard that writes nothing; return the list of the writers that are opened."""
    monkeypatch.setattr(Writer, "opened", [])
    package = ModuleType("tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    of_torch = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", of_torch)
    monkeypatch.setattr(torch.utils, "tensorboard", of_torch, raising=False)
    return Writer.opened


def test_the_same_command_on_a_finished_run_leaves_one_validation_in_its_tracker(tmp_path, writers):
    for _ in range(2):
        main(arguments("cls", tmp_path / "run", 1, 1, "--tracker", "tensorboard"))
    validations = [
        [step for name, step in writer.scalars if name == "validation/top1"] for writer in writers
    ]
    assert validations == [[1], []]


def test_a_run_that_was_killed_before_its_first_checkpoint_logs_its_beginning_once(tmp_path):
    for _ in range(2):
        log = RunLog(tmp_path / "metrics.jsonl", 0, 6, True, "t")
        log.event(0, {"trained_parameters": 3}, "training 3 parameters")
        log.close()
    assert entries(tmp_path) == [{"step": 0, "trained_parameters": 3}]


@pytest.mark.parametrize("start, dropped", [(0, 0), (4, 5)])
def test_tensorboard_drops_what_is_done_again(tmp_path, writers, start, dropped):
    PartialState()
    open_tracker("tensorboard", tmp_path, start, "moh_vision dit", {}, True)
    (writer,) = writers
    assert (writer.folder, writer.options) == (
        str(tmp_path / "tensorboard"),
        {"purge_step": dropped},
    )


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path, capsys):
    values = dict(
        loss=math.nan,
        top1=50.0,
        validation=dict(fid=math.inf, per_layer=[1.0, -math.inf]),
        name="NaN",
    )
    finite = dict(
        loss=None, top1=50.0, validation=dict(fid=None, per_layer=[1.0, None]), name="NaN"
    )
    write_json(tmp_path / "results.json", values)
    assert json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail) == finite
    keys = "loss, validation.fid, validation.per_layer"
    said = f"{tmp_path}/results.json: null stands for a number that is not finite: {keys}\n"
    assert capsys.readouterr().out == said
    log = RunLog(tmp_path / "metrics.jsonl", 0, 2, True, "t")
    log.event(1, values, "scores")
    log.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == dict(finite, step=1)


def test_a_tracker_whose_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    refuse("tracker wandb installed", check_tracker, "wandb")


# ---------------------------------------------------------------- starts and the end


def test_a_line_for_every_start_and_the_files_that_are_there_at_the_end(tmp_path, capsys):
    run = tmp_path / "run"
    for steps in (1, 2):
        main(arguments("cls", run, steps, 1, "--tracker", "null"))
    first, second = map(json.loads, (run / "environment.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 1)
    assert first["date"] <= second["date"]
    assert first["command"].startswith("train_cls.py --config configs/quickstart/cls.yaml")
    assert "--max-steps 1" in first["command"] and "--max-steps 2" in second["command"]
    assert first["versions"]["torch"] == torch.__version__.split("+")[0]
    assert first["versions"]["moh_vision"] == __version__
    assert first["processes"] == 1
    assert first["device"] and first["cores"] >= 1
    files, _, commands = capsys.readouterr().out.partition(f"{run} has ")[2].partition("\nnext\n")
    named = files.split(", ")
    assert {"results.json", "model.safetensors", "checkpoints", "config.yaml"} <= set(named)
    assert all((run / name).exists() for name in named)
    assert "best.safetensors" not in named
    assert shlex.split(commands.splitlines()[0])[-1] == str(run)


def test_commit(tmp_path):
    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    assert commit(tmp_path) is None  # there is no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD").strip()
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") is None  # a package installed inside somebody else's clone


@pytest.mark.parametrize("command", [*sum(logging.NEXT.values(), ()), *logging.OF_FILES.values()])
def test_what_comes_next_is_a_command(command, capsys):
    module, *words = shlex.split(f"python -m moh_vision{command}")[2:]
    argv = ["--help"]
    if module == "moh_vision":
        module = "moh_vision.__main__"
        argv = [words[0], "--help"]
    with contextlib.suppress(SystemExit):
        importlib.import_module(module).main(argv)
    known = re.findall(r"(?<![\w-])--[\w-]+", capsys.readouterr().out)
    options = {word for word in words if word.startswith("--")}
    assert options <= {option.replace("_", "-") for option in known}


def test_what_comes_next_imports_a_users_file(tmp_path):
    commands = ending("classification", tmp_path, imports=["my router.py"]).splitlines()[2:]
    assert all(command.endswith(" --imports 'my router.py'") for command in commands)
    assert "--imports" not in ending("classification", tmp_path)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_diffusion_run_suggests_few_steps_of_a_sampler_for_its_objective(tmp_path, objective):
    options = DitConfig(objective=objective).sampling_options()
    command = ending("diffusion", tmp_path, options).splitlines()[2]
    config = parse_config(SampleConfig, shlex.split(command)[3:], "sample.py")
    assert SAMPLERS[config.sampler].fits(OBJECTIVES[objective].prediction) and config.steps == 20
