"""Measuring the limits of `auto`: the command at tiny shapes, and what it makes of times."""

import json

import pytest
import torch

from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels, tune
from moh_vision.attention.executors import choose, limits
from moh_vision.attention.executors.auto import table
from moh_vision.attention.routing import Call


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a process that has read no table."""
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path))
    limits._found.cache_clear()
    yield tmp_path
    limits._found.cache_clear()


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(tune, "SHAPES", [(1, 8, 256), (2, 12, 256)])
    monkeypatch.setattr(tune, "VISIT", 0.0)
    monkeypatch.setattr(tune, "LEAST_ROUNDS", 1)


def chosen(tokens, active, dtype=torch.float32):
    layer = HeadMixtureAttention(256, HeadBudget(4, 64, 1, active - 1), dtype=dtype).eval()
    with torch.no_grad():
        x = torch.randn(1, tokens, 256, dtype=dtype)
        return choose(layer, Call(x, layer.route(x)[0]))[0]


@pytest.mark.parametrize("pays", [True, False])
def test_what_is_measured_is_what_auto_takes(path, pays, cache, tiny, monkeypatch, capsys):
    monkeypatch.setattr(
        tune, "visit", lambda steps: [1.0 if s.share is None else s.share * (1 if pays else 2) for s in steps]
    )
    assert table() == limits.shipped() and chosen(8, 3) == "masked"
    assert tune.main(["--seconds", "0"]) == 0
    said = capsys.readouterr().out
    place = limits.table_path()
    assert place.is_relative_to(cache) and said.endswith(f"kept for auto in {place}\n")
    assert ("C++, per token, 1 x 8 x 256" in said) == (path == "cpp") and "PyTorch, per sample, 2 x 12 x 256" in said
    assert table() == limits.shipped()  # this process has its table
    limits._found.cache_clear()
    assert "1 rounds" in table()["about"] and table() == json.loads(place.read_text())
    kernels.use(path)
    assert chosen(20, 2) == ("packed" if pays else "masked") and chosen(20, 4) == "masked"


@pytest.mark.parametrize(
    "points, limit",
    [
        ([(0.5, 0.7), (0.75, 0.8), (0.9, 0.9)], 0.95),  # on to where it was not measured, up to MOST
        ([(0.5, 0.7), (0.75, 0.95), (0.9, 0.99)], 0.825),  # between the last two
        ([(0.5, 0.87), (0.75, 1.07), (0.9, 1.2)], 0.625),
        ([(0.5, 0.98), (0.75, 1.03), (0.9, 1.2)], 0.45),  # below the first by its line
        ([(0.5, 1.9), (0.75, 2.0), (0.9, 2.1)], 0.0),
        ([(0.5, 1.2), (0.75, 1.1), (0.9, 0.9)], 0.0),  # noise
        ([(0.5, 0.99), (0.75, 0.99), (0.9, 0.99)], 0.0),  # less than noise
        ([(0.5, 0.6), (0.75, 0.6), (0.9, 0.6)], 0.95),
    ],
)
def test_limit(points, limit):
    assert tune.limit(points) == pytest.approx(limit)


def test_rows_beside_what_was_measured():
    def point(ratio):
        return [(0.5, ratio), (0.75, ratio), (0.9, ratio)]

    before = limits.shipped()
    before["cpp"]["token"]["float32"]["forward"] = [[1, 10, 0.6], [1, 10**9, 0.7], [150, 5, 0.8], [2048, 7, 0.5]]
    case = [tune.Case("token", "float32", "forward", shape) for shape in ((1, 100, 64), (4, 100, 64), (1, 200, 64))]
    measured = {(case[0], "cpp"): point(1.5), (case[1], "cpp"): point(0.5), (case[2], "cpp"): point(0.5)}
    after = tune.tabulate(measured, before, "here")
    assert after["about"] == "here" and after["torch"] == before["torch"]
    assert after["cpp"]["token"]["float32"] == {
        "forward": [
            [1, 10, 0.0],  # larger calls do not pay
            [1, 10**9, 0.7],
            [90, 5760, 0.0],
            [90, 23040, 0.95],
            [180, 11520, 0.95],
            [2048, 7, 0.95],  # smaller ones do
        ],
        "training": before["cpp"]["token"]["float32"]["training"],
    }


def test_the_file_has_a_row_a_line():
    text = tune.text_of(limits.shipped())
    assert json.loads(text) == limits.shipped() and "     [1, 25000, 0.6],\n" in text
