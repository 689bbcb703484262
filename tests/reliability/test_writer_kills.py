"""A process that is killed at any point of a save leaves a whole checkpoint, from which the run resumes."""

import copy
import itertools
import json
import os
import shutil
import signal
import time

import pytest
import torch
from safetensors import safe_open

from moh_vision.engine.step_folders import damage, latest_checkpoint
from tests.support.processes import fork, wait
from tests.support.repeat import cases
from tests.support.small_training import at_point, copy_over, hidden, seal


def kill_this_process(point):
    os.kill(os.getpid(), signal.SIGKILL)


# States of the folder of checkpoints before a save of step 6 is killed. Each function gets a folder with steps 2 and 4.


def only_step_4(checkpoints):
    shutil.rmtree(checkpoints / "step_2")


def steps_2_and_4(checkpoints):
    pass


def step_6_is_there_and_alone(checkpoints):
    """Step 6 exists already, with the weights of step 4. Saving an existing whole checkpoint again changes nothing."""
    copy_over(checkpoints / "step_4", checkpoints / "step_6")
    seal(checkpoints / "step_6", step=6)
    for step in (2, 4):
        shutil.rmtree(checkpoints / f"step_{step}")


def step_6_is_there_and_damaged(checkpoints):
    copy_over(checkpoints / "step_4", checkpoints / "step_6")
    seal(checkpoints / "step_6", step=6)
    shutil.rmtree(checkpoints / "step_2")
    (checkpoints / "step_6" / "model.safetensors").write_bytes(b"torn")


def killed_before(checkpoints):
    """An earlier kill has left temporary files next to the only checkpoint."""
    shutil.rmtree(checkpoints / "step_2")
    for name in (".step_6.tmp", ".step_2.gone", ".step_5.tmp"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(b"torn")
    (checkpoints.parent / ".ema.safetensors.tmp").write_bytes(b"torn")


ALWAYS = [only_step_4, step_6_is_there_and_alone]
RELIABILITY = [steps_2_and_4, step_6_is_there_and_damaged, killed_before]


@pytest.mark.parametrize(
    "before", ALWAYS + [pytest.param(case, marks=pytest.mark.reliability) for case in RELIABILITY]
)
def test_killed_at_every_point_of_a_save(training, tmp_path, before):
    """The save keeps one checkpoint, so the old one must not be deleted before the new one is whole."""
    base = tmp_path / "base"
    run = tmp_path / "run"
    states = {}
    weights = {}
    for step in range(1, 7):
        training.step(step)
        if step in (2, 4):
            assert training.save(base, step, keep=2) is None
        states[step] = training.state()
        weights[step] = {
            "model": copy.deepcopy(training.model.state_dict()),
            "ema": copy.deepcopy(training.ema.module.state_dict()),
        }
    before(base / "checkpoints")

    copy_over(base, run)
    points = []
    assert training.save(run, 6, 1, points.append) is None
    assert len(points) >= 20 and hidden(run) == []
    (run / "checkpoints" / "step_6").rename(tmp_path / "step_6")

    ends = {4: 0, 6: 0}  # step -> how many runs resume from it
    for last in range(len(points) + 1):
        copy_over(base, run)
        training.saved.restore(tmp_path / "step_6")
        kill = at_point(last, kill_this_process)

        def save_and_die(kill=kill):
            kill("before all")
            training.save(run, 6, 1, kill)

        assert wait(fork(save_and_die)) == -signal.SIGKILL
        where = "before all" if last == 0 else points[last - 1]
        step, folder = latest_checkpoint(run, lambda text: None)
        training.saved.restore(folder)
        reached = next(step for step in (4, 6) if states[step] == training.state())
        assert step == reached or before.__name__.startswith("step_6"), where
        ends[reached] += 1
        for name in ("model", "ema"):
            with safe_open(run / f"{name}.safetensors", "pt") as file:
                about = json.loads(file.metadata()["step"])
                expected = weights[about][name]
                assert set(file.keys()) == set(expected), where
                assert all(torch.equal(file.get_tensor(k), v) for k, v in expected.items()), where
        # The next save of a new process deletes what the dead one has left.
        assert training.save(run, 7, 1) is None, where
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_7"], where
        assert hidden(run) == [], where
        assert damage(run / "checkpoints" / "step_7", 7) is None
    assert ends[4] > 5 and (ends[6] > 3 or before is step_6_is_there_and_alone)
    print(
        f"{before.__name__}: {sum(ends.values())} of {len(points) + 1} kills resumed, at steps {ends}"
    )


def test_everything_is_on_the_disk_before_it_gets_its_name(training, tmp_path, monkeypatch):
    """Every file is flushed with fsync before a rename, so that a power cut loses no checkpoint.

    Tests that kill a process cannot show this: the system still writes what the dead process had handed over.
    """
    calls = []  # paths that fsync flushes, and pairs of paths that a renaming gets, in their order
    fsync = os.fsync

    def recorded_fsync(fd):
        calls.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def recorded(rename):
        def record_and_rename(source, target):
            calls.append((str(source), str(target)))
            rename(source, target)

        return record_and_rename

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, recorded(getattr(os, name)))
    checkpoints = tmp_path / "checkpoints"
    assert training.save(tmp_path, 1, 1) is None
    calls.clear()
    assert training.save(tmp_path, 2, 1) is None
    tmp = checkpoints / ".step_2.tmp"
    final = checkpoints / "step_2"
    named = calls.index((str(tmp), str(final)))
    flushed = {str(tmp), *(str(tmp / p.name) for p in final.iterdir())}
    assert len(flushed) == 5 and flushed <= set(calls[:named])
    deleted = calls.index((str(checkpoints / "step_1"), str(checkpoints / ".step_1.gone")))
    assert str(checkpoints) in calls[named:deleted]
    # The weights of the run are hard links to files of the checkpoint, which are on the disk by then.
    for name in ("model", "ema"):
        linked = calls.index(
            (str(tmp_path / f".{name}.safetensors.tmp"), str(tmp_path / f"{name}.safetensors"))
        )
        assert named < linked and str(tmp_path) in calls[linked:]
        assert (tmp_path / f"{name}.safetensors").samefile(final / f"{name}.safetensors")


@pytest.mark.reliability
@pytest.mark.parametrize("keep", [1, 2])
def test_a_whole_checkpoint_at_every_instant(training, tmp_path, keep):
    """A process that saves all the time is stopped at random instants, and another one looks for a checkpoint.

    Some instants fall into the deletion of old checkpoints.
    """

    def save_for_ever():  # every third step is saved twice
        for step in itertools.count(2):
            training.step(step)
            for _ in range(2 if step % 3 == 0 else 1):
                assert training.save(tmp_path, step, keep) is None, step

    n = 300
    numbers = cases(n, "stops")
    assert training.save(tmp_path, 1, keep) is None
    child = fork(save_for_ever)
    seen = set()
    torn = 0
    for _ in range(n):
        time.sleep(numbers.uniform(0, 0.03))
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        seen.add(latest_checkpoint(tmp_path, lambda text: None)[0])
        torn += bool(hidden(tmp_path))
        os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    print(
        f"keep {keep}: a whole checkpoint at {n} of {n} stops, {len(seen)} steps, {torn} stops amid a save"
    )
    assert len(seen) > 50 and torn > 50
