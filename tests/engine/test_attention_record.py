"""A run computes attention as it began: the path of its operators and the table of `auto`."""

import contextlib
import functools
import json
import os
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from processes import on_two_ranks
from refusals import one_line, refused
from small_runs import SMALL, outcome

from moh_vision.attention.executors import limits
from moh_vision.attention.kernels import build as building
from moh_vision.diffusion import train as train_dit
from moh_vision.engine.attention_record import AttentionRecord, keep_settings

COLD, WARM = {"limit": 0.5}, {"limit": 0.9}


class Machine:
    """Settings of attention, as in `moh_vision.attention.settings`; `used` is what a record has told it to use."""

    def __init__(self, path, table):
        self.found, self.measured, self.used = path, table, [None, None]

    PATHS = building.PATHS

    def path(self, device):
        return self.found

    def about(self, device):
        return f"attention runs on {self.found}"

    def table(self):
        return self.measured

    def use(self, path):
        self.used[0] = path

    def use_table(self, table):
        if table and "limit" not in table:
            raise ValueError("a table has a limit")
        self.used[1] = table


def goes_on(folder, path, table, *allowed):
    """(what a process with these settings uses, what it refuses) when it goes on with a folder."""
    machine = Machine(path, table)
    record = AttentionRecord(machine, folder, allowed)
    return machine.used, record.refused


@pytest.mark.parametrize("path", ["cpp", "torch"])
def test_what_begins_takes_what_is_there_and_keeps_it(tmp_path, path):
    machine = Machine(path, COLD)
    record = AttentionRecord(machine, None)
    assert machine.used == [path, COLD] and not record.refused and record.line == f"attention runs on {path}"
    record.save(tmp_path)
    assert json.loads((tmp_path / "attention.json").read_text()) == dict(path=path, table=COLD)
    assert goes_on(tmp_path, path, COLD) == ([path, COLD], [])


def test_what_goes_on_uses_what_it_began_with(tmp_path):
    AttentionRecord(Machine("torch", COLD), None).save(tmp_path)
    assert goes_on(tmp_path, "cpp", WARM) == (["torch", COLD], [])
    assert goes_on(tmp_path, "cpp", WARM, "attention.path") == (["cpp", COLD], [])
    assert goes_on(tmp_path, "cpp", WARM, "attention.table") == (["torch", WARM], [])
    assert f"as {tmp_path} began" in AttentionRecord(Machine("cpp", WARM), tmp_path).line


def test_operators_that_are_gone_are_refused_by_name(tmp_path):
    AttentionRecord(Machine("cpp", COLD), None).save(tmp_path)
    _, words = goes_on(tmp_path, "torch", WARM)
    assert words == ["attention.path: 'cpp' -> 'torch' (attention runs on torch)"]
    assert goes_on(tmp_path, "torch", WARM, "attention.path") == (["torch", COLD], [])


def test_on_a_gpu(tmp_path):
    """Triton's kernels that are gone are refused; a path of a CPU says nothing about them."""
    AttentionRecord(Machine("triton", COLD), None, device="cuda").save(tmp_path)
    record = AttentionRecord(Machine("torch", COLD), tmp_path, device="cuda")
    assert record.refused == ["attention.path: 'triton' -> 'torch' (attention runs on torch)"]
    assert AttentionRecord(Machine("triton", WARM), tmp_path, device="cuda").path == "triton"
    assert AttentionRecord(Machine("torch", WARM), tmp_path).path == "torch"
    AttentionRecord(Machine("cpp", COLD), None).save(tmp_path)
    machine = Machine("triton", WARM)
    assert not AttentionRecord(machine, tmp_path, device="cuda").refused and machine.used == ["triton", COLD]


def test_a_folder_of_an_earlier_version_is_not_checked(tmp_path):
    assert goes_on(tmp_path, "cpp", COLD) == (["cpp", COLD], [])


@pytest.mark.parametrize("text", ["", "[1]", '{"path": "cuda", "table": {}}', '{"path": "cpp"}', "\0" * 9])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "attention.json").write_text(text)
    with one_line("attention.json: not a record of attention that can be read"):
        goes_on(tmp_path, "cpp", COLD)


def test_a_table_of_another_version_is_refused_by_name(tmp_path):
    (tmp_path / "attention.json").write_text('{"path": "torch", "table": {"border": 3}}')
    assert goes_on(tmp_path, "torch", COLD)[1] == ["attention.table: a table has a limit"]
    assert goes_on(tmp_path, "torch", COLD, "attention.table") == (["torch", COLD], [])


def test_on_a_device_without_operators_nothing_is_kept(tmp_path):
    other = SimpleNamespace(device=SimpleNamespace(type="mps"))
    assert keep_settings(Machine("torch", COLD), tmp_path, other, contextlib.ExitStack()) is None


def on_a_rank(rank, folder):
    """The second process lacks the operators, and has another table."""
    Accelerator(cpu=True)
    machine = Machine("torch", WARM) if rank else Machine("cpp", COLD)
    begun = AttentionRecord(machine, None)
    assert machine.used == ["torch", COLD]
    assert begun.line == "attention runs in plain PyTorch on all processes (process 1: attention runs on torch)"

    compiled = AttentionRecord(machine, folder)
    assert compiled.refused == ["attention.path: 'cpp' -> 'torch' (process 1: attention runs on torch)"]

    machine = Machine("cpp", WARM) if rank else Machine("torch", COLD)
    AttentionRecord(machine, None)
    assert machine.used == ["torch", COLD]

    machine = Machine("cpp", WARM) if rank else Machine("cpp", COLD)
    AttentionRecord(machine, folder)
    assert machine.used == ["cpp", COLD]

    if rank:
        machine.path = lambda device: int("nothing")
    with one_line("invalid literal"):  # on both, none waits for the other
        AttentionRecord(machine, folder)


def test_processes_use_what_the_main_one_has(tmp_path):
    AttentionRecord(Machine("cpp", COLD), None).save(tmp_path)
    on_two_ranks(on_a_rank, tmp_path)


# ---------------------------------------------------------------- the script


@pytest.fixture
def train(monkeypatch):
    """train(folder, steps, kernels, ...): as in a process of its own, with that value of MOH_VISION_KERNELS."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def arguments(folder, steps, kernels, *more):
        monkeypatch.setenv("MOH_VISION_KERNELS", kernels)
        for module in (building, limits):
            name = "_find" if module is building else "_found"
            monkeypatch.setattr(module, name, functools.cache(getattr(module, name).__wrapped__))
        every = f"--max-steps {steps} --save-every 1 --output {folder}"
        return [*SMALL["dit"].split(), *every.split(), *more]

    def run(folder, *args):
        train_dit.main(arguments(folder, *args))
        return outcome(folder)

    run.arguments = arguments
    return run


PACKED = ("--model.executor", "packed")  # the model is so small that `auto` computes every head


@pytest.mark.skipif(not building.load(), reason="the C++ operators are not built")
def test_operators_that_come_and_go(tmp_path, train, capsys):
    compiled, plain, whole = (tmp_path / name for name in ("compiled", "plain", "whole"))
    assert train(compiled, 1, "auto", *PACKED) != train(plain, 1, "off", *PACKED)  # else the bits tell nothing
    assert capsys.readouterr().out.count("attention runs on the C++ operators") == 1
    assert train(plain, 2, "auto", *PACKED) == train(whole, 2, "off", *PACKED)
    assert f"attention runs in plain PyTorch, as {plain} began" in capsys.readouterr().out

    error = refused(capsys, train_dit.main, *train.arguments(compiled, 2, "off", *PACKED, "--optim.lr", "0.5"))
    why = "attention.path: 'cpp' -> 'torch' (attention runs in plain PyTorch because of MOH_VISION_KERNELS=off"
    assert why in error and "optim.lr: " in error and "--allow-change KEY" in error
    assert building._used is limits._given is None  # nothing of the runs is left in this process
    train(compiled, 2, "off", *PACKED, "--allow-change", "attention.path")
    assert json.loads((compiled / "attention.json").read_text())["path"] == "torch"
    train(compiled, 3, "auto", *PACKED)  # what was allowed stays
    assert f"as {compiled} began" in capsys.readouterr().out


def test_a_machine_that_is_measured_meanwhile(tmp_path, train, monkeypatch):
    run, whole, other = (tmp_path / name for name in ("run", "whole", "other"))
    measured = tmp_path / "measured.json"
    monkeypatch.setattr(limits, "table_path", lambda gpu=None: measured)
    never, always = (with_rows(rows) for rows in ([], [[1, 1, 1.0]]))
    measured.write_text(json.dumps(never))
    begun, undisturbed = train(run, 1, "off"), train(whole, 2, "off")
    measured.write_text(json.dumps(always))
    assert train(other, 1, "off") != begun  # else the bits tell nothing
    assert train(run, 2, "off") == undisturbed
    assert json.loads((run / "attention.json").read_text()) == dict(path="torch", table=never)


def train_on_a_rank(rank, folder):
    os.environ["MOH_VISION_KERNELS"] = "off" if rank else "auto"
    train_dit.main([*SMALL["dit"].split(), *f"--max-steps 1 --output {folder}".split(), *PACKED])


def test_two_processes_that_were_told_otherwise(tmp_path):
    on_two_ranks(train_on_a_rank, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "attention.json").read_text())["path"] == "torch"


def with_rows(rows):
    """A table that has the same rows for every call."""
    modes = dict.fromkeys(limits.MODES, rows)
    kinds = {path: {kind: dict.fromkeys(limits.BITS, modes) for kind in kinds} for path, kinds in limits.KINDS.items()}
    return dict(kinds, about="a test")


def test_dry_runs_say_which_path_runs(tmp_path, train, capsys):
    train_dit.main(train.arguments(tmp_path / "run", 1, "off", "--dry-run"))
    assert "attention runs in plain PyTorch because of MOH_VISION_KERNELS=off" in capsys.readouterr().out
