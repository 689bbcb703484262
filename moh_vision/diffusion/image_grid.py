"""Write images: grids, folders of PNGs, .npz files, and pictures of how noise becomes images."""

import itertools
import json
import os
import re
import shutil
import textwrap
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from moh_vision.common.errors import reason_of
from moh_vision.common.io import hidden_path, whole_file, write_whole
from moh_vision.diffusion.fonts import drawable, font_for
from moh_vision.diffusion.sampling import to_uint8

CELL = 48  # pixels: small images are enlarged to about this height
GAP = 2  # pixels between images
NAME_WIDTH = 16  # characters: names beside rows are wrapped at this width, or at a larger one
LINE_GAP = 2  # pixels between the lines of a name
SHOWN = 8  # number of images whose denoising is shown
MOMENTS = {".png": 8, ".gif": 25}  # number of steps that are shown, at most
FRAME_MS = 120  # milliseconds that a frame of an animation is shown
LAST_FRAME_MS = 2000
WRITTEN = ".samples.json"  # file in a folder of samples that lists the samples that we wrote there


def sample_name(number: int) -> str:
    """Return the file name of a sample."""
    return f"{number:06d}.png"


def written_samples(out: Path) -> set[str]:
    """Return the names of the samples that `write_images` wrote into a folder, from the list that it keeps there."""
    listing = out / WRITTEN
    if not listing.is_file():
        return set()
    try:
        names = json.loads(listing.read_text())
        # Files on the list may be deleted, so a damaged list must not name other files.
        if not all(re.fullmatch(r"\d{6,}\.png", name) for name in names):
            raise ValueError("it names other files")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{listing} is no list of samples ({reason_of(error)}); delete it to keep the images there"
        ) from None
    return set(names)


def refuse_strangers(option: str, out: Path, count: int) -> list[str]:
    """Return the sorted names of files in a folder that we did not write.

    Raises:
        ValueError: if such a file has the name that one of `count` samples will get.
    """
    strangers = {file.name for file in out.iterdir()} - written_samples(out) - {WRITTEN}
    taken = strangers.intersection(map(sample_name, range(count)))
    if taken:
        raise ValueError(
            f"{option} {out} holds {min(taken)}, which sample.py did not write there; give another folder"
        )
    return sorted(strangers)


def write_images(batches: Iterable[tuple[int, Tensor]], labels: Tensor, out: Path) -> None:
    """Write images as PNGs in the folder `out`, or as a .npz file for ADM's evaluator.

    Samples that this function wrote into the folder before are replaced; other files stay.

    Args:
        batches: (number of the first image, images uint8 [B, C, h, w]).
        labels: class numbers of all images, [N].
        out: the folder, or a path that ends in .npz.
    """
    if out.suffix == ".npz":
        _write_npz(batches, labels, out)
    else:
        _write_pngs(batches, len(labels), out)


def _write_npz(batches: Iterable[tuple[int, Tensor]], labels: Tensor, out: Path) -> None:
    """Write the file that numpy.savez would write, but without holding all images in memory."""
    with whole_file(out) as opened, zipfile.ZipFile(opened, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as file:
            for first, batch in batches:
                array = batch.permute(0, 2, 3, 1).numpy()
                if first == 0:
                    shape = (len(labels), *array.shape[1:])
                    header = dict(descr="|u1", fortran_order=False, shape=shape)
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(array.tobytes())
        with archive.open("arr_1.npy", "w") as file:
            np.lib.format.write_array(file, labels.numpy())


def _write_pngs(batches: Iterable[tuple[int, Tensor]], count: int, out: Path) -> None:
    """Write `count` images into a hidden folder first, and move them to `out` once all are written."""
    hidden = hidden_path(out)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()

    def save(number: int, image: Tensor) -> None:
        to_pil_image(image).save(hidden / sample_name(number))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first, batch in batches:
            # list() waits for all threads and raises the first error of a thread.
            list(pool.map(save, itertools.count(first), batch))
    names = [sample_name(number) for number in range(count)]
    if not out.exists():
        write_whole(hidden / WRITTEN, json.dumps(names))
        hidden.rename(out)
        return
    earlier = written_samples(out)
    # List the new files before moving them: after a kill in between, the list still names all files of ours.
    write_whole(out / WRITTEN, json.dumps(sorted(earlier.union(names))))
    for name in earlier:
        (out / name).unlink(missing_ok=True)
    for name in names:
        (hidden / name).rename(out / name)
    write_whole(out / WRITTEN, json.dumps(names))
    hidden.rmdir()


def draw_image_grid(images: Tensor, columns: int, path: str, **look) -> None:
    """Write an `image_grid` as a PNG, and create the folder of `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    image_grid(images, columns, **look).save(path, format="PNG")


def draw_class_rows(
    images: Callable, labels: Tensor, classes: Sequence[int], columns: int, path: str, names
) -> int:
    """Draw a grid with one class a row; return the number of rows.

    Args:
        images: function from image numbers to these images, uint8 [len(numbers), C, h, w].
        labels: class numbers of all images, [N].
        classes: the classes to draw; those without images are left out.
        columns: images in a row, at most; no row is longer than the class with the fewest images.
        path: the PNG.
        names: names of all classes, by number.
    """
    drawn = {c: torch.nonzero(labels == c).flatten().tolist() for c in classes}
    rows = [c for c in classes if drawn[c]]
    columns = min([columns, *(len(drawn[c]) for c in rows)])
    numbers = [i for c in rows for i in drawn[c][:columns]]
    draw_image_grid(images(numbers), columns, path, names=[names[c] for c in rows])
    return len(rows)


def image_grid(
    images: Tensor, columns: int, names: Sequence[str] = (), above: Sequence[str] = ()
) -> Image.Image:
    """Lay out images row by row, small ones enlarged to a height of about CELL pixels.

    Args:
        images: uint8 [N, 1 or 3, h, w].
        columns: images in a row.
        names: texts to the left of the rows.
        above: texts above the columns.
    """
    n, channels, height, width = images.shape
    factor = max(1, round(CELL / height))
    rows = -(-n // columns)
    height *= factor
    width *= factor
    names = [str(name) for name in names]
    font = font_for("".join(names), max(12, min(height // 5, 24)))
    names = [drawable(name, font) for name in names]
    texts = _in_lines(names, height // (sum(font.getmetrics()) + LINE_GAP))
    lengths = [font.getlength(line) for text in texts for line in text.splitlines()]
    margin = 0  # pixels to the left of the images
    if lengths:
        margin = int(max(lengths)) + 4 * GAP
    top = 0  # pixels above the images
    if above:
        top = sum(font.getmetrics()) + GAP
    size = (margin + columns * (width + GAP) + GAP, top + rows * (height + GAP) + GAP)
    canvas = Image.new("RGB" if channels == 3 else "L", size, "white")
    for i, image in enumerate(images):
        enlarged = to_pil_image(image).resize((width, height), Image.Resampling.BICUBIC)
        left = margin + GAP + (i % columns) * (width + GAP)
        upper = top + GAP + (i // columns) * (height + GAP)
        canvas.paste(enlarged, (left, upper))
    draw = ImageDraw.Draw(canvas)
    for row, text in enumerate(texts):
        middle = (margin - 2 * GAP, top + GAP + row * (height + GAP) + height // 2)
        draw.multiline_text(
            middle, text, "black", font, anchor="rm", spacing=LINE_GAP, align="right"
        )
    for column, text in enumerate(above):
        middle = (margin + GAP + column * (width + GAP) + width // 2, GAP)
        draw.text(middle, text, "black", font, anchor="mt")
    return canvas


def _in_lines(texts: list[str], most: int) -> list[str]:
    """Wrap all texts at one width: the smallest from NAME_WIDTH on that gives each at most `most` lines."""
    widths = range(NAME_WIDTH, max(map(len, texts), default=0) + NAME_WIDTH)
    wrapped = ([textwrap.wrap(text, width) for text in texts] for width in widths)
    fitting = next((lines for lines in wrapped if max(map(len, lines)) <= max(1, most)), [])
    return ["\n".join(lines) for lines in fitting]


class Denoising:
    """Draws images after some of a sampler's steps: a .png with one image a row, or an animated .gif.

    Args:
        path: the file to write.
        steps: number of steps that the sampler makes.
    """

    def __init__(self, path: str, steps: int):
        self.path = path
        self.frames = []
        self.times = []
        count = min(steps, MOMENTS[path[-4:]])
        self.moments = [steps - 1]
        if count > 1:
            self.moments = torch.linspace(0, steps - 1, count).round().int().tolist()

    def add(self, pipe, step: int, latents: Tensor) -> None:
        """Decode and keep the first images if `step` is to be shown."""
        if step in self.moments:
            self.frames.append(to_uint8(pipe.decode(latents[:SHOWN])).cpu())
            after = pipe.scheduler.timesteps[step + 1 : step + 2].tolist()
            self.times.append(f"t={after[0]:.0f}" if after else "image")

    def save(self, names: Sequence[str]) -> None:
        """Write the file; a .png has the `names` of the images beside its rows."""
        if self.path.endswith(".png"):
            strip = torch.stack(self.frames, dim=1).flatten(0, 1)  # [images * moments, C, h, w]
            return draw_image_grid(
                strip, len(self.frames), self.path, names=names, above=self.times
            )
        pictures = [image_grid(frame, min(4, len(frame))) for frame in self.frames]
        times = [FRAME_MS] * (len(pictures) - 1) + [LAST_FRAME_MS]
        pictures[0].save(
            self.path, save_all=True, append_images=pictures[1:], duration=times, loop=0
        )
