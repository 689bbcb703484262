"""The centre crop that the diffusion papers share."""

from __future__ import annotations

from PIL import Image

LONGEST = 32  # times the shorter side


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """An image of any shape -> its centre, `size` x `size` pixels (ADM: Dhariwal and Nichol 2021).

    Both sides are halved with a box filter while the shorter one is at least twice `size`; then the image is resized,
    bicubic, so that the shorter side is `size`, and its centre cut out. Smaller images are enlarged. An image of
    exactly that size comes back unchanged to the bit; of a very long one only the middle is looked at, see `shorten`.
    """
    image = shorten(image)
    while min(image.size) >= 2 * size:
        image = image.resize([side // 2 for side in image.size], Image.Resampling.BOX)
    short = min(image.size)
    image = image.resize([round(side * size / short) for side in image.size], Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


def shorten(image: Image.Image) -> Image.Image:
    """The middle of an image that is more than 32 times as long as it is wide or high; any other as it is.

    Before a crop of its centre: enlarging a whole image of 1 x 60,000 pixels until the shorter side fits would take
    gigabytes.
    """
    kept = [min(side, LONGEST * min(image.size)) for side in image.size]
    if tuple(kept) == image.size:
        return image
    left, top = ((side - part) // 2 for side, part in zip(image.size, kept))
    return image.crop((left, top, left + kept[0], top + kept[1]))
