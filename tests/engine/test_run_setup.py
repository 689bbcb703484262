"""The set-up of a run: how it reports errors, and which steps it finds left to do."""

import faulthandler
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moh_vision.common.errors import BadData
from moh_vision.engine.run_setup import RunSetup, Span
from moh_vision.engine.saver import SaveError
from tests.support.processes import fork, wait
from tests.support.small_runs import script


def setup_of(**parts):
    """Return a `RunSetup` that has these parts only."""
    given = dict.fromkeys(
        ("command", "config", "accelerator", "signals", "run_folder", "attention")
    )
    return RunSetup(name="train.py", **(given | parts))


@pytest.mark.parametrize(
    "error, setting_up, code",
    [
        (ValueError("a mistake"), True, 2),
        (FileNotFoundError("a mistake"), True, 2),
        (ModuleNotFoundError("", name="transformers"), True, 2),
        (BadData("an image"), False, 2),
        (SaveError("a full disk"), False, 1),
        (FloatingPointError("a loss"), False, 1),
    ],
    ids=["value", "file", "package", "data", "save", "loss"],
)
def test_what_a_user_can_mend_is_one_line(error, setting_up, code, capsys):
    with pytest.raises(SystemExit) as stop, setup_of(setting_up=setting_up).reporting():
        raise error
    assert stop.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: error: ")


@pytest.mark.parametrize(
    "error, setting_up",
    [
        (ModuleNotFoundError("of ours", name="moh_vision.none"), True),
        (KeyError("of ours"), True),
        # Once the folder of the run is open, such an error is no longer a user's mistake.
        (ValueError("of ours"), False),
        (ModuleNotFoundError("of ours", name="transformers"), False),
    ],
    ids=["a module of ours", "a key", "a value while training", "a package while training"],
)
def test_our_mistakes_keep_their_traceback(error, setting_up, capsys):
    with pytest.raises(type(error)) as raised, setup_of(setting_up=setting_up).reporting():
        raise error
    assert raised.value is error
    assert capsys.readouterr().err == ""


def test_a_crash_in_native_code_says_where(tmp_path):
    crash = tmp_path / "crash.py"
    crash.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    log = tmp_path / "log"

    def train():
        faulthandler.disable()  # pytest's
        with log.open("w") as sys.stderr:
            script("cls").main(["--imports", str(crash)])

    assert wait(fork(train)) == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in log.read_text()
    assert f'File "{crash}", line 2' in log.read_text()


STEP_4 = Path("run/checkpoints/step_4")


@pytest.mark.parametrize(
    "found, span",
    [(None, Span(0, 9, None)), ((4, STEP_4), Span(4, 9, STEP_4))],
    ids=["a new run", "a run with a checkpoint"],
)
def test_the_steps_that_are_left_to_do(found, span):
    """`sampler_arguments`, the arguments of the sampler, has the same first and last step."""
    optim = SimpleNamespace(batch_size=8, accumulation=2)
    setup = setup_of(
        run_folder=SimpleNamespace(lock_and_find_checkpoint=lambda steps: found),
        config=SimpleNamespace(optim=optim, estimate=False),
        accelerator=SimpleNamespace(process_index=1, num_processes=2),
    )
    assert setup.lock_and_find_steps(9) == span
    arguments = dict(batch_size=8, accumulation=2, rank=1, world=2, start=span.start, stop=9)
    assert setup.sampler_arguments(span) == arguments
    assert setup.micro_batch == 2
