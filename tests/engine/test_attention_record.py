"""A resumed run keeps the path of operators and the measurement table that it began with."""

import contextlib
import json
import os
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from moh_vision.attention.executors import measurement_table
from moh_vision.attention.executors.measurement_table import Row
from moh_vision.attention.kernels import build as building
from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit
from moh_vision.engine import attention_record
from moh_vision.engine.attention_record import AttentionRecord, keep_settings
from tests.support.processes import on_two_ranks
from tests.support.refusals import assert_says, refuse, refused
from tests.support.small_runs import arguments, outcome

# Two measurement tables that differ.
COLD = {"limit": 0.5}
WARM = {"limit": 0.9}


@pytest.fixture(autouse=True)
def real_machine():
    """After a test, let records ask the machine that runs the tests again, and not a `Machine`."""
    yield
    attention_record.operators = building
    attention_record.measurement_table = measurement_table


class Machine:
    """A stand-in for the machine: it has one path of operators and has measured one table.

    Records made after it ask this object. `used` is [path, table], as a record has told it to use.
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
    """Make the record of a new run on such a machine, measure, and write it to `folder`."""
    machine = Machine(path, table)
    record = AttentionRecord(None)
    record.measure(lambda: (table, ""), folder, Accelerator(cpu=True))
    return machine, record


def goes_on(folder, path, table, *allowed, device="cpu"):
    """Open the record of `folder` on a machine with this path and table, as a resumed run does.

    Returns: the [path, table] in use, the changes that are refused, and whether the run has to measure.
    """
    machine = Machine(path, table)
    record = AttentionRecord(folder, allowed, device)
    return machine.used, record.refused, record.table is None


def write_record(folder, path, table):
    (folder / "attention.json").write_text(json.dumps(dict(path=path, table=table)))


def test_a_new_run_uses_and_records_what_the_machine_has(tmp_path):
    machine, record = begin(tmp_path, "cpp", COLD)
    assert machine.used == ["cpp", COLD]
    assert not record.refused
    assert record.line == "attention runs on cpp"
    assert written(tmp_path) == dict(path="cpp", table=COLD)
    # A record that is saved before it has measured: None says that the table is missing, {} that measuring is off.
    for table, kept in ((None, {}), (COLD, None)):
        Machine("torch", table)
        AttentionRecord(None).save(tmp_path)
        assert written(tmp_path) == dict(path="torch", table=kept)


def written(folder):
    return json.loads((folder / "attention.json").read_text())


OLD_TABLE = {"border": 3}  # as another version would have written it

# Case -> (path and table of the record, path of the machine, key that --allow-change names, path and table in use,
# whether the run has to measure).
GOES_ON = {
    "other operators": (("torch", COLD), "cpp", "", ["torch", COLD], False),
    "other operators allowed": (("torch", COLD), "cpp", "attention.path", ["cpp", COLD], False),
    "another table allowed": (("torch", COLD), "cpp", "attention.table", ["torch", {}], True),
    "nothing is measured": (("cpp", {}), "cpp", "", ["cpp", {}], False),
    "ended before it had measured": (("cpp", None), "cpp", "", ["cpp", {}], True),
    "fewer operators allowed": (("cpp", COLD), "torch", "attention.path", ["torch", COLD], False),
    "old table allowed": (("torch", OLD_TABLE), "torch", "attention.table", ["torch", {}], True),
    "no record": (None, "cpp", "", ["cpp", {}], True),
    "from a GPU": (("triton", COLD), "torch", "", ["torch", COLD], False),
    "to a GPU": (("cpp", COLD), "triton", "", ["triton", COLD], False),
    "on a GPU": (("triton", COLD), "triton", "attention.table", ["triton", {}], True),
}


@pytest.mark.parametrize("stored, path, allowed, used, measures", GOES_ON.values(), ids=GOES_ON)
def test_a_resumed_run_uses_what_it_began_with(tmp_path, stored, path, allowed, used, measures):
    if stored:
        write_record(tmp_path, *stored)
    device = "cuda" if path == "triton" else "cpu"
    assert goes_on(tmp_path, path, WARM, allowed, device=device) == (used, [], measures)


# Case -> (path and table of the record, path and table in use, the change that is refused).
UNUSABLE = {
    "operators that are gone": (
        ("cpp", COLD),
        [None, None],
        "attention.path 'cpp' 'torch'",
    ),
    "a table of another version": (
        ("torch", OLD_TABLE),
        ["torch", None],
        "attention.table limit",
    ),
}


@pytest.mark.parametrize("stored, used, facts", UNUSABLE.values(), ids=UNUSABLE)
def test_a_run_that_cannot_resume_as_it_began_is_refused(tmp_path, stored, used, facts):
    write_record(tmp_path, *stored)
    taken, (refusal,), measures = goes_on(tmp_path, "torch", WARM, "")
    assert (taken, measures) == (used, False)
    assert_says(refusal, facts)


def test_kernels_that_are_gone_are_refused(tmp_path):
    write_record(tmp_path, "triton", COLD)
    _, (refusal,), _ = goes_on(tmp_path, "torch", WARM, device="cuda")
    assert_says(refusal, "attention.path 'triton' 'torch'")


DAMAGED = {
    "empty": "",
    "a list": "[1]",
    "an unknown path": '{"path": "cuda", "table": {}}',
    "no table": '{"path": "cpp"}',
    "zeros": "\0" * 9,
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_record_is_refused(tmp_path, case):
    (tmp_path / "attention.json").write_text(DAMAGED[case])
    refuse("attention.json delete", goes_on, tmp_path, "cpp", COLD)


def test_on_a_device_without_operators_nothing_is_kept(tmp_path):
    other = SimpleNamespace(device=SimpleNamespace(type="mps"))
    Machine("torch", COLD)
    assert keep_settings(tmp_path, other, contextlib.ExitStack()) is None


def on_a_rank(rank, folder):
    """The machine of the second process lacks the C++ operators and would measure another table."""
    Accelerator(cpu=True)
    table = WARM if rank else COLD
    machine, begun = begin(folder / "begun", "torch" if rank else "cpp", table)
    assert machine.used == ["torch", COLD] and begun.table == COLD  # the table of the main process
    lacks = "(process 1: attention runs on torch)"
    assert begun.line == f"attention runs in plain PyTorch on all processes {lacks}"

    compiled = AttentionRecord(folder)
    (refusal,) = compiled.refused
    assert_says(refusal, "attention.path 'cpp' 'torch' 1")

    machine = Machine("cpp" if rank else "torch", table)
    AttentionRecord(None)
    assert machine.used == ["torch", {}]

    machine = Machine("cpp", table)
    AttentionRecord(folder)
    assert machine.used == ["cpp", COLD]

    # An error on one process is raised on both.
    if rank:
        machine.path = lambda device: int("nothing")
    refuse("nothing", AttentionRecord, folder)


def test_all_processes_use_the_same_path_and_table(tmp_path):
    (tmp_path / "begun").mkdir()
    begin(tmp_path, "cpp", COLD)
    on_two_ranks(on_a_rank, tmp_path)


# ---------------------------------------------------------------- the script


@pytest.fixture
def train(monkeypatch, new_process):
    """Return train(folder, steps, kernels, ...), which trains as a new process would with this MOH_VISION_KERNELS."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def options(folder, steps, kernels, *more):
        monkeypatch.setenv("MOH_VISION_KERNELS", kernels)
        new_process()
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
    # The C++ operators round differently, so equal bits show below that the same path is in use.
    assert train(compiled, 1, "auto", *PACKED) != train(plain, 1, "off", *PACKED)
    assert capsys.readouterr().out.count("attention runs on the C++ operators") == 1
    assert train(plain, 2, "auto", *PACKED) == train(whole, 2, "off", *PACKED)
    assert f"attention runs in plain PyTorch, as {plain} began" in capsys.readouterr().out

    argv = train.options(compiled, 2, "off", *PACKED, "--optim.lr", "0.5")
    error = refused(capsys, train_dit.main, *argv)
    assert_says(error, "attention.path 'cpp' 'torch' MOH_VISION_KERNELS=off")
    assert_says(error, f"{compiled} optim.lr 0.5 --allow-change")
    # A run that has ended leaves no path and no table behind in this process.
    assert building._used is None
    assert measurement_table._current is None
    train(compiled, 2, "off", *PACKED, "--allow-change", "attention.path")
    assert written(compiled)["path"] == "torch"
    # The run goes on with the path that --allow-change accepted.
    train(compiled, 3, "auto", *PACKED)
    assert f"as {compiled} began" in capsys.readouterr().out


def measure_on_a_rank(rank, folder):
    os.environ.update(
        MOH_VISION_MEASURE="auto", MOH_VISION_CACHE=str(folder / "cache"), MOH_VISION_KERNELS="off"
    )
    train_cls.main(arguments("cls", folder / "run", 1, 1, "--model.router", "mae"))


def test_the_main_process_measures_gates_that_are_normalised_over_all(tmp_path):
    """MAE's batch norm reduces over all processes. Only the main one measures, and must not wait for the other."""
    on_two_ranks(measure_on_a_rank, tmp_path)
    assert written(tmp_path / "run")["table"]["rows"]


def test_a_run_measures_before_its_first_step_and_never_again(
    tmp_path, train, skipping_takes, cache, capsys
):
    skipping_takes(0.5)
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    # All runs are in plain PyTorch: `Sequences` needs no operators.
    per_sample = ("--model.scope", "sample")
    train(run, 1, "off", *per_sample)
    said = capsys.readouterr().out
    assert said.count("attention measured in ") == 1 and " of 2 kinds of calls skip heads" in said
    record = written(run)
    training, inference = (Row(*row) for row in record["table"]["rows"])
    assert training.call.startswith("Sequences training")
    assert inference.call.startswith("Sequences inference")
    assert training.batch == 8  # of the measurement
    (cached,) = (cache / "measured").iterdir()
    assert json.loads(cached.read_text())["rows"] == record["table"]["rows"]

    measured = train(whole, 2, "off", *per_sample)  # from the cache
    assert written(whole) == record
    capsys.readouterr()
    cached.unlink()
    assert train(run, 2, "off", *per_sample) == measured
    assert "attention measured" not in capsys.readouterr().out and not cached.exists()
    assert written(run) == record


def test_elastic_budgets_are_measured_at_the_shares_that_run(tmp_path, train, skipping_takes):
    skipping_takes(0.5)
    elastic = ["--model.scope", "sample", "--budget_range", "[uniform:0.5, uniform:0.875]"]
    train(tmp_path / "run", 1, "off", *elastic)
    rows = [Row(*row) for row in written(tmp_path / "run")["table"]["rows"]]
    # Active heads of 8: steps run five shares, evaluations the smallest, the middle and the largest.
    assert [row.active for row in rows if "training" in row.call] == [4, 5, 6, 7]
    assert [row.active for row in rows if "inference" in row.call] == [4, 6, 7]
