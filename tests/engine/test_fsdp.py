"""FSDP2 on two gloo processes: what accelerate does with configs/accelerate/fsdp2.yaml, which it does on GPUs only."""

import contextlib
import copy
from datetime import timedelta
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from accelerate import PartialState
from PIL import Image
from processes import on_two_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moh_vision  # noqa: F401
from moh_vision.classification import scores as scoring
from moh_vision.classification.task import ClassificationTask
from moh_vision.data.batches import image_transform
from moh_vision.data.decode import UnreadableImage
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.step import Updater
from moh_vision.engine.weights import make_ema

VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)


def train_sharded(rank, folder):
    dist.init_process_group("gloo")
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
    dist.destroy_process_group()


@pytest.mark.slow
def test_training_validation_and_export_of_a_sharded_task(tmp_path):
    on_two_ranks(train_sharded, tmp_path)


class HalfUnreadable:
    """12 images of 5 classes; the second process's, those of odd numbers, cannot be read."""

    classes, labels = list("abcde"), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]

    def __len__(self):
        return 12

    def image(self, i):
        if i % 2:
            raise UnreadableImage(f"image {i}")
        return Image.new("RGB", (16, 16), (20 * i, 0, 0))


def validate_sharded(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    PartialState(cpu=True)  # as a script has it
    data = SimpleNamespace(eval_batch_size=2, max_bad_fraction=0.5, workers=0)
    accelerator = SimpleNamespace(
        unwrap_model=lambda task: task, num_processes=2, process_index=rank, device="cpu", autocast=contextlib.nullcontext,
        reduce=lambda t, _: (dist.all_reduce(t), t)[1],
    )  # fmt: skip
    for layers in (False, True):
        torch.manual_seed(0)
        task = ClassificationTask(timm.create_model("moh_vit_tiny_patch16_224", **VIT), 0.01)
        mesh = init_device_mesh("cpu", (2,))
        if layers:
            fully_shard(task.model.head, mesh=mesh)
        fully_shard(task, mesh=mesh)
        transform = image_transform("none", 16, 3, [0.5] * 3, [0.5] * 3)
        for _ in range(2):
            scores, load, predictions = scoring.validate(task, HalfUnreadable(), transform, data, accelerator)
            assert (scores["images"], scores["unreadable"]) == (6, 6) and load.sums[:, -1].sum() == 6 * 17
            assert predictions[:, 0].tolist() == sorted(set(predictions[:, 0].tolist())) and len(predictions) == 6
            assert set(predictions[:, 1].tolist()) == {0, 1, 2, 3, 4}
            task.train()(torch.zeros(2, 3, 16, 16), torch.tensor([0, 1]))["loss"].backward()
            assert all(isinstance(p, DTensor) for p in task.parameters())  # sharded again
    dist.destroy_process_group()


@pytest.mark.slow
def test_validation_where_one_process_can_read_nothing():
    """Forwards of a sharded task wait for each other; a process that makes fewer blocked the others."""
    on_two_ranks(validate_sharded)
