"""Labelled images: scikit-learn's digits, and webdataset shards."""

from __future__ import annotations

from typing import Iterator

import numpy as np
from PIL import Image

from moh_vision.data.decode import UnreadableImage, decode_image
from moh_vision.data.tar_samples import TarSamples

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


class Digits:
    """The 1,797 digits of scikit-learn, 8 x 8 grey pixels; every fifth image of a class is in the test split."""

    channels = 1
    img_size = 8
    name = "digits"

    def __init__(self, split: str):
        from sklearn.datasets import load_digits

        data = load_digits()
        test = np.zeros(len(data.target), dtype=bool)
        for c in range(10):
            test[np.flatnonzero(data.target == c)[4::5]] = True
        keep = ~test if split == "train" else test
        self.pixels = np.rint(data.images[keep] * (255 / 16)).astype(np.uint8)  # [n, 8, 8]
        self.labels = data.target[keep].astype(np.int64)
        self.classes = [str(c) for c in range(10)]
        self.shard_sizes = (len(self.labels),)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])

    def listing(self) -> Iterator[bytes]:
        """Nothing: the labels in their order are enough."""
        yield from ()

    def identities(self) -> Iterator[bytes]:
        """For each sample what tells it from a changed one."""
        yield from (pixels.tobytes() for pixels in self.pixels)


class Shards(TarSamples):
    """A folder of webdataset shards whose samples are an image and a .cls file; see `TarSamples`."""

    channels = 3
    img_size = None  # as large as each image is; the transform decides
    what = "image"
    extensions = IMAGE_EXTENSIONS

    def image(self, index: int) -> Image.Image:
        data = self.read(index)
        try:
            return decode_image(data, "")
        except UnreadableImage as error:  # its name is read only now
            raise UnreadableImage(f"{self.where(index)}{error}") from None
