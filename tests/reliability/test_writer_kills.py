"""A process that is killed while it saves leaves a checkpoint to resume from, wherever it was."""

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
from tests.support.small_training import again, at_point, hidden, seal


def kill_this_process(point):
    os.kill(os.getpid(), signal.SIGKILL)


def only_step_4(checkpoints):
    shutil.rmtree(checkpoints / "step_2")


def steps_2_and_4(checkpoints):
    pass


def step_6_is_there_and_alone(checkpoints):
    """Saved again, a whole checkpoint stays as it is; here it has the weights of step 4."""
    again(checkpoints / "step_4", checkpoints / "step_6")
    seal(checkpoints / "step_6", step=6)
    for step in (2, 4):
        shutil.rmtree(checkpoints / f"step_{step}")


def step_6_is_there_and_damaged(checkpoints):
    again(checkpoints / "step_4", checkpoints / "step_6")
    seal(checkpoints / "step_6", step=6)
    shutil.rmtree(checkpoints / "step_2")
    (checkpoints / "step_6" / "model.safetensors").write_bytes(b"torn")


def killed_before(checkpoints):
    """There is rubbish beside the only checkpoint."""
    shutil.rmtree(checkpoints / "step_2")
    for name in (".step_6.tmp", ".step_2.gone", ".step_5.tmp"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(b"torn")
    (checkpoints.parent / ".ema.safetensors.tmp").write_bytes(b"torn")


FAST = [only_step_4, step_6_is_there_and_alone]
OTHERS = [steps_2_and_4, step_6_is_there_and_damaged, killed_before]


@pytest.mark.parametrize(
    "before", FAST + [pytest.param(case, marks=pytest.mark.reliability) for case in OTHERS]
)
def test_killed_at_every_point_of_a_save(training, tmp_path, before):
    """One checkpoint is kept, so that there is never another one to fall back to."""
    base = tmp_path / "base"
    run = tmp_path / "run"
    states = {}
    for step in range(1, 7):
        training.step(step)
        if step in (2, 4):
            assert training.save(base, step, keep=2) is None
        states[step] = training.state()
        weights = {"model": training.model.state_dict(), "ema": training.ema.module.state_dict()}
        states[step, "weights"] = {
            k: {n: t.clone() for n, t in w.items()} for k, w in weights.items()
        }
    before(base / "checkpoints")

    again(base, run)
    points = []
    assert training.save(run, 6, 1, points.append) is None
    assert len(points) >= 20 and hidden(run) == []
    (run / "checkpoints" / "step_6").rename(tmp_path / "step_6")

    ends = {4: 0, 6: 0}
    for last in range(len(points) + 1):
        again(base, run)
        training.saved.restore(tmp_path / "step_6")
        kill = at_point(last, kill_this_process)
        assert (
            wait(fork(lambda kill=kill: (kill("before all"), training.save(run, 6, 1, kill))))
            == -signal.SIGKILL
        )
        where = "before all" if last == 0 else points[last - 1]
        step, folder = latest_checkpoint(run, lambda text: None)
        training.saved.restore(folder)
        reached = next(step for step in (4, 6) if states[step] == training.state())
        assert step == reached or before.__name__.startswith("step_6"), where
        ends[reached] += 1
        for name in ("model", "ema"):
            with safe_open(run / f"{name}.safetensors", "pt") as file:
                about = json.loads(file.metadata()["step"])
                expected = states[about, "weights"][name]
                assert set(file.keys()) == set(expected), where
                assert all(torch.equal(file.get_tensor(k), v) for k, v in expected.items()), where
        # A new process goes on from there and leaves nothing of the dead one.
        assert training.save(run, 7, 1) is None, where
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_7"] and hidden(
            run
        ) == [], where
        assert damage(run / "checkpoints" / "step_7", 7) is None
    assert ends[4] > 5 and (ends[6] > 3 or before is step_6_is_there_and_alone)
    print(
        f"{before.__name__}: {sum(ends.values())} of {len(points) + 1} kills resumed, at steps {ends}"
    )


def test_everything_is_on_the_disk_before_it_gets_its_name(training, tmp_path, monkeypatch):
    """What a kill cannot show, because the system keeps what a dead process wrote: only a power cut loses it."""
    calls = []
    fsync = os.fsync
    rename = os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append((str(a), str(b))), rename(a, b)))
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
    for name in ("model", "ema"):  # links to what is on the disk
        linked = calls.index(
            (str(tmp_path / f".{name}.safetensors.tmp"), str(tmp_path / f"{name}.safetensors"))
        )
        assert named < linked and str(tmp_path) in calls[linked:]
        assert (tmp_path / f"{name}.safetensors").samefile(final / f"{name}.safetensors")


@pytest.mark.reliability
@pytest.mark.parametrize("keep", [1, 2])
def test_a_whole_checkpoint_at_every_instant(training, tmp_path, keep):
    """The writer is stopped at random instants, rotation included, and looked at from outside."""

    def save_for_ever():  # every third step twice
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
