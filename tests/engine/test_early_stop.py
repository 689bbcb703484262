import json

from moh_vision.engine.early_stop import Patience, earlier_losses


def test_stops_after_so_many_without_a_lower_loss():
    losses = [3.0, 2.0, 2.5, 2.0, 1.9, 2.0, 2.0, 2.0]
    patience = Patience(3)
    assert [patience(loss) for loss in losses] == [False] * 7 + [True]
    assert patience.best == 1.9
    never = Patience(0)
    assert not any(never(1.0) for _ in range(50))


def test_nan_is_not_lower():
    patience = Patience(2)
    assert [patience(loss) for loss in (1.0, float("nan"), float("nan"))] == [False, False, True]


def test_a_resumed_run_goes_on_counting(tmp_path):
    log = tmp_path / "metrics.jsonl"
    entries = [
        dict(step=9, loss=1.0),
        dict(step=9, validation=dict(loss=2.0)),
        dict(step=19, validation=dict(loss=2.1)),
    ]
    entries.append(dict(step=29, validation=dict(loss=2.2)))  # after the checkpoint that the run goes on from
    log.write_text("".join(json.dumps(e) + "\n" for e in entries) + '{"step": 3')
    earlier = earlier_losses(log, 20)
    assert earlier == [2.0, 2.1]
    assert Patience(2, earlier)(2.05)
    assert earlier_losses(tmp_path / "none", 5) == []
