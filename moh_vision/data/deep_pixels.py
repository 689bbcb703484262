"""Pixels of more than 8 bits: which of their values are black and white, and how they become 8 bits.

A file of 16 bits mostly holds 0 to 65535, but that of a sensor of 12 bits 0 to 4095, and a scan signed numbers.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

DEFAULT_RANGE = (0, 65535)
PNG_SIGNATURE = 8  # bytes in front of the first chunk
# Tags of TIFF.
BITS_PER_SAMPLE = 258
PHOTOMETRIC = 262
SMIN_SAMPLE_VALUE = 340
SMAX_SAMPLE_VALUE = 341


def is_deep(mode: str) -> bool:
    """Return whether images of a mode of Pillow have one channel of more than 8 bits."""
    return mode == "F" or mode.startswith("I")


@dataclass(frozen=True)
class DeepPixels:
    """How the values of a deep image become grey; `of` reads it from a file's header, before its pixels are read.

    Attributes:
        black, white: the values that become 0 and 255. Values outside are clipped.
        given: whether a user gave this range; if not, the file states it or DEFAULT_RANGE is assumed.
        significant_bits: bits of a sample that PNG's sBIT says, or 0; see `_range`.
        unsigned: whether Pillow's signed numbers of 32 bits are unsigned ones.
        inverted: whether the file says that small values are bright; Pillow heeds that in 8 bits alone.
    """

    black: float
    white: float
    given: bool = False
    significant_bits: int = 0
    unsigned: bool = False
    inverted: bool = False

    @classmethod
    def of(
        cls, image: Image.Image, value_range: Sequence[float] | None = None
    ) -> "DeepPixels | None":
        """Read the header of an opened image whose pixels are not read yet; None for an image of 8 bits.

        Raise ValueError for floating-point pixels without a range, and for a range that cannot be applied.
        """
        if not is_deep(image.mode):
            if value_range is not None and is_cut_to_8_bits(image):
                raise ValueError(
                    "colours of 16 bits, of which Pillow reads the upper 8: value_range cannot be applied; convert it "
                    "to 8 bits"
                )
            return None
        stated = _stated_range(image)
        if image.mode == "F" and value_range is None and stated is None:
            raise ValueError(
                "floating-point pixels, whose range is not known; give value_range, or convert it to 8 bits"
            )
        if value_range is None:
            black, white = stated or DEFAULT_RANGE
        else:
            scale = 65535 / _maxval(image)
            black, white = (value * scale for value in value_range)
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        return cls(
            black,
            white,
            given=value_range is not None,
            significant_bits=_significant_bits(image),
            unsigned=_rawmode(image) == "I;32N",
            inverted=tags.get(PHOTOMETRIC) == 0,
        )

    def values(self, image: Image.Image) -> np.ndarray:
        """Return the values of a loaded image, float64 [h, w]; raise ValueError for NaN."""
        pixels = np.asarray(image)
        if self.unsigned:
            pixels = pixels.view(np.uint32)
        values = pixels.astype(np.float64)
        if np.isnan(values).any():
            raise ValueError("pixels that are not a number (NaN)")
        return values

    def range_for(self, values: np.ndarray) -> tuple[float, float]:
        """Return the values that become 0 and 255, in an image with these `values`."""
        bits = self.significant_bits
        if self.given or not bits or values.max() >= 2**bits:
            return self.black, self.white
        # The specification of PNG has the significant bits at the upper end of a sample, so that a file as it asks has
        # multiples of this step, up to rounding. Cameras write them at the lower end.
        step = 2 ** (16 - bits)
        if (values % step <= 1).all():
            return self.black, self.white
        return 0, 2**bits - 1

    def in_8_bits(self, image: Image.Image) -> Image.Image:
        """Return a loaded image as grey of 8 bits; values between two levels become the lower one."""
        values = self.values(image)
        black, white = self.range_for(values)
        levels = np.floor((values.clip(black, white) - black) * 255 / (white - black))
        if self.inverted:
            levels = 255 - levels
        return Image.fromarray(levels.astype(np.uint8))


def is_cut_to_8_bits(image: Image.Image) -> bool:
    """Return whether Pillow reads only the upper 8 of an image's 16 bits, as in colour; its pixels are not read yet."""
    return ";16" in _rawmode(image) and not is_deep(image.mode)


def _rawmode(image: Image.Image) -> str:
    """Return how the pixels are stored, in Pillow's words such as "RGB;16B"; "" if Pillow does not say it."""
    if not image.tile:
        return ""
    arguments = image.tile[0].args
    if isinstance(arguments, str):
        return arguments
    return str(arguments[0]) if arguments else ""


def _maxval(image: Image.Image) -> int:
    """Return the value of white that the header of a PGM states, which Pillow scales to 65535; else 65535."""
    if image.format == "PPM" and isinstance(image.tile[0].args, tuple):
        _, maxval, *_ = image.tile[0].args
        if maxval > 0:
            return maxval
    return 65535


def _stated_range(image: Image.Image) -> tuple[float, float] | None:
    """Return the values of black and white that a TIFF states, or None."""
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return None
    if SMIN_SAMPLE_VALUE in tags and SMAX_SAMPLE_VALUE in tags:
        low, high = (_number(tags[tag]) for tag in (SMIN_SAMPLE_VALUE, SMAX_SAMPLE_VALUE))
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
    if image.mode.startswith("I"):
        (bits, *_) = tags.get(BITS_PER_SAMPLE, (16,))
        if bits < 16:
            return 0, 2**bits - 1
    return None


def _number(value: object) -> float:
    """Return the number of a tag, which may be a tuple of one for each channel; NaN if it is none."""
    if isinstance(value, tuple) and value:
        value = value[0]
    try:
        return float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        return math.nan


def _significant_bits(image: Image.Image) -> int:
    """Return the bits of grey that the chunk sBIT of a PNG of 16 bits says; 0 if there is none. Pillow skips it."""
    if image.format != "PNG":
        return 0
    before = image.fp.tell()
    try:
        image.fp.seek(PNG_SIGNATURE)
        while header := image.fp.read(8):
            length = int.from_bytes(header[:4], "big")
            name = header[4:]
            if name == b"sBIT":
                (bits,) = image.fp.read(1)
                return bits if bits < 16 else 0
            if name == b"IDAT":  # sBIT stands before the pixels
                return 0
            image.fp.seek(length + 4, io.SEEK_CUR)  # the data, and their checksum
        return 0
    except (OSError, ValueError):
        return 0
    finally:
        image.fp.seek(before)
