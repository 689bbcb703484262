"""Image files as they are found in the world: one way from bytes to an upright grey or RGB image."""

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError


class UnreadableImage(ValueError):
    """An image that cannot be decoded; the message names its file, or its shard and byte."""


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decode the bytes of one image file.

    A rotation noted in EXIF is applied (timm and torchvision ignore it). CMYK, palette and other colour images become
    RGB, alpha is dropped, and 16-bit grey is scaled to 8 bits.

    Args:
        data: the whole file.
        where: names it in errors.

    Returns:
        PIL image of mode "L" or "RGB".

    Raises:
        UnreadableImage: naming `where`; also for a file that ends early.
    """
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        image = upright(image)
        if image.mode in ("1", "LA", "La"):
            return image.convert("L")
        if image.mode.startswith("I"):  # 16-bit grey; PIL's own conversion would clip it to white
            return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return image if image.mode in ("L", "RGB") else image.convert("RGB")
    except UnidentifiedImageError:
        raise UnreadableImage(f"{where}: cannot identify the image format ({len(data)} bytes)") from None
    except Exception as error:  # decoders raise many kinds
        raise UnreadableImage(f"{where}: {error}") from None


def upright(image: Image.Image) -> Image.Image:
    """With the rotation that its EXIF data note, if any."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF data do no harm to the pixels
        return image
