"""Training and commands on a CPU build the C++ operators if they are missing."""

import contextlib
import functools
import os
from pathlib import Path

import pytest

from moh_vision.attention import kernels
from moh_vision.attention.kernels import build as building
from moh_vision.diffusion import train as train_dit
from tests.support.processes import Command
from tests.support.small_runs import arguments

BUILT = building.library_path()  # the library that this machine has
pytestmark = pytest.mark.skipif(not BUILT.is_file(), reason="the C++ operators are not built")


@pytest.fixture
def environment(tmp_path):
    """Environment variables that name an empty cache and a fake compiler.

    The compiler copies the library that this machine has, and adds a line to the file `compiled` in each call.
    """
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f"echo >> {tmp_path}/compiled\n"
        "sleep 0.1\n"
        f'while [ $# -gt 0 ]; do [ "$1" = -o ] && cp {BUILT} "$2"; shift; done\n'
    )
    compiler.chmod(0o755)
    return dict(
        MOH_VISION_CACHE=str(tmp_path / "cache"), CXX=str(compiler), MOH_VISION_MEASURE="off"
    )


def train(environment, argv):
    """Run a dry run, two runs that fail, and one that trains: only the last one may build."""
    os.environ.update(environment)
    os.environ.pop("MOH_VISION_BUILD", None)
    folder = Path(environment["CXX"]).parent
    common = arguments("dit", folder / "run", 1, 1)
    train_dit.main([*common, "--dry-run"])
    for mistake in (["--data.root", str(folder / "nothing")], ["--help"]):
        with contextlib.suppress(SystemExit):
            train_dit.main([*common, *mistake])
            raise AssertionError(mistake)
    assert not (folder / "compiled").exists()
    train_dit.main(common)


@pytest.mark.slow  # a process of its own that sets up training three times
def test_training_builds_at_the_end_of_its_set_up(environment, tmp_path):
    run = Command(functools.partial(train, environment), [], tmp_path / "log")
    assert run.wait() == 0, run.said()
    said = run.said()
    assert said.count("building the C++ operators: up to a minute, once; ") == 1
    assert said.count("built the C++ operators in ") == 1
    assert said.index("built the C++") < said.index("attention runs on the C++ operators")
    assert '"path": "cpp"' in (tmp_path / "run/attention.json").read_text()


def ask(environment, argv):
    """Print the path of operators, with the variables NAME=VALUE in `argv` set."""
    os.environ.update(environment, MOH_VISION_BUILD="auto")
    os.environ.update(a.split("=") for a in argv)
    print(kernels.path())


def answers(environment, tmp_path, count, *more):
    """Start `count` processes that `ask` at the same time, and return what each prints."""
    processes = [
        Command(functools.partial(ask, environment), more, tmp_path / f"log{number}")
        for number in range(count)
    ]
    assert [process.wait() for process in processes] == [0] * count
    return [process.said() for process in processes]


def test_processes_wait_for_the_one_that_builds(environment, tmp_path):
    said = answers(environment, tmp_path, 2)
    assert all(text.endswith("cpp\n") for text in said)
    assert "".join(said).count("built the C++ operators in") == 1


@pytest.mark.parametrize("off", ["MOH_VISION_KERNELS=off", "MOH_VISION_BUILD=off", "CXX=/nothing"])
def test_nothing_is_built_where_it_is_off_or_no_compiler_is_there(environment, tmp_path, off):
    assert answers(environment, tmp_path, 1, off) == ["torch\n"]


def test_a_failure_is_not_tried_again(environment, tmp_path):
    (tmp_path / "compiler").write_text(
        f"#!/bin/sh\necho >> {tmp_path}/compiled\necho 'x.cpp:1: error: no'\nexit 1\n"
    )
    for _ in range(2):
        (said,) = answers(environment, tmp_path, 1)
    assert said.count("building the C++ operators") == 1 and said.count("torch\n") == 2
    assert said.count("the C++ operators are not built: ") == 1 and "x.cpp:1: error: no" in said
