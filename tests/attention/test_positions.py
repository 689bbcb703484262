"""Masks and rotary embedding."""

from functools import partial
from itertools import product

import layers
import pytest
import torch
from layers import D

from moh_vision.attention.masks import rotate, visible

angles = partial(layers.angles, dtype=torch.float64)


def test_padded_keys_are_hidden_from_any_mask():
    padding = torch.tensor([[False, True, False], [False, False, True]])
    real = [[1, 0, 1], [1, 1, 0]]

    def hidden(mask, tokens):  # in cross-attention
        return visible(mask, False, padding, True, tokens, 3, 0, torch.device("cpu"))[0]

    assert hidden(None, 1)[:, 0, 0].int().tolist() == real
    allowed = torch.tensor([[True, True, True], [False, True, True]])  # [N, M] of all sequences
    assert hidden(allowed, 2)[:, 0].int().tolist() == [[r, [0, *r[1:]]] for r in real]
    inf = float("-inf")
    assert hidden(torch.arange(3.0).expand(2, 1, 1, 3), 1)[:, 0, 0].tolist() == [[0, inf, 2], [0, 1, inf]]


def test_rotary_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64)

    def score(i, j):
        return (rotate(q, angles(1, i)) * rotate(k, angles(1, j))).sum()

    torch.testing.assert_close(score(7, 3), score(14, 10))
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3
    torch.testing.assert_close(rotate(q, angles(1, 5)).norm(), q.norm())
    # Channel 1 and channel 1 + D/2 are one point, turned by position times its rate.
    point = torch.zeros(1, 1, 1, D, dtype=torch.float64)
    point[..., 1] = 1
    want = torch.tensor([0, torch.tensor(0.3).cos(), 0, torch.tensor(0.3).sin()], dtype=torch.float64)
    torch.testing.assert_close(rotate(point, angles(1, 3)).flatten(), want, atol=1e-7, rtol=0)


def test_neighbours_are_rotated():
    """The same points, turned by the same angles, whichever channels hold them."""
    x, turns = torch.randn(2, 7, 3, 8), torch.randn(7, 4)
    halves = [f(turns).repeat(1, 2) for f in (torch.cos, torch.sin)]
    pairs = [f(turns).repeat_interleave(2, 1) for f in (torch.cos, torch.sin)]
    side_by_side = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    want = torch.stack(rotate(x, halves).chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(rotate(side_by_side, pairs, pairs=True), want)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("given", [None, "bool", "additive", "bool of tokens"])
def test_one_mask_out_of_many(past, tokens, causal, padded, given):
    keys = past + tokens
    padding = torch.arange(keys) < torch.tensor([[0], [2]]) if padded else None
    allowed = torch.rand(tokens, keys) > 0.3
    allowed[torch.arange(tokens), past + torch.arange(tokens)] = True
    if given == "bool of tokens":
        allowed = torch.rand(tokens, 1) > 0.3
    mask = None if given is None else torch.randn(tokens, keys) if given == "additive" else allowed
    got, is_causal = visible(mask, causal, padding, False, tokens, keys, past, torch.device("cpu"))
    assert not (is_causal and got is not None)
    if got is None:
        got = torch.ones(tokens, keys, dtype=torch.bool).tril() if is_causal else torch.ones(tokens, keys).bool()
    got = got.expand(2, 1, tokens, keys)[:, 0]
    for b, n, m in product(range(2), range(tokens), range(keys)):
        seen = not (causal and m > past + n) and not (padded and padding[b, m])
        if given in ("bool", "bool of tokens"):
            seen = seen and bool(allowed.expand(tokens, keys)[n, m])
        seen = seen or (padded and padding[b, m] and m == past + n)
        assert got[b, n, m] == (seen if got.dtype == torch.bool else mask[n, m] if seen else float("-inf"))
