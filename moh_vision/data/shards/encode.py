"""The bytes of an image file, checked, and made smaller if asked."""

from __future__ import annotations

import io
from typing import Optional, Tuple

from PIL import Image

from moh_vision.data.decode import in_8_bits, open_image
from moh_vision.engine.commands import message_of

STORED = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}  # MPO: a JPEG with more pictures behind it
READ = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")  # a short list: some of Pillow's other formats start programs


class BadImage(ValueError):
    """The bytes are not a whole image, or not one that can be stored."""


def encode_sample(data: bytes, size: Optional[int], quality: int) -> Tuple[str, bytes]:
    """The bytes of an image file -> (extension, bytes to store).

    Args:
        size: pixels of the shorter side, or None to store `data` itself.
        quality: of the JPEG that is written with `size`, 1 to 100.

    Raises:
        BadImage: with what is wrong.
    """
    if not data:
        raise BadImage("zero bytes")
    try:
        image = open_image(io.BytesIO(data), READ)
        image.load()
        if size is None:
            if image.format not in STORED:
                raise BadImage(f"{image.format} inside; training reads jpg, png and webp (--size stores JPEG)")
            return STORED[image.format], data
        image = in_8_bits(image).convert("RGB")
        short = min(image.size)
        if short > size:
            image = image.resize([round(side * size / short) for side in image.size], Image.Resampling.BICUBIC)
        image.info = {}  # or the comment of the source would be stored again
        out = io.BytesIO()
        image.save(out, "JPEG", quality=quality, subsampling="4:4:4")
        return "jpg", out.getvalue()
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise BadImage("not an image that can be read") from None
    except Exception as error:  # decoders raise many kinds
        raise BadImage(message_of(error)) from None
