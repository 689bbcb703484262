import contextlib
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from moh_vision.engine.accelerator import make_accelerator
from moh_vision.engine.run_folder import RunFolder
from moh_vision.engine.step import average_over_step, learning_rate, set_learning_rate
from tests.support.processes import hold
from tests.support.refusals import refuse


def test_schedule():
    rates = [learning_rate(s, 1.0, "cosine", 10, 110, 0.1) for s in range(111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert [learning_rate(s, 2.0, "constant", 2, 5, 0.0) for s in range(5)] == [
        1.0,
        2.0,
        2.0,
        2.0,
        2.0,
    ]
    linear = [
        learning_rate(s, 1.0, "linear", 10, 20, 0.5, warmup_lr=0.1) for s in (0, 9, 10, 15, 20, 30)
    ]
    assert linear == pytest.approx([0.19, 1.0, 1.0, 0.75, 0.5, 0.5])
    falling = [
        learning_rate(s, 2.0, "inverse_sqrt", 100, 1000, 0.0) for s in (49, 99, 399, 10_000 - 1)
    ]
    assert falling == pytest.approx([1.0, 2.0, 1.0, 0.2])  # continuous at the end of the warm-up


def test_groups_keep_their_scale():
    optimizer = torch.optim.SGD(
        [dict(params=[torch.zeros(1)], lr_scale=0.5), dict(params=[torch.ones(1)])], lr=1.0
    )
    set_learning_rate(optimizer, 0.4)
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.4]


def test_losses_are_averaged_over_micro_batches():
    accelerator = SimpleNamespace(reduce=lambda tensor, how: tensor)
    micro = [
        dict(
            loss=torch.tensor(v),
            task_loss=torch.tensor(0.125),
            mse=torch.tensor(2 * v),
            head_runs=[runs],
        )
        for v, runs in (
            (0.25, torch.tensor([3.0, 3.0, 3.0])),
            (0.75, torch.tensor([3.0, 0.0, 9.0])),
        )
    ]
    # Ratios are those of the means: their own means would be 0.667 for balance_share, and 0.667 and 0.5 for the heads.
    means = dict(loss=0.5, task_loss=0.125, mse=1.0, balance_share=0.75, head_usage=[[0.5, 0.25]])
    assert average_over_step(accelerator, micro) == means


def test_accelerate_told_otherwise_is_refused(monkeypatch, forget_precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    refuse("launched with bf16, but mixed_precision is no", make_accelerator, "no")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_accelerator("no").gradient_accumulation_steps == 1
    forget_precision()
    refuse('fp16 needs a GPU; on a CPU it is "no" or "bf16"', make_accelerator, "fp16")


ACCELERATOR = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None, print=print)


@contextlib.contextmanager
def opened(path, config, fresh=False):
    with contextlib.ExitStack() as held:
        folder = RunFolder(str(path), fresh, ACCELERATOR, held)
        folder.find_checkpoint(1)
        folder.open(config, lambda earlier: ["lr: 1 -> 2"] * (earlier != config))
        yield


def open_here(path, *more, **named):
    with opened(path, *more, **named):
        return path


def test_open_run(tmp_path):
    run = open_here(tmp_path / "a" / "run", {"lr": 1})
    (run / "weights").write_text("precious")
    open_here(run, {"lr": 1})
    (run / "weights").rename(tmp_path / "weights")
    for lr in (3, 1):
        open_here(run, {"lr": lr})  # no step was done: another configuration may begin
    (tmp_path / "weights").rename(run / "weights")
    refuse("another configuration: lr: 1 -> 2", open_here, run, {"lr": 2})
    for number in (1, 2):
        open_here(run, {"lr": 2}, fresh=True)
        assert (run.with_name(f"run.{number}")).exists()
    assert sorted(p.name for p in run.with_name("run.1").iterdir()) == ["config.yaml", "weights"]
    assert [p.name for p in run.iterdir()] == ["config.yaml"]


def test_open_run_overwrites_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    refuse("is a file", open_here, tmp_path / "file", {})
    refuse("is not empty and holds no run", open_here, tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_another_process_writes_is_left_alone(tmp_path, monkeypatch, fresh):
    monkeypatch.setattr("moh_vision.common.io.PAUSE", 0)
    run = tmp_path / "run"
    child = hold(opened, run, {})
    refuse(
        f"--output {run}: process {child} on .* is writing there; wait, or take",
        open_here,
        run,
        {},
        fresh,
    )
    RunFolder(str(run), fresh, ACCELERATOR, None, dry=True).find_checkpoint(1)  # only reads
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    open_here(run, {}, fresh)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run.1"][: 1 + fresh]


def test_two_processes_that_begin_at_once_and_one_that_was_killed_while_it_began(
    tmp_path, monkeypatch
):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", ".config.yaml.tmp"):
        (run / name).write_text("")
    open_here(run, {})
    (run / "config.yaml").unlink()
    monkeypatch.setattr(
        ACCELERATOR, "wait_for_everyone", lambda: (run / "config.yaml").write_text("")
    )
    refuse("another process has begun a run there meanwhile", open_here, run, {})
