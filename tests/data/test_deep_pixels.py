"""Images of more than 8 bits: the range that a file states, that a user gives, and neither."""

import numpy as np
import pytest
from PIL import Image

from moh_vision.data.decode import Decoding, UnreadableImage, decode_image
from tests.support.pictures import encoded, png16, tiff
from tests.support.refusals import refuse

RAMP = np.linspace(0, 255, 96).astype(np.uint16).reshape(8, 12)  # the picture, in 8 bits
FULL = RAMP * 257
SENSOR = (RAMP.astype(np.uint32) * 4095 // 255).astype(np.uint16)  # of 12 bits
SIGNED = (RAMP.astype(np.int16) * 16 - 1000).astype(np.int16)  # -1000 .. 3080


def pgm(pixels, maxval):
    height, width = pixels.shape
    return f"P5 {width} {height} {maxval} ".encode() + pixels.astype(">u2").tobytes()


def floats(pixels):
    return encoded(Image.fromarray(pixels.astype(np.float32)), "TIFF")


# name -> (bytes, data.value_range); each shows RAMP
RIGHT = {
    "png": (png16(FULL), None),
    "tiff": (tiff(FULL), None),
    "pgm": (pgm(FULL, 65535), None),
    # The file states its range.
    "pgm-maxval": (pgm(SENSOR, 4095), None),
    "tiff-12": (tiff(SENSOR, bits=12), None),
    "tiff-smax": (tiff(SENSOR, smin=0, smax=4095), None),
    "tiff-signed-smin": (tiff(SIGNED, smin=-1000, smax=3080), None),
    "tiff-float-smax": (tiff((RAMP / 16).astype(np.float32), smin=0, smax=16), None),
    "png-sbit-below": (png16(SENSOR, 12), None),
    # As PNG asks: the significant bits are the upper ones, of bright and of dark pictures.
    "png-sbit-above": (png16(FULL, 12), None),
    "png-sbit-16": (png16(FULL, 16), None),
    # A user gives it.
    "png-range": (png16(SENSOR), (0, 4095)),
    "tiff-range": (tiff(SENSOR), (0, 4095)),
    "tiff-range-before-stated": (tiff(SENSOR, smin=0, smax=60000), (0, 4095)),
    "pgm-range": (pgm(SENSOR, 65535), (0, 4095)),
    "pgm-maxval-range": (pgm(SENSOR, 4095), (0, 4095)),
    "png-sbit-range": (png16(SENSOR, 14), (0, 4095)),
    "int16": (tiff(SIGNED), (-1000, 3080)),
    "int32": (tiff(SIGNED.astype(np.int32) * 1000), (-1_000_000, 3_080_000)),
    "uint32": (tiff(RAMP.astype(np.uint32) * (2**32 // 255)), (0, 2**32 - 1)),
    "float": (floats(RAMP / 255), (0, 1)),
    # TIFF's WhiteIsZero, which Pillow heeds in 8 bits alone.
    "tiff-white-is-zero": (tiff(65535 - FULL, white_is_zero=True), None),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_the_range_becomes_black_to_white(name):
    data, value_range = RIGHT[name]
    image = decode_image(data, name, Decoding(value_range=value_range))
    assert image.mode == "L"
    # A value between two levels becomes the lower one.
    difference = np.asarray(image).astype(int) - RAMP
    assert difference.min() >= -1 and difference.max() <= 0


def test_without_a_range_65535_is_white():
    for data in (png16(SENSOR), tiff(SENSOR)):
        assert (np.asarray(decode_image(data)) == SENSOR // 257).all()
    every = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    assert (np.asarray(decode_image(png16(every))) == every // 257).all()
    assert (np.asarray(decode_image(tiff(SIGNED))) == SIGNED.clip(0) // 257).all()


def test_a_dark_picture_as_png_asks_stays_dark():
    """12 bits that are scaled to 16 have multiples of 16, up to rounding: no camera's values."""
    levels = np.arange(96, dtype=np.uint32).reshape(8, 12)  # of 12 bits
    for stored in (levels << 4, np.rint(levels * 65535 / 4095)):
        picture = decode_image(png16(stored.astype(np.uint16), 12))
        assert np.asarray(picture).max() <= 6


REFUSED = {
    "float": (floats(RAMP), None, "floating-point value_range 8"),
    "colour": (png16(np.stack([SENSOR] * 3, -1)), (0, 4095), "16 value_range 8"),
    "nan": (floats(np.where(RAMP > 9, np.nan, 1)), (0, 1), "NaN"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_range_is_refused(name):
    data, value_range, facts = REFUSED[name]
    decoding = Decoding(value_range=value_range)
    file = f"some/{name}"
    refuse(f"{file} {facts}", decode_image, data, file, decoding, error=UnreadableImage)


def test_a_range_has_the_smaller_number_first():
    refuse("data.value_range 5 smaller", Decoding, value_range=(5, 5))
    refuse("--value-range 7 inf smaller", Decoding, value_range=(7, float("inf")), prefix="--")
