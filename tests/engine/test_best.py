import json
import math

import pytest

from moh_vision.engine.best import Best, earlier_scores


@pytest.mark.parametrize("key, patience, scores, better, ends", [
    ("loss", 3, [3.0, 2.0, 2.5, 2.0, 1.9, 2.0, 2.0, 2.0], "11001000", True),
    ("loss", 0, [1.0] * 50, "1" + "0" * 49, False),
    ("loss", 2, [math.nan, 1.0, math.nan, math.nan], "0100", True),  # nan is never the best
    ("top1", 0, [50, 40, 50, 60], "1001", False),  # of other scores the highest is
])  # fmt: skip
def test_the_best_and_when_patience_is_exhausted(key, patience, scores, better, ends):
    best = Best(key, patience)
    for step, (value, expected) in enumerate(zip(scores, better, strict=True), 1):
        assert not best.exhausted and best.better(value) == bool(int(expected))
        best.take(step, value, best.better(value))
    step = better.rindex("1") + 1
    assert (
        best.results() == {f"best_{key}": scores[step - 1], "best_step": step}
        and best.exhausted == ends
    )


def test_a_resumed_run_goes_on_counting(tmp_path):
    log = tmp_path / "metrics.jsonl"
    looks = [dict(step=10, validation=dict(loss=2.0)), dict(step=20, validation=dict(loss=2.1))]
    entries = [dict(step=10, loss=1.0), *looks]
    entries.append(
        dict(step=30, validation=dict(loss=2.2))
    )  # after the checkpoint that the run goes on from
    log.write_text("".join(json.dumps(e) + "\n" for e in entries) + '{"step": 3')
    assert earlier_scores(log, "loss", 20) == [(10, 2.0), (20, 2.1)]
    best = Best("loss", 2)
    best.replay(tmp_path, 20, from_file=False)
    assert (best.results(), best.waited, best.exhausted) == (
        dict(best_loss=2.0, best_step=10),
        1,
        False,
    )
    assert earlier_scores(tmp_path / "none", "loss", 5) == []
