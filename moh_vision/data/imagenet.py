"""The ImageNet recipe's transforms and mixing: timm's own, with randomness from (seed, position) alone."""

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

    `options` are those of timm's `create_transform`, which ignores `color_jitter` if it is given `auto_augment`.
    """
    options = dict(interpolation="bicubic", color_jitter=None) | options
    # Grey images are augmented as RGB, because several of RandAugment's operations need it: timm's own mean and std,
    # which have 3 values, stay.
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
    _, _, *erase = last.transforms  # `ToNormalised` replaces the first two steps
    return Compose([*steps, ToNormalised(mean, std), *erase])


def validation_transform(cfg: dict) -> Callable:
    """Return timm's validation transform of a pretrained_cfg: PIL image -> normalised float tensor of its input_size.

    Images are first resized to length = floor(side / crop_pct). crop_mode "center": the shorter side gets this length,
    then the centre is cropped. "squash": both sides get it, so that with crop_pct 1 the whole image is seen (as the
    papers do at 384 pixels). "border": the longer side gets it, and a border fills the rest.
    """
    channels, _, side = cfg["input_size"]
    cropping = {key: cfg[key] for key in ("interpolation", "crop_pct", "crop_mode")}
    # timm fills a border with the mean.
    transform = create_transform(side, mean=tuple(cfg["mean"]), **cropping)
    *fit, _, _ = transform.transforms  # `ToNormalised` replaces the last two steps
    steps = []
    # Only this mode lets the longer side become larger than asked for.
    if cfg["crop_mode"] == "center":
        steps.append(shorten)
    steps.append(Grayscale() if channels == 1 else _rgb)
    return Compose([*steps, *fit, ToNormalised(cfg["mean"], cfg["std"])])


def _let_posterize_reach_zero(augment: Compose) -> None:
    """Make posterizing to 0 bits return a black image: the papers' recipes do so, but Pillow 13 raises an error."""
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
    """Maps a PIL image to (pixels / 255 - mean) / std, float32 [C, h, w].

    The result is that of timm's two steps to the bit, but takes one new tensor instead of four.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self.mean = torch.tensor(mean)[:, None, None]  # [C, 1, 1]
        self.std = torch.tensor(std)[:, None, None]

    def __call__(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)  # [h, w, C]
        pixels = pixels.permute(2, 0, 1)
        floats = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(255).sub_(self.mean).div_(self.std)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":  # `convert` would copy it
        return image
    return image.convert("RGB")


def numbers_by_name(names: Mapping[int, str]) -> dict[str, list[int]]:
    """Return class numbers by the names of classes, and by the words for a class in ImageNet.

    A synset such as n01440764 is also found by "tench, Tinca tinca", "tench" and "Tinca tinca"; other names are split
    at commas in the same way. A word of digits alone is left out, and a name takes precedence over an equal word.
    """
    described = ImageNetInfo().label_descriptions(as_dict=True)
    by_word: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}  # names need not be unique
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
    """Return the transforms for training and validation that a `ClsDataConfig` and a pretrained_cfg describe."""
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
    """Mixes batches by timm's mixup and cutmix, with randomness from (seed, position of the first sample) alone.

    Images are mixed inside a micro-batch, so the number of processes changes which images are paired.

    Args:
        seed: of the run.
        num_classes: number of classes of the targets.
        mixup, cutmix: alpha of each, 0: never.
        prob: probability of mixing a batch.
        switch_prob: probability of cutmix rather than mixup, where both are on.
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
        # No smoothing here, because the loss does it: smoothing mixed labels equals mixing smoothed labels.
        self.mixup = Mixup(
            mixup_alpha=mixup,
            cutmix_alpha=cutmix,
            prob=prob,
            switch_prob=switch_prob,
            mode=mode,
            label_smoothing=0.0,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Mix images [B, C, h, w] in place; return them and their targets [B, classes].

        `labels` are [B], and B is even; `position` is that of the first sample.
        """
        seed = derive_seed(self.seed, position, Stream.MIXING)
        np.random.seed(seed % 2**32)  # timm draws from numpy's global generator
        return self.mixup(images, labels)
