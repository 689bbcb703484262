"""What is added up over the gates of layers, against slow counting."""

import math
from collections import Counter

import pytest
import torch

from moh_vision.attention import HeadBudget, HeadMixtureAttention, RoutingStats
from moh_vision.language.evaluation.gates import (
    GateStatistics,
    columns_of,
    gate_table,
    token_table,
)

V = 30


def batch(seed, B=4, N=6, dim=16):
    """Vectors, token ids and padding of the end; one sequence without any."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, N, dim, generator=generator)
    tokens = torch.randint(0, V, (B, N), generator=generator)
    lengths = torch.randint(1, N + 1, (B,), generator=generator)
    lengths[0] = N
    return x, tokens, torch.arange(N) >= lengths[:, None]


def moa(E=5, k=2):
    layer = HeadMixtureAttention(16, HeadBudget(E, 4, 0, k), router="moa", kv_heads=1)
    torch.nn.init.normal_(layer.router.gate.weight)
    return layer.eval()


def mae(leave_out=1, pool="sequence"):
    gates = dict(leave_out=leave_out, pool=pool)
    layer = HeadMixtureAttention(16, HeadBudget(4, 4, 4, 0), router="mae", router_kwargs=gates)
    torch.nn.init.normal_(layer.router.hidden.weight)
    torch.nn.init.normal_(layer.router.out.weight)
    return layer.eval()


LAYERS = {
    "MoA": (moa, 2),
    "MAE, 3 of 4": (mae, 1),
    "MAE, 2 of 4": (lambda: mae(2), 1),
    "MAE, causal": (lambda: mae(pool="running"), 1),
}


def slowly(layer, k, batches):
    """Entropy, load and PMI sentence by sentence and token by token, in plain Python."""
    entropies = []
    load = Counter()
    pairs = Counter()
    for x, tokens, padding in batches:
        probs = layer(x, padding_mask=padding)[1].probs
        for b in range(len(tokens)):
            whole = probs.shape[1] == 1
            for n in range(tokens.shape[1]):
                if padding[b, n] or (whole and n > 0 and not padding[b, 0]):
                    continue  # a gate of the whole sequence is looked at once
                p = probs[b, n].tolist()
                entropies.append(-math.fsum(q * math.log(q) for q in p))
                for e in sorted(range(len(p)), key=lambda e: -p[e])[:k]:
                    load[e] += 1
                    members = [n]
                    if whole:
                        members = [m for m in range(tokens.shape[1]) if not padding[b, m]]
                    pairs.update((tokens[b, m].item(), e) for m in members)
    total = sum(pairs.values())
    token = Counter()
    expert = Counter()
    for (t, e), count in pairs.items():
        token[t] += count
        expert[e] += count
    pmi = {
        (t, e): math.log(count * total / (token[t] * expert[e])) for (t, e), count in pairs.items()
    }
    return math.fsum(entropies) / len(entropies), load, pmi, token


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_against_slow_counting(name):
    make, k = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    batches = [batch(seed) for seed in range(5)]
    statistics, other = (
        GateStatistics([layer.router.gate_size()], V) for _ in range(2)
    )  # of two processes
    for number, (x, tokens, padding) in enumerate(batches):
        (other if number % 2 else statistics).update(
            [layer(x, padding_mask=padding)[1]], tokens, padding
        )
    sent = []
    other.reduce(lambda t: sent.append(t) or t)
    statistics.reduce(lambda t: t + sent.pop(0))
    entropy, load, pmi, token = slowly(layer, k, batches)

    assert statistics.entropy()[0] == pytest.approx(entropy, rel=1e-6)
    assert 0 < entropy < math.log(statistics.experts[0])
    got = statistics.load()[0]
    assert got.sum().item() == pytest.approx(1)
    assert got.tolist() == pytest.approx([load[e] / sum(load.values()) for e in range(len(got))])
    table = statistics.pmi()
    assert table.shape == (V, statistics.experts[0])
    assert len(pmi) > 30
    for t in range(V):
        for e in range(table.shape[1]):
            if (t, e) in pmi:
                assert table[t, e].item() == pytest.approx(pmi[t, e], abs=1e-9), (t, e)
            else:
                assert not math.isfinite(table[t, e])
    for e, best in enumerate(statistics.top_tokens(count=4, min_count=3)):
        often = [t for t in token if token[t] >= 3 * k and (t, e) in pmi]
        want = sorted(often, key=lambda t: (-round(pmi[t, e], 9), -token[t], t))[:4]
        assert [round(pmi[t, e], 9) for t in best] == [round(pmi[t, e], 9) for t in want], e


def test_columns_say_which_heads_are_shared():
    layers = [
        HeadMixtureAttention(16, HeadBudget(8, 4, shared, 4 - shared), router="moh")
        for shared in (1, 2)
    ]
    told = "EN is the share of choices that fell on expert N; every token chooses {}."
    shared = " The first {} heads are shared: they always run, and E1 is the next."
    assert columns_of(layers[1], layers[1:], "sentence") == told.format(2) + shared.format(2)
    assert columns_of(layers[0], layers, "sentence") == told.format("2 to 3") + shared.format(
        "1 to 2"
    )
    assert columns_of(moa(), [moa()], "sentence") == told.format(2)


def with_probs(probs):
    return RoutingStats(probs, torch.zeros(len(probs), probs.shape[-1]), probs.log())


def test_uniform_and_certain_gates():
    statistics = GateStatistics([(8, 1), (8, 1)], V)
    certain = torch.eye(8)[torch.tensor([2, 2, 5])][:, None]  # [3, 1, 8], with zeros
    stats = [with_probs(torch.full((3, 1, 8), 1 / 8)), with_probs(certain)]
    statistics.update(stats, torch.zeros(3, 4, dtype=torch.long))
    assert statistics.entropy() == pytest.approx([math.log(8), 0])
    assert statistics.load()[1].tolist() == pytest.approx([0, 0, 2 / 3, 0, 0, 1 / 3, 0, 0])
    numbers = zip(("encoder 1", "encoder 2"), statistics.entropy(), statistics.load())
    text = gate_table(
        [dict(name=n, experts=8, entropy=e, load=load.tolist()) for n, e, load in numbers]
    ).splitlines()
    assert len(text) == 5 and len({line.count("|") for line in text}) == 1
    assert text[3].startswith("| encoder 2 | 0.00 | 2.08 | 0.0 | 0.0 | 66.7 |")
    assert text[4].startswith("| mean | 1.04 | 2.08 |")


def test_indicative_tokens():
    """Expert 0 alone gets token 1; token 2 is everywhere; token 3 came once, with expert 1."""
    tokens = torch.tensor([[1, 2, 1, 2]] * 3 + [[2, 2, 4, 4]] * 3 + [[2, 2, 2, 3]])
    probs = torch.tensor([[0.9, 0.1]] * 3 + [[0.2, 0.8]] * 4)[:, None]
    statistics = GateStatistics([(2, 1)], V)
    statistics.update([with_probs(probs)], tokens)
    pmi = statistics.pmi()
    assert pmi[1, 0].item() == pytest.approx(math.log((6 / 28) / (6 / 28 * 12 / 28)))
    assert pmi[1, 1] == -math.inf and pmi[7].isnan().all()
    assert statistics.top_tokens(min_count=2) == [[1, 2], [4, 2]]
    assert statistics.top_tokens(min_count=1) == [
        [1, 2],
        [4, 3, 2],
    ]  # 4 and 3 are equal, 4 is more frequent
    assert statistics.top_tokens(min_count=1, count=1) == [[1], [4]]
    table = token_table([["the", "|"], ["bell"]]).splitlines()
    assert table == ["| expert 1 | expert 2 |", "|---|---|", "| the | bell |", "| \\| |  |"]
