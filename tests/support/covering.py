"""The fast part of a large sweep."""

import itertools

import pytest


def covering(cases):
    """Return the cases of a sweep as parameters, of which those that are not `of_pairs` are marked slow.

    Args:
        cases: tuples of the same length, such as `itertools.product` yields.
    """
    cases = list(cases)
    fast = of_pairs(cases)
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in cases]


def of_pairs(cases):
    """Return some of the cases of a sweep that hold all pairs of values: a covering array.

    A pair is two values of one case, each with its place. Most faults show in one value or a pair of values.
    """
    cases = list(cases)
    pairs = [
        set(itertools.combinations([(place, repr(value)) for place, value in enumerate(case)], 2))
        for case in cases
    ]
    uncovered = set().union(*pairs)
    chosen = []
    while uncovered:
        most = max(range(len(cases)), key=lambda number: len(pairs[number] & uncovered))
        chosen.append(cases[most])
        uncovered -= pairs[most]
    return chosen
