"""Loss and router gradient of a training step do not depend on how it is computed.

Stated tolerances, relative to the largest value: compiled: 1e-10 in float64, but 1e-5 for a compiled DiT, whose sines of
the timestep are float32; autocast to bfloat16: 2 % of the loss, and a router gradient in the same direction (cosine above
0.9): tokens whose heads are close to a tie choose others. Accumulation: test_block_descent.py. Two processes:
test_two_processes.py. Checkpointing: test_executors.py and test_every_family.py.
"""

import pytest
import timm
import torch

from moh_vision.classification.task import ClassificationTask
from moh_vision.diffusion import HybridLoss
from moh_vision.diffusion.task import DiffusionTask

VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5, head_budget=0.75)
DIT = dict(img_size=8, in_chans=3, num_classes=5, embed_dim=32, depth=2, num_heads=4, head_budget=0.75)


def make_task(kind, dtype=torch.float64):
    torch.manual_seed(1)
    if kind == "cls":
        task = ClassificationTask(timm.create_model("moh_vit_tiny_patch16_224", **VIT), 0.1)
    else:
        task = DiffusionTask(timm.create_model("moh_dit_small_patch2_75", **DIT), 0.1, HybridLoss())
    with torch.no_grad():  # a new DiT is the zero function, and routers of small weights differ little
        for parameter in task.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return task.to(dtype)


def make_batch(kind, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    size = 16 if kind == "cls" else 8
    images, noise = torch.randn(2, 8, 3, size, size, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(5, (8,), generator=generator)
    if kind == "cls":
        return dict(images=images, labels=labels)
    timesteps = torch.randint(1000, (8,), generator=generator)
    return dict(images=images, labels=labels, timesteps=timesteps, noise=noise)


def gradients(task, batch):
    """(loss, {name: gradient of a router's parameter})."""
    task.zero_grad()
    loss = task(**batch)["loss"]
    loss.backward()
    grads = {name: p.grad.clone() for name, p in task.named_parameters() if ".router." in name and p.grad is not None}
    assert len(grads) >= 4 and all(grad.norm() > 0 for grad in grads.values()), "a router gets no gradient"
    return loss.item(), grads


def close(one, other, tolerance):
    assert other[0] == pytest.approx(one[0], rel=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        assert (other[1][name] - grad).abs().max() <= tolerance * grad.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_compiled(kind):
    task, batch = make_task(kind), make_batch(kind)
    plain = gradients(task, batch)
    task.compile()
    close(plain, gradients(task, batch), 1e-10 if kind == "cls" else 1e-5)


@pytest.mark.parametrize("kind", ["cls", "dit"])
def test_autocast(kind):
    task, batch = make_task(kind, torch.float32), make_batch(kind, dtype=torch.float32)
    plain = gradients(task, batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gradients(task, batch)
    assert mixed[0] == pytest.approx(plain[0], rel=0.02) and mixed[0] != plain[0]
    for name, grad in plain[1].items():
        cosine = torch.nn.functional.cosine_similarity(grad.flatten(), mixed[1][name].flatten(), dim=0)
        assert cosine > 0.9, (name, cosine.item())
