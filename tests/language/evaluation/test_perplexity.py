import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moh_vision.language.evaluation.perplexity import perplexity, summary


def alone(total):
    return total


def batches_of(nll, labels, size):
    """The nll travels in the batch, so that `losses` only has to hand it on."""
    return [dict(nll=nll[i : i + size], labels=labels[i : i + size]) for i in range(0, len(nll), size)]


@pytest.fixture
def random_tokens():
    generator = torch.Generator().manual_seed(0)
    nll = 3 * torch.rand(23, 7, generator=generator)
    labels = torch.randint(0, 50, (23, 7), generator=generator)
    labels[torch.rand(23, 7, generator=generator) < 0.3] = -100
    return nll, labels


def test_mean_over_labelled_tokens(random_tokens):
    nll, labels = random_tokens
    kept = [x for row, names in zip(nll.tolist(), labels.tolist()) for x, name in zip(row, names) if name != -100]
    want = math.fsum(kept) / len(kept)
    for size in (23, 4):  # the last batch is smaller, and rows have different numbers of labels
        scores = perplexity(lambda batch: batch["nll"], batches_of(nll, labels, size), "cpu", alone)
        assert scores["tokens"] == len(kept)
        assert scores["loss"] == pytest.approx(want, rel=1e-12)
        assert scores["perplexity"] == pytest.approx(math.exp(want), rel=1e-12)
    text = f"perplexity {math.exp(want):.2f}, loss {want:.4f}, {len(kept)} tokens"
    assert summary(scores) == text


def test_a_uniform_guess_has_the_vocabulary_as_perplexity():
    batch = dict(labels=torch.randint(0, 100, (4, 5)))
    scores = perplexity(lambda b: torch.full(b["labels"].shape, math.log(100)), [batch], "cpu", alone)
    assert scores["perplexity"] == pytest.approx(100, rel=1e-6)


def test_processes_are_summed_not_averaged(random_tokens):
    nll, labels = random_tokens
    sums = []
    for part in (slice(0, 3), slice(3, 23)):  # shares of different size
        perplexity(lambda b: b["nll"], batches_of(nll[part], labels[part], 4), "cpu", lambda t: sums.append(t) or t)
    both = perplexity(lambda b: b["nll"], [], "cpu", lambda t: sums[0] + sums[1])
    one = perplexity(lambda b: b["nll"], batches_of(nll, labels, 23), "cpu", alone)
    assert both["loss"] == pytest.approx(one["loss"], rel=1e-12) and both["tokens"] == one["tokens"]


def test_small_terms_are_not_lost_in_the_sum():
    """In float32 the sum of a few million tokens stops growing digit by digit."""
    nll, labels = torch.full((1, 2**17), 0.1), torch.zeros(1, 2**17, dtype=torch.long)
    scores = perplexity(lambda b: b["nll"], [dict(nll=nll, labels=labels)] * 40, "cpu", alone)
    assert scores["loss"] == pytest.approx(nll[0, 0].double().item(), rel=1e-12)


def test_what_is_not_finite_is_named(random_tokens):
    nll, labels = random_tokens
    nll[labels == -100] = math.nan  # does not count, so it does no harm
    tokens = int((labels != -100).sum())
    assert perplexity(lambda b: b["nll"], batches_of(nll, labels, 4), "cpu", alone)["tokens"] == tokens
    where = (labels != -100).nonzero()
    nll[tuple(where[3])], nll[tuple(where[-1])] = math.nan, math.inf
    with pytest.raises(ValueError, match=f"^the loss of 2 of {tokens} tokens is not finite$"):
        perplexity(lambda b: b["nll"], batches_of(nll, labels, 4), "cpu", alone)
    with pytest.raises(ValueError, match="^there are no tokens to score$"):
        perplexity(lambda b: b["nll"], [], "cpu", alone)


def test_a_hopeless_model_has_infinite_perplexity():
    batch = dict(nll=torch.full((1, 2), 1e4), labels=torch.zeros(1, 2, dtype=torch.long))
    scores = perplexity(lambda b: b["nll"], [batch], "cpu", alone)
    assert scores["perplexity"] == math.inf and scores["loss"] == pytest.approx(1e4)


class TinyCausal(nn.Module):
    """Self-attention with positions over the whole input: what it predicts depends on how much context it sees."""

    def __init__(self, vocab, width=16, longest=12):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        T = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(T))  # [B, T, width]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        return self.out(self.block(x, src_mask=hidden))  # [B, T, vocab]


@pytest.mark.parametrize("window, context", ((8, 5), (8, 0), (12, 11)))
def test_windows_score_as_token_by_token(window, context):
    """Each token is predicted once, from all that its window holds before it; the slow way asks for one at a time.

    Windows of a text of n tokens: the first labels all of its targets, every further one the window - context new
    ones, and has the tokens before them as context (Baevski and Auli 2019, section 4.3).
    """
    torch.manual_seed(0)
    vocab, n = 20, 41
    text = torch.randint(0, vocab, (n + 1,))  # token i + 1 is the target of token i
    model = TinyCausal(vocab).double().eval()

    rows, first, slow = [], 0, []
    while first < n:  # targets first .. last - 1 are scored by this window
        last = min(n, first + (window if first == 0 else window - context))
        start = max(0, first - context)
        ids, labels = torch.zeros(window, dtype=torch.long), torch.full((window,), -100)
        ids[: last - start] = text[start:last]
        labels[first - start : last - start] = text[first + 1 : last + 1]
        rows.append((ids, labels))
        for i in range(first, last):
            with torch.no_grad():
                logits = model(text[None, start : i + 1])[0, -1]
            slow.append(-logits.log_softmax(-1)[text[i + 1]].item())
        first = last
    assert len(slow) == n

    def losses(batch):
        return F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none")

    ids, labels = (torch.stack(column) for column in zip(*rows))
    batches = [dict(input_ids=ids[i : i + 3], labels=labels[i : i + 3]) for i in range(0, len(ids), 3)]
    scores = perplexity(losses, batches, "cpu", alone)
    assert scores["tokens"] == n
    assert scores["loss"] == pytest.approx(math.fsum(slow) / n, rel=1e-10)
    assert not math.isclose(scores["loss"], math.log(vocab), rel_tol=1e-2)
