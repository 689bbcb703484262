"""Image files in every format and colour mode that a folder of images may hold, and folders of images."""

import io
import struct
import zlib

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


# ---------------------------------------------------------------- colour profiles

# XYZ of red, green and blue, adapted to D50.
PRIMARIES = dict(
    p3=((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407)),
    srgb=((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410)),
    adobe=((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)),
)
D50 = (0.9642, 1.0, 0.8249)


def _fixed(*values) -> bytes:
    """Return numbers in ICC's form s15Fixed16."""
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def _profile(space: bytes, device: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return the bytes of an ICC profile with the given tags."""
    text = b"test\0"
    tags = dict(tags)
    tags[b"desc"] = (
        b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(4 + 4 + 2 + 1 + 67)
    )
    tags[b"wtpt"] = b"XYZ " + bytes(4) + _fixed(*D50)
    table = struct.pack(">I", len(tags))
    body = b""
    at = 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", at + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    size = at + len(body)
    header = struct.pack(">I", size) + bytes(4) + b"\x02\x40\0\0" + device + space + connection
    header += bytes(12) + b"acsp" + bytes(28) + _fixed(*D50)
    return header.ljust(128, b"\0") + table + body


def rgb_profile(primaries: str = "p3", gamma: float | None = None) -> bytes:
    """Return a profile of colours with some primaries and the curve of sRGB, or a power."""
    if gamma is None:
        levels = np.linspace(0, 1, 1024)
        linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
        numbers = np.rint(65535 * linear).astype(">u2").tobytes()
        curve = b"curv" + bytes(4) + struct.pack(">I", 1024) + numbers
    else:
        curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))
    tags = {}
    for colour, xyz in zip((b"r", b"g", b"b"), PRIMARIES[primaries]):
        tags[colour + b"XYZ"] = b"XYZ " + bytes(4) + _fixed(*xyz)
        tags[colour + b"TRC"] = curve
    return _profile(b"RGB ", b"mntr", b"XYZ ", tags)


def grey_profile(gamma: float) -> bytes:
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))
    return _profile(b"GRAY", b"mntr", b"XYZ ", {b"kTRC": curve})


def cmyk_profile() -> bytes:
    """Return a profile of a printer whose cyan is (without other inks) CIELAB 60, -40, -40, and whose black is 20, 0, 0."""
    corners = np.zeros((2, 2, 2, 2, 3))  # cyan, magenta, yellow, black
    corners[..., 0] = 100
    corners[1, ..., 0] = 60
    corners[1, ..., 1:] = -40
    corners[..., 1, :] = (20, 0, 0)
    encoded_lab = np.rint(corners * (2.55, 1, 1) + (0, 128, 128)).astype(np.uint8)
    ramp = bytes(range(256))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + _fixed(1, 0, 0, 0, 1, 0, 0, 0, 1)
    table += 4 * ramp + encoded_lab.tobytes() + 3 * ramp
    return _profile(b"CMYK", b"prtr", b"Lab ", {b"A2B0": table})


# ---------------------------------------------------------------- more than 8 bits


def png16(pixels: np.ndarray, significant_bits: int | None = None) -> bytes:
    """Return a PNG of 16 bits, grey [h, w] or colour [h, w, 3], with the chunk sBIT if bits are given."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + checksum

    height, width = pixels.shape[:2]
    colour = 0 if pixels.ndim == 2 else 2
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0))]
    if significant_bits is not None:
        parts.append(chunk(b"sBIT", bytes([significant_bits])))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    parts += [chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# Numbers of the types of a TIFF's pixels, its tag SampleFormat.
SAMPLE_FORMATS = dict(u=1, i=2, f=3)


def tiff(pixels: np.ndarray, bits: int | None = None, white_is_zero: bool = False, **tags) -> bytes:
    """Return a TIFF of grey pixels [h, w] as they are, in their own type.

    `bits` 12: two pixels in three bytes. `tags` are smin and smax.
    """
    data = pixels.tobytes()
    if bits == 12:
        pairs = pixels.reshape(-1, 2).astype(int).tolist()
        data = b"".join((one << 12 | other).to_bytes(3, "big") for one, other in pairs)
    height, width = pixels.shape
    entries = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, bits or 8 * pixels.itemsize),
        (259, 3, 1),
        (262, 3, 0 if white_is_zero else 1),
        (273, 4, 8),
        (277, 3, 1),
        (278, 4, height),
        (279, 4, len(data)),
        (339, 3, SAMPLE_FORMATS[pixels.dtype.kind]),
    ]
    for number, name in ((340, "smin"), (341, "smax")):
        if name in tags:
            entries.append((number, 9, tags[name]))
    data += bytes(len(data) % 2)
    out = b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries))
    for number, form, value in entries:
        packed = struct.pack("<i", value) if form == 9 else struct.pack("<I", value)
        out += struct.pack("<HHI", number, form, 1) + packed
    return out + bytes(4)
