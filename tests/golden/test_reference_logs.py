"""The logs that ship with configurations: where they come from, and that their runs still begin as they did."""

import re

import pytest

from moh_vision.commands.curves import read_curves
from tests.golden.reference_logs import CONFIGS, kept, lines_of
from tests.support import golden_curves as curves

LOGS = sorted(CONFIGS.glob("*/*.jsonl"))
STEPS = (
    11  # the logged steps 1 and 11, within the warm-up, so that max_steps changes no learning rate
)
TOLERANCE = 0.02  # relative: processors and thread counts round differently, and a head that wins by a bit may lose


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.parent.name}/{log.stem}")
def test_a_log_is_small_and_says_what_was_run(log):
    about, *rows = lines_of(log)
    assert log.with_suffix(".yaml").is_file() and log.stat().st_size < 50_000
    assert {"commit", "device"} <= set(about)
    assert re.search(
        rf"--config (configs/)?{log.parent.name}/{log.stem}(\.yaml)? ", about["command"]
    )
    assert not re.search(r"(?<![\w.])/\w", about["command"])  # no place of the machine
    steps = [step for step, _ in read_curves(log)[0]["training"]]
    assert steps[:3] == [1, 11, 21] and len(steps) > 4 and rows == list(map(kept, rows))


@pytest.mark.parametrize("name", ["quickstart/cls", "quickstart/dit"])
def test_runs_begin_as_they_did(name, tmp_path):
    script = curves.train_cls if name.endswith("cls") else curves.train_dit
    short = f"--config {name} --output {tmp_path}/run --log_every 10 --max_steps {STEPS} --optim.schedule constant"
    script.main(short.split())
    shipped = lines_of(CONFIGS / f"{name}.jsonl")[1:3]
    found = lines_of(tmp_path / "run" / "metrics.jsonl")[:2]
    for was, now in zip(shipped, found, strict=True):
        assert was["step"] == now["step"] and was["lr"] == pytest.approx(now["lr"])
        for key in ("loss", "balance_loss", "mse", "grad_norm"):
            if key in was:
                tolerance = 5 * TOLERANCE if key == "grad_norm" else TOLERANCE
                assert now[key] == pytest.approx(was[key], rel=tolerance, abs=1e-3 * tolerance), (
                    was,
                    now,
                )
