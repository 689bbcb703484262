"""Twenty steps of every family have the losses that were recorded.

What changes them on purpose records them anew, and its commit says why they moved:

    python -m pytest tests/golden --record-curves [-k CASE]
"""

import copy

import curves
import pytest

RECORD = "python -m pytest tests/golden --record-curves"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return curves.write_data(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("case", curves.CASES)
def test_losses_are_as_recorded(case, data, tmp_path, pytestconfig):
    found = curves.curve(case, data, tmp_path / "run")
    if pytestconfig.getoption("--record-curves"):
        curves.write(case, found)
        pytest.skip(f"recorded {case}.json")
    record = curves.read(case)
    names = {**record["curves"], **found}
    lines = curves.differences(record, found, record["tolerance"], names)
    if lines:
        on, here = record["recorded_on"], curves.about()
        lines.append(f"recorded on {on}")
        lines.append(f"now on      {here}")
        lines.append(f"if it was meant to change: {RECORD} -k {case}, and say in the commit why the curve moved")
        pytest.fail(f"{case} trains otherwise than recorded\n" + "\n".join(lines), pytrace=False)


@pytest.mark.parametrize("case", ["vit_moh_token", "dit_pixels_sample"])
def test_float32_follows_with_and_without_compiled_operators(case, path, data, tmp_path):
    """As a user runs it, from the same weights and draws. Of these two, no head is chosen otherwise for a rounding."""
    found = curves.curve(case, data, tmp_path / "run", double=False, more="--model.executor packed")
    lines = curves.differences(curves.read(case), found, curves.TOLERANCE_IN_FLOAT32, ["loss"])
    assert not lines, "\n".join(lines)


def test_what_counts_as_a_difference():
    record = dict(curves=dict(loss=[2.0, 1.0], z_loss=[1e-9, 1e-9]))

    def differ(**changes):
        found = {**copy.deepcopy(record["curves"]), **changes}
        return curves.differences(record, found, 1e-6, {**record["curves"], **found})

    assert differ() == differ(loss=[2.0 + 1e-6, 1.0 - 5e-7], z_loss=[0.0, 2e-9]) == []
    assert "step 1" in differ(loss=[2.0, 1.0 + 2e-6])[0] and "1.000002" in differ(loss=[2.0, 1.0 + 2e-6])[2]
    for changes in (dict(loss=[2.0]), dict(loss=[]), dict(other=[1.0]), dict(loss=[2.0, float("nan")])):
        assert len(differ(**changes)) == 3
