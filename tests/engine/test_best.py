"""The best validation score of a run, and the patience that ends it."""

import json
import math

import pytest
import torch

from moh_vision.common.io import write_tensors
from moh_vision.engine.best import BEST, Best, earlier_scores, value_of
from tests.support.refusals import one_line


@pytest.mark.parametrize(
    "key, patience, scores, better, ends",
    [
        ("loss", 3, [3.0, 2.0, 2.5, 2.0, 1.9, 2.0, 2.0, 2.0], "11001000", True),
        ("loss", 0, [1.0] * 50, "1" + "0" * 49, False),
        ("loss", 2, [math.nan, 1.0, math.nan, math.nan], "0100", True),
        ("top1", 0, [50, 40, 50, 60], "1001", False),
    ],
    ids=["the lowest loss", "no patience", "nan is never the best", "the highest of other scores"],
)
def test_the_best_and_when_patience_is_exhausted(key, patience, scores, better, ends):
    """`better` has a 1 for each score that is the best so far; `ends` says whether the last score exhausts patience."""
    best = Best(key, patience)
    for step, (value, expected) in enumerate(zip(scores, better, strict=True), 1):
        assert not best.exhausted and best.better(value) == bool(int(expected))
        best.take(step, value, best.better(value))
    step = better.rindex("1") + 1
    assert best.results() == {f"best_{key}": scores[step - 1], "best_step": step}
    assert best.exhausted == ends


@pytest.mark.parametrize(
    "scores, value",
    [
        (dict(top1=50.0, loss=1.0), 50.0),
        (dict(top1=50.0), 50.0),
        (dict(top1=50.0, loss=math.nan), math.nan),
        (dict(top1=50.0, loss=math.inf), math.nan),
        (dict(top1=50.0, loss=None), math.nan),  # as the log has it
        (dict(top1=math.nan, loss=1.0), math.nan),
    ],
)
def test_a_score_beside_a_loss_that_is_not_finite_is_none(scores, value, tmp_path):
    assert value_of(scores, "top1") == pytest.approx(value, nan_ok=True)
    log = tmp_path / "metrics.jsonl"
    log.write_text(json.dumps(dict(step=1, validation=scores)) + "\n")
    assert earlier_scores(log, "top1", 1) == [(1, pytest.approx(value, nan_ok=True))]


def test_a_resumed_run_goes_on_counting(tmp_path):
    log = tmp_path / "metrics.jsonl"
    entries = [
        dict(step=10, loss=1.0),
        dict(step=10, validation=dict(loss=2.0)),
        dict(step=20, validation=dict(loss=2.1)),
        # This entry is later than the checkpoint, step 20, and is not read.
        dict(step=30, validation=dict(loss=2.2)),
    ]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 3')
    assert earlier_scores(log, "loss", 20) == [(10, 2.0), (20, 2.1)]
    best = Best("loss", 2, write=False)
    best.replay(tmp_path, 20)
    assert best.results() == dict(best_loss=2.0, best_step=10)
    assert best.waited == 1
    assert not best.exhausted
    assert earlier_scores(tmp_path / "none", "loss", 5) == []
    log.write_text(json.dumps(dict(step=10, validation=dict(loss=None))) + "\n")  # nan in JSON
    assert Best("loss", 1, write=False).replay(tmp_path, 20).exhausted


def write_best(folder, **metadata):
    write_tensors(folder / BEST, dict(weight=torch.zeros(1)), metadata)


def write_log(folder, key, scores):
    """Write metrics.jsonl with a validation after every step, from step 1 on."""
    entries = [dict(step=n, validation={key: score}) for n, score in enumerate(scores, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def validate(best, scores, first, folder=None):
    """Judge scores from step `first` on, as a run does, until patience is exhausted; return the last step."""
    for step in range(first, len(scores) + 1):
        value = scores[step - 1]
        better = best.better(value)
        if better and folder:
            write_best(folder, **{f"best_{best.key}": value}, step=step)
        best.take(step, value, better)
        if best.exhausted:
            return step


@pytest.mark.parametrize("key", ["loss", "top1"])
@pytest.mark.parametrize("killed", range(7))
@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("written", [True, False])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, key, killed, start, written):
    """A run is killed after `killed` validations and resumes from its checkpoint of step `start`.

    best.safetensors may be newer than this checkpoint. `written` says whether the run writes that file.
    """
    if start > killed:
        return
    scores = [5.0, 6.0, 4.0, 7.0, 3.0, 3.0, 8.0, 8.0, 8.0, 2.0]
    if key == "top1":
        scores = [-score for score in scores]
    folder = tmp_path if written else None
    whole = Best(key, 3, write=written)
    assert validate(whole, scores, 1) == 8
    assert whole.results() == {f"best_{key}": scores[4], "best_step": 5}
    validate(Best(key, 3), scores[:killed], 1, folder)
    write_log(tmp_path, key, scores[:killed])
    resumed = Best(key, 3, write=written).replay(tmp_path, start)
    assert validate(resumed, scores, start + 1) == 8
    assert vars(resumed) == vars(whole)


def test_only_the_file_says_which_weights_it_has(tmp_path):
    """A better score in the log does not count if best.safetensors was not written; a run without the file reads the log."""
    write_best(tmp_path, best_loss=5.0, step=1)
    write_log(tmp_path, "loss", [5.0, 4.0, 6.0])
    best = Best("loss", 3, write=True).replay(tmp_path, 3)
    assert (best.value, best.step, best.waited) == (5.0, 1, 2)
    # This file is left from an earlier part of the run, which wrote it.
    write_best(tmp_path, best_loss=3.0, step=1)
    best = Best("loss", 3, write=False).replay(tmp_path, 3)
    assert (best.value, best.step, best.waited) == (4.0, 2, 1)


@pytest.mark.parametrize(
    "metadata, missing",
    [(dict(best_top1=50.0, step=1), "best_loss"), (dict(best_loss=1.0), "step")],
    ids=["score", "step"],
)
def test_a_file_without_its_score_or_step_is_refused(tmp_path, metadata, missing):
    write_best(tmp_path, **metadata)
    with one_line(f"{tmp_path / BEST} {missing}"):
        Best("loss", write=True).replay(tmp_path, 1)
