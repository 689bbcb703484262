"""Two gloo processes by torchrun, through the real scripts: signals, a dead process, other numbers of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from PIL import Image
from repeat import cases
from safetensors.torch import load_file
from small_runs import arguments, checkpoint_steps, logged, outcome

pytestmark = pytest.mark.reliability

FLOAT64 = Path(__file__).with_name("in_float64.py")
OVERFLOW = Path(__file__).with_name("with_overflow.py")


def launch(processes, script, argv, log):
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    with open(log, "a") as file:
        return subprocess.Popen([*command, str(script), *argv], cwd=ROOT, env=env, stdout=file, stderr=file)


def ranks(launcher):
    """Pids of the workers of torchrun, by rank."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (place / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        rank = [e for e in environment if e.startswith(b"RANK=")]
        if parent == launcher.pid and rank:
            found[int(rank[0][5:])] = int(place.name)
    return found


def wait_for_steps(process, run, steps):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(logged(run)) >= steps:
            return
        time.sleep(0.02)
    pytest.fail("the run did not get so far")


def largest_difference(one, two):
    """Of two state dicts: the norm of a tensor's difference over its own norm, the largest of all tensors."""
    return max(((one[k] - two[k]).norm() / one[k].norm().clamp_min(1e-30)).item() for k in one)


def ended(process, log, within=120):
    process.wait(within)
    assert process.returncode == 0, log.read_text()[-3000:]


def test_a_signal_to_the_second_process_stops_both_at_one_step(tmp_path):
    log, random, script = tmp_path / "log", cases(10, "signals to rank 1"), ROOT / "train_dit.py"
    whole = launch(2, script, arguments("dit", tmp_path / "whole", 600, 10**6), log)
    ended(whole, log)
    argv = arguments("dit", tmp_path / "run", 600, 10**6)
    for stop in range(10):
        before = len(logged(tmp_path / "run")) if stop else 0
        process = launch(2, script, argv, log)
        wait_for_steps(process, tmp_path / "run", before + 1)
        time.sleep(random.uniform(0, 0.3))
        os.kill(ranks(process)[1], signal.SIGTERM)
        process.wait(60)
        assert process.returncode != 0
        assert checkpoint_steps(tmp_path / "run")[-1] == logged(tmp_path / "run")[-1]["step"]
    ended(launch(2, script, argv, log), log)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    text = log.read_text()
    assert text.count("stopped after") == 10
    assert 'train_dit.py", line' not in text  # the launcher prints a traceback of its own


@pytest.mark.parametrize("kind", ["cls", "dit", "text"])
def test_killed_twice(tmp_path, kind):
    """SIGKILL to the launcher and both processes, nothing of the scripts replaced: the bits of an undisturbed run."""
    log, random, script = tmp_path / "log", cases(2, f"kills of two processes, {kind}"), ROOT / f"train_{kind}.py"
    ended(launch(2, script, arguments(kind, tmp_path / "whole", 200, 10**6), log), log)
    argv = arguments(kind, tmp_path / "run", 200, 7)
    for _ in range(2):
        before = len(logged(tmp_path / "run")) if (tmp_path / "run" / "metrics.jsonl").exists() else 0
        process = launch(2, script, argv, log)
        wait_for_steps(process, tmp_path / "run", before + 10)
        time.sleep(random.uniform(0, 0.3))
        for pid in [process.pid, *ranks(process).values()]:
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
    ended(launch(2, script, argv, log), log)
    assert log.read_text().count("resuming") == 2
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    losses = [[entry["loss"] for entry in logged(tmp_path / name)] for name in ("run", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 200


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_process_ends_the_other_one(tmp_path, rank):
    log, script = tmp_path / "log", ROOT / "train_cls.py"
    argv = arguments("cls", tmp_path / "run", 10**6, 20)
    process = launch(2, script, argv, log)
    wait_for_steps(process, tmp_path / "run", 25)
    other = ranks(process)[1 - rank]
    os.kill(ranks(process)[rank], signal.SIGKILL)
    begin = time.monotonic()
    while Path(f"/proc/{other}").exists() and time.monotonic() - begin < 60:
        time.sleep(0.05)
    print(f"rank {1 - rank} was gone {time.monotonic() - begin:.1f} s after rank {rank}")
    assert time.monotonic() - begin < 30
    assert process.wait(60) != 0
    again = launch(2, script, argv, log)
    wait_for_steps(again, tmp_path / "run", 30)
    assert "resuming" in log.read_text()
    os.kill(ranks(again)[0], signal.SIGTERM)
    again.wait(60)


def test_twenty_runs_end_with_0(tmp_path):
    log, script = tmp_path / "log", ROOT / "train_dit.py"
    codes = []
    for number in range(20):
        process = launch(2, script, arguments("dit", tmp_path / str(number), 3, 3), log)
        codes.append(process.wait(120))
    assert codes == [0] * 20, log.read_text()[-3000:]


@pytest.mark.parametrize(
    "kind, more", [("cls", ""), ("dit", ""), ("cls", "--budget_range 0.5 1 --model.head_budget 0.5")]
)
def test_one_process_then_two_then_one(tmp_path, kind, more):
    """100 steps in float64: the weights of one process to 1e-10."""
    log = tmp_path / "log"

    def run(output, processes, *steps):
        for count, until in zip(processes, steps):
            argv = [kind, *arguments(kind, output, until, 10**6, "--optim.schedule", "constant", *more.split())]
            ended(launch(count, FLOAT64, argv, log), log)

    run(tmp_path / "one", [1], 100)
    run(tmp_path / "mixed", [1, 2, 1], 30, 70, 100)
    one, mixed = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "mixed"))
    worst = largest_difference(one, mixed)
    print(f"{kind}: largest relative difference of the weights after 100 steps {worst:.1e}")
    assert one[next(iter(one))].dtype == torch.float64 and worst <= 1e-10
    assert [e["step"] for e in logged(tmp_path / "mixed")] == list(range(1, 101))


@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_ten_steps_in_float32(tmp_path, kind):
    log, script = tmp_path / "log", ROOT / f"train_{kind}.py"
    for processes in (1, 2):
        argv = arguments(kind, tmp_path / str(processes), 10, 10)
        ended(launch(processes, script, argv, log), log)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2"))
    worst = largest_difference(one, two)
    print(f"{kind}: largest relative difference of the weights after 10 steps {worst:.1e}")
    assert worst <= 1e-4


def test_a_text_run_of_two_processes_is_that_of_one_with_twice_the_accumulation(tmp_path):
    """Ten steps of a dense translation model: micro-batches have different numbers of labels, the step's mean is one."""
    log, script = tmp_path / "log", ROOT / "train_text.py"
    dense = "--model.name mt_transformer_base --model.kwargs.dropout 0 --eval-every 5 --optim.accumulation".split()
    for processes in (1, 2):
        argv = arguments("text", tmp_path / str(processes), 10, 10, *dense, 2 // processes)
        ended(launch(processes, script, argv, log), log)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2"))
    worst = largest_difference(one, two)
    print(f"text: largest relative difference of the weights after 10 steps {worst:.1e}")
    assert worst <= 1e-4
    losses = [[entry["loss"] for entry in logged(tmp_path / name)] for name in ("1", "2")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("1", "2")]
    assert results[0]["validation"]["tokens"] == results[1]["validation"]["tokens"]
    assert results[0]["validation"]["loss"] == pytest.approx(results[1]["validation"]["loss"], rel=1e-4)
    assert results[0]["bleu"]["soft"]["bleu"]["sentences"] == 40


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_of_one_process_is_skipped_by_both(tmp_path, rank):
    log = tmp_path / "log"
    argv = arguments("dit", tmp_path / "run", 6, 1, "--keep-checkpoints", 9)
    ended(launch(2, OVERFLOW, [str(rank), "3", "dit", *argv], log), log)
    assert [entry["skipped"] for entry in logged(tmp_path / "run")] == [0, 0, 0, 1, 1, 1]
    steps = [load_file(tmp_path / "run" / "checkpoints" / f"step_{n}" / "model.safetensors") for n in (3, 4, 5)]
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])
    assert any(not torch.equal(steps[1][name], steps[2][name]) for name in steps[0])


def test_unreadable_images_are_counted_over_both(tmp_path):
    """4 of 24 images are damaged, 2 for each process: the limit is that of the whole run, to the sample."""
    for split, count in (("train", 24), ("val", 4)):
        for i in range(count):
            place = tmp_path / "images" / split / "ab"[i % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(place / f"{i:02}.png")
    damaged = [tmp_path / "images" / "train" / "ab"[i % 2] / f"{i:02}.png" for i in (1, 2, 9, 16)]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:40])
    more = f"--data.root {tmp_path / 'images'} --data.augment none --data.img_size 8 --optim.batch_size 4".split()
    codes, logs = [], []
    for allowed in (3, 4):
        log, run = tmp_path / f"{allowed}.log", tmp_path / str(allowed)
        argv = arguments("cls", run, 6, 6, *more, "--data.max_bad_fraction", f"{allowed / 24 + 1e-9:.9f}")
        codes.append(launch(2, ROOT / "train_cls.py", argv, log).wait(120))
        logs.append(log.read_text())
    assert codes[0] != 0 and "4 unreadable so far" in logs[0], logs[0][-2000:]
    assert codes[1] == 0 and logged(tmp_path / "4")[-1]["unreadable"] == 4, logs[1][-2000:]
