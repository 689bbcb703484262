"""Two processes of which the second sees an older state of the run's folder, as with the cache of a network disk.

Each process has a working directory of its own, so the same relative --output is another folder for it.
"""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from accelerate import Accelerator

from moh_vision.language.evaluation.scores import average_checkpoints
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says
from tests.support.small_runs import arguments, checkpoint_steps, logged, script


def command(steps):
    _, _, *rest = arguments("cls", "run", steps, 2, "--keep-checkpoints", 3)
    return ["--config", "quickstart/cls", *rest]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Train 4 steps with a checkpoint every second step; return the folder that holds `run`."""
    folder = tmp_path_factory.mktemp("begun")
    argv = command(4)
    argv[argv.index("run")] = str(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        script("cls").main(argv)
    return folder


@pytest.fixture
def views(begun, tmp_path):
    """Return the run as process 0 and process 1 see it."""
    for rank in ("0", "1"):
        shutil.copytree(begun, tmp_path / rank)
    return [tmp_path / rank / "run" for rank in ("0", "1")]


def damage(checkpoint):
    """Cut a file of weights."""
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def on_a_rank(rank, folder, work, *arguments):
    """Do `work` in the folder of a process; what it prints goes to the files out and err, its exit code to code."""
    os.chdir(folder / str(rank))
    code = 0
    with (
        open("out", "w") as out,
        open("err", "w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            work(*arguments)
        except SystemExit as stop:
            code = stop.code
    with open("code", "w") as file:
        file.write(str(code))


def on_a_machine(*arguments):
    """Train as the only process of a machine, which prints what happens once a machine."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    script("cls").main(*arguments)


def test_all_processes_go_on_from_the_step_that_the_main_process_finds(views):
    main, other = views
    damage(main / "checkpoints" / "step_4")
    for name in ("config.yaml", "metrics.jsonl", "data.json", "attention.json"):
        (other / name).unlink()
    shutil.rmtree(other / "checkpoints" / "step_4")
    shutil.copytree(other / "checkpoints" / "step_2", other / "checkpoints" / "step_6")
    on_two_ranks(on_a_rank, main.parents[1], on_a_machine, command(6))
    for view in views:
        assert (view.parent / "code").read_text() == "0", (view.parent / "err").read_text()
        assert "resuming run at step 2" in (view.parent / "out").read_text()
    assert [entry["step"] for entry in logged(main)] == [1, 2, 3, 4, 5, 6]
    assert checkpoint_steps(main) == [2, 4, 6]
    assert not (other / "config.yaml").exists()


def unseen(checkpoint):
    shutil.rmtree(checkpoint)


def of_another_run(checkpoint):
    file = checkpoint / "step.json"
    file.write_text(file.read_text().replace('"step": 4', '"step": 3'))


def without_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "alter, fact",
    [
        (unseen, "step.json"),
        (of_another_run, "step.json"),
        (without_weights, "model.safetensors"),
        (damage, "model.safetensors"),  # only reading it tells
    ],
)
def test_a_process_that_does_not_see_the_checkpoint_ends_all(views, alter, fact):
    main, other = views
    alter(other / "checkpoints" / "step_4")
    on_two_ranks(on_a_rank, main.parents[1], script("cls").main, command(6))
    first, second = ((view.parent / "err").read_text() for view in views)
    assert [(view.parent / "code").read_text() for view in views] == ["2", "2"], first + second
    (line,) = first.splitlines()
    assert second == ""
    assert_says(line, f"train_cls.py process 1 run/checkpoints/step_4 {fact}")
    assert len(logged(main)) == 4


def average():
    Accelerator(cpu=True)
    _, steps = average_checkpoints(Path("run"), 2)
    assert steps == [4]


def test_all_processes_average_what_the_main_process_finds(views):
    main, _ = views
    damage(main / "checkpoints" / "step_2")
    on_two_ranks(on_a_rank, main.parents[1], average)
