"""Learning curves of runs over epochs or steps, and their last scores over a key of the configuration.

python -m moh_vision curves RUN RUN ... --output curves.png
python -m moh_vision curves RUN RUN ... --over data.share --output share.png

RUN is the folder of a run of train_cls.py, train_dit.py or train_text.py. Runs that differ in nothing but the seed
make one line: the mean, solid ones in a band of one standard deviation (of n - 1).

The first form draws training losses (dotted) and validation losses (solid), as Peng 2020 (MAE), figure 3: of language models
both in nats a token without smoothed labels. A run need not have ended. Only runs of text log epochs: with a run of images, or
one that has not begun its second epoch, all are drawn over steps. The second form draws the first score of analysis.table
that the finished runs have, as Peng 2020, figure 2: BLEU over the share of the training pairs. NAME.json beside the figure has
the numbers.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from moh_vision.commands.figures import add_legend, check_figure, plt, write_figure
from moh_vision.commands.runs import (
    COLUMNS,
    NAMES,
    TEXT,
    ScoredRun,
    find_run,
    grouped,
    number_at,
    read_metrics,
    read_runs,
)
from moh_vision.engine.commands import Parser, closest, exit_code, say

Points = List[Tuple[float, float]]  # (x, value), in the order of x


class Curves(NamedTuple):
    """What the log of a run says of its losses.

    Attributes:
        train: (steps done, loss): without smoothed labels and auxiliary losses where the log has it so (nll), which is what
            validation measures.
        validation: (steps done, loss); empty if there was none.
        steps_an_epoch: None before the second epoch, and of images, whose runs log no epochs.
    """

    train: Points
    validation: Points
    steps_an_epoch: Optional[float]


class Line(NamedTuple):
    """A line of a figure: at each x the values of the runs that have one there."""

    name: str
    values: Dict[float, List[float]]
    dotted: bool = False

    def numbers(self) -> dict:
        """dict(name, x, mean, std: None where there is one value, runs: how many there are)."""
        found = list(self.values.values())
        std = [statistics.stdev(v) if len(v) > 1 else None for v in found]
        mean, runs = [statistics.mean(v) for v in found], [len(v) for v in found]
        return dict(name=self.name, x=list(self.values), mean=mean, std=std, runs=runs)


def read_curves(folder: Path) -> Curves:
    """The losses in the metrics.jsonl of a run.

    Raises:
        ValueError: naming the file, for a line that is not as a run writes it, or a log without losses.
    """
    file = folder / "metrics.jsonl"
    train: Points = []
    validation: Points = []
    began, before = {0.0: 0.0}, 0.0  # epoch -> steps before it; the last step logged
    for entry in read_metrics(folder):
        step, epoch = (number_at(entry, (key,), file) for key in ("step", "epoch"))
        if step is None:
            raise ValueError(f"{file}: a line without step")
        loss = number_at(entry, ("nll" if "nll" in entry else "loss",), file)
        validated = number_at(entry, ("validation", "loss"), file)
        if loss is not None:  # a skipped step has null
            train.append((step, loss))
        if validated is not None:
            validation.append((step, validated))
        if epoch is not None:
            # An epoch began after the last step logged and not after this one: in the middle, on average.
            began.setdefault(epoch, (before + step - 1) / 2)
            before = step
    if not train:
        raise ValueError(f"{file}: no line has a loss")
    last = max(began)
    return Curves(train, validation, began[last] / last if last else None)


def running_mean(points: Points, window: int) -> Points:
    """Each value becomes the mean of the last `window` ones: batches differ more than models."""
    values = [value for _, value in points]
    return [(x, float(np.mean(values[max(0, i + 1 - window) : i + 1]))) for i, (x, _) in enumerate(points)]


def learning_curves(groups: Sequence[Tuple[str, Sequence[Curves]]], window: int = 1, first_epoch: float = 0.0):
    """(lines, label of x) of training and validation losses.

    Args:
        groups: curves of runs that differ in nothing but the seed, by their name.
        window: of `running_mean`, over training losses.
        first_epoch: what lies before is left out, so that the high losses at the start do not flatten the rest.

    Raises:
        ValueError: for a first_epoch that no run reaches.
    """
    lengths = [curves.steps_an_epoch for _, group in groups for curves in group]
    over_epochs = None not in lengths
    if first_epoch and not over_epochs:
        raise ValueError(f"--first-epoch {first_epoch:g}: a run has no second epoch in its log, so steps are drawn")
    lines = []
    for name, group in groups:
        # Seeds have batches of slightly different numbers: one length of an epoch keeps their steps together.
        unit = statistics.mean(curves.steps_an_epoch for curves in group) if over_epochs else 1
        kinds = dict(training=[running_mean(c.train, window) for c in group], validation=[c.validation for c in group])
        for kind, runs in kinds.items():
            values: Dict[float, List[float]] = {}
            for step, value in sorted(point for points in runs for point in points):
                if step / unit >= first_epoch:
                    values.setdefault(step / unit, []).append(value)
            if values:
                lines.append(Line(f"{name}, {kind}", values, dotted=kind == "training"))
    if not lines:
        raise ValueError(f"--first-epoch {first_epoch:g}: no run has got so far")
    return lines, "epochs" if over_epochs else "steps"


def loss_label(runs: Sequence[ScoredRun]) -> str:
    """The label of y; it says so where losses of several kinds stand in one axis."""
    kinds = dict.fromkeys(
        "text" if run.kind in TEXT.values() else run.config.get("objective", "noise") if run.kind == "diffusion" else run.kind
        for run in runs
    )  # fmt: skip
    if len(kinds) > 1:
        return f"losses of {' and '.join(kinds)}, which have no common scale"
    return "loss, nats per token" if "text" in kinds else "loss"


def scores_over(runs: Sequence[ScoredRun], key: str, names: Optional[Sequence[str]] = None) -> Tuple[List[Line], str]:
    """(lines, label of y): the first score of `COLUMNS` that the runs have, over the numbers at a key of their
    configurations.

    Raises:
        ValueError: for a key that is unknown, or where a run has no number; or if there is no score.
    """
    for run in runs:
        if key not in run.config:
            raise ValueError(f"--over {key}: no such key in {run.folder / 'config.yaml'}: {closest(key, run.config)}")
        value = run.config[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"--over {key}: {run.folder} has {value!r} there; expected a number")
    score = next((score for score in COLUMNS if all(run.scores.get(score) is not None for run in runs)), None)
    if score is None:
        raise ValueError(f"{', '.join(str(run.folder) for run in runs)} have no score in common")
    lines = []
    for name, group in grouped(runs, key, names):
        values: Dict[float, List[float]] = {}
        for run in sorted(group, key=lambda run: run.config[key]):
            values.setdefault(run.config[key], []).append(run.scores[score])
        lines.append(Line(name, values))
    return lines, COLUMNS[score][0]


def draw_lines(lines: Sequence[Line], x: str, y: str) -> Figure:
    """A figure of lines with bands; a dotted line has the colour of the one behind it."""
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    colour = 0
    for place, line in enumerate(lines):
        numbers = line.numbers()
        look = dict(linewidth=1, linestyle=":") if line.dotted else dict(linewidth=1.6, marker="o", markersize=3)
        axes.plot(numbers["x"], numbers["mean"], color=f"C{colour % 10}", label=line.name, **look)
        mean, std = np.array(numbers["mean"]), np.array([s or 0.0 for s in numbers["std"]])
        if std.any() and not line.dotted:  # bands of training losses hide the rest
            axes.fill_between(numbers["x"], mean - std, mean + std, color=f"C{colour % 10}", alpha=0.15, linewidth=0)
        colour += not (line.dotted and place + 1 < len(lines) and not lines[place + 1].dotted)
    axes.set_xlabel(x)
    if axes.get_xlim()[1] >= 10_000:  # steps, tokens
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    add_legend(figure, axes, ncols=1 if len(lines) < 7 else 2)
    return figure


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision curves", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add("--output", required=True, type=Path, metavar="FILE", help=".png or .svg; NAME.json has the numbers")
    add("--over", metavar="KEY", help="last scores over this key of the configuration, such as data.share")
    add("--names", nargs="+", metavar="NAME", help=NAMES)
    add("--window", type=int, default=1, metavar="N", help="mean of so many logged training losses (%(default)s)")
    add("--first-epoch", type=float, default=0.0, metavar="E", help="of text: leave out what lies before (%(default)s)")

    def work() -> None:
        options = parser.parse(argv)
        check_figure("--output", options.output)
        if options.window < 1:
            raise ValueError(f"--window {options.window}: expected 1 or more")
        if options.over:
            lines, y = scores_over(read_runs(options.runs), options.over, options.names)
            x = options.over
        else:
            runs = [find_run(folder) for folder in options.runs]
            groups = [
                (name, [read_curves(run.folder) for run in group]) for name, group in grouped(runs, names=options.names)
            ]
            lines, x = learning_curves(groups, options.window, options.first_epoch)
            y = loss_label(runs)
        numbers = dict(
            x=x, y=y, runs=[str(folder) for folder in options.runs], lines=[line.numbers() for line in lines]
        )
        written = write_figure(draw_lines(lines, x, y), options.output, numbers)
        say(f"{written}: {len(lines)} lines over {x}")

    return exit_code("learning_curves", work)


if __name__ == "__main__":
    raise SystemExit(main())
