"""Decode image files as users have them to upright grey or RGB images, always in the same way; crop their centre."""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Literal, Self, get_args

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from moh_vision.common.errors import BadData, message_of
from moh_vision.data.colour_profiles import can_convert, to_srgb
from moh_vision.data.deep_pixels import DeepPixels

# Not all formats of Pillow: some of the others start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")
LONGEST = 32  # the longer side over the shorter one, at most, before the centre is cropped
# The limit at which Pillow warns: a file of a few kilobytes can decode to any number of pixels.
MAX_PIXELS = 89_478_485


class UnreadableImage(BadData):
    """An image that cannot be decoded; the message names its file, or its shard and byte."""


class BadSamples:
    """Counts the samples that cannot be decoded, over all processes and each sample once.

    Raises UnreadableImage if there are more than `max_fraction` of `total`; `option` set this share.
    """

    def __init__(
        self, total: int, max_fraction: float = 0.0, option: str = "data.max_bad_fraction"
    ):
        self.total = total
        self.max_fraction = max_fraction
        self.option = option
        # Exact arithmetic, because in floats 0.29 * 100 is below 29.
        self.allowed = math.floor(Fraction(str(max_fraction)) * total)
        self.seen: dict[int | str, str] = {}  # sample -> message
        self.new = False  # whether this process has found some since the last `share`

    def check(self, bad: Iterable[tuple[int | str, str]]) -> None:
        """Count the unreadable samples, as (sample, message), of a batch or shard; raise if they are too many."""
        known = len(self.seen)
        self.seen.update(bad)
        count = len(self.seen)
        self.new = self.new or count > known
        if count > self.allowed:
            *_, last = self.seen.values()
            # The share that would allow these, rounded up to 3 decimals or, if smaller, to the first that is not 0.
            digits = max(3, math.ceil(math.log10(self.total / count)))
            enough = math.ceil(Fraction(count, self.total) * 10**digits) / 10**digits
            allowed = f"{self.option} {self.max_fraction:g} of {self.total} images; {enough:g} allows these"
            raise UnreadableImage(f"{last} ({count} unreadable so far, allowed are {allowed})")

    @property
    def line(self) -> str:
        """How many samples were unreadable so far, and the first of them; "" if there are none."""
        if not self.seen:
            return ""
        first, *_ = self.seen.values()
        allowed = f"{self.option} {self.max_fraction:g} allows {self.allowed}"
        return f"{len(self.seen)} of {self.total} images unreadable so far, {allowed}; the first: {first}"

    def share(self, gather: Callable[[list], list]) -> None:
        """Exchange what the processes have seen. A collective: `gather` joins the lists of all processes."""
        self.check(gather(list(self.seen.items())))
        self.new = False


def open_image(file: Path | BinaryIO, formats: Sequence[str] = FORMATS) -> Image.Image:
    """Open an image file and read its header; raise ValueError for more than MAX_PIXELS. Pillow may raise anything."""
    image = Image.open(file, formats=formats)
    if math.prod(image.size) > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, at most {MAX_PIXELS} are read")
    return image


ColourSpace = Literal["keep", "srgb"]


@dataclass(frozen=True)
class Decoding:
    """How the pixels of image files are read; every reader of a run, a command or a score takes the same.

    Attributes:
        colour_space: "keep": the numbers that a file stores, as timm, torch-fidelity and ADM read it; "srgb": colours are
            converted to sRGB where a file embeds another colour profile.
        value_range: the values that become black and white in images of more than 8 bits; None: those that a file states,
            else 0 and 65535.
        prefix: what the names of the options begin with that set these two, for messages.
    """

    colour_space: ColourSpace = "keep"
    value_range: tuple[float, float] | None = None
    prefix: str = field(default="data.", compare=False)

    def __post_init__(self):
        if self.value_range is not None:
            black, white = self.value_range
            if not (math.isfinite(black) and math.isfinite(white) and black < white):
                option = self.option("value_range")
                raise ValueError(f"{option} {black:g} {white:g}: expected the smaller number first")
        if self.colour_space == "srgb" and not can_convert():
            option = self.option("colour_space")
            raise ValueError(
                f"{option} srgb needs a Pillow with LittleCMS; python -m PIL says what yours has"
            )

    @classmethod
    def of(cls, keys, prefix: str = "data.") -> Self:
        """Return the decoding that an object with the attributes `colour_space` and `value_range` says."""
        value_range = keys.value_range
        if value_range is not None:
            value_range = tuple(value_range)
        return cls(keys.colour_space, value_range, prefix)

    def option(self, name: str) -> str:
        """Return the option that sets an attribute, such as data.value_range or --value-range."""
        if self.prefix.startswith("--"):
            name = name.replace("_", "-")
        return f"{self.prefix}{name}"

    @property
    def record(self) -> dict[str, object]:
        """The decoding as plain values, for files."""
        value_range = self.value_range
        if value_range is not None:
            value_range = list(value_range)
        return dict(colour_space=self.colour_space, value_range=value_range)


AS_STORED = Decoding()


def add_decoding(add: Callable) -> None:
    """Add the options of `Decoding` to a command's parser by its `add`."""
    add(
        "--colour-space",
        choices=get_args(ColourSpace),
        default="keep",
        help="srgb: colours with another embedded profile are converted to sRGB (keep)",
    )
    add(
        "--value-range",
        type=float,
        nargs=2,
        metavar=("BLACK", "WHITE"),
        help="values of images of more than 8 bits (those that a file states, else 0 65535)",
    )


def in_8_bits(image: Image.Image, decoding: Decoding = AS_STORED) -> Image.Image:
    """Turn an image of any mode upright and convert it to "L" or "RGB"; its pixels must not be read yet.

    A rotation noted in EXIF is applied (timm and torchvision ignore it). CMYK, palette and other colour images become
    RGB, alpha is dropped, and more than 8 bits are scaled to 8, see `DeepPixels`. An animation gives its first frame.
    Raise ValueError for floating-point pixels whose range is not known.
    """
    deep = DeepPixels.of(image, decoding.value_range)
    profile = image.info.get("icc_profile")
    image.load()
    image = upright(image)
    if deep is not None:
        image = deep.in_8_bits(image)
    elif image.mode in ("1", "LA", "La"):
        image = image.convert("L")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA").convert("RGB")
    elif image.mode not in ("L", "RGB", "CMYK"):
        image = image.convert("RGB")
    if profile and decoding.colour_space == "srgb":
        image = to_srgb(image, profile)
    if image.mode == "CMYK":
        image = image.convert("RGB")
    return image


def decode_image(
    data: bytes,
    where: str = "",
    decoding: Decoding = AS_STORED,
    convert: Callable = in_8_bits,
):
    """Decode the bytes of an image file and return `convert(image, decoding)`.

    Raise UnreadableImage, whose message begins with `where`, if either fails.
    """
    try:
        return convert(open_image(io.BytesIO(data)), decoding)
    except UnidentifiedImageError:
        reason = f"cannot identify the image format ({len(data)} bytes)"
    except Exception as error:  # decoders raise exceptions of many classes
        reason = message_of(error)
    raise UnreadableImage(f"{where}: {reason}" if where else reason)


def upright(image: Image.Image) -> Image.Image:
    """Rotate or mirror an image as its EXIF orientation says."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        if not turned:  # `exif_transpose` would copy it
            return image
        return ImageOps.exif_transpose(image)
    except Exception:  # EXIF data are damaged; the pixels may be good
        return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height that `upright` gives, from an image's header, without reading pixels."""
    # Not image.getexif(): for a PNG it decodes the pixels, to find EXIF data that are stored behind them.
    try:
        turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) >= 5
    except Exception:
        turned = False
    return image.size[::-1] if turned else image.size


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Crop the centre of an image of any shape to `size` x `size` pixels (ADM: Dhariwal and Nichol 2021).

    Both sides are halved with a box filter while the shorter one is at least twice `size`; then the image is resized,
    bicubic, so that the shorter side is `size`. An image of exactly that size comes back unchanged to the bit.
    """
    image = shorten(image)
    while min(image.size) >= 2 * size:
        image = image.resize([side // 2 for side in image.size], Image.Resampling.BOX)
    short = min(image.size)
    image = image.resize(
        [round(side * size / short) for side in image.size], Image.Resampling.BICUBIC
    )
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


def shorten(image: Image.Image) -> Image.Image:
    """Crop the longer side of an image, around its middle, to at most LONGEST times the shorter side.

    A crop of the centre first enlarges a small image until its shorter side fits. For a whole image of 1 x 60,000
    pixels, that would take gigabytes.
    """
    kept = [min(side, LONGEST * min(image.size)) for side in image.size]
    if tuple(kept) == image.size:
        return image
    left, top = ((side - length) // 2 for side, length in zip(image.size, kept))
    return image.crop((left, top, left + kept[0], top + kept[1]))
