"""Learning curves of runs over epochs or steps, or their last scores over a key.

    python -m moh_vision curves RUN RUN ... --output curves.png
    python -m moh_vision curves RUN RUN ... --over data.share --output share.png
    python -m moh_vision curves RUN --beside quickstart/cls --output curves.png

Training losses are dotted, validation losses solid (Peng 2020 (MAE), figure 3); for text both are
nats per token without smoothed labels. Only text runs, from their second epoch on, have epochs.
--over draws the first score in the command table that all have (figure 2). Runs that differ only in
the seed make one line, in a band of one standard deviation. --beside adds the log that ships with
a configuration, of one run of it.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import Line, draw_lines, lines_of
from moh_vision.commands.runs import (
    COLUMNS,
    NAMES,
    ScoredRun,
    find_run,
    grouped,
    number_at,
    read_lines,
    read_runs,
)
from moh_vision.common.errors import closest
from moh_vision.engine.command_line import SHIPPED

Points = list[tuple[float, float]]  # (steps done, loss)


def options(add) -> None:
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add(
        "--over",
        metavar="KEY",
        help="last scores over this key of the configuration, such as data.share",
    )
    add(
        "--beside",
        metavar="NAME",
        help="also the log that ships with a configuration, such as quickstart/cls",
    )
    add("--names", nargs="+", metavar="NAME", help=NAMES)
    add(
        "--window",
        type=int,
        default=1,
        metavar="N",
        help="mean of so many logged training losses (%(default)s)",
    )


def figure(options) -> Drawn:
    if options.window < 1:
        raise ValueError(f"--window {options.window}: expected 1 or more")
    if options.over and options.beside:
        raise ValueError(f"--beside {options.beside} has no effect with --over: a log has losses")
    if options.over:
        x = options.over
        lines, y = scores_over(read_runs(options.runs), x, options.names)
    else:
        runs = [find_run(folder) for folder in options.runs]
        groups = grouped(runs, names=options.names)
        logs = [(name, [run.folder / "metrics.jsonl" for run in group]) for name, group in groups]
        if options.beside:
            logs.append((f"{options.beside} as shipped", [shipped_log(options.beside)]))
        lines, x = learning_curves(logs, options.window)
        y = loss_label(runs)
    folders = [str(folder) for folder in options.runs]
    numbers = dict(x=x, y=y, runs=folders, lines=[line.numbers() for line in lines])
    return Drawn(draw_lines(lines, x, y), numbers, f": {len(lines)} lines over {x}")


def shipped_log(name: str) -> Path:
    """Return the path of the log that ships with a configuration; `name` is as --config takes it."""
    file = SHIPPED / f"{name.removeprefix('configs/').removesuffix('.yaml')}.jsonl"
    if not file.is_file():
        there = sorted(f"{log.parent.name}/{log.stem}" for log in SHIPPED.glob("*/*.jsonl"))
        raise ValueError(f"--beside {name}: no such log; there are {', '.join(there)}")
    return file


def read_curves(file: Path) -> tuple[dict[str, Points], float | None]:
    """Read the losses in a log, and the mean number of steps per epoch, None if no second epoch has begun."""
    losses: dict[str, Points] = dict(training=[], validation=[])
    began = {0.0: 0.0}  # epoch -> steps before it
    before = 0.0  # the last step logged
    for entry in read_lines(file):
        step = number_at(entry, ("step",), file)
        epoch = number_at(entry, ("epoch",), file)
        if step is None:
            raise ValueError(f"{file}: a line without step")
        # "nll" is the loss without label smoothing; only text runs log it.
        training_loss = number_at(entry, ("nll" if "nll" in entry else "loss",), file)
        validation_loss = number_at(entry, ("validation", "loss"), file)
        if training_loss is not None:  # a skipped step has null
            losses["training"].append((step, training_loss))
        if validation_loss is not None:
            losses["validation"].append((step, validation_loss))
        if epoch is not None:
            # An epoch began between the last logged step and this one: take the middle.
            began.setdefault(epoch, (before + step - 1) / 2)
            before = step
    if not losses["training"]:
        raise ValueError(f"{file}: no line has a loss")
    last = max(began)
    if last == 0:
        return losses, None
    return losses, began[last] / last


def running_mean(points: Points, window: int) -> Points:
    """Average each value with the `window` - 1 values before it, because losses of single batches are noisy."""
    values = [value for _, value in points]
    return [
        (x, float(np.mean(values[max(0, i + 1 - window) : i + 1])))
        for i, (x, _) in enumerate(points)
    ]


def learning_curves(files: Sequence[tuple[str, list[Path]]], window: int) -> tuple[list[Line], str]:
    """Return the lines of training and validation losses, and the label of x.

    Args:
        files: (name, logs) of each group; a group makes one line of each loss.
        window: how many logged training losses are averaged.
    """
    logs = [(name, [read_curves(file) for file in group]) for name, group in files]
    over_epochs = all(steps for _, group in logs for _, steps in group)
    label = "epochs" if over_epochs else "steps"
    lines = []
    for number, (name, group) in enumerate(logs):
        unit = 1  # steps
        if over_epochs:
            # The steps per epoch differ a little between seeds. With one unit for the whole group, equal steps have
            # equal x and are averaged.
            unit = statistics.mean(steps for _, steps in group)
        for split, length in dict(training=window, validation=1).items():
            losses = [point for curves, _ in group for point in running_mean(curves[split], length)]
            points = [(f"{name}, {split}", step / unit, loss) for step, loss in losses]
            lines += lines_of(points, colour=f"C{number % 10}", dotted=split == "training")
    return lines, label


def loss_label(runs: Sequence[ScoredRun]) -> str:
    """Return the label of y; if the runs have different losses, it names them."""
    losses = []
    for run in runs:
        if run.wing == "diffusion":
            losses.append(run.config.get("objective", "noise"))
        else:
            losses.append(run.wing)
    losses = list(dict.fromkeys(losses))
    if len(losses) > 1:
        return f"losses of {' and '.join(losses)} (no common scale)"
    if losses == ["text"]:
        return "loss, nats per token"
    return "loss"


def scores_over(
    runs: Sequence[ScoredRun], key: str, names: list[str] | None
) -> tuple[list[Line], str]:
    """Return lines of the first score that all runs have over the value of a key, and the label of y."""
    for run in runs:
        if key not in run.config:
            raise ValueError(
                f"--over {key}: no such key in {run.folder / 'config.yaml'}: {closest(key, run.config)}"
            )
        value = run.config[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"--over {key}: {run.folder} has {value!r} there; expected a number")
    score = next(
        (score for score in COLUMNS if all(run.scores.get(score) is not None for run in runs)), None
    )
    if score is None:
        raise ValueError(f"{', '.join(str(run.folder) for run in runs)} have no score in common")
    groups = grouped(runs, key, names)
    points = [(name, run.config[key], run.scores[score]) for name, group in groups for run in group]
    return lines_of(points), COLUMNS[score].title
