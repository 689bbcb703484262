"""Draw the figures of a report: curves, head budgets and confusion matrices as SVG; embed pictures as data URIs."""

import base64
import io
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from PIL import Image

from moh_vision.commands.figures import plt
from moh_vision.commands.head_load import short_names, shortened
from moh_vision.common.errors import reason_of

Curve = tuple[Sequence[int], Sequence[float]]  # (steps, values)
POINTS = 400  # most points of a curve
MOST_CLASSES = 30  # a confusion matrix of more classes is not drawn
MOST_BYTES = 150_000  # a larger picture is compressed again, as JPEG
_numbers = itertools.count()  # numbers the figures of a page


class Picture(NamedTuple):
    """An element of the page that shows a picture."""

    markup: Markup
    width: int  # CSS pixels
    caption: str = ""


def draw_curves(
    title: str, curves: dict[str, Curve], colours: dict[str, str], log: bool = False
) -> Picture:
    """Draw values over steps, a line per run; a long run is averaged to POINTS points.

    log: use a logarithmic axis if the values are positive and span more than a factor of 10.
    """
    figure, axes = plt.subplots(figsize=(3.25, 2.3), layout="constrained")
    all_values = [value for _, values in curves.values() for value in values]
    for name, (steps, values) in curves.items():
        parts = np.array_split(np.arange(len(steps)), min(POINTS, len(steps)))
        ends = [steps[indices[-1]] for indices in parts]
        means = [np.mean([values[index] for index in indices]) for indices in parts]
        marker = "o" if len(parts) <= 20 else ""
        axes.plot(ends, means, color=colours[name], linewidth=1.3, marker=marker, markersize=3)
    if log and min(all_values) > 0 and max(all_values) > 10 * min(all_values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("steps", fontsize=8)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
    axes.tick_params(labelsize=7.5)
    axes.grid(alpha=0.3)
    return inline_svg(figure)


def draw_budget(layers: Sequence[dict], caption: str, parts: str = "heads") -> Picture:
    """Draw how many heads of each layer are shared, routed and not run.

    Args:
        layers: the "layers" of a `head_budget`, or those of its "mlp".
        caption: stands under the picture.
        parts: "heads", or "groups" of MLPs.
    """
    names = short_names([layer["name"] for layer in layers], range(len(layers)))
    wordy = max(map(len, names)) > 3
    width = min(max(3.6, 1.0 + 0.3 * len(layers)), 10.5)
    height = 2.8 if wordy else 2.2
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    bars = (
        ("shared", "#08519c", [layer["shared"] for layer in layers]),
        ("routed", "#6baed6", [layer["routed"] for layer in layers]),
        ("not run", "#e3e6ea", [layer["heads"] - layer["active"] for layer in layers]),
    )
    below = np.zeros(len(layers))
    for label, colour, heads in bars:
        axes.bar(range(len(layers)), heads, bottom=below, color=colour, width=0.8, label=label)
        below += heads
    nth = math.ceil(len(layers) / 40)
    rotation = 45 if wordy else 0
    axes.set_xticks(range(0, len(layers), nth), names[::nth], fontsize=8, rotation=rotation)
    if wordy:
        plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
    axes.set_xlabel("layer", fontsize=9)
    axes.set_ylabel(f"{parts} that a token runs", fontsize=9)
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.tick_params(axis="y", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return inline_svg(figure, caption)


def draw_confusion(counts: np.ndarray, classes: Sequence[str], caption: str) -> Picture:
    """Draw a confusion matrix: a row per class, a column per prediction, coloured by share."""
    size = 1.9 + 0.3 * len(classes)
    figure, axes = plt.subplots(figsize=(size, size - 0.3), layout="constrained")
    share = counts / counts.sum(1, keepdims=True).clip(1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    if len(classes) <= 20:
        for (row, column), images in np.ndenumerate(counts):
            if images:
                colour = "black"
                if share[row, column] > 0.5:
                    colour = "white"
                axes.text(column, row, images, ha="center", va="center", fontsize=7, color=colour)
    names = [shortened(name) for name in classes]
    rotation = 0 if max(map(len, names)) <= 2 else 90
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=rotation)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("taken for", fontsize=9)
    axes.set_ylabel("class", fontsize=9)
    return inline_svg(figure, caption)


def inline_svg(figure, caption: str = "") -> Picture:
    """Turn a figure that was drawn within `svg_settings` into an element of the page, and close the figure."""
    text = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", metadata=none)
    width = round(96 * figure.get_figwidth())
    plt.close(figure)
    number = next(_numbers)

    def with_number(tag: re.Match) -> str:
        """Put the figure's number before the ids in a tag, because matplotlib gives all figures of a page the same."""
        return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>f{number}-", tag[0])

    svg = re.sub("<[^<>]+>", with_number, text.getvalue())
    return Picture(Markup(svg[svg.index("<svg") :]), width, caption)


def svg_settings():
    """Return a context in which text in figures stays text, and `$` in a name starts no formula."""
    return matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False})


def embed(file: Path, most: int, caption: str = "") -> Picture:
    """Embed a picture file in the page as a data URI, with at most `most` pixels a side."""
    try:
        data = file.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            file_format = image.format.lower()
            large = max(image.size) > most
            image.thumbnail((most, most))
            width = image.width
            if large or len(data) > MOST_BYTES or file_format not in ("png", "jpeg"):
                compressed = io.BytesIO()
                image.convert("RGB").save(compressed, "JPEG", quality=88)
                data = compressed.getvalue()
                file_format = "jpeg"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} is no picture that can be read ({reason_of(error)})") from None
    source = f"data:image/{file_format};base64,{base64.b64encode(data).decode()}"
    return Picture(Markup('<img src="{}" alt="{}">').format(source, caption), width, caption)
