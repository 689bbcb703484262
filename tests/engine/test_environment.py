"""environment.jsonl: a line for every start of a run."""

import json
import subprocess

import small_runs
import torch

from moh_vision import __version__
from moh_vision.classification import train as train_cls
from moh_vision.engine.logging import commit


def git(folder, *words):
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", str(folder), *name, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_line_for_every_start(tmp_path):
    for steps in (1, 2):
        train_cls.main(small_runs.arguments("cls", tmp_path / "run", steps, 1, "--tracker", "null"))
    first, second = map(json.loads, (tmp_path / "run" / "environment.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 1) and first["date"] <= second["date"]
    assert first["command"].startswith("train_cls.py --config configs/quickstart/cls.yaml")
    assert "--max-steps 1" in first["command"] and "--max-steps 2" in second["command"]
    assert first["versions"]["torch"] == torch.__version__.split("+")[0] and first["processes"] == 1
    assert first["versions"]["moh_vision"] == __version__ and first["device"] and first["cores"] >= 1


def test_commit(tmp_path):
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) is None  # nothing is committed
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") is None  # installed inside somebody's clone
