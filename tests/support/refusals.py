"""Mistakes are told in one line, and an output that nobody reads any more without a word."""

import contextlib
import os
import sys

import pytest


@contextlib.contextmanager
def one_line(words="", error=ValueError):
    """Expect an error of this class; the regular expression `words` is found in its message, which is one line."""
    with pytest.raises(error, match=words) as raised:
        yield raised
    assert "\n" not in str(raised.value), raised.value


def refuse(words, call, *arguments, error=ValueError, **named):
    """A call raises an error of this class, in whose message of one line the regular expression `words` is found."""
    with one_line(words, error):
        call(*arguments, **named)


def refused(capsys, main, *argv, silent=False) -> str:
    """The one line of standard error with which a script or command, `main(argv)`, refuses its arguments."""
    capsys.readouterr()
    try:
        code = main([str(a) for a in argv])
    except SystemExit as stop:
        code = stop.code
    out, error = capsys.readouterr()
    assert not (silent and out), out
    assert code == 2 and error.count("\n") == 1 and "error: " in error, error
    return error


@contextlib.contextmanager
def unread(monkeypatch):
    """Standard output is a pipe that nobody reads any more, as after `| head`."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        yield


def told(capfd, command=""):
    """The one line of an error."""
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert f"{command}: error: " in line, line
    return line
