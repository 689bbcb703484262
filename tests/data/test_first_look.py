"""What reading images leaves out is said before work begins."""

import io

import numpy as np
import pytest
from PIL import Image

from moh_vision.data.decode import Decoding
from moh_vision.data.first_look import findings, lost_of
from moh_vision.data.sources import Digits, ListedFiles
from tests.support.pictures import (
    cmyk_profile,
    encoded,
    gradient,
    grey_profile,
    image_files,
    png16,
    rgb_profile,
    tiff,
)

RAMP = np.linspace(0, 4095, 96).astype(np.uint16).reshape(8, 12)


def frames(form, count=3):
    pictures = [Image.new("RGB", (12, 8), (80 * number, 0, 0)) for number in range(count)]
    return encoded(pictures[0], form, save_all=True, append_images=pictures[1:])


P3 = encoded(gradient(), icc_profile=rgb_profile("p3"))
PLAIN = Decoding()
SRGB = Decoding(colour_space="srgb")
TWELVE = Decoding(value_range=(0, 4095))
# name -> (bytes of a file, decoding, what is found)
FOUND = {
    "tiff-pages": (frames("TIFF"), PLAIN, {"frames"}),
    "webp-frames": (frames("WEBP"), PLAIN, {"frames"}),
    "apng-frames": (frames("PNG"), PLAIN, {"frames"}),
    "gif-frames": (frames("GIF"), PLAIN, {"frames"}),
    "tiff-page": (frames("TIFF", 1), PLAIN, set()),
    "mpo": (frames("MPO"), PLAIN, set()),  # a photo of a telephone, and its previews
    "p3": (P3, PLAIN, {"profile"}),
    "p3-converted": (P3, SRGB, set()),
    "grey-gamma": (encoded(gradient().convert("L"), icc_profile=grey_profile(1.8)), PLAIN, {"profile"}),
    "cmyk": (encoded(gradient().convert("CMYK"), "JPEG", icc_profile=cmyk_profile()), PLAIN, {"profile"}),
    "srgb-profile": (encoded(gradient(), icc_profile=rgb_profile("srgb")), PLAIN, set()),
    "damaged-profile": (encoded(gradient(), icc_profile=b"no profile"), PLAIN, set()),
    "damaged-profile-srgb": (encoded(gradient(), icc_profile=b"no profile"), SRGB, {"unusable"}),
    "other-profile-srgb": (encoded(gradient(), icc_profile=grey_profile(1.8)), SRGB, {"unusable"}),
    "sensor": (png16(RAMP), PLAIN, {"dark"}),
    "sensor-with-its-range": (png16(RAMP), TWELVE, set()),
    "sensor-that-says-it": (png16(RAMP, 12), PLAIN, set()),
    "16-bits": (png16(RAMP * 16), PLAIN, set()),
    "16-bits-clipped": (png16(RAMP * 16), TWELVE, {"clipped"}),
    "signed": (tiff(RAMP.astype(np.int16) - 1000), PLAIN, {"clipped", "dark"}),
    "large": (tiff(RAMP.astype(np.int32) * 1000), PLAIN, {"clipped"}),
    "uint32": (tiff(np.full((8, 12), 2**32 - 1, np.uint32)), PLAIN, {"clipped"}),
    "colour-of-a-sensor": (png16(np.stack([RAMP] * 3, -1)), PLAIN, {"dark_colours"}),
    "colour-of-16-bits": (png16(np.stack([RAMP * 16] * 3, -1)), PLAIN, set()),
    "no-image": (b"no image", PLAIN, set()),  # who reads it says so
    **{name: (data, PLAIN, set()) for name, data in image_files().items()},
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_is_left_out_is_found(name):
    data, decoding, found = FOUND[name]
    assert set(findings(data, decoding)) == found


def test_lines_count_and_name_the_first(tmp_path):
    contents = dict(a=png16(RAMP * 16), b=png16(RAMP), c=png16(RAMP), d=P3, e=frames("TIFF"))
    files = []
    for name, data in contents.items():
        files.append(str(tmp_path / name))
        (tmp_path / name).write_bytes(data)
    source = ListedFiles([*files, str(tmp_path / "gone")])
    source.decoding = Decoding(prefix="--")
    looked_at = "of 5 images that were looked at"
    assert list(lost_of(source)) == [
        f"1 {looked_at} have further pages or frames (first {tmp_path}/e), which are left out",
        f"1 {looked_at} have a colour profile other than sRGB (first {tmp_path}/d), which is ignored; "
        "--colour-space srgb converts them",
        f"2 {looked_at} hold more than 8 bits and stay under a sixteenth of the range that becomes black to white "
        f"(first {tmp_path}/b: 0 to 4095, the range is 0 to 65535); --value-range BLACK WHITE sets another one",
    ]
    assert list(lost_of(Digits("val"))) == []


def test_reading_is_the_first_frame():
    for form in ("TIFF", "WEBP", "PNG"):
        assert Image.open(io.BytesIO(frames(form))).convert("RGB").getpixel((0, 0)) == (0, 0, 0)
