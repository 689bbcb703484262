"""SIGKILL, SIGTERM and SIGINT at random instants: the run ends with the bits of an undisturbed one."""

import contextlib
import functools
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from moh_vision.engine import training_loop
from moh_vision.engine.logging import RunLog
from moh_vision.engine.saver import Saver
from tests.support.processes import Command
from tests.support.repeat import cases
from tests.support.small_runs import arguments, checkpoint_steps, logged, losses, outcome, script


def recorded(script_name, file, slow_save, argv):
    """The real main(); each step's loss, as a hexadecimal number, is appended by one write, which a kill cannot tear."""
    losses = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    real = SimpleNamespace(
        average=training_loop.average_over_step, metrics=RunLog.metrics, save=Saver.save
    )
    exact = []

    def average(accelerator, values):
        exact[:] = [float(v["loss"].detach()).hex() for v in values]
        return real.average(accelerator, values)

    def metrics(self, step, values, show):
        os.write(losses, f"{step} {' '.join(exact)}\n".encode())
        real.metrics(self, step, values, show)

    def save(*args, **kwargs):
        time.sleep(slow_save)
        return real.save(*args, **kwargs)

    training_loop.average_over_step = average
    RunLog.metrics = metrics
    Saver.save = save
    script(script_name).main(argv)


@pytest.fixture
def start():
    """start(script_name, argv, folder): a run in a process; folder/NAME.log has its output, NAME.losses its losses."""
    started = []

    def start_run(script_name, argv, folder, slow_save=0.0) -> Command:
        main = functools.partial(
            recorded, script_name, str(folder / f"{script_name}.losses"), slow_save
        )
        started.append(Command(main, argv, folder / f"{script_name}.log"))
        return started[-1]

    yield start_run
    for command in started:
        command.kill()


CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
# What draws random numbers in a step, or adds to its state.
MORE = {
    "cls": [
        "--model.kwargs",
        "{drop_rate: 0.1, drop_path_rate: 0.1, pos_embed_std: 0.5}",
        "--optim.layer_decay",
        "0.9",
    ]
    + "--data.augment imagenet --data.auto_augment rand-m9-mstd0.5-inc1 --data.erase_prob 0.25 --data.repeats 3".split()
    + "--mix.mixup 0.8 --mix.cutmix 1 --label_smoothing 0.1".split(),
    "dit": "--optim.accumulation 2 --mixed_precision bf16".split(),
    "text": [],
}


def disturbed(start, tmp_path, script_name, signals, ahead, save_every):
    """A run that gets a signal again and again is, in the end, the undisturbed one; returns how many steps it did twice.

    SIGKILL comes at any time from the start of the process to when it will have done about `ahead` steps, by the pace of
    the undisturbed run; the others up to `ahead` steps after its first one. Twice as many steps end the wait, so that no
    pace of the machine lets the run end first. Every other start has a loader process.
    """
    steps = 3 * ahead * (len(signals) + 1)
    whole = tmp_path / "whole"
    folder = tmp_path / "disturbed"
    random = cases(len(signals), f"signals to {script_name}")
    whole.mkdir(), folder.mkdir()

    def begin(folder, save_every, number=0):
        workers = [] if script_name == "text" else ["--data.workers", number % 2]
        return start(
            script_name,
            arguments(script_name, folder / "run", steps, save_every, *MORE[script_name], *workers),
            folder,
        )

    since = time.monotonic()
    command = begin(whole, 10**6)
    assert command.until(lambda: losses(whole, script_name)), command.said()[-3000:]
    first = time.monotonic()
    assert command.wait(within=1200) == 0, command.said()[-3000:]
    beyond = ahead * (time.monotonic() - first) / steps
    in_training = 0
    for count, number in enumerate(signals):
        before = losses(folder, script_name)

        def more(before=before):
            return len(losses(folder, script_name)) - len(before)

        command = begin(folder, save_every, count)
        if number != signal.SIGKILL:
            assert command.until(more), command.said()[-3000:]
        instant = time.monotonic() + random.uniform(
            0, beyond + (first - since if number == signal.SIGKILL else 0)
        )
        there = command.until(lambda: time.monotonic() >= instant or more() >= 2 * ahead)  # noqa: B023
        assert there, command.said()[-3000:]
        os.kill(command.pid, number)
        status = command.wait()
        added = losses(folder, script_name)[len(before) :]
        assert status == CODES[number], f"signal {count}: {status}\n{command.said()[-3000:]}"
        if before and added:
            # A checkpoint that was being written is lost too; the next one would have waited for it.
            assert added[0][0] > before[-1][0] + 1 - 2 * save_every, (
                "more steps than two saves apart were lost"
            )
        if number != signal.SIGKILL:
            assert checkpoint_steps(folder / "run")[-1] == added[-1][0], "not the step it was at"
        in_training += bool(added)
    command = begin(folder, save_every)
    assert command.wait(within=600) == 0, command.said()[-3000:]

    expected = dict(losses(whole, script_name))
    done = losses(folder, script_name)
    assert len(expected) == steps and all(expected[step] == value for step, value in done)
    assert {step for step, _ in done} == set(expected)
    assert outcome(folder / "run") == outcome(whole / "run")
    assert [e["step"] for e in logged(folder / "run")] == sorted(
        expected
    )  # in metrics.jsonl each step once
    # The loader of a killed process may tell, last, that nobody takes its batch any more.
    text = re.sub(
        r"Traceback [^\n]*\n  File [^\n]*resource_sharer.*?\n\w+Error: [^\n]*\n",
        "",
        command.said(),
        flags=re.S,
    )
    noted = [number for number in signals if number != signal.SIGKILL]
    assert text.count("finishing this step and saving") == len(noted) and "Traceback" not in text
    twice = len(done) - steps
    print(
        f"{script_name}: {len(signals)} signals, {in_training} of them after a step; {twice} steps done twice, none lost"
    )
    assert in_training >= len(signals) // 8
    return twice


@pytest.mark.parametrize("script_name", ["cls", "dit"])
def test_a_kill_and_a_signal(start, tmp_path, script_name):
    disturbed(
        start, tmp_path, script_name, [signal.SIGKILL, signal.SIGTERM], ahead=10, save_every=5
    )


@pytest.mark.reliability
@pytest.mark.parametrize("script_name, kills", [("cls", 50), ("dit", 50), ("text", 20)])
def test_many_kills(start, tmp_path, script_name, kills):
    kills = int(os.environ.get("KILLS", kills))
    disturbed(start, tmp_path, script_name, [signal.SIGKILL] * kills, ahead=20, save_every=10)


@pytest.mark.reliability
@pytest.mark.parametrize("script_name", ["cls", "dit", "text"])
def test_many_signals(start, tmp_path, script_name):
    signals = [signal.SIGTERM, signal.SIGINT] * (int(os.environ.get("KILLS", 20)) // 2)
    # Nothing but what a signal saves is saved, so that no step is done twice.
    assert disturbed(start, tmp_path, script_name, signals, ahead=15, save_every=10**6) == 0


def test_a_signal_before_the_first_step_leaves_nothing(start, tmp_path):
    command = start("dit", arguments("dit", tmp_path / "run", 10, 5), tmp_path)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() in (143, -signal.SIGTERM)
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_second_signal_leaves_at_once(start, tmp_path):
    argv = arguments("dit", tmp_path / "run", 10**6, 10**6)
    command = start("dit", argv, tmp_path, slow_save=60)
    assert command.until(lambda: len(losses(tmp_path, "dit")) >= 3)
    os.kill(command.pid, signal.SIGTERM)
    os.kill(command.pid, signal.SIGTERM)  # the same one, passed on by a launcher
    time.sleep(1.2)
    assert "again" not in command.said()
    begin = time.monotonic()
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 143 and time.monotonic() - begin < 10
    assert "SIGTERM again: left without saving" in command.said()
    assert not list(tmp_path.glob("run/checkpoints/step_*"))


def test_a_signal_in_the_last_save_still_ends_the_run(tmp_path, monkeypatch, capsys):
    save = Saver.save

    def save_and_signal(*args, **kwargs):
        save(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Saver, "save", save_and_signal)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        script("cls").main(arguments("cls", tmp_path, 3, 3))
    assert stop.value.code == 143 and "SIGTERM: stopped after 3 steps" in capsys.readouterr().out
    assert checkpoint_steps(tmp_path) == [3] and not (tmp_path / "results.json").exists()
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.setattr(Saver, "save", save)
    script("cls").main(arguments("cls", tmp_path, 3, 3))  # only the validation is left to do
    assert (tmp_path / "results.json").exists()


@pytest.mark.reliability
@pytest.mark.parametrize("script_name, workers", [("cls", 0), ("cls", 1), ("dit", 0)])
def test_two_thousand_steps(start, tmp_path, script_name, workers):
    """Memory, open files and files on disk stay bounded."""
    argv = arguments(
        script_name, tmp_path / "run", 2000, 100, "--keep-checkpoints", 2, "--data.workers", workers
    )
    command = start(script_name, argv, tmp_path)
    seen = []
    process = psutil.Process(command.pid)
    with contextlib.suppress(psutil.Error, ValueError):  # it has ended
        while True:
            steps = len(losses(tmp_path, script_name))
            seen.append((steps, process.memory_info().rss / 2**20, process.num_fds()))
            time.sleep(0.1)
    assert command.wait() == 0, command.said()[-2000:]
    steps, mib, files = (
        np.array(column) for column in zip(*[s for s in seen if 300 <= s[0] < 1990])
    )
    assert len(steps) > 30, "too few looks at it"
    slope = 1000 * np.polyfit(steps, mib, 1)[0]
    print(
        f"{script_name}, {workers} workers: {slope:+.2f} MB per 1,000 steps at {mib.mean():.0f} MB, {files.max()} files"
    )
    assert slope <= 1.0
    assert np.median(files[-10:]) <= np.median(files[:10])
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert len([p for p in (tmp_path / "run").rglob("*") if p.is_file()]) < 25
