import json
import math
import sys
import types

import pytest
import torch
from accelerate import PartialState

from moh_vision.engine.logging import RunLog, check_tracker, numbers, open_tracker, write_json


class Recorder:
    """A tracker with accelerate's methods."""

    name = "wandb"

    def __init__(self):
        self.calls = []

    def log(self, values, step):
        self.calls.append((step, values))

    def log_images(self, values, step, **kwargs):
        self.calls.append((step, {k: (v.shape, v.dtype.name) for k, v in values.items()}, kwargs))

    def finish(self):
        self.calls.append("finished")


def test_numbers():
    values = dict(loss=0.5, step=3, on=True, head_usage=[[1.0]], name="x", none=None, validation=dict(top1=9.5, n=[1]))
    assert numbers(values) == {"loss": 0.5, "step": 3, "validation/top1": 9.5}


def test_the_log_hands_its_numbers_on(tmp_path):
    recorder = Recorder()
    log = RunLog(tmp_path / "metrics.jsonl", 0, 2, True, "t", recorder)
    log.metrics(0, dict(loss=1.5, grad_norm=float("nan"), head_usage=[[1.0]]), "loss")
    log.event(1, dict(validation=dict(top1=50.0)), "validation")
    log.pictures(1, "samples", torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    log.close()
    (step, first), second, images, end = recorder.calls
    assert step == 0 and first["loss"] == 1.5 and "grad_norm" not in first and "images_per_s" in first
    assert second == (1, {"validation/top1": 50.0}) and end == "finished"
    assert images == (1, {"samples": ((4, 8, 8, 3), "uint8")}, {})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["grad_norm"] is None and lines[1] == {"step": 1, "validation": {"top1": 50.0}}


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path, capsys):
    values = dict(loss=math.nan, top1=50.0, validation=dict(fid=math.inf, per_layer=[1.0, -math.inf]), name="NaN")
    finite = dict(loss=None, top1=50.0, validation=dict(fid=None, per_layer=[1.0, None]), name="NaN")
    write_json(tmp_path / "results.json", values)
    assert json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail) == finite
    named = "null stands for a number that is not finite: loss, validation.fid, validation.per_layer"
    assert capsys.readouterr().out == f"{tmp_path}/results.json: {named}\n"
    log = RunLog(tmp_path / "metrics.jsonl", 0, 2, True, "t")
    log.event(1, values, "scores")
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == dict(finite, step=1)


def test_no_tracker_and_a_missing_package(tmp_path, monkeypatch):
    assert open_tracker(None, tmp_path, 0, "t", {}, True) is None
    assert open_tracker("tensorboard", tmp_path, 0, "t", {}, False) is None
    check_tracker(None)
    monkeypatch.setattr("moh_vision.engine.logging.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tracker wandb: the package is not installed"):
        check_tracker("wandb")


def test_wandb_goes_on_under_the_id_of_the_folder(tmp_path, monkeypatch):
    """wandb is not a dependency: a module of its name takes the calls."""
    PartialState()  # as a script has it
    started = []
    fake = types.SimpleNamespace(
        init=lambda **kwargs: started.append(kwargs) or types.SimpleNamespace(finish=lambda: None),
        config=types.SimpleNamespace(update=lambda values, **_: started.append(values)),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        open_tracker("wandb", tmp_path / "run", 0, "moh_vision dit", {"seed": 1}, True).finish()
    first, config, second, _ = started
    assert config == {"seed": 1} and first["id"] == second["id"] and first["resume"] == "allow"
    assert first["project"] == "moh_vision dit" and first["name"] == "run"
