"""Learning rates, averages of losses, the accelerator's settings, and how a run opens its folder."""

import contextlib
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from moh_vision.engine.accelerator import make_accelerator
from moh_vision.engine.run_folder import RunFolder
from moh_vision.engine.step import average_over_step, learning_rate, set_learning_rate
from moh_vision.engine.step_folders import rotate
from tests.support.processes import hold
from tests.support.refusals import refuse


def test_schedule():
    rates = [learning_rate(step, 1.0, "cosine", 10, 110, 0.1) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert all(before >= after for before, after in zip(rates[10:], rates[11:], strict=False))
    constant = [learning_rate(step, 2.0, "constant", 2, 5, 0.0) for step in range(5)]
    assert constant == [1.0, 2.0, 2.0, 2.0, 2.0]
    linear = [
        learning_rate(step, 1.0, "linear", 10, 20, 0.5, warmup_lr=0.1)
        for step in (0, 9, 10, 15, 20, 30)
    ]
    assert linear == pytest.approx([0.19, 1.0, 1.0, 0.75, 0.5, 0.5])
    # Step 99 ends the warm-up of inverse_sqrt at the peak; the rate falls from there without a jump.
    falling = [
        learning_rate(step, 2.0, "inverse_sqrt", 100, 1000, 0.0)
        for step in (49, 99, 399, 10_000 - 1)
    ]
    assert falling == pytest.approx([1.0, 2.0, 1.0, 0.2])


def test_groups_keep_their_scale():
    optimizer = torch.optim.SGD(
        [dict(params=[torch.zeros(1)], lr_scale=0.5), dict(params=[torch.ones(1)])], lr=1.0
    )
    set_learning_rate(optimizer, 0.4)
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.4]


def test_losses_are_averaged_over_micro_batches():
    def losses(loss, head_runs):
        return dict(
            loss=torch.tensor(loss),
            task_loss=torch.tensor(0.125),
            mse=torch.tensor(2 * loss),
            head_runs=[torch.tensor(head_runs)],
        )

    accelerator = SimpleNamespace(reduce=lambda tensor, reduction: tensor)
    micro_batches = [losses(0.25, [3.0, 3.0, 3.0]), losses(0.75, [3.0, 0.0, 9.0])]
    # Ratios are computed from means. Means of ratios would be 0.667 for balance_share, and 0.667 and 0.5 for head_usage.
    means = dict(loss=0.5, task_loss=0.125, mse=1.0, balance_share=0.75, head_usage=[[0.5, 0.25]])
    assert average_over_step(accelerator, micro_batches) == means


def test_settings_of_accelerate_that_contradict_the_configuration(monkeypatch, forget_precision):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    refuse("bf16 mixed_precision no", make_accelerator, "no")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_accelerator("no").gradient_accumulation_steps == 1
    forget_precision()
    refuse('fp16 GPU CPU "no" "bf16"', make_accelerator, "fp16")


ACCELERATOR = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None, print=print)


@contextlib.contextmanager
def opened(path, config, fresh=False):
    """Open the folder of a run with this configuration, and hold its lock within the block."""

    def changes(earlier):
        return ["lr: 1 -> 2"] if earlier != config else []

    with contextlib.ExitStack() as held:
        folder = RunFolder(str(path), fresh, ACCELERATOR, held)
        folder.lock_and_find_checkpoint(1)
        folder.open(config, changes)
        yield


def open_here(path, *more, **named):
    """Open the folder of a run, close it, and return its path."""
    with opened(path, *more, **named):
        return path


def test_open_run(tmp_path):
    run = open_here(tmp_path / "a" / "run", {"lr": 1})
    (run / "weights").write_text("precious")
    open_here(run, {"lr": 1})
    (run / "weights").rename(tmp_path / "weights")
    for lr in (3, 1):
        # A run without weights has done no step, so its configuration may change.
        open_here(run, {"lr": lr})
    (tmp_path / "weights").rename(run / "weights")
    refuse(f"{run} lr 1 2 --allow-change --fresh", open_here, run, {"lr": 2})
    for number in (1, 2):
        open_here(run, {"lr": 2}, fresh=True)
        assert (run.with_name(f"run.{number}")).exists()
    assert sorted(p.name for p in run.with_name("run.1").iterdir()) == ["config.yaml", "weights"]
    assert [p.name for p in run.iterdir()] == ["config.yaml"]


def test_open_run_overwrites_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    refuse(f"{tmp_path}/file file", open_here, tmp_path / "file", {})
    refuse(f"{tmp_path} empty run", open_here, tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_another_process_writes_is_left_alone(tmp_path, no_pauses, fresh):
    run = tmp_path / "run"
    child = hold(opened, run, {})
    no_pauses()
    refuse(f"--output {run} {child}", open_here, run, {}, fresh)
    # A dry run takes no lock.
    RunFolder(str(run), fresh, ACCELERATOR, None, dry=True).lock_and_find_checkpoint(1)
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
    for name in (".lock", ".config.yaml.tmp"):  # left by a process that was killed while it began
        (run / name).write_text("")
    open_here(run, {})
    (run / "config.yaml").unlink()

    def another_process_begins():
        (run / "config.yaml").write_text("")

    monkeypatch.setattr(ACCELERATOR, "wait_for_everyone", another_process_begins)
    refuse(f"{run} process meanwhile", open_here, run, {})


@pytest.mark.parametrize(
    "step, keep, kept",
    [
        (6, 3, {2, 4, 6, 8}),  # 5, left by a signal, goes before the older 2 and 4
        (6, 4, {2, 4, 5, 6, 8}),
        (5, 1, {5, 6, 8}),  # the new one is kept, whatever its step
    ],
)
def test_checkpoints_between_regular_ones_are_deleted_first(tmp_path, step, keep, kept):
    """Those of later steps are left alone."""
    for number in (2, 4, 5, 6, 8):
        (tmp_path / "checkpoints" / f"step_{number}").mkdir(parents=True)
    rotate(tmp_path, step, keep, every=2)
    assert {path.name for path in tmp_path.glob("checkpoints/*")} == {f"step_{n}" for n in kept}
