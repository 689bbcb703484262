import timm
import torch

import moh_vision  # noqa: F401
from moh_vision.attention import load_balance_loss
from moh_vision.diffusion import HybridLoss
from moh_vision.tasks import ClassificationTask, DiffusionTask

VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)
DIT = dict(img_size=8, in_chans=3, num_classes=5, embed_dim=32, depth=2, num_heads=4, head_budget=0.75)


def test_classification_losses():
    model = timm.create_model("moh_vit_tiny_patch16_224", **VIT)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 4])
    losses = ClassificationTask(model, balance_weight=0.5)(images, labels)
    logits, stats = model.forward_routed(images)
    cross, balance = torch.nn.functional.cross_entropy(logits, labels), load_balance_loss(stats)
    torch.testing.assert_close(losses["loss"], cross + 0.5 * balance)
    torch.testing.assert_close(losses["task_loss"], cross.detach())
    torch.testing.assert_close(losses["balance_share"], (0.5 * balance / (cross + 0.5 * balance)).detach())
    assert losses["batch_accuracy"] == (logits.argmax(1) == labels).float().mean()
    assert [u.shape[0] for u in losses["head_usage"]] == [6, 6]


def test_the_balance_loss_balances():
    """From a router that favours one head, training on the balance loss alone evens the load out."""
    model = timm.create_model("moh_vit_tiny_patch16_224", **{**VIT, "depth": 1, "head_budget": [(1, 1)]})
    x = torch.randn(16, 3, 16, 16)
    router = model.blocks[0].attn.router
    with torch.no_grad():
        router.routed.weight[0] += model.blocks[0].norm1(model._pos_embed(model.patch_embed(x))).mean((0, 1))
    optimizer = torch.optim.Adam(router.parameters(), lr=0.02)
    spread = []
    for _ in range(80):
        stats = model.forward_routed(x)[1]
        loss = load_balance_loss(stats)
        usage = stats[0].counts[:, 1:].sum(0)
        spread.append(((usage.max() - usage.min()) / usage.sum()).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert spread[0] > 0.3 and min(spread[-10:]) < 0.5 * spread[0]
    assert loss.item() < 1.15  # 1 = k at balance


def test_diffusion_losses():
    model = timm.create_model("moh_dit_small_patch2_75", **DIT)
    diffusion = HybridLoss()
    images, noise = torch.rand(3, 3, 8, 8) * 2 - 1, torch.randn(3, 3, 8, 8)
    labels, t = torch.tensor([0, 4, 5]), torch.tensor([0, 10, 999])
    losses = DiffusionTask(model, 0.01, diffusion)(images, labels, t, noise)
    # a new DiT predicts noise 0, so the error is the noise itself
    torch.testing.assert_close(losses["mse"], noise.square().mean())
    torch.testing.assert_close(losses["task_loss"], losses["mse"] + losses["vb"])
    losses["loss"].backward()
    assert model.final_layer.linear.weight.grad.norm() > 0


def test_a_dense_model_has_no_balance_loss():
    model = timm.create_model("dit_small_patch2", **{k: v for k, v in DIT.items() if k != "head_budget"})
    zeros = torch.zeros(1, dtype=torch.long)
    losses = DiffusionTask(model, 0.01, HybridLoss())(torch.zeros(1, 3, 8, 8), zeros, zeros, torch.randn(1, 3, 8, 8))
    assert losses["balance_loss"] == 0 and torch.equal(losses["loss"].detach(), losses["task_loss"])
    assert all(u.tolist() == [1.0] * 4 for u in losses["head_usage"])


def test_mixed_targets_and_eval_mode():
    model = timm.create_model("moh_vit_tiny_patch16_224", **VIT)
    task = ClassificationTask(model, 0.0, label_smoothing=0.1)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 4])
    hard = torch.nn.functional.one_hot(labels, 5).float()
    torch.testing.assert_close(task(images, hard)["loss"], task(images, labels)["loss"])
    assert task(images, hard)["batch_accuracy"] == task(images, labels)["batch_accuracy"]
    logits, stats = task.eval()(images)
    assert torch.equal(logits, model(images)) and len(stats) == 2
