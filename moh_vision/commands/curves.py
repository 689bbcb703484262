"""Learning curves of runs over epochs or steps, and their last scores over a key of the configuration.

python -m moh_vision curves RUN RUN ... --output curves.png
python -m moh_vision curves RUN RUN ... --over data.share --output share.png

The first form draws training losses (dotted) and validation losses (solid), as Peng 2020 (MAE), figure 3: of language
models both in nats a token without smoothed labels. A run need not have ended. Only runs of text log epochs: with
another, or one in its first epoch, all are drawn over steps. The second form draws the first score of the command
table that all runs have, as Peng 2020, figure 2. Runs that differ in nothing but the seed make one line, in a band of
one standard deviation (of n - 1).
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from moh_vision.commands.figures import add_legend, plt
from moh_vision.commands.runs import COLUMNS, NAMES, ScoredRun, find_run, grouped, number_at, read_metrics, read_runs
from moh_vision.engine.commands import closest

Points = List[Tuple[float, float]]  # (steps done, loss)


def options(add) -> None:
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add("--over", metavar="KEY", help="last scores over this key of the configuration, such as data.share")
    add("--names", nargs="+", metavar="NAME", help=NAMES)
    add("--window", type=int, default=1, metavar="N", help="mean of so many logged training losses (%(default)s)")
    add("--first-epoch", type=float, default=0.0, metavar="E", help="of text: leave out what lies before (%(default)s)")


def figure(options) -> Tuple[Figure, dict, str]:
    if options.window < 1:
        raise ValueError(f"--window {options.window}: expected 1 or more")
    if options.over:
        x = options.over
        lines, y = scores_over(read_runs(options.runs), x, options.names)
    else:
        runs = [find_run(folder) for folder in options.runs]
        lines, x = learning_curves(grouped(runs, names=options.names), options.window, options.first_epoch)
        y = loss_label(runs)
    runs = [str(folder) for folder in options.runs]
    numbers = dict(x=x, y=y, runs=runs, lines=[line.numbers() for line in lines])
    return draw_lines(lines, x, y), numbers, f": {len(lines)} lines over {x}"


class Curves(NamedTuple):
    """What the log of a run says of its losses, the training's without smoothed labels where the log has it so."""

    training: Points
    validation: Points
    steps_an_epoch: Optional[float]  # None before the second epoch, and of images, whose runs log no epochs


class Line(NamedTuple):
    """A line of a figure: at each x the values of the runs that have one there."""

    name: str
    values: Dict[float, List[float]]
    dotted: bool = False

    def numbers(self) -> dict:
        """Return the line as JSON has it; std is None where there is one value."""
        found = list(self.values.values())
        return dict(
            name=self.name,
            x=list(self.values),
            mean=[statistics.mean(values) for values in found],
            std=[statistics.stdev(values) if len(values) > 1 else None for values in found],
            runs=[len(values) for values in found],
        )


def read_curves(folder: Path) -> Curves:
    """Read the losses in the metrics.jsonl of a run."""
    file = folder / "metrics.jsonl"
    training: Points = []
    validation: Points = []
    began, before = {0.0: 0.0}, 0.0  # epoch -> steps before it; the last step logged
    for entry in read_metrics(folder):
        step, epoch = (number_at(entry, (key,), file) for key in ("step", "epoch"))
        if step is None:
            raise ValueError(f"{file}: a line without step")
        loss = number_at(entry, ("nll" if "nll" in entry else "loss",), file)
        validated = number_at(entry, ("validation", "loss"), file)
        if loss is not None:  # a skipped step has null
            training.append((step, loss))
        if validated is not None:
            validation.append((step, validated))
        if epoch is not None:
            # An epoch began after the last step logged and not after this one: in the middle, on average.
            began.setdefault(epoch, (before + step - 1) / 2)
            before = step
    if not training:
        raise ValueError(f"{file}: no line has a loss")
    last = max(began)
    return Curves(training, validation, began[last] / last if last else None)


def running_mean(points: Points, window: int) -> Points:
    """Replace each value by the mean of the last `window` ones: batches differ more than models."""
    values = [value for _, value in points]
    return [(x, float(np.mean(values[max(0, i + 1 - window) : i + 1]))) for i, (x, _) in enumerate(points)]


def learning_curves(groups: Sequence[Tuple[str, Sequence[ScoredRun]]], window: int, first_epoch: float):
    """Return lines of losses, and the label of x.

    Left out is what lies before first_epoch, so that the high losses at the start do not flatten the rest.
    """
    logs = [(name, [read_curves(run.folder) for run in group]) for name, group in groups]
    over_epochs = all(log.steps_an_epoch for _, group in logs for log in group)
    if first_epoch and not over_epochs:
        raise ValueError(f"--first-epoch {first_epoch:g}: a run has no second epoch in its log, so steps are drawn")
    lines = []
    for name, group in logs:
        # Seeds have batches of slightly different numbers: one length of an epoch keeps their steps together.
        unit = statistics.mean(log.steps_an_epoch for log in group) if over_epochs else 1
        kinds = dict(training=[running_mean(log.training, window) for log in group])
        kinds["validation"] = [log.validation for log in group]
        for kind, found in kinds.items():
            values: Dict[float, List[float]] = {}
            for step, value in sorted(point for points in found for point in points):
                if step / unit >= first_epoch:
                    values.setdefault(step / unit, []).append(value)
            if values:
                lines.append(Line(f"{name}, {kind}", values, dotted=kind == "training"))
    if not lines:
        raise ValueError(f"--first-epoch {first_epoch:g}: no run has got so far")
    return lines, "epochs" if over_epochs else "steps"


def loss_label(runs: Sequence[ScoredRun]) -> str:
    """Return the label of y; it says so where losses of several kinds stand in one axis."""
    kinds = {}
    for run in runs:
        own = dict(classification="classification", diffusion=run.config.get("objective", "noise"))
        kinds[own.get(run.kind, "text")] = True
    if len(kinds) > 1:
        return f"losses of {' and '.join(kinds)}, which have no common scale"
    return "loss, nats per token" if "text" in kinds else "loss"


def scores_over(runs: Sequence[ScoredRun], key: str, names: Optional[Sequence[str]]) -> Tuple[List[Line], str]:
    """Return lines of the first score that the runs have, over the numbers at a key of theirs, and the label of y."""
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
    """Draw lines with bands; a solid line has the colour of the dotted one before it."""
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    number, paired = -1, False
    for line in lines:
        number += line.dotted or not paired
        paired, colour, found = line.dotted, f"C{number % 10}", line.numbers()
        look = dict(linewidth=1, linestyle=":") if line.dotted else dict(linewidth=1.6, marker="o", markersize=3)
        axes.plot(found["x"], found["mean"], color=colour, label=line.name, **look)
        mean, std = np.array(found["mean"]), np.array([s or 0.0 for s in found["std"]])
        if std.any() and not line.dotted:  # bands of training losses hide the rest
            axes.fill_between(found["x"], mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(x)
    if axes.get_xlim()[1] >= 10_000:  # steps, tokens
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    add_legend(figure, axes, ncols=1 if len(lines) < 7 else 2)
    return figure
