from collections import Counter

import numpy as np
import pytest
import torch

from moh_vision.language.data.batches import TokenSampler, length_slices
from moh_vision.language.data.tokens import Tokens, write_store
from moh_vision.language.data.translation import ParallelTokens
from moh_vision.language.data.vocabulary import BOS, EOS, PAD, train_vocabulary
from tests.support.refusals import refuse

LENGTHS = np.random.default_rng(5).integers(1, 40, (500, 2))


def batches(lengths=LENGTHS, **kwargs):
    defaults = dict(max_tokens=200, seed=3, accumulation=1, rank=0, world=1, start=0, stop=300)
    return TokenSampler(lengths, **{**defaults, **kwargs})


def flat(lists):
    return [item for items in lists for item in items]


def padded_size(lengths, numbers):
    return len(numbers) * lengths[numbers].max()


def test_max_tokens_is_kept_and_used():
    whole = batches()
    for numbers in whole:
        assert padded_size(LENGTHS, numbers) <= 200
    # Greedy over the sorted lengths, sentence by sentence: the fewest batches there can be of neighbours.
    count = 1
    batch = []
    for size in sorted(LENGTHS.max(1)):
        if (len(batch) + 1) * size > 200:
            count += 1
            batch = []
        batch.append(size)
    assert whole.total == count


def test_every_epoch_has_each_sentence_once_and_as_many_batches():
    whole = batches(stop=10_000)
    epochs = [[whole.sample(e * whole.total + i) for i in range(whole.total)] for e in range(3)]
    for epoch in epochs:
        assert sorted(flat(epoch)) == list(range(500))
        assert Counter(len(b) for b in epoch) == Counter(len(b) for b in epochs[0])
    assert epochs[0] != epochs[1] and list(batches(seed=4)) != list(batches())
    n = whole.total
    assert [batches().epoch(s) for s in (0, n - 1, n, 5 * n - 1, 5 * n)] == [0, 0, 1, 4, 5]
    assert len(batches(start=137, accumulation=2)) == 326


def test_sentences_of_equal_length_are_mixed_anew_and_batches_too():
    same = np.full((64, 2), 5)
    whole = batches(same, max_tokens=40, stop=16)
    rows = list(whole)
    first = rows[:8]
    second = rows[8:]
    assert {frozenset(b) for b in first}.isdisjoint({frozenset(b) for b in second})
    # Different lengths: the same batches, in another order.
    different = np.arange(1, 33)[:, None].repeat(2, 1)
    whole = batches(different, max_tokens=32, stop=2 * 31)
    n = whole.total
    rows = list(whole)
    first = rows[:n]
    second = rows[n : 2 * n]
    assert first != second and {frozenset(b) for b in first} == {frozenset(b) for b in second}
    order = [max(b) for b in first]
    assert order != sorted(order)


def test_mistakes():
    refuse(
        "data.max_tokens 30 39 data.max_length",
        lambda: batches(max_tokens=30),
    )
    refuse("shard_sizes 0 1", lambda: batches(LENGTHS[:0]))


def test_evaluation_takes_every_sentence_once():
    lengths = np.concatenate([LENGTHS, [[900, 3]]])
    slices = [length_slices(lengths, 200, rank, 3) for rank in range(3)]
    assert sorted(flat(flat(slices))) == list(range(501))
    for numbers in flat(slices):
        assert padded_size(lengths, numbers) <= 200 or numbers == [500]


SOURCE = ["a b c", "b", "", "c c c c c c", "a a", "d d d d"]
TARGET = ["x y", "x", "y", "x x", "z z z z z", "y x y x y x y"]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    stores = []
    for name, lines in (("source", SOURCE), ("target", TARGET)):
        write_store(folder / name, lines, train_vocabulary(lines), name)
        stores.append(Tokens([folder / name]))
    return stores


def lines_of(pairs):
    return pairs.lines.tolist()


def test_filters_are_those_of_the_papers(caches):
    every = ParallelTokens(*caches)
    assert lines_of(every) == [0, 1, 3, 4, 5] and every.left_out == {
        "empty": 1,
        "too long": 0,
        "ratio": 0,
    }
    assert every.lengths.tolist() == [[4, 3], [2, 2], [7, 3], [3, 6], [5, 8]]  # with eos
    assert every.lengths.tolist() == [[len(source), len(target)] for source, target in every]
    short = ParallelTokens(*caches, max_length=5)
    assert lines_of(short) == [0, 1, 4] and short.left_out["too long"] == 2
    even = ParallelTokens(*caches, max_ratio=1.5)  # 3:2 is within
    assert lines_of(even) == [0, 1] and even.left_out["ratio"] == 3
    assert "2 of 6 pairs (left out: 1 empty, 3 ratio)" == even.summary()
    names = " ".join(tokens.name for tokens in caches)
    facts = f"{names} 0 6 pairs 1 empty 5 data.max_length 0 data.max_ratio 1"
    refuse(facts, ParallelTokens, *caches, max_length=0)


def test_shares_are_nested(caches):
    shares = [set(lines_of(ParallelTokens(*caches, share=s))) for s in (0.2, 0.4, 0.8, 1.0)]
    assert [len(s) for s in shares] == [1, 2, 4, 5] and all(
        a < b for a, b in zip(shares, shares[1:])
    )


def test_a_batch(caches):
    pairs = ParallelTokens(*caches)
    batch = pairs.collate([pairs[0], pairs[3]])  # a b c -> x y; a a -> z z z z z
    a, b, c = caches[0][0][:3]
    x, y = caches[1][0][:2]
    z = caches[1][4][0]
    assert {k: v.tolist() for k, v in batch.items()} == dict(
        input_ids=[[a, b, c, EOS], [a, a, EOS, PAD]],
        attention_mask=[[1, 1, 1, 1], [1, 1, 1, 0]],
        decoder_input_ids=[[BOS, x, y, PAD, PAD, PAD], [BOS, z, z, z, z, z]],
        labels=[[x, y, EOS, -100, -100, -100], [z, z, z, z, z, EOS]],
    )
    assert all(v.dtype == torch.int64 for v in batch.values())
