import numpy as np
import pytest
from pictures import encoded, gradient, kinds

from moh_vision.data.decode import UnreadableImage, decode_image


@pytest.mark.parametrize("name", kinds())
def test_every_kind_of_file_is_the_same_picture(name):
    image = decode_image(kinds()[name], name)
    assert image.size == (12, 8) and image.mode in ("L", "RGB")
    grey = name.startswith(("grey", "bit"))
    expected = gradient().convert("1").convert("L") if "bit" in name else gradient().convert("L" if grey else "RGB")
    assert image.mode == expected.mode
    lossy = dict(jpg=30, palette=80).get("palette" if "palette" in name else name[-3:], 0)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(expected).astype(int)).max() <= lossy


def test_damaged_files_are_named():
    with pytest.raises(UnreadableImage, match=r"a/b.png: cannot identify the image format \(5 bytes\)"):
        decode_image(b"nofun", "a/b.png")
    with pytest.raises(UnreadableImage, match="empty.png: cannot identify the image format"):
        decode_image(b"", "empty.png")
    photo = encoded(gradient(64, 64), "JPEG")
    with pytest.raises(UnreadableImage, match="photo.jpg: .*[Tt]runcated"):
        decode_image(photo[: len(photo) // 2], "photo.jpg")


def test_damaged_exif_does_no_harm():
    photo = encoded(gradient(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert decode_image(photo, "photo.jpg").size == (12, 8)
