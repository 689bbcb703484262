"""Masks and rotary embedding, which the tests of converted models compare with timm's and transformers' own."""

from itertools import product

import pytest
import torch

from moh_vision.attention.masks import rotate, visible


@pytest.mark.parametrize("pairs, x, y", [(False, 1, 3), (True, 2, 3)])
def test_a_point_is_turned_by_its_angle(pairs, x, y):
    """Scores do not tell in which direction; cached keys do."""
    angle = torch.tensor(0.3)
    unit = torch.eye(4)
    turns = (angle * (unit[x] + unit[y])).unsqueeze(0)
    turned = rotate(unit[x].view(1, 1, 1, 4), (turns.cos(), turns.sin()), pairs)
    torch.testing.assert_close(turned.flatten(), angle.cos() * unit[x] + angle.sin() * unit[y])


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("causal, crosses", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("given", [None, "bool", "additive", "bool of tokens"])
def test_one_mask_out_of_many(past, tokens, causal, crosses, padded, given):
    keys = past + tokens
    padding = torch.arange(keys) < torch.tensor([[0], [2]]) if padded else None
    allowed = torch.rand(tokens, keys) > 0.3
    allowed[torch.arange(tokens), past + torch.arange(tokens)] = True
    if given == "bool of tokens":
        allowed = torch.rand(tokens, 1) > 0.3
    mask = None if given is None else torch.randn(tokens, keys) if given == "additive" else allowed
    got, is_causal = visible(
        mask, causal, padding, crosses, tokens, keys, past, torch.device("cpu")
    )
    assert not (is_causal and got is not None)
    if got is None:
        got = (
            torch.ones(tokens, keys, dtype=torch.bool).tril()
            if is_causal
            else torch.ones(tokens, keys).bool()
        )
    got = got.expand(2, 1, tokens, keys)[:, 0]
    for b, n, m in product(range(2), range(tokens), range(keys)):
        seen = not (causal and m > past + n) and not (padded and padding[b, m])
        if given in ("bool", "bool of tokens"):
            seen = seen and bool(allowed.expand(tokens, keys)[n, m])
        seen = seen or (padded and not crosses and padding[b, m] and m == past + n)
        assert got[b, n, m] == (
            seen if got.dtype == torch.bool else mask[n, m] if seen else float("-inf")
        )
