"""Checks that errors are reported in one line, and a standard output that nobody reads."""

import contextlib
import os
import sys

import pytest


@contextlib.contextmanager
def one_line(words="", error=ValueError):
    """Expect that the block raises `error` with a message of one line in which the pattern `words` is found."""
    with pytest.raises(error, match=words) as raised:
        yield raised
    assert "\n" not in str(raised.value), raised.value


def refuse(words, call, *arguments, error=ValueError, **named):
    """Expect that a call raises `error` with a message of one line in which the pattern `words` is found."""
    with one_line(words, error):
        call(*arguments, **named)


def refused(capsys, main, *argv, silent=False) -> str:
    """Call `main(argv)` of a script or command, which should refuse its arguments; return its line of standard error.

    silent: fail if anything was printed to standard output before.
    """
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
    """Within the block standard output is a pipe that is closed at its other end, as after `| head`."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        yield


def error_line(capfd, command=""):
    """Return the line that was printed to standard error, which must be an error of the command."""
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert f"{command}: error: " in line, line
    return line
