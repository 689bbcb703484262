import json

from moh_vision.language.early_stop import Patience, earlier_losses


def looks(patience, losses):
    found = []
    for step, loss in enumerate(losses, 1):
        lowest = patience(step, loss)
        found.append((lowest, patience.exhausted))
    return found


def test_stops_after_so_many_without_a_lower_loss():
    patience = Patience(3)
    found = looks(patience, [3.0, 2.0, 2.5, 2.0, 1.9, 2.0, 2.0, 2.0])
    assert [lowest for lowest, _ in found] == [True, True, False, False, True, False, False, False]
    assert [end for _, end in found] == [False] * 7 + [True]
    assert (patience.best, patience.best_step) == (1.9, 5)
    assert not any(end for _, end in looks(Patience(0), [1.0] * 50))


def test_nan_is_not_lower():
    assert looks(Patience(2), [1.0, float("nan"), float("nan")]) == [(True, False), (False, False), (False, True)]


def test_a_resumed_run_goes_on_counting(tmp_path):
    log = tmp_path / "metrics.jsonl"
    looks = [dict(step=10, validation=dict(loss=2.0)), dict(step=20, validation=dict(loss=2.1))]
    entries = [dict(step=10, loss=1.0), *looks]
    entries.append(dict(step=30, validation=dict(loss=2.2)))  # after the checkpoint that the run goes on from
    log.write_text("".join(json.dumps(e) + "\n" for e in entries) + '{"step": 3')
    earlier = earlier_losses(log, 20)
    assert earlier == [(10, 2.0), (20, 2.1)]
    patience = Patience(2, earlier)
    assert not patience(30, 2.05) and patience.exhausted and patience.best_step == 10
    assert earlier_losses(tmp_path / "none", 5) == []
