"""A run that is killed or signalled at random instants, and resumed, ends with the same bits as an undisturbed run."""

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
    """Call the script's main() and append every step's loss, in hexadecimal, to `file`.

    Each loss is one call of write(), which a kill cannot split. Every save takes `slow_save` seconds longer.
    """
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
    """start(script_name, argv, folder) starts a run in a process.

    Its output goes to folder/NAME.log and its losses to folder/NAME.losses, where NAME is `script_name`.
    """
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


EXIT_CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
# Options with which a step draws random numbers of every kind, or keeps more state, that a resumed run must restore.
MORE = {
    "cls": [
        "--model.kwargs",
        "{drop_rate: 0.1, drop_path_rate: 0.1, pos_embed_std: 0.5}",
        *"--optim.layer_decay 0.9 --data.augment imagenet --data.auto_augment rand-m9-mstd0.5-inc1".split(),
        *"--data.erase_prob 0.25 --data.repeats 3 --mix.mixup 0.8 --mix.cutmix 1 --label_smoothing 0.1".split(),
    ],
    "dit": "--optim.accumulation 2 --mixed_precision bf16".split(),
    "text": [],
}


def disturbed(start, tmp_path, script_name, signals, ahead, save_every):
    """Stop a run by each of `signals`, resume it, and compare it with an undisturbed run; return the steps done twice.

    SIGKILL comes at a random time between the start of the process and the time by which it should have done `ahead`
    steps; the other signals wait for its first step. The time of a step is measured on the undisturbed run. If the
    process gets faster, the signal comes after 2 * `ahead` steps at the latest, so that the run cannot end before it.
    Every other start has a loader process.
    """
    steps = 3 * ahead * (len(signals) + 1)
    whole = tmp_path / "whole"
    folder = tmp_path / "disturbed"
    random = cases(len(signals), f"signals to {script_name}")
    whole.mkdir()
    folder.mkdir()

    def begin(folder, save_every, number=0):
        workers = [] if script_name == "text" else ["--data.workers", number % 2]
        more = (*MORE[script_name], *workers)
        argv = arguments(script_name, folder / "run", steps, save_every, *more)
        return start(script_name, argv, folder)

    since = time.monotonic()
    command = begin(whole, 10**6)
    assert command.until(lambda: losses(whole, script_name)), command.said()[-3000:]
    first = time.monotonic()
    assert command.wait(within=1200) == 0, command.said()[-3000:]
    seconds_to_first_step = first - since
    seconds_ahead = ahead * (time.monotonic() - first) / steps
    in_training = 0
    for count, number in enumerate(signals):
        before = losses(folder, script_name)

        def new_steps(before=before):
            return len(losses(folder, script_name)) - len(before)

        command = begin(folder, save_every, count)
        if number == signal.SIGKILL:
            latest = seconds_to_first_step + seconds_ahead
        else:
            assert command.until(new_steps), command.said()[-3000:]
            latest = seconds_ahead
        instant = time.monotonic() + random.uniform(0, latest)
        still_runs = command.until(lambda: time.monotonic() >= instant or new_steps() >= 2 * ahead)  # noqa: B023
        assert still_runs, command.said()[-3000:]
        os.kill(command.pid, number)
        status = command.wait()
        added = losses(folder, script_name)[len(before) :]
        assert status == EXIT_CODES[number], f"signal {count}: {status}\n{command.said()[-3000:]}"
        if before and added:
            # A kill can also lose the checkpoint that was being written, but no second one: saves wait for each other.
            first_allowed = before[-1][0] + 1 - 2 * save_every
            assert added[0][0] > first_allowed, "the steps between more than two saves were lost"
        if number != signal.SIGKILL:
            assert checkpoint_steps(folder / "run")[-1] == added[-1][0], (
                "the last step is not saved"
            )
        in_training += bool(added)
    command = begin(folder, save_every)
    assert command.wait(within=600) == 0, command.said()[-3000:]

    expected = dict(losses(whole, script_name))
    done = losses(folder, script_name)
    assert len(expected) == steps and all(expected[step] == value for step, value in done)
    assert {step for step, _ in done} == set(expected)
    assert outcome(folder / "run") == outcome(whole / "run")
    # metrics.jsonl has each step once, although some were done twice.
    assert [e["step"] for e in logged(folder / "run")] == sorted(expected)
    # The loader process of a killed run may print a traceback, because nobody takes its batch any more.
    loader_error = r"Traceback [^\n]*\n  File [^\n]*resource_sharer.*?\n\w+Error: [^\n]*\n"
    text = re.sub(loader_error, "", command.said(), flags=re.S)
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
    disturbed(start, tmp_path, script_name, [signal.SIGKILL, signal.SIGTERM], ahead=6, save_every=3)


@pytest.mark.reliability
@pytest.mark.parametrize("script_name, kills", [("cls", 50), ("dit", 50), ("text", 20)])
def test_many_kills(start, tmp_path, script_name, kills):
    kills = int(os.environ.get("KILLS", kills))
    disturbed(start, tmp_path, script_name, [signal.SIGKILL] * kills, ahead=20, save_every=10)


@pytest.mark.reliability
@pytest.mark.parametrize("script_name", ["cls", "dit", "text"])
def test_many_signals(start, tmp_path, script_name):
    signals = [signal.SIGTERM, signal.SIGINT] * (int(os.environ.get("KILLS", 20)) // 2)
    # Only the signals save. They save the last step, so no step is done twice.
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
    # Within a second a further signal counts as the same one: a launcher passes on what the process got already.
    os.kill(command.pid, signal.SIGTERM)
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
    """Neither memory nor open files nor files on disk grow with the number of steps."""
    argv = arguments(
        script_name, tmp_path / "run", 2000, 100, "--keep-checkpoints", 2, "--data.workers", workers
    )
    command = start(script_name, argv, tmp_path)
    seen = []
    process = psutil.Process(command.pid)
    with contextlib.suppress(psutil.Error, ValueError):  # raised once the process has ended
        while True:
            steps = len(losses(tmp_path, script_name))
            seen.append((steps, process.memory_info().rss / 2**20, process.num_fds()))
            time.sleep(0.1)
    assert command.wait() == 0, command.said()[-2000:]
    settled = [row for row in seen if 300 <= row[0] < 1990]
    steps, mib, files = (np.array(column) for column in zip(*settled))
    assert len(steps) > 30, "too few samples of its memory"
    # A leak grows in every third of the run; the allocator takes a megabyte or two once, at any step.
    thirds = np.array_split(np.arange(len(steps)), 3)
    slopes = [1000 * np.polyfit(steps[third], mib[third], 1)[0] for third in thirds]
    shown = ", ".join(f"{slope:+.2f}" for slope in slopes)
    print(
        f"{script_name}, {workers} workers: {shown} MB per 1,000 steps at {mib.mean():.0f} MB, {files.max()} files"
    )
    assert min(slopes) <= 1.0
    assert np.median(files[-10:]) <= np.median(files[:10])
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert len([p for p in (tmp_path / "run").rglob("*") if p.is_file()]) < 25
