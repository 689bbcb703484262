import collections
import functools
import gc
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.paths import ROOT

# Without a GPU, Triton interprets its kernels on the CPU. It reads the variable when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests neither measure attention nor build operators, so that their results depend on no timing and no compiler.
os.environ.update(MOH_VISION_MEASURE="off", MOH_VISION_BUILD="off")

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
    torch.set_default_device(
        "cuda" if request.param == "triton" and torch.cuda.is_available() else None
    )
    yield request.param
    torch.set_default_device(None)
    kernels.use(None)


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
