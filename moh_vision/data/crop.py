"""The centre crop that the diffusion papers share."""

from __future__ import annotations

from PIL import Image


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """An image of any shape -> its centre, `size` x `size` pixels (ADM: Dhariwal and Nichol 2021).

    Both sides are halved with a box filter while the shorter one is at least twice `size`; then the image is resized,
    bicubic, so that the shorter side is `size`, and its centre cut out. Smaller images are enlarged. An image of
    exactly that size comes back unchanged to the bit.
    """
    while min(image.size) >= 2 * size:
        image = image.resize([side // 2 for side in image.size], Image.Resampling.BOX)
    short = min(image.size)
    image = image.resize([round(side * size / short) for side in image.size], Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))
