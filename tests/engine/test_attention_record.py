"""A run computes attention as it began: the path of its operators and the table of `auto`."""

import contextlib
import functools
import json
import os
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from moh_vision.attention import measure, trial
from moh_vision.attention.executors import measurement_table
from moh_vision.attention.kernels import build as building
from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit
from moh_vision.engine import attention_record
from moh_vision.engine.attention_record import AttentionRecord, keep_settings
from tests.support.processes import on_two_ranks
from tests.support.refusals import refuse, refused
from tests.support.small_runs import arguments, outcome

COLD, WARM = {"limit": 0.5}, {"limit": 0.9}


@pytest.fixture(autouse=True)
def real_machine():
    """Afterwards records ask the machine that the tests run on again."""
    yield
    attention_record.operators = building
    attention_record.measurement_table = measurement_table


class Machine:
    """A machine that has these operators and has measured this table, which records ask from now on.

    `used` is what a record has told it to use.
    """

    def __init__(self, path, table):
        self.found = path
        self.measured = table
        self.used = [None, None]
        attention_record.operators = self
        attention_record.measurement_table = self

    PATHS = building.PATHS

    def path(self, device):
        return self.found

    def about(self, device):
        return f"attention runs on {self.found}"

    def measuring_is_off(self):
        return self.measured is None

    def use(self, path):
        self.used[0] = path

    def use_table(self, table):
        if table and "limit" not in table:
            raise ValueError("a table has a limit")
        self.used[1] = table


def begin(folder, path, table):
    """A record of work that begins with these settings and has measured, written into a folder."""
    machine = Machine(path, table)
    record = AttentionRecord(None)
    record.measure(lambda: (table, ""), folder, Accelerator(cpu=True))
    return machine, record


def goes_on(folder, path, table, *allowed, device="cpu"):
    """(what a process with these settings uses, what it refuses, whether it is to measure) when it goes on with a folder."""
    machine = Machine(path, table)
    record = AttentionRecord(folder, allowed, device)
    return machine.used, record.refused, record.table is None


def test_what_begins_takes_what_is_there_and_keeps_it(tmp_path):
    machine, record = begin(tmp_path, "cpp", COLD)
    assert (
        machine.used == ["cpp", COLD]
        and not record.refused
        and record.line == "attention runs on cpp"
    )
    assert written(tmp_path) == dict(path="cpp", table=COLD)
    for table, kept in ((None, {}), (COLD, None)):  # before it has measured
        Machine("torch", table)
        AttentionRecord(None).save(tmp_path)
        assert written(tmp_path) == dict(path="torch", table=kept)


def written(folder):
    return json.loads((folder / "attention.json").read_text())


@pytest.mark.parametrize("stored, path, allowed, found", [
    (("torch", COLD), "cpp", "", (["torch", COLD], [], False)),
    (("torch", COLD), "cpp", "attention.path", (["cpp", COLD], [], False)),
    (("torch", COLD), "cpp", "attention.table", (["torch", {}], [], True)),
    (("cpp", {}), "cpp", "", (["cpp", {}], [], False)),  # where nothing is measured
    (("cpp", None), "cpp", "", (["cpp", {}], [], True)),  # it ended before it had measured
    (("cpp", COLD), "torch", "attention.path", (["torch", COLD], [], False)),
    (("torch", {"border": 3}), "torch", "attention.table", (["torch", {}], [], True)),
    (None, "cpp", "", (["cpp", {}], [], True)),
    # unusable: operators that are gone, a table of another version
    (("cpp", COLD), "torch", "", ([None, None], ["attention.path: 'cpp' -> 'torch' (attention runs on torch)"], False)),
    (("torch", {"border": 3}), "torch", "", (["torch", None], ["attention.table: a table has a limit"], False)),
    # of another kind of device
    (("triton", COLD), "torch", "", (["torch", COLD], [], False)),
    (("cpp", COLD), "triton", "", (["triton", COLD], [], False)),
    (("triton", COLD), "triton", "attention.table", (["triton", {}], [], True)),
])  # fmt: skip
def test_what_goes_on_uses_what_it_began_with_and_measures_nothing(
    tmp_path, stored, path, allowed, found
):
    if stored:
        (tmp_path / "attention.json").write_text(json.dumps(dict(path=stored[0], table=stored[1])))
    device = "cuda" if path == "triton" else "cpu"
    assert goes_on(tmp_path, path, WARM, allowed, device=device) == found


def test_kernels_that_are_gone_are_refused(tmp_path):
    (tmp_path / "attention.json").write_text(json.dumps(dict(path="triton", table=COLD)))
    words = "attention.path: 'triton' -> 'torch' (attention runs on torch)"
    assert goes_on(tmp_path, "torch", WARM, device="cuda")[1] == [words]


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"path": "cuda", "table": {}}', '{"path": "cpp"}', "\0" * 9]
)
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "attention.json").write_text(text)
    refuse(
        "attention.json: not a record of attention that can be read", goes_on, tmp_path, "cpp", COLD
    )


def test_on_a_device_without_operators_nothing_is_kept(tmp_path):
    other = SimpleNamespace(device=SimpleNamespace(type="mps"))
    Machine("torch", COLD)
    assert keep_settings(tmp_path, other, contextlib.ExitStack()) is None


def on_a_rank(rank, folder):
    """The second process lacks the operators, and would measure another table."""
    Accelerator(cpu=True)
    machine, begun = begin(folder / "begun", *("torch", WARM) if rank else ("cpp", COLD))
    assert machine.used == ["torch", COLD] and begun.table == COLD  # of the first process
    assert (
        begun.line
        == "attention runs in plain PyTorch on all processes (process 1: attention runs on torch)"
    )

    compiled = AttentionRecord(folder)
    assert compiled.refused == [
        "attention.path: 'cpp' -> 'torch' (process 1: attention runs on torch)"
    ]

    machine = Machine("cpp", WARM) if rank else Machine("torch", COLD)
    AttentionRecord(None)
    assert machine.used == ["torch", {}]

    machine = Machine("cpp", WARM) if rank else Machine("cpp", COLD)
    AttentionRecord(folder)
    assert machine.used == ["cpp", COLD]

    if rank:
        machine.path = lambda device: int("nothing")
    refuse("invalid literal", AttentionRecord, folder)


def test_processes_use_what_the_main_one_has(tmp_path):
    (tmp_path / "begun").mkdir()
    begin(tmp_path, "cpp", COLD)
    on_two_ranks(on_a_rank, tmp_path)


# ---------------------------------------------------------------- the script


@pytest.fixture
def train(monkeypatch):
    """train(folder, steps, kernels, ...): as in a process of its own, with that value of MOH_VISION_KERNELS."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def options(folder, steps, kernels, *more):
        monkeypatch.setenv("MOH_VISION_KERNELS", kernels)
        monkeypatch.setattr(building, "_find", functools.cache(building._find.__wrapped__))
        return arguments("dit", folder, steps, 1, *more)

    def run(folder, *args):
        train_dit.main(options(folder, *args))
        return outcome(folder)

    run.options = options
    return run


PACKED = ("--model.executor", "packed")  # the model is so small that `auto` computes every head


@pytest.mark.skipif(not building.load(), reason="the C++ operators are not built")
def test_operators_that_come_and_go(tmp_path, train, capsys):
    compiled, plain, whole = (tmp_path / name for name in ("compiled", "plain", "whole"))
    assert train(compiled, 1, "auto", *PACKED) != train(
        plain, 1, "off", *PACKED
    )  # else the bits tell nothing
    assert capsys.readouterr().out.count("attention runs on the C++ operators") == 1
    assert train(plain, 2, "auto", *PACKED) == train(whole, 2, "off", *PACKED)
    assert f"attention runs in plain PyTorch, as {plain} began" in capsys.readouterr().out

    error = refused(
        capsys, train_dit.main, *train.options(compiled, 2, "off", *PACKED, "--optim.lr", "0.5")
    )
    why = "attention.path: 'cpp' -> 'torch' (attention runs in plain PyTorch because of MOH_VISION_KERNELS=off"
    assert why in error and "optim.lr: " in error and "--allow-change KEY" in error
    assert (
        building._used is measurement_table._current is None
    )  # nothing of the runs is left in this process
    train(compiled, 2, "off", *PACKED, "--allow-change", "attention.path")
    assert written(compiled)["path"] == "torch"
    train(compiled, 3, "auto", *PACKED)  # what was allowed stays
    assert f"as {compiled} began" in capsys.readouterr().out


def measure_on_a_rank(rank, folder):
    os.environ.update(
        MOH_VISION_MEASURE="auto", MOH_VISION_CACHE=str(folder / "cache"), MOH_VISION_KERNELS="off"
    )
    train_cls.main(arguments("cls", folder / "run", 1, 1, "--model.router", "mae"))


def test_the_main_process_measures_gates_that_are_normalised_over_all(tmp_path):
    on_two_ranks(measure_on_a_rank, tmp_path)
    assert written(tmp_path / "run")["table"]["rows"]


def test_a_run_measures_before_its_first_step_and_never_again(tmp_path, train, monkeypatch, capsys):
    monkeypatch.setenv("MOH_VISION_MEASURE", "auto")
    monkeypatch.setenv(
        "MOH_VISION_CACHE", str(tmp_path / "cache")
    )  # without operators: all runs in plain PyTorch
    run, whole = tmp_path / "run", tmp_path / "whole"
    per_sample = ("--model.scope", "sample")
    train(run, 1, "off", *per_sample)
    said = capsys.readouterr().out
    assert said.count("attention measured in ") == 1 and " of 2 kinds of calls skip heads" in said
    record = written(run)
    (training, first), (inference, _) = record["table"]["rows"].items()
    assert training.startswith("Sequences training") and inference.startswith("Sequences inference")
    assert first[0][2] == 8  # the batch
    (cached,) = (tmp_path / "cache" / "measured").iterdir()
    assert json.loads(cached.read_text())["rows"] == record["table"]["rows"]

    measured = train(whole, 2, "off", *per_sample)  # from the cache
    assert written(whole) == record
    capsys.readouterr()
    cached.unlink()
    assert train(run, 2, "off", *per_sample) == measured
    assert "attention measured" not in capsys.readouterr().out and not cached.exists()
    assert written(run) == record


def test_elastic_budgets_are_measured_at_three_shares(tmp_path, train, monkeypatch):
    monkeypatch.setenv("MOH_VISION_MEASURE", "auto")
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "timed", lambda call, left: (0.5, 0.0))
    monkeypatch.setattr(measure, "STEPS", 1000)
    train(
        tmp_path / "run",
        1,
        "off",
        "--model.scope",
        "sample",
        "--budget_range",
        "[uniform:0.5, uniform:0.875]",
    )
    rows = written(tmp_path / "run")["table"]["rows"]
    training = next(kind for key, kind in rows.items() if "training" in key)
    assert [row[3] for row in training] == [
        4,
        6,
        7,
    ]  # of 8 heads; the smallest, the middle, the largest
