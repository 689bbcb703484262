import numpy as np
import pytest
import torch

from moh_vision.diffusion.fonts import _font_file
from moh_vision.diffusion.image_grid import _in_lines, image_grid


@pytest.mark.parametrize("channels", [1, 3])
def test_grid_with_names(channels):
    images = torch.zeros(4, channels, 32, 32, dtype=torch.uint8)
    names = ["a", "a class with a name that is far too long"]
    plain, named = (np.asarray(image_grid(images, 2, shown).convert("L")) for shown in ((), names))
    margin = named.shape[1] - plain.shape[1]
    assert 30 < margin < 250
    assert (named[:, margin:] == plain).all()  # beside the images, not on them
    ink = (named[:, :margin] < 128).sum(1)
    assert 0 < ink[:34].sum() < ink[34:].sum()  # one a row


def test_every_letter_of_a_name_is_drawn(monkeypatch):
    """Pillow's own font draws a box for each letter that is not of English; a font that has it is taken."""
    images = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
    drawn = {name: np.asarray(image_grid(images, 1, names=[name])) for name in ("ß", "é", "Ж", "ł")}
    for one in drawn:
        for other in drawn:
            same = drawn[one].shape == drawn[other].shape and (drawn[one] == drawn[other]).all()
            assert same == (one == other)
    # Where none has it, the name says it in ASCII.
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: [])
    _font_file.cache_clear()
    asked = np.asarray(image_grid(images, 1, names=["Straße 猫"]))
    assert (asked == np.asarray(image_grid(images, 1, names=["Straße \\u732b"]))).all()
    _font_file.cache_clear()


@pytest.mark.parametrize("side", [8, 40, 64])
def test_names_of_a_grid_are_whole(side):
    """Of any length and wider than the images: all words are there, in lines that keep to their rows."""
    long = "polecat, fitch, foulmart, foumart, " * 4
    images = torch.zeros(3, 1, side, side, dtype=torch.uint8)
    grid = np.asarray(image_grid(images, 1, names=["", long, ""]))
    height = (grid.shape[0] - 2) // 3
    margin = grid.shape[1] - height
    assert height == {8: 48, 40: 40, 64: 64}[side] + 2  # small ones are enlarged
    ink = (grid[:, :margin] < 128).any(1)
    assert ink[height : 2 * height].any() and not ink[:height].any() and not ink[2 * height :].any()
    ours = _in_lines(["ab", long, "x" * 90], 3)[1]
    assert ours.count("\n") < 3 and ours.split() == long.split()
