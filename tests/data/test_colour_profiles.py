"""Colour profiles: `keep` reads the numbers of a file, `srgb` converts them."""

import numpy as np
import pytest
from PIL import Image, ImageCms

from moh_vision.data.decode import AS_STORED, Decoding, decode_image
from tests.support.pictures import (
    PRIMARIES,
    cmyk_profile,
    encoded,
    gradient,
    grey_profile,
    image_files,
    rgb_profile,
)

SRGB = Decoding(colour_space="srgb")
# The profile that Pillow's LittleCMS makes, as other programs embed it.
SRGB_PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def flat(colour, mode="RGB"):
    return Image.new(mode, (12, 8), colour)


def level_of(light):
    """The level of sRGB, 0 .. 255, with some light, 0 .. 1."""
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def from_primaries(colour, primaries, gamma):
    """The colour in sRGB of a colour with other primaries and a power as its curve."""
    light = (np.array(colour) / 255) ** gamma
    xyz = np.array(PRIMARIES[primaries]).T @ light
    return level_of(np.linalg.inv(np.array(PRIMARIES["srgb"]).T) @ xyz)


# name -> (image, its profile, format, mode of the result, the right colour in sRGB)
CASES = {
    "display-p3": (flat((200, 100, 50)), rgb_profile("p3"), "PNG", (215, 93, 31)),
    "display-p3-jpeg": (flat((200, 100, 50)), rgb_profile("p3"), "JPEG", (215, 93, 31)),
    "display-p3-webp": (flat((200, 100, 50)), rgb_profile("p3"), "WEBP", (215, 93, 31)),
    "display-p3-tiff": (flat((200, 100, 50)), rgb_profile("p3"), "TIFF", (215, 93, 31)),
    "display-p3-palette": (flat((200, 100, 50)).quantize(2), rgb_profile("p3"), "PNG", (215, 93, 31)),
    "display-p3-alpha": (flat((200, 100, 50, 255), "RGBA"), rgb_profile("p3"), "PNG", (215, 93, 31)),
    "adobe-rgb": (
        flat((100, 150, 100)), rgb_profile("adobe", 563 / 256), "PNG", from_primaries((100, 150, 100), "adobe", 563 / 256)
    ),
    "grey-gamma": (flat(100, "L"), grey_profile(1.8), "PNG", level_of((100 / 255) ** 1.80078)),
    "grey-alpha": (flat((100, 255), "LA"), grey_profile(1.8), "PNG", level_of((100 / 255) ** 1.80078)),
    # Programs embed profiles of colours in grey pictures too; primaries do not change a grey.
    "grey-in-p3": (flat(100, "L"), rgb_profile("p3", 1.8), "PNG", level_of((100 / 255) ** 1.80078)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_colours_become_srgb(name):
    image, profile, form, right = CASES[name]
    data = encoded(image, form, icc_profile=profile)
    as_stored = np.asarray(decode_image(data, name))
    plain = np.asarray(decode_image(encoded(image, form), name))
    assert (as_stored == plain).all()  # the profile changes nothing
    converted = np.asarray(decode_image(data, name, SRGB))
    assert converted.shape == plain.shape
    assert np.abs(converted[4, 6] - np.array(right)).max() <= 2


def test_grey_of_16_bits_has_a_profile_too():
    grey = Image.fromarray(np.full((8, 12), 100 * 257, np.uint16))
    data = encoded(grey, icc_profile=grey_profile(1.8))
    assert np.asarray(decode_image(data))[0, 0] == 100
    assert abs(np.asarray(decode_image(data, "", SRGB))[0, 0] - level_of((100 / 255) ** 1.8)) < 1.5


def test_cmyk_is_converted_by_its_profile():
    paper = encoded(flat((0, 0, 0, 0), "CMYK"), "TIFF", icc_profile=cmyk_profile())
    cyan = encoded(flat((255, 0, 0, 0), "CMYK"), "TIFF", icc_profile=cmyk_profile())
    assert (np.asarray(decode_image(cyan)) == (0, 255, 255)).all()  # Pillow's own formula
    assert (np.asarray(decode_image(paper, "", SRGB)) >= 253).all()
    red, green, blue = np.asarray(decode_image(cyan, "", SRGB))[0, 0].astype(int)
    # CIELAB 60, -40, -40 lies outside of sRGB, whose red ends there.
    assert red <= 2 and 150 < green < 175 and 200 < blue < 225


UNCHANGED = {
    "srgb": (gradient(), rgb_profile("srgb")),
    "srgb-of-littlecms": (gradient(), SRGB_PROFILE),
    "damaged": (gradient(), b"no profile"),
    "no-colour-space": (gradient(), rgb_profile("p3").replace(b"RGB ", b"\xaaGB ", 1)),
    "cut": (gradient(), rgb_profile("p3")[:200]),
    "grey-profile-of-colours": (gradient(), grey_profile(1.8)),
    "cmyk-profile-of-colours": (gradient(), cmyk_profile()),
    "cmyk-profile-of-grey": (gradient().convert("L"), cmyk_profile()),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_srgb_and_what_cannot_be_a_profile_change_no_bit(name):
    image, profile = UNCHANGED[name]
    data = encoded(image, icc_profile=profile)
    assert (np.asarray(decode_image(data, name, SRGB)) == np.asarray(image)).all()


@pytest.mark.parametrize("name", image_files())
def test_files_without_a_profile_are_the_same(name):
    data = image_files()[name]
    same = decode_image(data, name, SRGB)
    assert same.mode == decode_image(data, name).mode
    assert (np.asarray(same) == np.asarray(decode_image(data, name, AS_STORED))).all()
