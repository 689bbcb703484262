"""Cases that this machine cannot run are left out of a session and counted in its summary."""

import pytest

pytest_plugins = ["pytester"]

CASES = """
import contextlib
import pytest

class Backend:
    def __init__(self, name, reason=None):
        self.name = name
        self.reason = reason

    def __str__(self):
        return self.name

    def why_no_case(self):
        return self.reason

    @contextlib.contextmanager
    def running(self):
        yield

BACKENDS = [Backend("here"), Backend("gone", "no such instructions")]
on_all = pytest.mark.parametrize("backend", BACKENDS, ids=str, indirect=True)

@on_all
@pytest.mark.parametrize("number", [1, 2])
def test_two_cases_of_each(backend, number):
    assert backend.name == "here"

@on_all
@pytest.mark.timm
def test_marked(backend):
    pass

@pytest.mark.parametrize("number", [1])
def test_of_no_backend(number):
    pass

def test_without_cases():
    pass
"""

LINE = "{} tests are no cases on this machine: gone: no such instructions"


@pytest.fixture
def session(pytester):
    """session(*argv) runs the cases in a session of pytest that has the hooks of tests/conftest.py; returns its result."""
    pytester.makepyfile(CASES)
    return lambda *argv: pytester.runpytest("-p", "tests.conftest", *argv)


def test_what_cannot_run_is_left_out_and_counted(session):
    result = session()
    result.assert_outcomes(passed=5, deselected=3)
    result.stdout.fnmatch_lines([LINE.format(3)])


def test_what_the_command_line_leaves_out_is_not_counted(session):
    result = session("-k", "two_cases")
    result.assert_outcomes(passed=2, deselected=6)
    result.stdout.fnmatch_lines([LINE.format(2)])


def test_where_all_can_run_nothing_is_said(session):
    result = session("-k", "of_no_backend or without_cases")
    result.assert_outcomes(passed=2, deselected=6)
    result.stdout.no_fnmatch_line("*no cases on this machine*")


@pytest.mark.slow  # the processes of pytest-xdist import all that tests/conftest.py does
def test_processes_of_xdist_count_once(session):
    result = session("-n", "2")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines([LINE.format(3)])
