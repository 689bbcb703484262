"""Where the images come from and what is done to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional, Tuple

from moh_vision.config.checks import check


@dataclass
class DataConfig:
    """The images.

    Args:
        root: "digits"; a folder of webdataset shards (train-*.tar and val-*.tar with images and .cls); a folder with
            train/CLASS/*.jpg and val/CLASS/*.jpg; or hfds/NAME for a Hugging Face data set. For diffusion also a
            folder of latents.
        img_size: side in pixels; left out: that of the data (digits, latents) or of the model, with a VAE 256.
        augment: "none", "affine" (small rotation, shift, scale), "crop_flip" (padded crop, mirror) or "flip".
        shuffle_shards: shards that are shuffled together.
        workers: loader processes of each rank.
        max_bad_fraction: share of the images that may be unreadable; each is replaced by the next one that is not.
    """

    root: str = "digits"
    img_size: Optional[int] = None
    augment: Literal["none", "affine", "crop_flip", "flip"] = "none"
    shuffle_shards: int = 8
    workers: int = 2
    max_bad_fraction: float = 0.0

    def __post_init__(self):
        check("data.img_size", self.img_size, self.img_size is None or self.img_size >= 1, "at least 1")
        check("data.shuffle_shards", self.shuffle_shards, self.shuffle_shards >= 1, "at least 1")
        check("data.workers", self.workers, self.workers >= 0, "0 or more")
        check("data.max_bad_fraction", self.max_bad_fraction, 0 <= self.max_bad_fraction < 1, "0 <= fraction < 1")


@dataclass
class ClsDataConfig(DataConfig):
    """The images of a classifier; from `repeats` on: the ImageNet recipe, with timm's transforms.

    Args:
        augment: as above, or "imagenet": random resized crop, mirror, and what the keys below add.
        repeats: repeated augmentation: copies of an image in an epoch, which covers as much less of the images.
        crop_scale: area of the random crop, as a share of the image's.
        auto_augment: timm's string, such as rand-m9-mstd0.5-inc1.
        color_jitter: of brightness, contrast and saturation. timm leaves it out beside an auto_augment other than 3a.
        erase_prob: how often a rectangle is erased.
        erase_mode: what it is filled with: zeros, one random colour, or random pixels.
        crop_pct: validation crops this share of the resized image; left out: the model's own with augment imagenet, else 1.
        crop_mode: validation resizes the shorter side ("center"), both ("squash": nothing is lost at crop_pct 1), or
            the longer ("border"); left out: the model's own with augment imagenet, else "squash".
        eval_batch_size: images at a time in validation, on each process.
    """

    augment: Literal["none", "affine", "crop_flip", "flip", "imagenet"] = "none"
    repeats: int = 1
    crop_scale: Tuple[float, float] = (0.08, 1.0)
    auto_augment: Optional[str] = None
    color_jitter: float = 0.0
    erase_prob: float = 0.0
    erase_mode: Literal["const", "rand", "pixel"] = "pixel"
    crop_pct: Optional[float] = None
    crop_mode: Optional[Literal["center", "squash", "border"]] = None
    eval_batch_size: int = 256

    def __post_init__(self):
        super().__post_init__()
        low, high = self.crop_scale
        check("data.repeats", self.repeats, self.repeats >= 1, "at least 1")
        check("data.crop_scale", self.crop_scale, 0 < low <= high <= 1, "0 < smallest <= largest <= 1")
        check("data.color_jitter", self.color_jitter, self.color_jitter >= 0, "0 or more")
        check("data.erase_prob", self.erase_prob, 0 <= self.erase_prob <= 1, "0 to 1")
        check("data.crop_pct", self.crop_pct, self.crop_pct is None or 0 < self.crop_pct <= 1, "0 < share <= 1")
        check("data.eval_batch_size", self.eval_batch_size, self.eval_batch_size >= 1, "at least 1")

    def train_options(self) -> dict:
        """Keyword arguments of `imagenet_train_transform`."""
        return {k: getattr(self, k) for k in ("crop_scale", "auto_augment", "color_jitter", "erase_prob", "erase_mode")}

    def eval_options(self, pretrained_cfg: dict) -> dict:
        """Keyword arguments of `imagenet_eval_transform`; `pretrained_cfg` is the model's."""
        own = dict(crop_pct=1.0, crop_mode="squash")
        if self.augment == "imagenet":
            own = dict(
                crop_pct=pretrained_cfg.get("crop_pct", 0.875), crop_mode=pretrained_cfg.get("crop_mode") or "center"
            )
        return dict(crop_pct=self.crop_pct or own["crop_pct"], crop_mode=self.crop_mode or own["crop_mode"])


@dataclass
class MixConfig:
    """Mixup and cutmix, timm's, inside a micro-batch.

    Args:
        mixup: alpha of mixup; 0: none.
        cutmix: alpha of cutmix; 0: none.
        prob: how often a micro-batch is mixed.
        switch_prob: how often it is cutmix, where both are on.
        mode: what shares one draw: the "batch", a "pair", or each image ("elem").
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    def __post_init__(self):
        for name in ("mixup", "cutmix"):
            check(f"mix.{name}", getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("prob", "switch_prob"):
            check(f"mix.{name}", getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")

    @property
    def on(self) -> bool:
        return bool((self.mixup or self.cutmix) and self.prob)
