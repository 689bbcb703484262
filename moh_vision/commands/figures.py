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


def add_legend(figure, axes, **place) -> None:
    """Draw the legend of an axes inside it; where names are so long that they hide lines, below.

    The figure has the layout "constrained", and grows by what stands below; `place` is of a legend inside.
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
    """Refuse a path, the value of an option, where `write_figure` cannot write new files."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{option} {path}: expected a name that ends in .png or .svg")
    for file in (path, numbers_path(path)):
        refuse_output(option, str(file))


def numbers_path(path: Path) -> Path:
    """Return NAME.json for a figure NAME.png, or NAME.png.json where there is a file of that name."""
    plain = path.with_suffix(".json")
    return Path(f"{path}.json") if plain.exists() else plain


def write_figure(figure, path: Path, numbers: dict) -> str:
    """Write a figure and, beside it, the numbers that it shows; return both names, to be printed."""
    figure.savefig(path, dpi=130)
    plt.close(figure)
    beside = numbers_path(path)
    write_whole(beside, json.dumps(numbers, indent=1) + "\n")
    return f"{path}, {beside}"
