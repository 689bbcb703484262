"""Mistakes are told in one line, and an output that nobody reads any more without a word."""

import contextlib
import os
import sys

import pytest


@contextlib.contextmanager
def one_line(words="", kind=ValueError):
    """Expect an error of this kind; the regular expression `words` is found in its message, which is one line."""
    with pytest.raises(kind, match=words) as error:
        yield error
    assert "\n" not in str(error.value), error.value


def refused(capsys, main, *argv) -> str:
    """The one line of standard error with which a command, `main(argv)`, refuses its arguments."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in argv])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "error: " in error, error
    return error


@contextlib.contextmanager
def unread(monkeypatch):
    """Standard output is a pipe that nobody reads any more, as after `| head`."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        yield
