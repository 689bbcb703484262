"""A disk that is full for a while, through the training scripts; test_writer_failures.py has the writer itself."""

import time

import pytest
from refusals import refused
from small_runs import arguments, checkpoint_steps, logged

from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit
from moh_vision.engine import saver
from moh_vision.engine.step import Step

WAIT = ["--save_in_background", "false"]  # so that a failure is in the next line of the log
SCRIPTS = dict(cls=train_cls, dit=train_dit)


def full_after(monkeypatch, steps):
    """The disk is full for the saves of these steps."""
    seal = saver.seal

    def seal_unless_full(folder, step, *rest):
        if step in steps:
            raise OSError(28, "No space left on device")
        seal(folder, step, *rest)

    monkeypatch.setattr(saver, "seal", seal_unless_full)


@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_training_goes_on_and_is_saved_later(tmp_path, monkeypatch, capsys, kind):
    full_after(monkeypatch, {2, 4, 8})
    SCRIPTS[kind].main(arguments(kind, tmp_path, 10, 2, "--keep-checkpoints", 9, *WAIT))
    assert checkpoint_steps(tmp_path) == [6, 10]
    assert [e["failed_saves"] for e in logged(tmp_path)] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert capsys.readouterr().out.count("No space left on device); training goes on") == 3


@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_three_in_a_row_end_the_run(tmp_path, monkeypatch, capsys, kind):
    full_after(monkeypatch, {4, 6, 8})
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[kind].main(arguments(kind, tmp_path, 100, 2, *WAIT))
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and "step 8 could not be saved" in error and "3. failure in a row" in error
    assert checkpoint_steps(tmp_path) == [2] and logged(tmp_path)[-1]["step"] == 8


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    seal, step = saver.seal, Step.__call__

    def seal_late(*arguments):
        time.sleep(2)
        seal(*arguments)

    def step_until_3(self, number, *arguments, **more):
        if number == 3:
            assert checkpoint_steps(tmp_path) == []
            raise RuntimeError("of the code")
        return step(self, number, *arguments, **more)

    monkeypatch.setattr(saver, "seal", seal_late)
    monkeypatch.setattr(Step, "__call__", step_until_3)
    with pytest.raises(RuntimeError, match="of the code"):
        train_cls.main(arguments("cls", tmp_path, 10, 3))
    assert checkpoint_steps(tmp_path) == [3]


def test_an_output_that_cannot_be_written_is_found_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.TemporaryFile", unwritable)
    error = refused(capsys, train_dit.main, *arguments("dit", tmp_path / "run", 10, 2))
    assert "cannot be written" in error and "Read-only" in error
    assert not (tmp_path / "run").exists()


def unwritable(*args, **kwargs):
    raise OSError(30, "Read-only file system")
