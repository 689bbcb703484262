"""A run that goes on in the middle of an epoch sees the samples it would have seen, in their order."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from moh_vision.__main__ import main
from moh_vision.data.batches import LabelledImages, training_batches
from moh_vision.data.order import StepBatches
from moh_vision.data.splits import open_source

COUNT, STEPS, BATCH = 60, 45, 4  # three epochs


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The same 60 images, told apart by their colour, as a folder and as shards."""
    folder = tmp_path_factory.mktemp("order")
    for split, count in (("train", COUNT), ("val", 4)):
        for i in range(count):
            place = folder / "folder" / split / "ab"[i % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(place / f"{i:03}.png")
    argv = f"--in {folder / 'folder'} --out {folder / 'shards'} --samples-per-shard 13 --workers 1"
    assert main(["shards", *argv.split()]) == 0
    return {"folder": folder / "folder", "shards": folder / "shards"}


def step_batches(source, **where):
    return StepBatches(source.shard_sizes, group=2, seed=3, batch_size=BATCH, accumulation=1, **where)


def seen(root, start, workers, world=1, stop=STEPS):
    """Numbers of the images of every step, [stop - start, BATCH], over `world` ranks."""
    source = open_source(str(root), "train")
    ranks = []
    for rank in range(world):
        batches = step_batches(source, rank=rank, world=world, start=start, stop=stop)
        stream = training_batches(LabelledImages(source, pil_to_tensor, 3), batches, workers)
        ranks.append([batch["images"][:, 0, 0, 0].tolist() for batch in stream])
    return [sum(parts, []) for parts in zip(*ranks)]


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_in_order_and_each_once(roots, kind):
    whole = seen(roots[kind], 0, 0)
    assert len(whole) == STEPS
    for epoch in range(3):
        numbers = sum(whole[15 * epoch : 15 * (epoch + 1)], [])
        assert sorted(numbers) == list(range(COUNT)), "an image is missing or twice"
    assert whole[:15] != whole[15:30]
    for start in range(1, STEPS, 4):
        assert seen(roots[kind], start, 0) == whole[start:]
    for workers, start in ((1, 7), (1, 22), (2, 7), (2, 15), (2, 31)):
        assert seen(roots[kind], start, workers) == whole[start:], f"{workers} workers from step {start}"
    assert [sorted(step) for step in seen(roots[kind], 7, 0, world=2)] == [sorted(step) for step in whole[7:]]


def test_a_shard_that_changed_is_refused(roots, tmp_path):
    root = tmp_path / "shards"
    shutil.copytree(roots["shards"], root)
    assert seen(root, 0, 0, stop=2)
    shard = sorted(root.glob("train-*.tar"))[1]
    data = bytearray(shard.read_bytes())
    shard.write_bytes(data + bytes(10240))
    with pytest.raises(ValueError, match=shard.name):
        seen(root, 2, 0)


def test_bits_of_augmentation_do_not_depend_on_workers(roots):
    def noisy(image):
        return pil_to_tensor(image).float() + torch.rand(())

    source = open_source(str(roots["folder"]), "train")
    streams = []
    for workers, start in ((0, 0), (2, 9)):
        batches = step_batches(source, rank=0, world=1, start=start, stop=12)
        streams.append([b["images"] for b in training_batches(LabelledImages(source, noisy, 3), batches, workers)])
    assert all(torch.equal(a, b) for a, b in zip(streams[0][9:], streams[1], strict=True))
