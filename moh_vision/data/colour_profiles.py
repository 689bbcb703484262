"""Colour profiles (ICC) that image files embed: whether one is sRGB, and converting pixels to sRGB by it."""

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms, features

# What the colour space of a profile must be for images of a mode. A grey image may have a profile of colours.
FITTING = {"L": ("GRAY", "RGB "), "RGB": ("RGB ",), "CMYK": ("CMYK",)}
# A profile that changes no colour by more levels is sRGB. Profiles called so differ by 1.
TOLERANCE = 2
MOST_PROFILES = 32  # transforms that a process keeps; few cameras and programs make most files


def can_convert() -> bool:
    """Return whether this Pillow was built with LittleCMS, as its wheels are."""
    return features.check("littlecms2")


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image of mode "L", "RGB" or "CMYK" to sRGB; grey stays grey.

    The image comes back as it is if its profile is sRGB, cannot be read, or is of another colour space.
    """
    if not is_other_profile(profile, image.mode):
        return image
    if image.mode == "L":
        return image.point(_grey_levels(profile))
    return ImageCms.applyTransform(image, _transform(profile, image.mode))


@lru_cache(MOST_PROFILES)
def is_other_profile(profile: bytes, mode: str) -> bool:
    """Return whether a profile can be applied to images of a mode, and is not sRGB."""
    if _transform(profile, mode) is None:
        return False
    if mode == "CMYK":
        return True
    if mode == "L":
        changed = np.abs(np.array(_grey_levels(profile)) - np.arange(256))
    else:
        # All colours whose channels are multiples of 17, [16, 256, 3].
        colours = np.stack(np.meshgrid(*[np.arange(0, 256, 17, dtype=np.uint8)] * 3), -1)
        probe = Image.fromarray(colours.reshape(16, 256, 3))
        converted = ImageCms.applyTransform(probe, _transform(profile, mode))
        changed = np.abs(np.asarray(converted, np.int16) - np.asarray(probe, np.int16))
    return int(changed.max()) > TOLERANCE


def is_unusable_profile(profile: bytes, mode: str) -> bool:
    """Return whether a profile cannot be read, or is of another colour space than images of a mode."""
    return _transform(profile, mode) is None


@lru_cache(MOST_PROFILES)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform from a profile to sRGB; None if the profile is unusable."""
    if not can_convert():
        return None
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = opened.profile.xcolor_space
        if space not in FITTING[mode]:
            return None
        if mode == "L" and space == "RGB ":
            mode = "RGB"
        return ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (
        OSError,
        ImageCms.PyCMSError,
        UnicodeDecodeError,
    ):  # the last: its name of a space is not ASCII
        return None


@lru_cache(MOST_PROFILES)
def _grey_levels(profile: bytes) -> list[int]:
    """Return the level in sRGB of each level of grey from 0 to 255."""
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    transform = _transform(profile, "L")
    converted = ImageCms.applyTransform(ramp.convert(transform.input_mode), transform)
    return np.asarray(converted.convert("L")).ravel().tolist()
