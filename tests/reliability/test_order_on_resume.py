"""A run that goes on in the middle of an epoch sees the samples it would have seen, in their order."""

import numpy as np
import pytest
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


def seen(root, start, workers, world=1):
    """Numbers of the images of every step, [STEPS - start, BATCH], over `world` ranks."""
    source = open_source(str(root), "train")
    how, ranks = dict(group=2, seed=3, batch_size=BATCH, accumulation=1, world=world, start=start, stop=STEPS), []
    for rank in range(world):
        batches = StepBatches(source.shard_sizes, rank=rank, **how)
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
