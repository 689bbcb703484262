"""Image files as they are found in the world: one way from bytes to an upright grey or RGB image."""

import io
import math
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Sequence, Tuple, Union

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from moh_vision.engine.commands import BadData

# A short list: some of Pillow's other formats start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")
MAX_PIXELS = 89_478_485  # where Pillow begins to warn; a file of a few kilobytes can unpack to any number


class UnreadableImage(BadData):
    """An image that cannot be decoded; the message names its file, or its shard and byte."""


def open_image(file: Union[Path, BinaryIO], formats: Sequence[str] = FORMATS) -> Image.Image:
    """The image in a file, its header read and its size checked, but not its pixels.

    Raises:
        ValueError, and whatever Pillow's decoders raise: not of these formats, or more than MAX_PIXELS.
    """
    image = Image.open(file, formats=formats)
    if math.prod(image.size) > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, at most {MAX_PIXELS} are read")
    return image


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decode the bytes of one image file.

    A rotation noted in EXIF is applied (timm and torchvision ignore it). CMYK, palette and other colour images become
    RGB, alpha is dropped, and 16-bit grey is scaled to 8 bits. Of an animation it is the first picture.

    Args:
        data: the whole file.
        where: names it in errors.

    Returns:
        PIL image of mode "L" or "RGB".

    Raises:
        UnreadableImage: naming `where`; also for a file that ends early, and for more than MAX_PIXELS.
    """
    try:
        image = open_image(io.BytesIO(data))
        return in_8_bits(image)
    except UnidentifiedImageError:
        raise UnreadableImage(f"{where}: cannot identify the image format ({len(data)} bytes)") from None
    except Exception as error:  # decoders raise many kinds
        raise UnreadableImage(f"{where}: {str(error) or type(error).__name__}") from None


def in_8_bits(image: Image.Image) -> Image.Image:
    """An image of any mode, upright, as "L" or "RGB".

    Raises:
        ValueError for floating-point pixels, and whatever Pillow's decoders raise.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels, whose range is not known; convert it to 8 bits")
    image.load()
    image = upright(image)
    if image.mode in ("1", "LA", "La"):
        return image.convert("L")
    if image.mode.startswith("I"):  # 16-bit grey; PIL's own conversion would clip it to white
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def upright(image: Image.Image) -> Image.Image:
    """With the rotation that its EXIF data note, if any."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1  # else it would be copied
        return ImageOps.exif_transpose(image) if turned else image
    except Exception:  # damaged EXIF data do no harm to the pixels
        return image


def upright_size(image: Image.Image) -> Tuple[int, int]:
    """Width and height of `upright`, as the header of an image says, whose pixels are not read."""
    try:  # PIL's getexif of a PNG would read them, to find what stands behind
        turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) >= 5
    except Exception:
        turned = False
    return image.size[::-1] if turned else image.size


def allowed_bad(fraction: float, total: int) -> int:
    """How many of `total` images may be unreadable; exact, where 0.29 * 100 in floats is less than 29."""
    return math.floor(Fraction(str(fraction)) * total)


def fraction_for(bad: int, total: int) -> str:
    """The smallest fraction that allows `bad` of `total` images, as one types it: 3 decimals, or the first that is
    not 0."""
    digits = max(3, math.ceil(math.log10(total / bad)))
    return f"{math.ceil(Fraction(bad, total) * 10**digits) / 10**digits:.{digits}f}".rstrip("0").rstrip(".")
