"""The ImageNet recipe's transforms and mixing: timm's own, every draw a function of (seed, position)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo, Mixup, create_transform
from torch import Tensor
from torchvision.transforms import Compose, Grayscale

from moh_vision.common.io import composed
from moh_vision.common.seeds import Stream, derive_seed
from moh_vision.data.batches import image_transform
from moh_vision.data.decode import shorten


def imagenet_train_transform(
    img_size: int, channels: int, mean: Sequence[float], std: Sequence[float], **options
) -> Callable:
    """Return timm's training transform: PIL image -> normalised float tensor [channels, img_size, img_size].

    `options` are those of timm's `create_transform`, which leaves `color_jitter` out with `auto_augment`.
    """
    options = dict(interpolation="bicubic", color_jitter=None) | options
    # Grey images are augmented in colour, because several of RandAugment's operations know only that.
    if channels == 3:
        options.update(mean=tuple(mean), std=tuple(std))
    try:
        crop, augment, last = create_transform(img_size, is_training=True, separate=True, **options)
    except (AssertionError, ValueError, KeyError) as error:
        raise ValueError(
            f"data.auto_augment {options.get('auto_augment')!r}: timm does not understand it ({error}); the recipe's is "
            "rand-m9-mstd0.5-inc1"
        ) from None
    _let_posterize_reach_zero(augment)
    steps = [_rgb, crop, augment]
    if channels == 1:
        steps.append(Grayscale())
    _, _, *erase = last.transforms  # behind timm's two steps of `ToNormalised`
    return Compose([*steps, ToNormalised(mean, std), *erase])


def validation_transform(cfg: dict) -> Callable:
    """Return timm's validation transform of a pretrained_cfg: PIL image -> normalised float tensor of its input_size.

    crop_mode "center": the shorter side becomes floor(side / crop_pct), then the centre is cropped. "squash": both sides
    become that, so that with crop_pct 1 the whole image is seen (as the papers do at 384 pixels). "border": the longer
    side becomes that, with a border.
    """
    channels, _, side = cfg["input_size"]
    cropping = {key: cfg[key] for key in ("interpolation", "crop_pct", "crop_mode")}
    # The mean is the colour of a border.
    transform = create_transform(side, mean=tuple(cfg["mean"]), **cropping)
    *fit, _, _ = transform.transforms  # without timm's two steps of `ToNormalised`
    steps = []
    # The other modes see the whole image, and make it no larger than they were asked to.
    if cfg["crop_mode"] == "center":
        steps.append(shorten)
    steps.append(Grayscale() if channels == 1 else _rgb)
    return Compose([*steps, *fit, ToNormalised(cfg["mean"], cfg["std"])])


def _let_posterize_reach_zero(augment: Compose) -> None:
    """Make posterizing to 0 bits a black image again: the papers' recipes reach it, and Pillow 13 raises."""
    for step in augment.transforms:
        policies = getattr(step, "policy", [])  # AutoAugment's
        for op in [*getattr(step, "ops", []), *(op for policy in policies for op in policy)]:
            if op.name.startswith("Posterize"):
                op.aug_fn = partial(_posterize, op.aug_fn)


def _posterize(posterize: Callable, image: Image.Image, bits: int, **options) -> Image.Image:
    if bits < 1:
        return Image.new(image.mode, image.size)
    return posterize(image, bits, **options)


class ToNormalised:
    """PIL image -> (pixels / 255 - mean) / std, float32 [C, h, w]: timm's two steps to the bit, with one tensor for four."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)  # [h, w, C]
        pixels = pixels.permute(2, 0, 1)
        floats = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(255).sub_(self.mean).div_(self.std)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":  # `convert` would copy it
        return image
    return image.convert("RGB")


def unnamed_classes(count: int) -> list[str]:
    """Name the classes of weights that come without names: 1,000 are ImageNet's synsets, others their numbers."""
    imagenet = ImageNetInfo()
    if count == imagenet.num_classes():
        return list(imagenet.label_names())
    return [str(c) for c in range(count)]


def numbers_by_name(names: Mapping[int, str]) -> dict[str, list[int]]:
    """Return class numbers by name, and all by the words of a name or of ImageNet's synset; digits are no word."""
    described = ImageNetInfo().label_descriptions(as_dict=True)
    by_word: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}  # of names from elsewhere several may be equal
    for number, name in names.items():
        by_name.setdefault(composed(name), []).append(number)
        text = described.get(name, composed(name))
        for word in {text, *text.split(", ")}:
            if not word.isdecimal():
                by_word.setdefault(word, []).append(number)
    return {**by_word, **by_name}


def classification_transforms(
    data,
    pretrained_cfg: dict,
    img_size: int,
    channels: int,
) -> tuple[Callable, Callable]:
    """Return the transforms for training and for validation, of a `ClsDataConfig` and a model's pretrained_cfg."""
    normal = dict(mean=pretrained_cfg["mean"][:channels], std=pretrained_cfg["std"][:channels])
    if data.augment == "imagenet":
        options = dict(interpolation=pretrained_cfg["interpolation"], **data.train_options())
        train = imagenet_train_transform(img_size, channels, **normal, **options)
    else:
        train = image_transform(data.augment, img_size, channels, **normal)
    size = dict(input_size=(channels, img_size, img_size))
    eval_options = data.eval_options(pretrained_cfg)
    return train, validation_transform(pretrained_cfg | size | normal | eval_options)


class BatchMixing:
    """timm's mixup and cutmix, whose arguments it takes, drawn from (seed, position of the first sample).

    Images are mixed inside a micro-batch, so that another number of processes pairs other images.

    Args:
        seed: of the run.
        num_classes: of the targets.
        mixup, cutmix: alpha of each, 0: never.
        prob: of mixing a batch at all.
        switch_prob: of cutmix where both are on.
        mode: "batch", "pair" or "elem": what shares one draw.
    """

    def __init__(
        self,
        seed: int,
        num_classes: int,
        mixup: float,
        cutmix: float,
        prob: float,
        switch_prob: float,
        mode: str,
    ):
        self.seed = seed
        # Smoothing is the loss's: smoothing mixed labels is mixing smoothed ones.
        self.mixup = Mixup(
            mixup,
            cutmix,
            None,
            prob,
            switch_prob,
            mode,
            label_smoothing=0.0,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """images [B, C, h, w] (changed in place), labels [B], B even -> mixed images, targets [B, classes]."""
        seed = derive_seed(self.seed, position, Stream.MIXING)
        np.random.seed(seed % 2**32)  # timm draws from numpy's global generator
        return self.mixup(images, labels)
