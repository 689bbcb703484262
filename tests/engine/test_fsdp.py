"""Validation under FSDP2 on two gloo processes. Tests of training and checkpoints are in test_checkpoint.py."""

import contextlib
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moh_vision  # noqa: F401
from moh_vision.classification import scores as scoring
from moh_vision.classification.task import ClassificationTask
from moh_vision.data.batches import LabelledImages, image_transform
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.sources import ImageSource
from tests.support.processes import on_two_ranks

VIT = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=5)
GROUPS = dict(scope="sample", head_budget=0.5, mlp_budget=0.5)


class HalfUnreadable(ImageSource):
    """12 images of 5 classes. Images with odd indices, those of the second process, cannot be read."""

    classes = list("abcde")
    labels = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]

    def read(self, i):
        if i % 2:
            raise UnreadableImage(f"image {i}")
        return np.full((16, 16, 3), (20 * i, 0, 0), np.uint8)


def validate_sharded(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    PartialState(cpu=True)  # in a script the accelerator makes it
    data = SimpleNamespace(eval_batch_size=2, max_bad_fraction=0.5, workers=0)

    def reduce(tensor, reduction):
        dist.all_reduce(tensor)
        return tensor

    accelerator = SimpleNamespace(
        unwrap_model=lambda task: task,
        num_processes=2,
        process_index=rank,
        device="cpu",
        autocast=contextlib.nullcontext,
        reduce=reduce,
    )
    for layers, more in ((False, {}), (True, {}), (True, GROUPS)):
        torch.manual_seed(0)
        model = timm.create_model("moh_vit_tiny_patch16_224", **VIT, **more)
        task = ClassificationTask(model, 0.01)
        mesh = init_device_mesh("cpu", (2,))
        if layers:
            fully_shard(task.model.head, mesh=mesh)
        fully_shard(task, mesh=mesh)
        transform = image_transform("none", 16, 3, [0.5] * 3, [0.5] * 3)
        images = LabelledImages(HalfUnreadable(), transform, 0, replace_unreadable=False)
        for _ in range(2):
            scores, load, predictions = scoring.validate(
                task, images, data, accelerator, lambda batches, _: batches
            )
            assert (scores["images"], scores["unreadable"]) == (6, 6)
            choices = 1 if more else 17  # an image's, or those of its tokens
            assert load.sums[:, -1].sum() == 6 * choices
            indices = predictions[:, 0].tolist()
            assert len(indices) == 6
            assert indices == sorted(set(indices))
            assert set(predictions[:, 1].tolist()) == {0, 1, 2, 3, 4}
            task.train()(torch.zeros(2, 3, 16, 16), torch.tensor([0, 1]))["loss"].backward()
            assert all(isinstance(p, DTensor) for p in task.parameters())  # resharded
    dist.destroy_process_group()


@pytest.mark.slow
def test_validation_where_one_process_can_read_nothing():
    """A forward under FSDP is a collective: if a process without readable images made fewer, the other would hang."""
    on_two_ranks(validate_sharded)
