"""FSDP2 on two gloo processes: what accelerate does with configs/accelerate/fsdp2.yaml, which it does on GPUs only."""

import copy
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moh_vision  # noqa: F401
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.ema import make_ema
from moh_vision.engine.sharded_files import foreign_objects
from moh_vision.engine.steps import Updater
from moh_vision.tasks import ClassificationTask

VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)


def train_sharded(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = ClassificationTask(timm.create_model("moh_vit_tiny_patch16_224", **VIT), 0.01)
    copied = copy.deepcopy(whole)
    emas = [make_ema(task.model, 0.9, False, "cpu") for task in (whole, copied)]
    sharded = fully_shard(copied, mesh=init_device_mesh("cpu", (2,)))
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 4])
    accelerator = SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_, scaler=None)
    norms = []
    for task, ema in zip((whole, sharded), emas):
        optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
        update = Updater(accelerator, clip_norm=1.0)
        for step in range(3):
            losses = task(images, labels)
            losses["loss"].backward()
            norms.append(update(task, optimizer, step, [losses])[0])
            ema.update(task.model, step + 1)
        task.eval()
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(sharded(images)[0], whole(images)[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(emas[1].module.state_dict().values(), emas[0].module.state_dict().values(), strict=True):
        assert not isinstance(ours, DTensor)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(emas[0].module.head.weight, whole.model.head.weight, rtol=1e-4, atol=1e-5)
    export_weights(sharded.model, folder / "model.safetensors", {}, write=rank == 0)
    dist.barrier()
    emas[1].set(sharded.model)
    written, expected = load_file(folder / "model.safetensors"), whole.model.state_dict()
    assert written.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(written[name], expected[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(emas[1].module.state_dict()[name], written[name])
    # What accelerate saves of it is let through by the reader's allow-list.
    state = dict(model=get_model_state_dict(sharded), optimizer=get_optimizer_state_dict(sharded, optimizer))
    checkpoint.save(state, checkpoint_id=folder / "step_1" / "sharded")
    assert foreign_objects(folder / "step_1") is None
    dist.destroy_process_group()


@pytest.mark.slow
def test_training_validation_and_export_of_a_sharded_task(tmp_path):
    torch.multiprocessing.spawn(train_sharded, args=(tmp_path,), nprocs=2)
