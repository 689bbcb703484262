import json

from moh_vision.engine.best import Best, earlier_scores


def judged(best, scores):
    """(better, exhausted) after each score."""
    found = []
    for step, value in enumerate(scores, 1):
        better = best.better(value)
        best.take(step, value, better)
        found.append((better, best.exhausted))
    return found


def test_stops_after_so_many_without_a_lower_loss():
    best = Best("loss", 3)
    found = judged(best, [3.0, 2.0, 2.5, 2.0, 1.9, 2.0, 2.0, 2.0])
    assert [better for better, _ in found] == [True, True, False, False, True, False, False, False]
    assert [end for _, end in found] == [False] * 7 + [True]
    assert best.results() == dict(best_loss=1.9, best_step=5)
    assert not any(end for _, end in judged(Best("loss"), [1.0] * 50))


def test_of_other_scores_the_highest_is_the_best():
    assert [better for better, _ in judged(Best("top1"), [50, 40, 50, 60])] == [True, False, False, True]


def test_nan_is_not_better():
    nan = float("nan")
    found = judged(Best("loss", 2), [nan, 1.0, nan, nan])
    assert found == [(False, False), (True, False), (False, False), (False, True)]


def test_a_resumed_run_goes_on_counting(tmp_path):
    log = tmp_path / "metrics.jsonl"
    looks = [dict(step=10, validation=dict(loss=2.0)), dict(step=20, validation=dict(loss=2.1))]
    entries = [dict(step=10, loss=1.0), *looks]
    entries.append(dict(step=30, validation=dict(loss=2.2)))  # after the checkpoint that the run goes on from
    log.write_text("".join(json.dumps(e) + "\n" for e in entries) + '{"step": 3')
    assert earlier_scores(log, "loss", 20) == [(10, 2.0), (20, 2.1)]
    best = Best("loss", 2)
    best.replay(tmp_path, 20, from_file=False)
    assert (best.results(), best.waited, best.exhausted) == (dict(best_loss=2.0, best_step=10), 1, False)
    assert earlier_scores(tmp_path / "none", "loss", 5) == []
