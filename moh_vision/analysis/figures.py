"""Pictures: grids of images, and the files of figures."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Iterable, List, Optional, Sequence

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from moh_vision.engine.commands import refuse_output
from moh_vision.engine.io import hidden_path, whole_file, write_whole

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the backend is chosen

NAME_WIDTH = 16  # characters that a line of a name beside a row of images has at least
LINE_GAP = 2  # pixels between the lines of a name


def write_images(batches: Iterable[Tensor], labels: Tensor, out: Path) -> None:
    """Write images batch by batch: PNGs 000000.png ... in a folder, or one .npz as ADM's evaluator reads it.

    What is there before is replaced only when all is written.

    Args:
        batches: uint8 [B, C, h, w] each.
        labels: [N], arr_1 of the .npz; arr_0 is uint8 [N, h, w, C].
        out: path of the folder or .npz file.
    """
    if out.suffix == ".npz":
        with whole_file(out) as file:
            _write_npz(batches, labels, file)
        return
    hidden = hidden_path(out)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    number = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for batch in batches:
            list(pool.map(lambda i, x: to_pil_image(x).save(hidden / f"{i:06d}.png"), itertools.count(number), batch))
            number += len(batch)
    if out.exists():
        for stale in out.glob("*.png"):
            stale.unlink()
        for file in hidden.iterdir():
            file.rename(out / file.name)
        hidden.rmdir()
    else:
        hidden.rename(out)


def _write_npz(batches: Iterable[Tensor], labels: Tensor, out: BinaryIO) -> None:
    """As numpy.savez, without all images in memory."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as file:
            started = False
            for batch in batches:
                array = np.ascontiguousarray(batch.permute(0, 2, 3, 1).numpy())
                if not started:
                    about = dict(descr="|u1", fortran_order=False, shape=(len(labels), *array.shape[1:]))
                    np.lib.format.write_array_header_1_0(file, about)
                    started = True
                file.write(array.tobytes())
        with archive.open("arr_1.npy", "w") as file:
            np.lib.format.write_array(file, labels.numpy())


def draw_image_grid(
    images: Tensor,
    columns: int,
    path: str,
    cell: int = 48,
    gap: int = 2,
    names: Optional[Sequence[str]] = None,
    above: Optional[Sequence[str]] = None,
) -> None:
    """Write a PNG of images [N, C, h, w] (uint8, C = 1 or 3), row by row; small ones are enlarged (bicubic).

    Args:
        images, columns, path: see above.
        cell: pixels that a small image is enlarged to, about.
        gap: white pixels between images.
        names: one a row, such as its class, to the left of it; long ones take several lines.
        above: one a column, short.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    image_grid(images, columns, cell, gap, names, above).save(path, format="PNG")


def image_grid(
    images: Tensor,
    columns: int,
    cell: int = 48,
    gap: int = 2,
    names: Optional[Sequence[str]] = None,
    above: Optional[Sequence[str]] = None,
) -> Image.Image:
    """The picture that `draw_image_grid` writes."""
    n, channels, height, width = images.shape
    factor = max(1, round(cell / height))
    rows = -(-n // columns)
    height, width = height * factor, width * factor
    font = ImageFont.load_default(max(12, min(height // 5, 24)))
    texts = _in_lines([str(name) for name in names or []], height // (sum(font.getmetrics()) + LINE_GAP))
    margin = max((int(font.getlength(line)) + 4 * gap for text in texts for line in text.splitlines()), default=0)
    top = sum(font.getmetrics()) + gap if above else 0
    size = (margin + columns * (width + gap) + gap, top + rows * (height + gap) + gap)
    canvas = Image.new("RGB" if channels == 3 else "L", size, "white")
    for i, image in enumerate(images):
        enlarged = to_pil_image(image).resize((width, height), Image.Resampling.BICUBIC)
        place = (margin + gap + (i % columns) * (width + gap), top + gap + (i // columns) * (height + gap))
        canvas.paste(enlarged, place)
    draw = ImageDraw.Draw(canvas)
    for row, text in enumerate(texts):
        middle = (margin - 2 * gap, top + gap + row * (height + gap) + height // 2)
        draw.multiline_text(middle, text, "black", font, anchor="rm", spacing=LINE_GAP, align="right")
    for column, text in enumerate(above or []):
        draw.text((margin + gap + column * (width + gap) + width // 2, gap), text, "black", font, anchor="mt")
    return canvas


def _in_lines(texts: List[str], most: int) -> List[str]:
    """Every text in at most `most` lines of one width, the least from NAME_WIDTH characters on."""
    widths = range(NAME_WIDTH, max(map(len, texts), default=0) + NAME_WIDTH)
    broken = ([textwrap.wrap(text, width) for text in texts] for width in widths)
    fitting = next((lines for lines in broken if max(map(len, lines)) <= max(1, most)), [])
    return ["\n".join(lines) for lines in fitting]


def save_figure(figure, path: str) -> None:
    """Write a figure of matplotlib, as SVG if the path ends so and as PNG otherwise, and close it; makes its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="svg" if str(path).endswith(".svg") else "png")
    plt.close(figure)


def add_legend(figure, axes, **place) -> None:
    """The legend of an axes, inside it; below it, where names are so long that they would hide what is drawn.

    Args:
        figure: with the layout "constrained"; it grows by what stands below.
        axes: with labelled lines.
        place: of a legend inside, as matplotlib has it.
    """
    handles, names = axes.get_legend_handles_labels()
    if max(map(len, names)) <= 44:
        axes.legend(fontsize=8, **place)
        return
    names = [textwrap.fill(name, int(13 * figure.get_figwidth()), break_on_hyphens=False) for name in names]
    lines = "\n".join(names).count("\n") + 1
    figure.set_figheight(figure.get_figheight() + 0.15 * lines + 0.3)
    figure.legend(handles, names, fontsize=8, loc="outside lower left")


def check_figure(option: str, path: Path) -> None:
    """Raise ValueError, naming the option, unless `write_figure` can write the figure and the numbers as new files."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{option} {path}: expected a name that ends in .png or .svg")
    for file in (path, numbers_path(path)):
        refuse_output(option, str(file))


def numbers_path(path: Path) -> Path:
    """Where the numbers of a figure NAME.png go: NAME.json, or NAME.png.json where there is a file of that name."""
    plain = path.with_suffix(".json")
    return Path(f"{path}.json") if plain.exists() else plain


def write_figure(figure, path: Path, numbers: dict) -> str:
    """Write a figure, see `save_figure`, and the numbers it shows to `numbers_path`; returns both names, to be printed."""
    save_figure(figure, str(path))
    beside = numbers_path(path)
    write_whole(beside, json.dumps(numbers, indent=1) + "\n")
    return f"{path}, {beside}"
