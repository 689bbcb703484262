"""Draw figures of lines, and write a figure with its numbers."""

import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from moh_vision.common.io import write_whole

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # after the backend is chosen


class Line(NamedTuple):
    """A line of a figure, with one value per run at each x."""

    name: str
    values: dict[float, list[float]]  # x -> the values of the runs
    colour: Any = None  # None: the next colour of matplotlib's cycle
    dotted: bool = False

    def numbers(self) -> dict:
        """Return what the JSON says of the line; std is None where x has a single value."""
        values_of_runs = list(self.values.values())
        deviations = [
            statistics.stdev(values) if len(values) > 1 else None for values in values_of_runs
        ]
        return dict(
            name=self.name,
            x=list(self.values),
            mean=[statistics.mean(values) for values in values_of_runs],
            std=deviations,
            runs=[len(values) for values in values_of_runs],
        )


def lines_of(points: Iterable[tuple[str, float, float]], **look) -> list[Line]:
    """Make one line per name from points (name, x, value) in any order; `look` are further fields of every `Line`."""
    by_name: dict[str, dict[float, list[float]]] = {}
    for name, x, value in points:
        by_name.setdefault(name, {}).setdefault(x, []).append(value)
    return [Line(name, dict(sorted(values.items())), **look) for name, values in by_name.items()]


def draw_lines(lines: Sequence[Line], x: str, y: str):
    """Draw means with bands of one standard deviation."""
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    for line in lines:
        numbers = line.numbers()
        look = dict(linewidth=1.6, marker="o", markersize=3)
        if line.dotted:
            look = dict(linewidth=1, linestyle=":")
        (drawn,) = axes.plot(
            numbers["x"], numbers["mean"], color=line.colour, label=line.name, **look
        )
        # No band around a dotted line: training losses vary so much that their bands would hide the other lines.
        if any(numbers["std"]) and not line.dotted:
            deviations = [deviation or 0 for deviation in numbers["std"]]
            low = [mean - deviation for mean, deviation in zip(numbers["mean"], deviations)]
            high = [mean + deviation for mean, deviation in zip(numbers["mean"], deviations)]
            band = dict(color=drawn.get_color(), alpha=0.15, linewidth=0)
            axes.fill_between(numbers["x"], low, high, **band)
    axes.set_xlabel(x)
    if axes.get_xlim()[1] >= 10_000:  # such as steps or tokens: write 20k for 20000
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    add_legend(figure, axes)
    return figure


def add_legend(figure, axes) -> None:
    """Draw the legend inside the axes, or below them, with a taller figure, if it would hide lines."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(map(len, names))
    if longest <= 44 and len(names) <= 12:
        axes.legend(fontsize=8, ncols=1 if len(names) < 7 else 2)
        return
    width = int(13 * figure.get_figwidth())  # characters
    names = [textwrap.fill(name, width, break_on_hyphens=False) for name in names]
    columns = max(1, width // (longest + 8))
    lines = "\n".join(names).count("\n") + 1
    figure.set_figheight(figure.get_figheight() + 0.15 * lines / columns + 0.3)
    figure.legend(handles, names, fontsize=8, ncols=columns, loc="outside lower left")


def numbers_path(path: Path) -> Path:
    """Return NAME.json for NAME.png, or NAME.png.json if NAME.json exists."""
    plain = path.with_suffix(".json")
    if plain.exists():
        return Path(f"{path}.json")
    return plain


def write_figure(figure, path: Path, numbers: dict) -> str:
    """Write a figure and its numbers; return both names, to be printed."""
    figure.savefig(path, dpi=130)
    plt.close(figure)
    numbers_file = numbers_path(path)
    write_whole(numbers_file, json.dumps(numbers, indent=1) + "\n")
    return f"{path}, {numbers_file}"
