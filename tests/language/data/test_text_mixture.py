"""Weighted sources: which block of which source comes at which position."""

from collections import Counter, defaultdict

import pytest

from moh_vision.language.config import TextDataConfig
from moh_vision.language.data.batches import load_batches
from moh_vision.language.data.inputs import CausalInputs
from moh_vision.language.data.mixture import LONGEST_ROUND, Mixture, MixtureSampler
from moh_vision.language.data.vocabulary import train_vocabulary
from tests.support.refusals import refuse
from tests.support.small_text import write_ids

TABLE_B = [4.24, 3.50, 4.37, 3.19, 10.94, 61.28, 12.48]  # of Jin 2024


def test_shares_are_exact():
    mixture = Mixture(TABLE_B, [1000] * 7, seed=0)
    assert mixture.length <= 10_000
    counts = Counter(mixture[p][0] for p in range(10_000))
    assert [counts[s] / 100 for s in range(7)] == TABLE_B
    assert mixture.drawn(10_000) == [round(100 * weight) for weight in TABLE_B]
    some = mixture.drawn(12_345)
    assert sum(some) == 12_345 and all(abs(n - 123.45 * w) < 100 for n, w in zip(some, TABLE_B))
    counts.update(mixture[p][0] for p in range(10_000, 12_345))
    assert [counts[s] for s in range(7)] == some


def test_odd_weights_are_never_a_block_from_their_share():
    weights = [123_456_789, 987_654_321, 1e6 / 7]
    mixture = Mixture(weights, [10, 10, 10], seed=0)
    assert mixture.length == LONGEST_ROUND
    for rounds in (1, 3, 1000, 10**6):
        drawn = mixture.drawn(rounds * LONGEST_ROUND)
        assert sum(drawn) == rounds * LONGEST_ROUND
        assert all(abs(n - w / sum(weights) * sum(drawn)) < 1 for n, w in zip(drawn, weights))
    refuse("data.mixture 1 weight 1e-07 1.5e-05", lambda: Mixture([1e7, 1], [10, 10], seed=0))


def test_a_source_is_gone_through_before_it_repeats():
    blocks = [13, 50, 7]
    mixture = Mixture([0.5, 0.3, 0.2], blocks, seed=4)
    seen = defaultdict(list)
    for position in range(400):
        source, block = mixture[position]
        seen[source].append(block)
    for source, count in enumerate(blocks):
        whole = [
            seen[source][i : i + count] for i in range(0, len(seen[source]) - count + 1, count)
        ]
        assert whole and all(sorted(epoch) == list(range(count)) for epoch in whole)
        assert len(whole) < 2 or whole[0] != whole[1]
    assert len(seen[0]) > 10 * blocks[0]
    other, again = (Mixture([0.5, 0.3, 0.2], blocks, seed=seed) for seed in (5, 4))
    assert [other[p][0] for p in range(50)] != [mixture[p][0] for p in range(50)]
    drawn = [block for source, block in map(other.__getitem__, range(50)) if source == 0]
    assert drawn[:13] != seen[0][:13]
    assert (
        again[10**12] == mixture[10**12] and again[300] == mixture[300]
    )  # found without those before


NUMBERS = train_vocabulary([" ".join(map(str, range(996)))])  # 1,000 tokens


def source(folder, name, count, first):
    """A source of `count` ids from `first` on."""
    write_ids(folder / name / "train", range(first, first + count), NUMBERS)
    return dict(root=name, weight=count)


def inputs(folder, sources):
    NUMBERS.save(folder / "tokenizer.json", CausalInputs.form)
    write_ids(folder / "train", range(40), NUMBERS)
    data = TextDataConfig(
        root=str(folder), mixture=sources, block=8, val="train", tokenizer=str(folder)
    )
    return CausalInputs(data, str(folder / "cache"), 3, data.tokenizer)


def test_a_run_on_sources(tmp_path, capsys):
    weights = (dict(weight=5), dict(weight=3, name="second"), dict(weight=2))
    sources = [
        {**source(tmp_path, f"s{i}", 8 * count, 100 * i), **more}
        for i, (count, more) in enumerate(zip((5, 9, 3), weights))
    ]
    text = inputs(tmp_path, sources)
    assert text.train.names == ["s0", "second", "s2"] and len(text.train) == 17
    assert text.model_arguments() == dict(vocab_size=1000)

    batches = text.sampler(4, accumulation=1, rank=0, world=1, start=0, stop=30)
    assert isinstance(batches, MixtureSampler)
    rows = [row for batch in load_batches(text.train, batches) for row in batch["labels"].tolist()]
    of = Counter(next(i for i in row if i != -100) // 100 for row in rows)
    assert of == {0: 60, 1: 36, 2: 24}
    assert (
        capsys.readouterr().out.splitlines()[-3]
        == "source s0: 50.00 %, 40 tokens, 5 blocks; 12.00 times in this run"
    )
    # A window is a piece of its own source, whatever stands beside it.
    for row in rows:
        real = [i for i in row if i != -100]
        assert (
            real == list(range(real[0], real[0] + len(real))) and real[-1] // 100 == real[0] // 100
        )
    later = text.sampler(
        4, accumulation=2, rank=1, world=2, start=20, stop=30
    )  # resumed, as one of two processes
    assert [item for batch in later for item in batch] == [
        list(batches)[n][m] for n in range(20, 30) for m in (1, 3)
    ]
    assert batches.epoch(0) == 0 and batches.epoch(29) == 11
    assert batches.epochs() == [12.0, 4.0, 8.0]


def test_text_and_ids_may_be_mixed(tmp_path):
    """The vocabulary of the run encodes what is text."""
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "train.txt").write_text("a b c\n" * 20)
    vocabulary = train_vocabulary(["a b c d"])
    vocabulary.save(tmp_path / "tokenizer.json", CausalInputs.form)
    write_ids(tmp_path / "ids" / "train", [4, 5, 6, 7] * 16, vocabulary)
    sources = [dict(root="lines", weight=1), dict(root="ids", weight=1)]
    (tmp_path / "val.txt").write_text("a b\n" * 9)

    def opened():
        data = TextDataConfig(
            root=str(tmp_path), mixture=sources, block=8, tokenizer=str(tmp_path), val="val"
        )
        return CausalInputs(data, str(tmp_path / "cache"), 3, data.tokenizer)

    text = opened()
    assert [len(window.tokens.ids) for window in text.train.datasets] == [80, 64]
    assert text.train[0, 0][1].tolist() == [4, 5, 6, 2, 4, 5, 6, 2]
    before = text.record(1)["train"]
    write_ids(tmp_path / "ids" / "train", [7, 6, 5, 4] * 16, vocabulary)
    (tmp_path / "lines" / "train.txt").write_text("a c b\n" * 20)
    assert [one == other for one, other in zip(before, opened().record(1)["train"])] == [
        False,
        False,
    ]


@pytest.mark.parametrize(
    "sources, facts",
    [
        pytest.param([], "data.mixture [] one", id="no source"),
        pytest.param([dict(weight=1)], "data.mixture 0 root None folder", id="no root"),
        pytest.param(
            [dict(root="a", weight=0)],
            "data.mixture 0 weight 0 above",
            id="weight 0",
        ),
        pytest.param(
            [dict(root="a", weight="much")],
            "data.mixture 0 weight 'much' above 0",
            id="weight much",
        ),
        pytest.param(
            [dict(root="a", weight=True)], "data.mixture 0 weight True above 0", id="weight True"
        ),
        pytest.param(
            [dict(root="a", weight=float("inf"))],
            "data.mixture 0 weight inf above 0",
            id="weight inf",
        ),
        pytest.param(
            [dict(root="a", weight=1, wait=2)],
            "data.mixture 0 'wait' root weight name",
            id="unknown key",
        ),
        pytest.param(
            [dict(root="a", weight=1), dict(root="b/a/", weight=1)],
            "data.mixture 1 name 'a' other",
            id="one name twice",
        ),
    ],
)
def test_mistakes(sources, facts):
    refuse(facts, TextDataConfig, mixture=sources)


def test_a_source_that_is_not_there(tmp_path):
    refuse(
        f"data.root {tmp_path}/nowhere train.txt hfds/NAME",
        lambda: inputs(tmp_path, [dict(root="nowhere", weight=1)]),
        error=FileNotFoundError,
    )
    (tmp_path / "empty").mkdir()
    refuse(
        f"data.root {tmp_path}/empty train.txt train.jsonl",
        lambda: inputs(tmp_path, [dict(root="empty", weight=1)]),
        error=FileNotFoundError,
    )
    refuse(
        f"{tmp_path}/short/train 4 tokens block 8",
        lambda: inputs(tmp_path, [source(tmp_path, "short", 4, 0)]),
    )
