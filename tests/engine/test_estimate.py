"""`--estimate`: the table, what it is computed from, refusals, and that nothing is left behind."""

import contextlib
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from moh_vision.engine import estimate, step_times
from moh_vision.engine.estimate import Cost, largest_by_growth, largest_on_gpu, lines_of, table
from moh_vision.engine.published_rates import DIFFUSION, PublishedRate, rows_of_rates
from moh_vision.engine.step_times import Pace, StepTimes
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, one_line, refused
from tests.support.small_runs import arguments, script

ROWS = [
    "speed",
    "step",
    "  data",
    "  forward and backward",
    "  optimiser",
    "peak memory",
    "product rate",
    "whole run",
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_product(monkeypatch):
    """Measure the rate of a large product for a moment."""
    monkeypatch.setattr(estimate, "PRODUCT_SECONDS", 0.01)


def rows(out):
    """Return row -> its value of the table in a printed text."""
    lines = out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("estimate from 20 steps"))
    found = {}
    for line in lines[begin + 1 :]:
        row = re.match(r"(.*?) {2,}([0-9]\S* \S+)  \S", line)
        if row:
            found[row[1]] = row[2]
    return found


@pytest.fixture
def clock(monkeypatch):
    """Let the steps' clock go on by a quarter of a second each time that it is read."""
    ticks = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: next(ticks) / 4)
    monkeypatch.setattr(step_times, "time", fake)


@pytest.mark.parametrize("task, unit", [
    ("cls", "img"),
    pytest.param("dit", "img", marks=pytest.mark.slow),
    ("text", "tok"),
    pytest.param("clm", "tok", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_estimate_prints_its_table_and_leaves_nothing_behind(tmp_path, capsys, task, unit):
    script(task).main(arguments(task, tmp_path / "run", 2, 1, "--estimate"))
    values = rows(capsys.readouterr().out)
    assert list(values) == ROWS
    assert values["speed"].endswith(f" {unit}/s") and values["step"].endswith(" ms")
    assert 100 < float(values["peak memory"].removesuffix(" MiB").replace(",", ""))
    assert 0 < float(values["product rate"].removesuffix(" %")) < 100
    # Encoded text stays in the cache that the runs of a folder share, as after a dry run.
    assert {path.name for path in tmp_path.iterdir()} <= {".index"}


def test_hours_follow_from_the_steps_and_the_measured_speed(tmp_path, capsys, clock):
    # A step looks at the clock 5 times: after its data, its backward, the processes' agreement, the update, the EMA.
    script("cls").main(arguments("cls", tmp_path / "run", 2880, 1, "--estimate"))
    values = rows(capsys.readouterr().out)
    assert values["step"] == "1,250.0 ms"
    assert values["speed"] == "6 img/s"  # a step has 8 images
    assert values["whole run"] == "1.000 h"
    parts = [values[row] for row in ROWS if row.startswith("  ")]
    assert parts == ["250.0 ms", "500.0 ms", "500.0 ms"]


def test_a_run_says_the_parts_of_a_step_once(tmp_path, capsys, clock):
    script("cls").main(arguments("cls", tmp_path / "run", 4, 10))
    out = capsys.readouterr().out
    line = "6 img/s, 1250.0 ms a step: data 250.0 ms (20 %), forward and backward 500.0 ms (40 %), optimiser 500.0 ms (40 %)"
    assert out.count(" ms a step: ") == 1
    after_first_step = out[out.index("classification 2/4: ") : out.index("classification 3/4: ")]
    assert f"\nclassification: {line}\n" in after_first_step


def test_the_table_adds_up_processes():
    def cost(rate, seconds, memory):
        parts = dict(data=seconds / 4, compute=seconds / 2, optimiser=seconds / 4)
        return Cost(Pace(rate, seconds, parts), memory, flops=2e9, product=8e9)

    lines = table([cost(60, 1.0, 10), cost(20, 3.0, 70)], 900, "img", CPU, "bf16")
    text = "\n".join(["estimate from 20 steps", *lines_of(lines)])
    values = rows(text)
    assert values["speed"] == "40 img/s" and "  20 img/s  each process" in text
    assert values["step"] == "2,000.0 ms" and values["  data"] == "500.0 ms"
    assert values["peak memory"] == "70 MiB" and "the most of 2 processes" in text
    assert values["product rate"] == "25 %" and "of 8 GFLOP/s" in text and "bf16" in text
    assert values["whole run"] == "0.500 h"


def test_hours_elsewhere_follow_from_the_multiply_accumulates():
    rate = PublishedRate("X", 2e9, "1 card", images=100, setting="bf16", source="a paper")
    # 720,000 images of half of the published model's work, at 100 of its images a second.
    [(cards, hours, said)] = rows_of_rates([rate], images=720_000, macs=10**9)
    assert (cards, hours) == ("  1 card", "1 h")
    assert "X" in said and "100 img/s" in said and "a paper" in said


def test_a_run_of_minutes_has_no_hours_elsewhere():
    assert rows_of_rates(DIFFUSION, images=1000, macs=10**9) == []


@pytest.mark.parametrize("task, cards", [
    ("cls", ["  1 RTX 3090"]),
    pytest.param("dit", ["  8 A100", "  1 A100", "  8 H800"], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_long_run_is_said_to_take_so_long_elsewhere(tmp_path, capsys, task, cards):
    script(task).main(arguments(task, tmp_path / "run", 10**12, 1, "--estimate"))
    assert list(rows(capsys.readouterr().out)) == [*ROWS, *cards]


def test_published_rates_of_dit_give_its_own_hours():
    [[_, hours, _], *_] = rows_of_rates(DIFFUSION, images=256 * 400_000, macs=int(118.6e9))
    assert float(hours.removesuffix(" h")) == pytest.approx(400_000 / 0.81 / 3600, rel=0.01)


def test_times_of_a_gpu_are_read_from_its_events(monkeypatch):
    ticks = itertools.count()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(ticks) ** 2

        def elapsed_time(self, end):
            return end.at - self.at  # in milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = StepTimes(torch.device("cuda"))  # event 0
    for count in (10, 30):  # events 1 to 3, 4 to 6
        for part in ("data", "compute", "optimiser"):
            times.mark(part)
        times.end_step(count)
    pace = times.pace()
    assert pace.parts == pytest.approx(dict(data=0.004, compute=0.006, optimiser=0.008))
    assert pace.step == pytest.approx(0.018) and pace.rate == pytest.approx(20 / 0.018)


# ---------------------------------------------------------------- the largest micro-batch


def gpu_loop(monkeypatch):
    """Return a stand-in for a loop, and the list of what is cleared after failures."""
    cleared = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append("cache"))
    optimizer = SimpleNamespace(zero_grad=lambda set_to_none: cleared.append("gradients"))
    return SimpleNamespace(losses=[], optimizer=optimizer), cleared


@pytest.mark.parametrize("room, found", [
    (100, "100 samples, 104 do not fit"),
    (8, "8 samples, 9 do not fit"),
    (10**9, "at least 65,536 samples"),
])  # fmt: skip
def test_on_a_gpu_the_micro_batch_is_doubled_and_halved(monkeypatch, room, found):
    loop, cleared = gpu_loop(monkeypatch)
    failures = []

    def do(samples):
        if samples > room:
            failures.append(samples)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    assert largest_on_gpu(loop, do, 8) == found
    assert cleared == ["gradients", "cache"] * len(failures)


def test_another_failure_on_a_gpu_is_said_and_ends_the_search(monkeypatch):
    loop, cleared = gpu_loop(monkeypatch)
    tried = []

    def do(samples):
        tried.append(samples)
        if samples > 16:
            raise RuntimeError("too many blocks\nin the grid")

    words = "at least 16 samples; 32 failed, not for want of memory (too many blocks)"
    assert largest_on_gpu(loop, do, 8) == words
    assert tried == [16, 32] and cleared == ["gradients"]


@pytest.mark.parametrize("each, room, found, sizes", [
    (10, 4000, "about 390 samples by 10 MiB for each sample, 3.9 GiB of memory", [16]),
    (2, 4000, "about 1,950 samples by 2 MiB for each sample, 3.9 GiB of memory", [16, 32, 64]),
    (0, 4000, "at least 2,621,440 samples", [2**n for n in range(4, 17)]),
    (10, 350, "at least 15 samples", []),
])  # fmt: skip
def test_on_a_cpu_the_micro_batch_follows_from_the_growth(each, room, found, sizes):
    """The process has 100 MiB and 8 samples; these are not doubled where that could take all of the memory."""
    done = []

    def grow(samples):
        done.append(samples)
        return (samples - 8) * each

    before = 100 + 8 * each
    assert largest_by_growth(room * 2**20, before, grow, 8) == found
    assert done == sizes
    assert largest_by_growth(None, before, grow, 8).startswith("not known on this device")


@pytest.mark.parametrize("task", ["cls", pytest.param("clm", marks=pytest.mark.slow)])
def test_the_largest_micro_batch_is_said_below_the_table(tmp_path, capsys, monkeypatch, task):
    monkeypatch.setattr(estimate, "ENOUGH_MIB", 1)
    script(task).main(arguments(task, tmp_path / "run", 2, 1, "--estimate", "largest-batch"))
    last = capsys.readouterr().out.splitlines()[-1]
    of = dict(cls="; now 8, of [1, 8, 8]", clm="; now 4, of [16]")
    assert re.match("largest micro-batch: (about|at least) [0-9,]+ samples", last)
    assert last.endswith(of[task])
    assert {path.name for path in tmp_path.iterdir()} <= {".index"}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("task, more, facts", [
    ("cls", "--estimate --dry-run", "estimate dry_run"),
    ("dit", "--estimate largest", "estimate bool largest-batch largest"),
    ("cls", "--estimate --data.root ./none", "data.root ./none"),
    ("clm", "--estimate --max-steps 0", "estimate max_steps 0 1"),
])  # fmt: skip
def test_what_cannot_be_estimated_is_refused(tmp_path, capsys, task, more, facts):
    argv = arguments(task, tmp_path / "run", 2, 1, *more.split())
    assert_says(refused(capsys, script(task).main, *argv), facts)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_run_is_refused_and_stays_as_it_is(trained, tmp_path, capsys):
    run = trained("cls", 2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    argv = arguments("cls", run, 4, 100, "--estimate")
    assert_says(refused(capsys, script("cls").main, *argv), f"estimate --output {run} --fresh")
    script("cls").main([*argv, "--fresh"])
    assert list(rows(capsys.readouterr().out)) == ROWS
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert not run.with_name(f"{run.name}.1").exists()


def test_a_script_that_estimates_nothing_refuses_the_option(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script("cls"), "estimate_images", lambda loop, *_: next(loop.steps()))
    argv = arguments("cls", tmp_path / "run", 2, 1, "--estimate")
    assert_says(refused(capsys, script("cls").main, *argv), "estimate train_cls.py estimate_cost")
    assert not list(tmp_path.iterdir())


def test_the_largest_micro_batch_needs_one_process():
    config = SimpleNamespace(estimate="largest-batch", output="run", max_steps=5)
    with one_line("estimate largest-batch process 2"):
        estimate.check_estimate(config, False, SimpleNamespace(num_processes=2))
    estimate.check_estimate(config, False, SimpleNamespace(num_processes=1))


# ---------------------------------------------------------------- two processes


def estimate_on_a_rank(rank, folder):
    with open(folder / f"out_{rank}", "w") as out, contextlib.redirect_stdout(out):
        script("cls").main(arguments("cls", folder / "run", 2, 1, "--estimate"))


@pytest.mark.slow
def test_two_processes_print_one_table(tmp_path):
    on_two_ranks(estimate_on_a_rank, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"out_0", "out_1"}
    out = (tmp_path / "out_0").read_text()
    assert set(rows(out)) == {*ROWS, ""} and "  2 processes\n" in out
    assert "estimate" not in (tmp_path / "out_1").read_text()
