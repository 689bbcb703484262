import collections
import functools
import gc
import itertools
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.interpreter import speed_up
from tests.support.paths import ROOT

# Without a GPU, Triton interprets its kernels on the CPU. It reads the variable when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests neither measure attention nor build operators, so that their results depend on no timing and no compiler.
os.environ.update(MOH_VISION_MEASURE="off", MOH_VISION_BUILD="off")
# Otherwise a process that is forked after texts were tokenised prints advice, of which tests of commands know nothing.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# The first backward of a process starts autograd's threads, one for each device that is known by then. A fake tensor makes
# PyTorch believe in devices that are not there, and after their threads no process that tests fork could differentiate.
torch.ones((), requires_grad=True).backward()

CIFAR = Path(os.environ.get("MOH_VISION_CIFAR10", ROOT.parent / "shared" / "data" / "cifar10"))


def pytest_configure(config):
    # tests/models/test_timm_contract.py runs timm's own tests, which have these markers.
    markers = "base cfg cfg_nonstd forward backward torchscript features fxforward fxbackward"
    for name in markers.split():
        config.addinivalue_line("markers", f"{name}: of timm's own tests")


def pytest_addoption(parser):
    parser.addoption(
        "--record-curves", action="store_true", help="record the loss curves of tests/golden anew"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector away from the millions of objects that imports make, and which are no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


# "BACK END: why it cannot run here" -> how many tests were left out for that.
left_out = pytest.StashKey[collections.Counter]()


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    """Leave out the tests of back ends that this machine cannot run, so that every skipped test is news."""
    kept = []
    dropped = []
    reasons = collections.Counter()
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        reason = backend.why_no_case() if backend else None
        if reason is None:
            kept.append(item)
        else:
            dropped.append(item)
            reasons[f"{backend}: {reason}"] += 1
    items[:] = kept
    config.stash[left_out] = reasons
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist, which prints nothing
        config.workeroutput["left_out"] = dict(reasons)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    # Every process collects all tests, so each has the same counts. One that crashed has none.
    reasons = getattr(node, "workeroutput", {}).get("left_out")
    if reasons is not None:
        node.config.stash[left_out] = collections.Counter(reasons)


def pytest_terminal_summary(terminalreporter, config):
    for reason, count in config.stash.get(left_out, {}).items():
        terminalreporter.write_line(f"{count} tests are no cases on this machine: {reason}")


def pytest_unconfigure():
    gc.unfreeze()  # otherwise Triton's bindings report leaks at exit


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.compiler.reset()  # recompilations of one test must not count towards the limit of another


@pytest.fixture
def cifar10() -> str:
    """The folder of CIFAR-10 shards, for tests that need real data."""
    if not CIFAR.is_dir():
        pytest.skip(f"no CIFAR-10 shards at {CIFAR} (set MOH_VISION_CIFAR10)")
    return str(CIFAR)


@pytest.fixture(params=["cpp", "torch"])
def path(request) -> str:
    """The path of operators that a test uses: "cpp" and "torch" or, if the test asks for it, "triton", on a GPU if there is one."""
    from moh_vision.attention import kernels

    try:
        kernels.use(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    if request.param == "triton":
        speed_up()
        torch.set_default_device("cuda" if torch.cuda.is_available() else None)
    yield request.param
    torch.set_default_device(None)
    kernels.use(None)


@pytest.fixture
def backend(request):
    """The back end that a test is parametrised with, indirectly, as by `on` of tests/support/attend_backends.py."""
    with request.param.running():
        yield request.param


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run_command(capsys):
    """run_command(name, *argv) runs a command and returns its exit code and what it printed."""
    from moh_vision.__main__ import main

    def run(*argv):
        capsys.readouterr()
        return Result(main([str(a) for a in argv]), *capsys.readouterr())

    return run


@pytest.fixture
def refused(capsys):
    """refused(name, *argv) runs a command, which must refuse its arguments in one line and print nothing; returns the line."""
    from moh_vision.__main__ import main
    from tests.support import refusals

    return lambda *argv: refusals.refused(capsys, main, *argv, silent=True)


@pytest.fixture
def forget_precision():
    """forget_precision() resets accelerate's state, so that this process may use another precision.

    It is called at the end of the test too.
    """
    from accelerate.state import AcceleratorState

    yield (forget := functools.partial(AcceleratorState._reset_state, reset_partial_state=True))
    forget()


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """trained(name, steps, *options) returns the folder of a small run of `small_runs`, which ends in its name.

    Tests share the folders: a test that changes one changes a copy.
    """
    from tests.support import small_runs

    kept = {}

    def train(name, steps, *options):
        if (name, steps, *options) not in kept:
            folder = tmp_path_factory.mktemp("trained") / name
            kept[name, steps, *options] = folder
            small_runs.script(name).main(small_runs.arguments(name, folder, steps, 100, *options))
        return kept[name, steps, *options]

    return train


@pytest.fixture
def training():
    """A `SmallTraining` with one thread, because a test may fork this process."""
    from tests.support.small_training import SmallTraining

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SmallTraining()
    torch.set_num_threads(threads)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty folder that is the user's cache. Operators that are built stay in this process."""
    from moh_vision.attention.kernels import build

    build.load()
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("MOH_VISION_CACHE", str(folder))
    return folder


@pytest.fixture
def new_process():
    """new_process() forgets the path of operators and the measurement table that this process has settled on.

    It is called at the beginning and at the end of the test too.
    """
    from moh_vision.attention import kernels
    from moh_vision.attention.executors import measurement_table
    from moh_vision.attention.kernels import build

    def forget():
        kernels.use(None)
        build.find.cache_clear()
        measurement_table.use_table(None)

    forget()
    yield forget
    forget()


@pytest.fixture
def skipping_takes(cache, monkeypatch):
    """skipping_takes(ratio) lets every measured call take this share of the time of all heads; returns a list of the calls.

    Measuring is on from the beginning of the test. Nothing is computed, so that the time for measuring is never used up.
    """
    from moh_vision.attention import measure, trial
    from moh_vision.attention.executors import measurement_table

    monkeypatch.setenv("MOH_VISION_MEASURE", "auto")
    measurement_table.use_table(None)

    def set_ratio(ratio):
        measured = []

        def judge(call, sizes, time_left):
            measured.append(call)
            taken = call.executor.__name__ if ratio <= trial.PAYS else "Masked"
            return taken, ratio, 0.0

        monkeypatch.setattr(measure, "judge", judge)
        return measured

    yield set_ratio
    measurement_table.use_table(None)


@pytest.fixture
def long_drawing(monkeypatch):
    """long_drawing() lets sample.py count as long what it draws, so that it measures first."""
    from moh_vision.diffusion import sample

    return functools.partial(monkeypatch.setattr, sample, "WORTH_MEASURING", 0)


@pytest.fixture
def eager_graphs(monkeypatch):
    """eager_graphs(**options) lets runs and sample.py capture with `EagerGraphs` of these options, on a CPU.

    It returns a list of those that they make.
    """
    from moh_vision.diffusion import sample
    from moh_vision.engine import step_graph
    from tests.support.eager_graphs import EagerGraphs

    def begin(**options):
        made = []

        def make():
            made.append(EagerGraphs(**options))
            return made[-1]

        for module in (step_graph, sample):
            monkeypatch.setattr(module, "CudaGraphs", make)
        return made

    return begin


@pytest.fixture
def hours_pass(monkeypatch):
    """hours_pass() lets a minute pass between any two looks at the clock: progress is a line at each step."""

    def begin():
        minutes = itertools.count(60 * (1 + int(time.monotonic() / 60)), 60)
        monkeypatch.setattr(time, "monotonic", lambda: next(minutes))

    return begin


@pytest.fixture
def no_pauses(monkeypatch):
    """no_pauses() lets this process, and forks that it makes from then on, try again at once instead of waiting before."""
    return functools.partial(monkeypatch.setattr, time, "sleep", lambda seconds: None)


@pytest.fixture
def own_files(tmp_path):
    """An `OwnFiles` in the folder tmp_path / "own"; what its files added to the package's tables is removed afterwards."""
    from tests.support.own_files import OwnFiles  # imports models

    folder = (tmp_path / "own").resolve()
    folder.mkdir()
    files = OwnFiles(folder)
    yield files
    files.forget()
