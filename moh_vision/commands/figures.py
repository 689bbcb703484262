"""The files of figures."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import matplotlib

from moh_vision.engine.commands import refuse_output
from moh_vision.engine.io import write_whole

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the backend is chosen


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
