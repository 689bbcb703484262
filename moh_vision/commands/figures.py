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
from matplotlib import pyplot as plt  # import it after the backend is chosen

# A legend with longer names or more lines is drawn below the axes. Widths are in characters of its font of size 8.
LONGEST_INSIDE = 44
MOST_INSIDE = 12
ONE_COLUMN = 6  # up to so many lines a legend inside the axes has one column
PER_INCH = 13  # characters of an inch
MARKER = 8  # width of a line's sample and the gap to the next column
LINE_HEIGHT = 0.15  # inches
MARGIN = 0.3  # inches


class Line(NamedTuple):
    """A line of a figure, with one value per run at each x."""

    name: str
    by_x: dict[float, list[float]]  # x -> the values of the runs
    colour: Any = None  # None: the next colour of matplotlib's cycle
    dotted: bool = False

    def numbers(self) -> dict:
        """Return what the JSON says of the line; std is None where x has a single value."""
        means = []
        deviations = []
        for values in self.by_x.values():
            means.append(statistics.mean(values))
            deviations.append(statistics.stdev(values) if len(values) > 1 else None)
        return dict(
            name=self.name,
            x=list(self.by_x),
            mean=means,
            std=deviations,
            runs=[len(values) for values in self.by_x.values()],
        )


def lines_of(points: Iterable[tuple[str, float, float]], **look) -> list[Line]:
    """Make one line per name from points (name, x, value) in any order; `look` sets colour or dotted of every `Line`."""
    by_name: dict[str, dict[float, list[float]]] = {}
    for name, x, value in points:
        by_name.setdefault(name, {}).setdefault(x, []).append(value)
    return [Line(name, dict(sorted(by_x.items())), **look) for name, by_x in by_name.items()]


def draw_lines(lines: Sequence[Line], x: str, y: str):
    """Draw means with bands of one standard deviation."""
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    plot_lines(axes, lines)
    axes.set_xlabel(x)
    if axes.get_xlim()[1] >= 10_000:  # such as steps or tokens: write 20k for 20000
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.set_ylabel(y)
    add_legend(figure, axes)
    return figure


def plot_lines(axes, lines: Sequence[Line]) -> None:
    """Plot means with bands of one standard deviation into axes."""
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
    axes.grid(alpha=0.3)


def add_legend(figure, axes) -> None:
    """Draw the legend inside the axes, or below them, with a taller figure, if it would hide lines."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(map(len, names))
    if longest <= LONGEST_INSIDE and len(names) <= MOST_INSIDE:
        axes.legend(fontsize=8, ncols=1 if len(names) <= ONE_COLUMN else 2)
        return
    width = int(PER_INCH * figure.get_figwidth())
    # Not at hyphens: names contain options and model names, which are to stay whole.
    names = [textwrap.fill(name, width, break_on_hyphens=False) for name in names]
    columns = max(1, width // (longest + MARKER))
    lines = "\n".join(names).count("\n") + 1
    figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * lines / columns + MARGIN)
    figure.legend(handles, names, fontsize=8, ncols=columns, loc="outside lower left")


def numbers_path(path: Path) -> Path:
    """Return NAME.json for NAME.png, or NAME.png.json if NAME.json exists, such as the head_load.json that is drawn."""
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
