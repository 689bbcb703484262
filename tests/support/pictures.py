"""Image files in every format and colour mode that a folder of images may hold, and folders of images."""

import io

import numpy as np
from PIL import Image

from moh_vision.__main__ import main


def gradient(width=12, height=8) -> Image.Image:
    """Return an RGB image whose red grows to the right and whose green grows downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def rotated_by_exif() -> bytes:
    """Return a PNG of the gradient, stored rotated, with an EXIF orientation that turns it back."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    return encoded(gradient().transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)


def image_files() -> dict:
    """Return {name: bytes} of files that all show the gradient, as far as their format and colour mode can."""
    picture = gradient()
    grey16 = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    return {
        "rgb.png": encoded(picture),
        "grey.png": encoded(picture.convert("L")),
        "grey16.png": encoded(grey16),
        "bit.png": encoded(picture.convert("1")),
        "alpha.png": encoded(picture.convert("RGBA")),
        "palette.png": encoded(picture.convert("P")),
        "cmyk.jpg": encoded(picture.convert("CMYK"), "JPEG", quality=95),
        "photo.jpg": encoded(picture, "JPEG", quality=95),
        "turned.png": rotated_by_exif(),
    }


def write_folder(root, classes=("cat", "dog"), train=6, val=4, size=(12, 8)):
    """Write a folder as of torchvision's ImageFolder: ROOT/SPLIT/CLASS/i.png; classes differ in colour.

    train, val: the number of images of each class. Returns `root`.
    """
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for c, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (size[1], size[0], 3), dtype=np.uint8)
                pixels[..., c % 3] += 150
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def contents(folder):
    """Return {name: bytes} of the files in a folder, except for indices of shards: these hold modification times."""
    return {
        p.name: p.read_bytes()
        for p in folder.iterdir()
        if ".index.npy" not in p.name and p.is_file()
    }


def convert(root, out, options="") -> int:
    """Run `python -m moh_vision shards` and return its exit code."""
    return main(
        ["shards", "--in", str(root), "--out", str(out), "--workers", "1", *options.split()]
    )
