"""The first half of a run: what it says of errors, and the steps that it finds to do."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from moh_vision.common.errors import BadData
from moh_vision.engine.run_setup import RunSetup, Span
from moh_vision.engine.saver import SaveError


def setup_of(**parts):
    given = dict.fromkeys(
        ("command", "config", "accelerator", "signals", "run_folder", "attention")
    )
    return RunSetup(name="train.py", **(given | parts))


@pytest.mark.parametrize("error, setting_up, code", [
    (ValueError("a mistake"), True, 2),
    (FileNotFoundError("a mistake"), True, 2),
    (ModuleNotFoundError("", name="transformers"), True, 2),
    (ModuleNotFoundError("of ours", name="moh_vision.none"), True, None),
    (KeyError("of ours"), True, None),
    (ValueError("of ours"), False, None),  # the folder is open: no mistake of a user is left
    (ModuleNotFoundError("of ours", name="transformers"), False, None),
    (BadData("an image"), False, 2),
    (SaveError("a full disk"), False, 1),
    (FloatingPointError("a loss"), False, 1),
])  # fmt: skip
def test_what_a_user_can_mend_is_one_line(error, setting_up, code, capsys):
    """And all else keeps its traceback."""
    expected = type(error) if code is None else SystemExit
    with pytest.raises(expected) as raised, setup_of(setting_up=setting_up).reporting():
        raise error
    lines = capsys.readouterr().err.splitlines()
    if code is None:
        assert raised.value is error and lines == []
    else:
        assert raised.value.code == code
        assert len(lines) == 1 and lines[0].startswith("train.py: error: ")


@pytest.mark.parametrize("found, span", [
    (None, Span(0, 9, None)),
    ((4, Path("run/checkpoints/step_4")), Span(4, 9, Path("run/checkpoints/step_4"))),
])  # fmt: skip
def test_the_steps_that_are_left_to_do(found, span):
    """A sampler is told the same."""
    optim = SimpleNamespace(batch_size=8, accumulation=2)
    setup = setup_of(
        run_folder=SimpleNamespace(find_checkpoint=lambda steps: found),
        config=SimpleNamespace(optim=optim),
        accelerator=SimpleNamespace(process_index=1, num_processes=2),
    )
    assert setup.find_checkpoint(9) == span
    portion = dict(batch_size=8, accumulation=2, rank=1, world=2, start=span.start, stop=9)
    assert setup.portion(span) == portion
    assert setup.micro_batch == 2
