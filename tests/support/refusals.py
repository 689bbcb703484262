"""Checks that errors are reported in one line, and a standard output that nobody reads."""

import contextlib
import os
import re
import sys

import pytest


def assert_says(message: str, facts: str) -> None:
    """Assert that a message says each of some facts, in whatever words.

    facts: words with a space between them, such as the name of the file or key, the value and what is allowed. A fact is
    found where no letter or digit adjoins: 3 is neither in 13 nor in 3.5.
    """
    missing = [
        fact
        for fact in facts.split()
        if not re.search(rf"(?<!\w)(?<!\d\.){re.escape(fact)}(?!\w)(?!\.\d)", message)
    ]
    assert not missing, f"{missing} not in: {message}"


@contextlib.contextmanager
def one_line(facts="", error=ValueError):
    """Expect that the block raises `error` with a message of one line that says `facts`, as in `assert_says`."""
    with pytest.raises(error) as raised:
        yield raised
    message = str(raised.value)
    assert "\n" not in message, message
    assert_says(message, facts)


def refuse(facts, call, *arguments, error=ValueError, **named):
    """Expect that a call raises `error` with a message of one line that says `facts`, as in `assert_says`."""
    with one_line(facts, error):
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
