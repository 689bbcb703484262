import math

import pytest
import torch

from moh_vision.language.evaluation.perplexity import perplexity, summary
from tests.support.refusals import one_line, refuse


def alone(total):
    return total


def batches_of(nll, labels, size):
    """The nll travels in the batch, so that `losses` only has to hand it on."""
    return [
        dict(nll=nll[i : i + size], labels=labels[i : i + size]) for i in range(0, len(nll), size)
    ]


@pytest.fixture
def random_tokens():
    generator = torch.Generator().manual_seed(0)
    nll = 3 * torch.rand(23, 7, generator=generator)
    labels = torch.randint(0, 50, (23, 7), generator=generator)
    labels[torch.rand(23, 7, generator=generator) < 0.3] = -100
    return nll, labels


def test_mean_over_labelled_tokens(random_tokens):
    nll, labels = random_tokens
    kept = [
        x
        for row, names in zip(nll.tolist(), labels.tolist())
        for x, name in zip(row, names)
        if name != -100
    ]
    want = math.fsum(kept) / len(kept)
    for size in (23, 4):  # the last batch is smaller, and rows have different numbers of labels
        scores = perplexity(lambda batch: batch["nll"], batches_of(nll, labels, size), "cpu", alone)
        assert scores["tokens"] == len(kept)
        assert scores["loss"] == pytest.approx(want, rel=1e-12)
        assert scores["perplexity"] == pytest.approx(math.exp(want), rel=1e-12)
    assert (
        summary(scores) == f"perplexity {math.exp(want):.2f}, loss {want:.4f}, {len(kept)} tokens"
    )
    sums = []
    for part in (slice(0, 3), slice(3, 23)):  # shares of two processes, of different size
        perplexity(
            lambda b: b["nll"],
            batches_of(nll[part], labels[part], 4),
            "cpu",
            lambda t: sums.append(t) or t,
        )
    both = perplexity(lambda b: b["nll"], [], "cpu", lambda t: sums[0] + sums[1])
    assert both["loss"] == pytest.approx(want, rel=1e-12) and both["tokens"] == len(kept)


def test_small_terms_are_not_lost_in_the_sum():
    """In float32 the sum of a few million tokens stops growing digit by digit."""
    nll = torch.full((1, 2**17), 0.1)
    labels = torch.zeros(1, 2**17, dtype=torch.long)
    scores = perplexity(lambda b: b["nll"], [dict(nll=nll, labels=labels)] * 40, "cpu", alone)
    assert scores["loss"] == pytest.approx(nll[0, 0].double().item(), rel=1e-12)
    hopeless = perplexity(lambda b: 1e5 * b["nll"], [dict(nll=nll, labels=labels)], "cpu", alone)
    assert hopeless["perplexity"] == math.inf and hopeless["loss"] == pytest.approx(1e4)


def test_what_is_not_finite_is_named(random_tokens):
    nll, labels = random_tokens
    nll[labels == -100] = math.nan  # does not count, so it does no harm
    tokens = int((labels != -100).sum())
    assert (
        perplexity(lambda b: b["nll"], batches_of(nll, labels, 4), "cpu", alone)["tokens"] == tokens
    )
    where = (labels != -100).nonzero()
    nll[tuple(where[3])] = math.nan
    nll[tuple(where[-1])] = math.inf
    with one_line(f"loss 2 {tokens} finite"):
        perplexity(lambda b: b["nll"], batches_of(nll, labels, 4), "cpu", alone)
    refuse("no tokens", lambda: perplexity(lambda b: b["nll"], [], "cpu", alone))
