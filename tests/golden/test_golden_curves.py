"""Twenty steps of every family of models have the losses that were recorded.

A change that is meant to move the losses records them anew, and its commit says why they moved:

    python -m pytest tests/golden --record-curves [-k CASE]
"""

import json

import pytest

from tests.support import golden_curves as curves


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return curves.write_data(tmp_path_factory.mktemp("golden"))


def recorded(case):
    """Return the record of a case; a new router's is written by the command above."""
    return json.loads((curves.HERE / f"{case}.json").read_text())


@pytest.mark.parametrize("case", curves.CASES)
def test_losses_are_as_recorded(case, data, tmp_path, pytestconfig):
    found = curves.curve(case, data, tmp_path / "run")
    if pytestconfig.getoption("--record-curves"):
        curves.write(case, found)
        pytest.skip(f"recorded {case}.json")
    record = recorded(case)
    where = f"recorded on {record['recorded_on']}\nnow on      {curves.about()}"
    advice = f"if it was meant to change: --record-curves -k {case}, and say in the commit why the curve moved"
    expected = curves.as_recorded(record["curves"], record["tolerance"])
    assert curves.by_step(found) == expected, (
        f"{case} trains otherwise than recorded\n{where}\n{advice}"
    )


@pytest.mark.parametrize(
    "case, path",
    [
        ("vit_moh_token", "cpp"),
        ("dit_pixels_sample", "torch"),
        pytest.param("vit_moh_token", "torch", marks=pytest.mark.slow),
        pytest.param("dit_pixels_sample", "cpp", marks=pytest.mark.slow),
    ],
    indirect=["path"],
)
def test_float32_follows_with_and_without_compiled_operators(case, path, data, tmp_path):
    """A run in float32, as users have it, follows the curve in float64 from the same weights and random numbers.

    In these two cases rounding never changes which heads are chosen, so the curves stay close.
    """
    found = curves.curve(case, data, tmp_path / "run", double=False, more="--model.executor packed")
    loss = dict(loss=recorded(case)["curves"]["loss"])
    assert curves.by_step(dict(loss=found["loss"])) == curves.as_recorded(
        loss, curves.TOLERANCE_IN_FLOAT32
    )
