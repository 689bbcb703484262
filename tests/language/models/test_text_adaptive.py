"""The adaptive vocabulary against torch's own adaptive softmax."""

import pytest
import torch
from torch import nn

from moh_vision.language.models.adaptive import AdaptiveVocabulary

DIM = 16
VOCAB = 30
CUTOFFS = [8, 20]


@pytest.fixture
def vocabulary():
    torch.manual_seed(0)
    return AdaptiveVocabulary(VOCAB, DIM, CUTOFFS, factor=4).double()


def test_input_is_the_projected_embedding_of_its_band(vocabulary):
    ids = torch.tensor([[0, 7, 8], [19, 20, 29]])
    x = vocabulary(ids)
    for row, word in zip(x.flatten(0, 1), ids.flatten().tolist()):
        band = (word >= 8) + (word >= 20)
        inside = word - [0, 8, 20][band]
        expected = vocabulary.projections[band].weight @ vocabulary.embeddings[band].weight[inside]
        torch.testing.assert_close(row, expected)


def test_nll_equals_the_full_softmax_in_value_and_gradient(vocabulary):
    hidden = torch.randn(60, DIM, dtype=torch.float64, requires_grad=True)
    words = torch.randint(0, VOCAB, (60,))
    full = -vocabulary.log_probs(hidden).gather(1, words[:, None])[:, 0]
    short = vocabulary.nll(hidden, words)
    torch.testing.assert_close(short, full)
    wanted = [
        hidden,
        *(p for name, p in vocabulary.named_parameters() if name != "projections.0.weight"),
    ]
    weight = torch.randn(60, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(full @ weight, wanted), torch.autograd.grad(short @ weight, wanted)
    ):
        torch.testing.assert_close(a, b)


def test_nll_never_computes_words_of_bands_that_do_not_occur(vocabulary):
    projected = []  # hidden states [T, C of the band] that get the words of a band, seen at their dropout
    vocabulary.dropout.register_forward_hook(lambda *call: projected.append(call[-1].shape))
    vocabulary.nll(torch.randn(5, DIM, dtype=torch.float64), torch.tensor([0, 9, 3, 10, 1]))
    assert projected == [(2, DIM // 4), (0, DIM // 16)]


def test_torchs_adaptive_softmax_with_the_same_weights_agrees(vocabulary):
    oracle = nn.AdaptiveLogSoftmaxWithLoss(DIM, VOCAB, CUTOFFS, div_value=4).double()
    with torch.no_grad():
        oracle.head.weight.copy_(
            torch.cat([vocabulary.embeddings[0].weight, vocabulary.clusters.weight])
        )
        for band in (1, 2):
            oracle.tail[band - 1][0].weight.copy_(vocabulary.projections[band].weight.T)
            oracle.tail[band - 1][1].weight.copy_(vocabulary.embeddings[band].weight)
    hidden = torch.randn(40, DIM, dtype=torch.float64)
    words = torch.randint(0, VOCAB, (40,))
    log_probs = vocabulary.log_probs(hidden)
    torch.testing.assert_close(log_probs, oracle.log_prob(hidden))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(-vocabulary.nll(hidden, words), oracle(hidden, words).output)


def test_every_weight_has_a_gradient_though_a_band_does_not_occur(vocabulary):
    """Else DistributedDataParallel would wait for it."""
    ids = torch.tensor([[1, 2, 9]])
    vocabulary.nll(vocabulary(ids).flatten(0, 1), ids.flatten()).sum().backward()
    assert all(p.grad is not None for p in vocabulary.parameters())


def test_without_cutoffs_it_is_a_tied_embedding():
    vocabulary = AdaptiveVocabulary(VOCAB, DIM).double()
    assert [name for name, _ in vocabulary.named_parameters()] == ["embeddings.0.weight"]
    ids = torch.tensor([[3, 29]])
    hidden = torch.randn(4, DIM, dtype=torch.float64)
    table = vocabulary.embeddings[0].weight
    assert torch.equal(vocabulary(ids), table[ids])
    torch.testing.assert_close(vocabulary.log_probs(hidden), (hidden @ table.T).log_softmax(-1))
    words = torch.tensor([0, 5, 29, 7])
    torch.testing.assert_close(
        vocabulary.nll(hidden, words), -(hidden @ table.T).log_softmax(-1)[range(4), words]
    )


def test_autocast_keeps_the_loss_in_float32():
    torch.manual_seed(0)
    vocabulary = AdaptiveVocabulary(VOCAB, DIM, CUTOFFS)
    ids = torch.randint(0, VOCAB, (2, 9))
    exact = vocabulary.nll(vocabulary(ids).flatten(0, 1), ids.flatten())
    with torch.autocast("cpu", torch.bfloat16):
        x = vocabulary(ids)
        loss = vocabulary.nll(x.flatten(0, 1), ids.flatten())
    assert x.dtype == torch.bfloat16 and loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.05)
