"""The fast part of a large sweep."""

import itertools

import pytest


def covering(cases):
    """Return the cases of a sweep as parameters, of which those that cover no new pair of values are marked slow.

    A pair is two values of one case, each with its place. Most faults show in one value or a pair of values, so that the
    fast tests run a covering array of pairs, and the slow ones the whole sweep.

    Args:
        cases: tuples of the same length, such as `itertools.product` yields.
    """
    cases = list(cases)
    pairs = [
        set(itertools.combinations([(place, repr(value)) for place, value in enumerate(case)], 2))
        for case in cases
    ]
    uncovered = set().union(*pairs)
    fast = set()
    while uncovered:
        most = max(range(len(cases)), key=lambda number: len(pairs[number] & uncovered))
        fast.add(most)
        uncovered -= pairs[most]
    return [
        pytest.param(*case, marks=() if number in fast else pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
