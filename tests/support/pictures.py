"""Image files of every kind that a folder of images holds, written by the tests."""

import io

import numpy as np
from PIL import Image

from moh_vision.__main__ import main


def gradient(width=12, height=8) -> Image.Image:
    """RGB; red grows to the right, green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def rotated_by_exif() -> bytes:
    """The gradient, stored turned by a quarter, with the note that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    return encoded(gradient().transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)


def kinds() -> dict:
    """Name -> bytes of files that are all the same picture, as far as their format can say."""
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
    """An ImageFolder: ROOT/train/CLASS/i.png and ROOT/val/CLASS/i.png, class c in its own colour."""
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
    """Name -> bytes, without the index, which holds the times of the shards."""
    return {
        p.name: p.read_bytes()
        for p in folder.iterdir()
        if ".index.npy" not in p.name and p.is_file()
    }


def convert(root, out, options="") -> int:
    """The exit code of `python -m moh_vision shards`."""
    return main(
        ["shards", "--in", str(root), "--out", str(out), "--workers", "1", *options.split()]
    )
