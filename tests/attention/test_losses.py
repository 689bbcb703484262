"""Losses of the routers, and of a task that trains with them; whole tasks are in the golden curves."""

import math

import pytest
import torch

from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    load_balance_loss,
    moa_balance_loss,
    router_z_loss,
)
from moh_vision.attention.losses import RoutedTask
from moh_vision.attention.routers.dense import DenseRouter
from moh_vision.attention.routers.moa import MoARouter
from moh_vision.attention.routers.moh import MoHRouter


def test_is_equation_7_scaled_by_the_candidates_and_averaged_over_routed_layers():
    x = torch.randn(3, 5, 16)
    dense = DenseRouter(16, HeadBudget(8, 4, 8, 0))
    routers = [MoHRouter(16, HeadBudget(8, 4, 2, 3)) for _ in range(2)]
    losses = []
    for router in routers:
        p = (x.flatten(0, 1) @ router.routed.weight.T).softmax(-1)  # [T, E]
        f = torch.zeros_like(p).scatter(1, p.topk(3, 1).indices, 1.0).mean(0)
        losses.append(6 * (f * p.mean(0)).sum())
        torch.testing.assert_close(load_balance_loss([router(x).stats]), losses[-1])
    stats = [router(x).stats for router in (routers[0], dense, routers[1])]
    torch.testing.assert_close(load_balance_loss(stats), sum(losses) / 2)
    only_dense = load_balance_loss(stats[1:2])
    assert only_dense.item() == 0 and not only_dense.requires_grad
    balanced = [MoARouter(16, HeadBudget(8, 4, 0, 3))(x).stats]  # a new router is uniform
    assert load_balance_loss(balanced).item() == pytest.approx(3)
    assert moa_balance_loss(balanced).item() == pytest.approx(1)


@pytest.mark.parametrize("loss", [load_balance_loss, moa_balance_loss])
def test_two_processes_with_counts_summed_equal_one_batch(loss):
    router = MoARouter(16, HeadBudget(8, 4, 0, 3)).double()
    x = torch.randn(4, 5, 16, dtype=torch.float64)
    torch.nn.init.normal_(router.gate.weight)
    stats = [[router(half).stats] for half in x.chunk(2)]
    sent = []

    def keep(counts):
        sent.append(counts)
        return counts

    for half in stats:
        loss(half, keep)
    losses = [loss(half, lambda counts: sent[0] + sent[1]) for half in stats]
    both = (losses[0] + losses[1]) / 2
    whole = loss([router(x).stats])
    torch.testing.assert_close(both, whole)
    gradients = [torch.autograd.grad(each, router.gate.weight)[0] for each in (both, whole)]
    torch.testing.assert_close(*gradients)
    assert not any(counts.requires_grad for counts in sent)


@pytest.mark.parametrize("loss", [load_balance_loss, moa_balance_loss, router_z_loss])
def test_padding_does_not_count(loss):
    router = MoARouter(16, HeadBudget(8, 4, 0, 3))
    torch.nn.init.normal_(router.gate.weight)
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    padded = router(x, padding_mask=padding)
    short = router(x[:, :4])
    torch.testing.assert_close(loss([padded.stats]), loss([short.stats]))


def moa_by_hand(stats):
    """L_a and L_z of Zhang 2022, eq. 13 to 17, token by token."""
    balance = 0.0
    z = 0.0
    for probs, _, logits in stats:
        tokens = [
            (p.tolist(), row.tolist()) for p, row in zip(probs.flatten(0, 1), logits.flatten(0, 1))
        ]
        E = len(tokens[0][0])
        k = 2
        f = [0] * E
        P = [0.0] * E
        for p, row in tokens:
            for i in sorted(range(E), key=lambda i: -p[i])[:k]:
                f[i] += 1
            for i in range(E):
                P[i] += p[i]
            z += math.log(sum(math.exp(v) for v in row)) ** 2 / len(tokens)
        balance += E * sum(a / sum(f) * b / sum(P) for a, b in zip(f, P))
    return balance, z


def test_each_router_has_its_own_losses(monkeypatch):
    """A model may mix routers: dense cross-attention beside MoA, MoH beside both."""
    budgets = dict(moa=(0, 2), dense=(6, 0), moh=(2, 2), mae=(6, 0), gated=(6, 0))
    layers = [
        HeadMixtureAttention(24, HeadBudget(6, 4, *b), router=router)
        for router, b in budgets.items()
    ]
    layers.append(HeadMixtureAttention(24, HeadBudget(6, 4, 0, 2), router="moa"))
    model = torch.nn.ModuleList(layers)
    x = torch.randn(3, 5, 24)
    for layer in (layers[0], layers[-1]):
        torch.nn.init.normal_(layer.router.gate.weight)
    stats = [layer(x)[1] for layer in layers]
    balance, z = moa_by_hand([stats[0], stats[-1]])
    moh = load_balance_loss(stats[2:3]).item()
    losses = RoutedTask(model, 0.5).losses(torch.tensor(1.0), stats)
    assert losses["moa_balance_loss"].item() == pytest.approx(balance, rel=1e-5) and balance > 2
    assert losses["z_loss"].item() == pytest.approx(z, rel=1e-5)
    total = 1 + 0.5 * moh + 0.01 * balance + 0.001 * z
    assert losses["loss"].item() == pytest.approx(total, rel=1e-6)
    head_runs = losses.pop("head_runs")
    assert [len(runs) for runs in head_runs] == [7] * 6
    assert [name for name, value in losses.items() if value.requires_grad] == ["loss"]
    weighed = RoutedTask(model, 0.0, moa_balance_weight=2.0, z_weight=3.0)
    total = weighed.losses(torch.tensor(1.0), stats)["loss"]
    assert total.item() == pytest.approx(1 + 2 * balance + 3 * z, rel=1e-6)
    monkeypatch.setattr(
        "moh_vision.attention.losses.sum_over_processes", lambda counts: counts.flip(0)
    )
    # Tokens of other processes count too.
    elsewhere = RoutedTask(model, 0.5).losses(torch.tensor(1.0), stats)
    assert all(elsewhere[name] != losses[name] for name in ("balance_loss", "moa_balance_loss"))
    plain = RoutedTask(model[1:4], 0.5).losses(torch.tensor(1.0), stats[1:4])
    assert list(plain) == ["loss", "task_loss", "balance_loss", "head_runs"]
    with pytest.raises(ValueError):  # statistics of another model
        RoutedTask(model, 0.5).losses(torch.tensor(1.0), stats[1:])
