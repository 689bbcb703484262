"""Look at some images of a data set before work begins; say what reading them leaves out, clips or ignores."""

import io
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from PIL import Image

from moh_vision.data.colour_profiles import is_other_profile, is_unusable_profile
from moh_vision.data.decode import Decoding, open_image
from moh_vision.data.deep_pixels import DeepPixels, is_cut_to_8_bits
from moh_vision.data.sources import Source

LOOKED_AT = 64  # images of a split, evenly spread
# Behind the photo, the MPO files of cameras hold previews, depth and gain maps of the same picture.
OF_ONE_PICTURE = "MPO"
# What is found -> the words for it, with {first}, the first image that has it, and what sets another decoding.
WORDS = dict(
    alpha=(
        "have transparent pixels (first {first}): alpha is dropped, and the colours under it are seen; "
        "flatten them onto a background if they should not be"
    ),
    frames="have further pages or frames (first {first}), which are left out",
    profile=(
        "have a colour profile other than sRGB (first {first}), which is ignored; {colour_space} srgb converts them"
    ),
    unusable=(
        "have a colour profile that cannot be read or is of another colour space (first {first}): their pixels are "
        "taken as sRGB"
    ),
    dark=(
        "hold more than 8 bits and stay under a sixteenth of the range that becomes black to white (first {first}); "
        "{value_range} BLACK WHITE sets another one"
    ),
    clipped=(
        "hold values outside of the range that becomes black to white (first {first}), which are clipped; "
        "{value_range} BLACK WHITE sets another one"
    ),
    dark_colours=(
        "are colours of 16 bits that stay under a sixteenth of them (first {first}); Pillow reads the upper 8 bits: "
        "convert them to 8 bits"
    ),
)


def say_what_is_lost(named: str, sources: Mapping[str, Source], say: Callable) -> None:
    """Say what decoding leaves out of each split (name -> source), see `lost_of`.

    `named` is the option that names the images, with its value.
    """
    for split, source in sources.items():
        for line in lost_of(source):
            say(f"{named}, {split}: {line}")


def lost_of(source: Source) -> Iterator[str]:
    """Look at up to LOOKED_AT images of a source, and yield a line for each thing that decoding leaves out of them."""
    look = FirstLook(source.decoding)
    for sample in source.looked_at(LOOKED_AT):
        if isinstance(sample.content, bytes):
            look.at(sample.content, partial(source.where, sample.name))
    yield from look.lines("images that were looked at")


class FirstLook:
    """Counts what decoding leaves out of files."""

    def __init__(self, decoding: Decoding):
        self.decoding = decoding
        self.total = 0
        self.counts: dict[str, int] = {}  # finding, of WORDS -> number of files
        self.first: dict[str, str] = {}  # finding -> the first file, and more on it

    def at(self, data: bytes, where: Callable[[], str]) -> None:
        """Look at the bytes of a file; `where` returns the file's name."""
        self.total += 1
        for finding, detail in findings(data, self.decoding).items():
            self.counts[finding] = self.counts.get(finding, 0) + 1
            if finding not in self.first:
                self.first[finding] = f"{where()}{detail}"

    def lines(self, files: str) -> Iterator[str]:
        """Yield a line for each finding; `files` is what the line calls the files."""
        options = {name: self.decoding.option(name) for name in ("colour_space", "value_range")}
        for finding, words in WORDS.items():
            if finding in self.counts:
                text = words.format(first=self.first[finding], **options)
                yield f"{self.counts[finding]} of {self.total} {files} {text}"


def findings(data: bytes, decoding: Decoding) -> dict[str, str]:
    """Return what decoding leaves out of the bytes of an image file: finding -> more on it, or ""."""
    found: dict[str, str] = {}
    try:
        image = open_image(io.BytesIO(data))
        if getattr(image, "is_animated", False) and image.format != OF_ONE_PICTURE:
            found["frames"] = ""
        _look_at_values(image, decoding, found)
        _look_at_profile(image, decoding, found)
        if _is_transparent(image):
            found["alpha"] = ""
    except Exception:  # decoders raise any class; unreadable images are reported when they are read
        pass
    return found


def _look_at_values(image: Image.Image, decoding: Decoding, found: dict[str, str]) -> None:
    deep = DeepPixels.of(image, decoding.value_range)
    if deep is not None:
        values = deep.values(image)
        black, white = deep.range_for(values)
        low = values.min()
        high = values.max()
        detail = f": {low:g} to {high:g}, the range is {black:g} to {white:g}"
        if low < black or high > white:
            found["clipped"] = detail
        if high - black < (white - black) / 16:
            found["dark"] = detail
    elif is_cut_to_8_bits(image) and np.asarray(image.convert("RGB")).max() < 16:
        found["dark_colours"] = ""


def _look_at_profile(image: Image.Image, decoding: Decoding, found: dict[str, str]) -> None:
    profile = image.info.get("icc_profile")
    if not profile:
        return
    mode = "RGB"
    if image.mode == "CMYK":
        mode = "CMYK"
    elif image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I"):
        mode = "L"
    if decoding.colour_space == "keep" and is_other_profile(profile, mode):
        found["profile"] = ""
    if decoding.colour_space == "srgb" and is_unusable_profile(profile, mode):
        found["unusable"] = ""


def _is_transparent(image: Image.Image) -> bool:
    if image.mode not in ("RGBA", "RGBa", "LA", "La", "PA") and "transparency" not in image.info:
        return False
    return image.convert("RGBA").getchannel("A").getextrema()[0] < 255
