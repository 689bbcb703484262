import numpy as np
import pytest
from pictures import gradient
from PIL import Image

from moh_vision.data.batches import image_transform
from moh_vision.data.decode import center_crop


def noise(width, height, mode="RGB"):
    shape = (height, width) if mode == "L" else (height, width, 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_an_image_of_that_size_is_unchanged(mode):
    image = noise(16, 16, mode)
    assert np.array_equal(center_crop(image, 16), image)


def test_of_a_longer_image_the_centre_is_cut_out_untouched():
    image = noise(16, 25)
    assert np.array_equal(center_crop(image, 16), np.asarray(image)[4:20])
    image = noise(31, 16)
    assert np.array_equal(center_crop(image, 16), np.asarray(image)[:, 7:23])


@pytest.mark.parametrize(
    "size", [(1, 1), (5, 7), (15, 16), (16, 17), (31, 32), (33, 47), (37, 50), (64, 16), (333, 129)]
)
def test_every_shape_gives_the_centre(size):
    image = center_crop(gradient(*size), 16)
    assert image.size == (16, 16) and image.mode == "RGB"
    pixels = np.asarray(image).astype(float)
    if min(size) >= 15:  # red grows to the right, green downwards: half of both in the middle
        assert abs(pixels[7:9, 7:9, :2].mean((0, 1)) - 127.5).max() < 9  # half a pixel, where one too many is cut off
        width, height = (16 * side / min(size) for side in size)
        slopes = np.diff(pixels[8, :, 0])[2:-2].mean(), np.diff(pixels[:, 8, 1])[2:-2].mean()
        assert slopes == pytest.approx((255 / width, 255 / height), rel=0.12)


def test_much_larger_images_are_halved_with_a_box():
    small = noise(16, 16)
    assert np.array_equal(center_crop(small.resize((64, 64), Image.Resampling.NEAREST), 16), small)
    image = noise(44, 32)
    halved = np.asarray(image).astype(float).reshape(16, 2, 22, 2, 3).mean((1, 3))
    assert abs(np.asarray(center_crop(image, 16)) - halved[:, 3:19]).max() <= 1  # rounded once a direction


def test_diffusion_data_are_cropped_not_squashed():
    image, half = noise(25, 16), [0.5] * 3
    cropped = image_transform("none", 16, 3, half, half, fit="crop")(image)
    expected = np.asarray(image)[:, 4:20].transpose(2, 0, 1) / 127.5 - 1
    assert np.allclose(cropped, expected, atol=1e-6)
    squashed = image_transform("none", 16, 3, half, half)
    assert not np.allclose(squashed(image), expected, atol=0.1)
    fitting = noise(16, 16)
    assert np.array_equal(image_transform("none", 16, 3, half, half, fit="crop")(fitting), squashed(fitting))
