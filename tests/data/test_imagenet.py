"""Augmentation and validation transforms of classification compared with timm's, and what loaders do with them."""

import math
import os
import random

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as vision
from PIL import Image, ImageOps
from timm.data import create_transform

from moh_vision.classification.config import ClsDataConfig
from moh_vision.data.batches import BadSamples, LabelledImages, evaluation_loader, training_loader
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.imagenet import (
    BatchMixing,
    classification_transforms,
    imagenet_train_transform,
    validation_transform,
)
from moh_vision.data.order import PositionSampler
from moh_vision.data.sources import Digits
from moh_vision.data.splits import open_source
from tests.support.pictures import gradient, write_folder
from tests.support.refusals import one_line, refuse

RECIPE = dict(auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.4, re_prob=0.25, re_mode="pixel")
NORMAL = dict(mean=(0.5,) * 3, std=(0.5,) * 3)
CFG = dict(
    NORMAL, interpolation="bicubic", crop_pct=0.9, crop_mode="center", input_size=(3, 16, 16)
)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_become_floats_as_in_timm(channels):
    image = gradient(40, 30).convert("L" if channels == 1 else "RGB")
    normal = dict(mean=(0.3, 0.6, 0.9)[:channels], std=(0.2, 0.3, 0.4)[:channels])
    timms = dict(normal, interpolation="bicubic")
    cfg = dict(CFG, input_size=(channels, 16, 16), **normal)
    pairs = [(validation_transform(cfg), create_transform(16, **timms, crop_pct=0.9))]
    if channels == 3:  # grey images are augmented in colour
        recipe = dict(RECIPE, re_prob=1.0)
        timms = create_transform(16, is_training=True, **timms, **recipe)
        pairs.append((imagenet_train_transform(16, 3, **normal, **recipe), timms))
    for pair in pairs:
        tensors = []
        for transform in pair:
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
            tensors.append(torch.cat([transform(image) for _ in range(20)]))
        assert torch.equal(*tensors)
        assert tensors[0].is_contiguous() and tensors[0].dtype == torch.float32


def loader(root, workers=0, bad=None, mixing=None, prepare=None, **order):
    """Return a training loader of a folder; `order` changes arguments of its `PositionSampler`."""
    source = open_source(str(root), "train")
    transform = imagenet_train_transform(16, 3, **NORMAL, **RECIPE)
    defaults = dict(batch_size=8, accumulation=1, rank=0, world=1, start=0, stop=3, repeats=3)
    order = {**defaults, **order}
    sampler = PositionSampler(source.shard_sizes, group=2, seed=5, **order)
    images = LabelledImages(source, transform, seed=5)
    return training_loader(images, sampler, workers, bad, mixing, prepare)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_prepares_batches_in_its_own_process(tmp_path, workers):
    """`prepare` may use the GPU, which workers must not."""
    root = write_folder(tmp_path, train=8)
    processes = []

    def prepared(batch):
        processes.append(os.getpid())
        return dict(batch, count=len(batch["labels"]))

    batches = list(loader(root, workers, prepare=prepared))
    assert [batch["count"] for batch in batches] == [8] * 3
    assert processes == [os.getpid()] * 3


@pytest.mark.parametrize("augment", ["imagenet", "none", "affine", "crop_flip", "flip"])
def test_augmentation_depends_on_seed_and_position_alone(augment):
    """An image is augmented differently at each position, whatever the state of the global random generators."""
    train, _ = classification_transforms(
        ClsDataConfig(augment=augment, color_jitter=0.4), CFG, 8, 1
    )
    data = LabelledImages(Digits("train"), train, seed=4)
    views = []
    for noise in (1, 2):
        random.seed(noise)
        np.random.seed(noise)
        torch.manual_seed(noise)
        views.append(torch.stack([data[(p, 3)]["images"] for p in range(40)]))
    assert torch.equal(*views)
    assert views[0].shape == (40, 1, 8, 8) and views[0].abs().max() <= 1
    assert (len(views[0].unique(dim=0)) == 1) == (augment == "none")


def test_workers_resuming_and_mixing_do_not_change_a_bit(tmp_path):
    root = write_folder(tmp_path, train=15)

    def run(workers, **order):
        mixing = BatchMixing(5, 2, 0.8, 1.0, 1.0, 0.5, "batch")
        batches = list(loader(root, workers, mixing=mixing, **order))
        return [torch.stack([b[key] for b in batches]) for key in ("images", "labels")]

    images, labels = run(0)
    assert images.shape == (3, 8, 3, 16, 16) and labels.shape == (3, 8, 2)
    torch.testing.assert_close(labels.sum(-1), torch.ones(3, 8))
    again = run(2)
    later = run(0, start=1)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
    assert torch.equal(images[1:], later[0]) and torch.equal(labels[1:], later[1])


def test_two_processes_mix_as_two_micro_batches_do(tmp_path):
    root = write_folder(tmp_path, train=15)
    mixing = BatchMixing(5, 2, 0.8, 1.0, 1.0, 0.5, "batch")
    alone = [b["images"] for b in loader(root, mixing=mixing, accumulation=2)]
    ranks = [[b["images"] for b in loader(root, mixing=mixing, rank=r, world=2)] for r in range(2)]
    in_turns = [images for of_both in zip(*ranks) for images in of_both]
    assert all(torch.equal(a, b) for a, b in zip(alone, in_turns, strict=True))


def test_mixing_is_the_mean_of_pairs_and_its_targets_agree():
    x = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).clone()
    y = torch.tensor([0, 1, 2, 3])
    only_mixup = BatchMixing(0, 4, 0.8, 0.0, 1.0, 0.5, "batch")
    mixed, targets = only_mixup(x.clone(), y, position=64)
    share = targets[0, 0]
    assert 0 < share < 1
    torch.testing.assert_close(mixed, x * share + x.flip(0) * (1 - share))
    torch.testing.assert_close(targets, torch.eye(4) * share + torch.eye(4).flip(1) * (1 - share))
    assert not torch.equal(only_mixup(x.clone(), y, position=72)[1], targets)
    only_cutmix = BatchMixing(0, 4, 0.0, 1.0, 1.0, 0.5, "batch")
    mixed, targets = only_cutmix(x.clone(), y, position=64)
    # The target of cutmix is the share of the area that the image, all 0 here, keeps.
    torch.testing.assert_close(targets[0, 0], (mixed[0] == 0).float().mean())


def test_posterizing_to_zero_bits_is_black():
    """Magnitude 10 keeps no bits of a pixel. Pillow 13 refuses to posterize so, but earlier versions drew black."""
    transform = imagenet_train_transform(8, 3, **NORMAL, auto_augment="rand-m10-inc1", scale=(1, 1))
    rand_augment = transform.transforms[2].transforms[0]
    op = next(op for op in rand_augment.ops if op.name == "PosterizeIncreasing")
    op.prob = 1.0
    assert np.asarray(op(gradient())).max() == 0
    op.magnitude = 5
    assert np.array_equal(np.asarray(op(gradient())), np.asarray(ImageOps.posterize(gradient(), 2)))


@pytest.mark.parametrize("wrong", ["rnd-m9", "rand-q9"])
def test_an_augmentation_that_timm_does_not_know(wrong):
    facts = f"data.auto_augment {wrong} timm rand-m9-mstd0.5-inc1"
    refuse(facts, imagenet_train_transform, 16, 3, **NORMAL, auto_augment=wrong)


def test_grey_images_are_augmented_too():
    transform = imagenet_train_transform(8, 1, (0.5,), (0.5,), **RECIPE)
    for seed in range(60):  # enough draws for every operation to come up
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        assert transform(gradient().convert("L")).shape == (1, 8, 8)


@pytest.mark.parametrize("size, crop_pct", [(224, 0.9), (224, 0.875), (32, 0.9)])
def test_validation_resizes_the_shorter_side_and_crops_the_centre_or_squashes(size, crop_pct):
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (301, 400, 3), dtype=np.uint8)
    )
    resized = vision.resize(
        image, math.floor(size / crop_pct), interpolation=vision.InterpolationMode.BICUBIC
    )
    whole = image.resize((size, size), Image.Resampling.BICUBIC)
    for mode, share, expected in (
        ("center", crop_pct, vision.center_crop(resized, size)),
        ("squash", 1.0, whole),
    ):
        cfg = dict(CFG, input_size=(3, size, size), crop_pct=share, crop_mode=mode)
        ours = validation_transform(cfg)(image)
        torch.testing.assert_close(ours, vision.to_tensor(expected) * 2 - 1)


def test_validation_follows_the_model_or_the_configuration():
    assert ClsDataConfig(augment="imagenet").eval_options(CFG) == dict(
        crop_pct=0.9, crop_mode="center"
    )
    assert ClsDataConfig(augment="flip").eval_options(CFG) == dict(crop_pct=1.0, crop_mode="squash")
    given = ClsDataConfig(augment="imagenet", crop_pct=1.0, crop_mode="squash")
    assert given.eval_options(CFG) == dict(crop_pct=1.0, crop_mode="squash")
    train, val = classification_transforms(
        ClsDataConfig(augment="imagenet", erase_prob=0.25), CFG, 20, 3
    )
    assert train(gradient()).shape == val(gradient()).shape == (3, 20, 20)


def damage(root, *names):
    """Cut off files of the training split."""
    for name in names:
        path = root / "train" / name
        path.write_bytes(path.read_bytes()[:60])


def test_an_unreadable_image_is_replaced_by_the_next_and_counted(tmp_path):
    root = write_folder(tmp_path, train=8)
    damage(root, "cat/3.png", "cat/4.png")
    source = open_source(str(root), "train")
    data = LabelledImages(source, imagenet_train_transform(16, 3, **NORMAL, **RECIPE), seed=5)
    item = data[(7, 3)]
    assert [number for number, _ in item["bad"]] == [3, 4]
    assert "train/cat/3.png" in item["bad"][0][1]
    assert torch.equal(item["images"], data[(7, 5)]["images"])  # augmented as image 5 at position 7
    bad = BadSamples(len(source), 0.2)
    for workers in (0, 1):
        batches = list(loader(root, workers, bad, repeats=1, stop=4))
        assert [len(b["images"]) for b in batches] == [8] * 4
        assert set(batches[0]) == {"images", "labels"}
    assert bad.new and set(bad.seen) == {3, 4}  # an image that comes again is not counted again
    data.replace_unreadable = False  # validation leaves unreadable images out
    batches = evaluation_loader(data, [[0, 3, 9], [3, 4], [8]], 0, bad)
    assert [batch["labels"].tolist() for batch in batches] == [[0, 1], [1]]
    of_another_process = [(5, "rank 1: bad"), (6, "rank 1: bad")]

    def gather(of_this_process):
        return of_this_process + of_another_process

    facts = "rank 1: bad 2 data.max_bad_fraction 0.1 16 0.125"
    refuse(facts, BadSamples(16, 0.1).share, gather, error=UnreadableImage)


def test_all_unreadable_does_not_search_for_ever(tmp_path):
    root = write_folder(tmp_path, train=8)
    damage(root, *(f"{c}/{i}.png" for c in ("cat", "dog") for i in range(8)))
    with one_line(f"{root}/train 99 before", UnreadableImage):
        list(loader(root, 0, BadSamples(100, 0.99), repeats=1))
