"""Tests of the mutations that `tests/mutations.py` makes."""

import ast

from tests.mutations import mutations

LEFT_OUT = '''
def f(x: 1 = None) -> 2:
    """3 < 4"""
    y: Literal[5] = x
    assert y, f"{y + 6}"
    raise ValueError("a" + str(7 - 8))
'''


def mutants(source):
    return [ast.unparse(tree) for tree in [ast.parse(source)] for _ in mutations(tree)]


def test_one_operator_or_constant_is_exchanged_at_a_time():
    assert mutants("a < b == c") == ["a <= b == c", "a < b != c"]
    assert mutants("a and not b") == ["a or not b", "a and (not not b)"]
    assert mutants("x -= f(1, True)") == ["x += f(1, True)", "x -= f(2, True)", "x -= f(1, False)"]
    assert mutants(LEFT_OUT) == []
