import functools
import gc
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.paths import ROOT

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when Triton is imported: kernels run on the CPU

os.environ.update(
    MOH_VISION_MEASURE="off", MOH_VISION_BUILD="off"
)  # times and compilers decide nothing here

CIFAR = Path(os.environ.get("MOH_VISION_CIFAR10", ROOT.parent / "shared" / "data" / "cifar10"))


def pytest_configure(config):
    # Those of timm's own tests, see tests/models/test_timm_contract.py.
    timms = "base cfg cfg_nonstd forward backward torchscript features fxforward fxbackward"
    for name in timms.split():
        config.addinivalue_line("markers", f"{name}: of timm's own tests")


def pytest_addoption(parser):
    parser.addoption(
        "--record-curves", action="store_true", help="record the loss curves of tests/golden anew"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports make millions of objects, no garbage: they are neither searched meanwhile nor at the end of every run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or Triton's bindings print that they leak


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.compiler.reset()  # compiled variants of one test do not count against another's limit


@pytest.fixture
def cifar10() -> str:
    """Folder of CIFAR-10 shards, for tests that say more on real data."""
    if not CIFAR.is_dir():
        pytest.skip(f"no CIFAR-10 shards at {CIFAR} (set MOH_VISION_CIFAR10)")
    return str(CIFAR)


@pytest.fixture(params=["cpp", "torch"])
def path(request) -> str:
    """Run a test on the C++ operators and in plain PyTorch, or on Triton's kernels (on a GPU where one is)."""
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
    """run_command(name, *argv): the exit code of a command and what it printed."""
    from moh_vision.__main__ import main

    def run(*argv):
        capsys.readouterr()
        return Result(main([str(a) for a in argv]), *capsys.readouterr())

    return run


@pytest.fixture
def refused(capsys):
    """refused(name, *argv): the one line with which a command refuses its arguments, before it prints anything."""
    from moh_vision.__main__ import main
    from tests.support import refusals

    return lambda *argv: refusals.refused(capsys, main, *argv, silent=True)


@pytest.fixture
def forget_precision():
    """forget_precision(): another precision may come, of which a process has one; done at the end of the test too."""
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
    """A `SmallTraining`, in a process that may fork."""
    from tests.support.small_training import SmallTraining

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SmallTraining()
    torch.set_num_threads(threads)
