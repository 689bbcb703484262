"""Losses of the routers, and of the tasks that train with them."""

import math

import pytest
import timm
import torch
from torch.nn import functional as F

import moh_vision  # noqa: F401
from moh_vision.attention import HeadBudget, HeadMixtureAttention, load_balance_loss, moa_balance_loss, router_z_loss
from moh_vision.attention.losses import RoutedTask
from moh_vision.attention.routers.dense import DenseRouter
from moh_vision.attention.routers.moa import MoARouter
from moh_vision.attention.routers.moh import MoHRouter
from moh_vision.classification.task import ClassificationTask
from moh_vision.diffusion import HybridLoss
from moh_vision.diffusion.task import DiffusionTask


def test_is_equation_7_scaled_by_the_candidates_and_averaged_over_routed_layers():
    x, dense = torch.randn(3, 5, 16), DenseRouter(16, HeadBudget(8, 4, 8, 0))
    routers, losses = [MoHRouter(16, HeadBudget(8, 4, 2, 3)) for _ in range(2)], []
    for router in routers:
        p = (x.flatten(0, 1) @ router.routed.weight.T).softmax(-1)  # [T, E]
        f = torch.zeros_like(p).scatter(1, p.topk(3, 1).indices, 1.0).mean(0)
        losses.append(6 * (f * p.mean(0)).sum())
        torch.testing.assert_close(load_balance_loss([router(x).stats]), losses[-1])
    stats = [router(x).stats for router in (routers[0], dense, routers[1])]
    torch.testing.assert_close(load_balance_loss(stats), sum(losses) / 2)
    only_dense = load_balance_loss(stats[1:2])
    assert only_dense.item() == 0 and not only_dense.requires_grad


def test_two_processes_with_counts_summed_equal_one_batch():
    router = MoHRouter(16, HeadBudget(8, 4, 2, 3)).double()
    x = torch.randn(4, 5, 16, dtype=torch.float64)

    def gradient(loss):
        return torch.autograd.grad(loss, router.routed.weight)[0]

    parts = [router(half).stats for half in x.chunk(2)]
    sent = []
    for part in parts:
        load_balance_loss([part], lambda t: sent.append(t) or t)
    total = sent[0] + sent[1]
    losses = [load_balance_loss([part], lambda t: total) for part in parts]
    whole = load_balance_loss([router(x).stats])
    torch.testing.assert_close((losses[0] + losses[1]) / 2, whole)
    torch.testing.assert_close((gradient(losses[0]) + gradient(losses[1])) / 2, gradient(whole))
    assert not total.requires_grad


@pytest.mark.parametrize("loss", [load_balance_loss, moa_balance_loss, router_z_loss])
def test_padding_does_not_count(loss):
    router = MoARouter(16, HeadBudget(8, 4, 0, 3))
    torch.nn.init.normal_(router.gate.weight)
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    padded, short = router(x, padding_mask=padding), router(x[:, :4])
    torch.testing.assert_close(loss([padded.stats]), loss([short.stats]))


VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)
DIT = dict(img_size=8, in_chans=3, num_classes=5, embed_dim=32, depth=2, num_heads=4)


def images_and_labels():
    return torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 4])


def test_classification_losses():
    model, (images, labels) = timm.create_model("moh_vit_tiny_patch16_224", **VIT), images_and_labels()
    losses = ClassificationTask(model, balance_weight=0.5)(images, labels)
    logits, stats = model.forward_routed(images)
    cross, balance = F.cross_entropy(logits, labels), load_balance_loss(stats)
    torch.testing.assert_close(losses["loss"], cross + 0.5 * balance)
    torch.testing.assert_close(losses["task_loss"], cross.detach())
    assert losses["batch_accuracy"] == (logits.argmax(1) == labels).float().mean()
    assert [runs.tolist()[-1] for runs in losses["head_runs"]] == [4 * 17, 4 * 17]

    task, mixed = ClassificationTask(model, 0.0, label_smoothing=0.1), F.one_hot(labels, 5).float()
    torch.testing.assert_close(task(images, mixed)["loss"], task(images, labels)["loss"])
    assert task(images, mixed)["batch_accuracy"] == losses["batch_accuracy"]
    again, stats = task.eval()(images)
    assert torch.equal(again, logits) and len(stats) == 2


def test_diffusion_losses():
    model = timm.create_model("moh_dit_small_patch2_75", **DIT, head_budget=0.75)
    images, noise = torch.rand(3, 3, 8, 8) * 2 - 1, torch.randn(3, 3, 8, 8)
    labels, t = torch.tensor([0, 4, 5]), torch.tensor([0, 10, 999])
    losses = DiffusionTask(model, 0.01, HybridLoss())(images, labels, t, noise)
    # a new DiT predicts noise 0, so the error is the noise itself
    torch.testing.assert_close(losses["mse"], noise.square().mean())
    torch.testing.assert_close(losses["task_loss"], losses["mse"] + losses["vb"])
    losses["loss"].backward()
    assert model.final_layer.linear.weight.grad.norm() > 0

    dense = timm.create_model("dit_small_patch2", **DIT)
    losses = DiffusionTask(dense, 0.01, HybridLoss())(images, labels, t, noise)
    assert losses["balance_loss"] == 0 and torch.equal(losses["loss"].detach(), losses["task_loss"])
    assert all(runs.tolist() == [3 * 16.0] * 5 for runs in losses["head_runs"])


def moa_by_hand(stats, counted=lambda module, expert: 0):
    """L_a and L_z of Zhang 2022, eq. 13 to 17, token by token; `counted` adds tokens of other processes to f."""
    balance = z = 0.0
    for module, (probs, _, logits) in enumerate(stats):
        tokens = [(p.tolist(), row.tolist()) for p, row in zip(probs.flatten(0, 1), logits.flatten(0, 1))]
        E, k = len(tokens[0][0]), 2
        f, P = [counted(module, i) for i in range(E)], [0.0] * E
        for p, row in tokens:
            for i in sorted(range(E), key=lambda i: -p[i])[:k]:
                f[i] += 1
            for i in range(E):
                P[i] += p[i]
            z += math.log(sum(math.exp(v) for v in row)) ** 2 / len(tokens)
        balance += E * sum(a / sum(f) * b / sum(P) for a, b in zip(f, P))
    return balance, z


@pytest.mark.parametrize("others", [0, 7])
def test_moa_is_trained_with_its_two_losses(monkeypatch, others):
    model = timm.create_model("moh_vit_tiny_patch16_224", **VIT, router="moa", head_budget=[(0, 2), (0, 2)])
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.router.gate.weight)
    images, labels = images_and_labels()
    extra = torch.arange(12.0) * others  # tokens of another process, two modules of six experts in one message
    monkeypatch.setattr("moh_vision.attention.losses.sum_over_processes", lambda counts: counts + extra)
    losses = ClassificationTask(model, balance_weight=99.0)(images, labels)
    logits, stats = model.forward_routed(images)
    balance, z = moa_by_hand(stats, lambda module, i: extra[6 * module + i].item())
    assert losses["moa_balance_loss"].item() == pytest.approx(balance, rel=1e-5) and balance > 2
    assert losses["z_loss"].item() == pytest.approx(z, rel=1e-5)
    cross = F.cross_entropy(logits, labels)
    assert losses["loss"].item() == pytest.approx(cross.item() + 0.01 * balance + 0.001 * z, rel=1e-6)
    assert losses["balance_loss"] == 0  # that is MoH's
    assert not any(v.requires_grad for k, v in losses.items() if k not in ("loss", "head_runs"))
    task = ClassificationTask(model, 0.0, moa_balance_weight=2.0, z_weight=3.0)
    assert task(images, labels)["loss"].item() == pytest.approx(cross.item() + 2 * balance + 3 * z, rel=1e-6)


def test_each_router_has_its_own_losses():
    """A model may mix routers: dense cross-attention beside MoA, MoH beside both."""
    budgets = dict(moa=(0, 2), dense=(6, 0), moh=(2, 2), mae=(6, 0))
    layers = torch.nn.ModuleList(HeadMixtureAttention(24, HeadBudget(6, 4, *b), router=r) for r, b in budgets.items())
    torch.nn.init.normal_(layers[0].router.gate.weight)
    x = torch.randn(3, 5, 24)
    stats = [layer(x)[1] for layer in layers]
    losses = RoutedTask(layers, 0.5).losses(torch.tensor(1.0), stats)
    balance, z = moa_by_hand(stats[:1])
    moh = load_balance_loss(stats[2:3]).item()
    assert losses["loss"].item() == pytest.approx(1 + 0.5 * moh + 0.01 * balance + 0.001 * z, rel=1e-6)
    assert [len(runs) for runs in losses["head_runs"]] == [7] * 4
    plain = RoutedTask(layers[1:], 0.5).losses(torch.tensor(1.0), stats[1:])
    assert list(plain) == ["loss", "task_loss", "balance_loss", "head_runs"]
    with pytest.raises(ValueError):  # statistics of another model
        RoutedTask(layers, 0.5).losses(torch.tensor(1.0), stats[1:])
