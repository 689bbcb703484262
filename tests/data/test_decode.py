"""Decoding: the pixels of every format, and the centre crop of images of any shape."""

import numpy as np
import pytest
from PIL import Image

from moh_vision.data.batches import image_transform
from moh_vision.data.decode import center_crop, decode_image
from tests.support.pictures import encoded, gradient, image_files


@pytest.mark.parametrize("name", image_files())
def test_every_kind_of_file_is_the_same_picture(name):
    image = decode_image(image_files()[name], name)
    assert image.size == (12, 8) and image.mode in ("L", "RGB")
    grey = name.startswith(("grey", "bit"))
    expected = gradient().convert("L" if grey else "RGB")
    if "bit" in name:
        expected = gradient().convert("1").convert("L")
    assert image.mode == expected.mode
    lossy = dict(jpg=30).get(name[-3:], 0)
    if "palette" in name:
        lossy = 80
    difference = np.asarray(image).astype(int) - np.asarray(expected).astype(int)
    assert np.abs(difference).max() <= lossy


def test_damaged_exif_does_no_harm():
    photo = encoded(gradient(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert decode_image(photo, "photo.jpg").size == (12, 8)


def noise(width, height, mode="RGB"):
    shape = (height, width)
    if mode != "L":
        shape = (height, width, 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_centre_of_a_longer_image_is_cut_out_without_resampling(mode):
    for width, height, top, left in ((16, 16, 0, 0), (16, 25, 4, 0), (31, 16, 0, 7)):
        image = noise(width, height, mode)
        assert np.array_equal(
            center_crop(image, 16), np.asarray(image)[top : top + 16, left : left + 16]
        )


@pytest.mark.parametrize(
    "size", [(1, 1), (5, 7), (15, 16), (16, 17), (31, 32), (33, 47), (37, 50), (64, 16), (333, 129)]
)
def test_every_shape_gives_the_centre(size):
    image = center_crop(gradient(*size), 16)
    assert image.size == (16, 16) and image.mode == "RGB"
    pixels = np.asarray(image).astype(float)
    if min(size) >= 15:
        # Red grows to the right and green downwards, so both are 127.5 in the middle. The crop may be half a pixel off
        # centre, if an odd number of pixels is cut off.
        assert abs(pixels[7:9, 7:9, :2].mean((0, 1)) - 127.5).max() < 9
        width, height = (16 * side / min(size) for side in size)
        slope_of_red = np.diff(pixels[8, :, 0])[2:-2].mean()
        slope_of_green = np.diff(pixels[:, 8, 1])[2:-2].mean()
        expected = pytest.approx((255 / width, 255 / height), rel=0.12)
        assert (slope_of_red, slope_of_green) == expected


def test_much_larger_images_are_halved_with_a_box():
    small = noise(16, 16)
    assert np.array_equal(center_crop(small.resize((64, 64), Image.Resampling.NEAREST), 16), small)
    image = noise(44, 32)
    halved = np.asarray(image).astype(float).reshape(16, 2, 22, 2, 3).mean((1, 3))
    # Pillow averages and rounds one direction after the other.
    assert abs(np.asarray(center_crop(image, 16)) - halved[:, 3:19]).max() <= 1


def test_diffusion_data_are_cropped_not_squashed():
    image = noise(25, 16)
    half = [0.5] * 3
    cropped = image_transform("none", 16, 3, half, half, fit="crop")(image)
    expected = np.asarray(image)[:, 4:20].transpose(2, 0, 1) / 127.5 - 1
    assert np.allclose(cropped, expected, atol=1e-6)
    squashed = image_transform("none", 16, 3, half, half)
    assert not np.allclose(squashed(image), expected, atol=0.1)
    fitting = noise(16, 16)
    assert np.array_equal(
        image_transform("none", 16, 3, half, half, fit="crop")(fitting), squashed(fitting)
    )
