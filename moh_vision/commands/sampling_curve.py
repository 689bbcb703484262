"""Scores of samples over an option of sampling: which guidance, interval, sampler, steps, cache, or average of the weights.

    python -m moh_vision sampling-curve RUN --over cfg_scale 1 1.5 2 3 --score REFERENCE --output curve.png
    python -m moh_vision sampling-curve RUN OTHER_RUN --over steps 5 10 25 50 --score REFERENCE --output steps.png
    python -m moh_vision sampling-curve RUN --over cfg_interval 0,1 0.1,0.8 --cfg-scale 2 --score REFERENCE --output cut.png

RUN comes first: runs of diffusion models, or what sample.py opens. Other options are those of sample.py;
--num-images says how many samples each value has. All values draw the same noises: the score is the mean
over --noises of them. The best value is ringed. Values whose score differs from the best one's by at
most twice the standard error of the differences, noise by noise, are named: they are as good.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moh_vision.attention import model_budgets
from moh_vision.commands.budget_curve import measured_calls
from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import Line, add_legend, plot_lines, plt
from moh_vision.commands.runs import COLUMNS
from moh_vision.common.errors import closest
from moh_vision.common.progress import say
from moh_vision.common.wings import DIFFUSION
from moh_vision.diffusion.opening import OpenedDiffusion
from moh_vision.engine.command_line import named_options
from moh_vision.models.describe import aligned
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights

REST = "RUN"
# Options of sample.py that change the samples of given noises and labels.
OVER = (
    "cfg_scale",
    "cfg_interval",
    "steps",
    "sampler",
    "weights",
    "guide",
    "guide_scale",
    "guide_channels",
    "cache",
)
BUDGETS = ("head_budget", "mlp_budget")
# Scores that are drawn, of those that the extractor computes. The first one decides which value is best.
SCORES = ("fid", "fd", "frechet_distance", "recognised", "inception_score", "precision", "recall")
LOWER_IS_BETTER = ("fid", "fd", "frechet_distance")


class Point(NamedTuple):
    """What was measured at one value of the option.

    Attributes:
        value: as it was given.
        scores: by name of SCORES, one for each noise.
        seconds: that drawing an image took, one for each noise.
    """

    value: str
    scores: dict[str, list[float]]
    seconds: list[float]


def options(add) -> None:
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run, or another --checkpoint of sample.py; they come first",
    )
    add(
        "--over",
        nargs="+",
        required=True,
        metavar=("OPTION", "VALUE"),
        help=f"one of {', '.join(OVER)}, and its values; an interval is two numbers with a comma",
    )
    add(
        "--noises",
        type=int,
        default=3,
        metavar="N",
        help="seeds of each value, from --seed on (%(default)s)",
    )


def figure(options) -> Drawn:
    key, values = parse_over(options.over)
    if options.noises < 1:
        raise ValueError(f"--noises {options.noises}: expected 1 or more")
    for name, texts in named_options(options.rest):
        if name == key:
            raise ValueError(f"{name} {' '.join(texts)} has no effect: --over says its values")
    opened = [open_all(run, key, values, options) for run in options.runs]
    lines = []
    numbers = []
    text = ""
    for run, by_value in zip(options.runs, opened):
        first = by_value[0][0]
        data = first.scored_on.format(c=first.config)
        say(f"{run}: weights of {first.metadata['weights']}; scored on {data}")
        points = score_all(by_value, values)
        lines.append(points)
        text += "\n" + "\n".join(in_words(run, key, points))
        numbers.append(
            dict(
                run=run,
                weights=first.metadata["weights"],
                model=first.metadata["architecture"],
                data=data,
                over=key,
                values=values,
                seeds=[one.config.seed for one in by_value[0]],
                scores={
                    name: [point.scores[name] for point in points] for name in points[0].scores
                },
                seconds=[point.seconds for point in points],
            )
        )
    return Drawn(draw(options.runs, key, lines), dict(torch=torch.__version__, lines=numbers), text)


def parse_over(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the option of --over, as a key of sample.py, and its values; ValueError for what cannot be."""
    name, *values = texts
    key = name.replace("-", "_")
    if key in BUDGETS:
        said = "the command budget-curve draws scores over the share of heads and groups"
        raise ValueError(f"--over {name}: {said}")
    if key not in OVER:
        raise ValueError(f"--over {name}: {closest(key, OVER)}; allowed are {', '.join(OVER)}")
    if len(values) < 2:
        raise ValueError(f"--over {' '.join(texts)}: expected two values or more")
    seen = []
    for value in values:
        if key == "cfg_interval" and len(value.split(",")) != 2:
            said = "expected two numbers with a comma, such as 0.1,0.8"
            raise ValueError(f"--over {name} {value}: {said}")
        same = as_number(value)
        if same in seen:
            raise ValueError(f"--over {name} {value}: the value is given twice")
        seen.append(same)
    return key, values


def as_number(text: str) -> float | str:
    """Return the number that a text is, or else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def open_all(run: str, key: str, values: Sequence[str], options) -> list[list[OpenedDiffusion]]:
    """Open a run for each value and each noise; the model, its VAE and the reference are read once.

    All options are checked before the first image is drawn.
    """
    found = find_weights(run, wing=DIFFUSION.name, key="RUN")
    first = None
    by_value = []
    for value in values:
        texts = value.split(",") if key == "cfg_interval" else [value]
        asked = [*options.rest, f"--{key}", *texts]
        if first is None:
            first = open_weights(found, asked, scores=True, command="sampling-curve")
        of_value = []
        for noise in range(options.noises):
            seed = str(first.config.seed + noise)
            one = first.drawn_with([*asked, "--seed", seed], "sampling-curve")
            one.open_drawing()
            of_value.append(one)
        by_value.append(of_value)
    return by_value


def score_all(by_value: Sequence[Sequence[OpenedDiffusion]], values: Sequence[str]) -> list[Point]:
    """Draw and score the samples of every value and noise, one noise after another.

    A slow phase of the machine then falls on all values alike.
    """
    of_first_noise = [of_value[0] for of_value in by_value]
    passes = [one.make_forward() for one in of_first_noise]
    budgets = [{1.0: model_budgets(one.model)} for one in of_first_noise]
    points = [Point(value, {}, []) for value in values]
    with measured_calls(of_first_noise, passes, budgets):
        for of_noise in zip(*by_value):
            for point, one in zip(points, of_noise):
                scores = one.scores()
                for name in SCORES:
                    if scores.get(name) is not None:
                        point.scores.setdefault(name, []).append(scores[name])
                point.seconds.append(one.seconds / one.config.num_images)
    return points


def best_of(points: Sequence[Point], score: str) -> Point:
    """Return the point with the best mean of a score."""
    sign = 1 if score in LOWER_IS_BETTER else -1
    return min(points, key=lambda point: sign * statistics.mean(point.scores[score]))


def not_told_apart(points: Sequence[Point], best: Point, score: str) -> list[Point]:
    """Return the points whose score differs from the best one's by at most twice the standard error.

    The differences are those of equal noises. Of one noise nothing can be said, and no point is returned.
    """
    near = []
    for point in points:
        differences = [a - b for a, b in zip(point.scores[score], best.scores[score])]
        if point is best or len(differences) < 2:
            continue
        error = statistics.stdev(differences) / len(differences) ** 0.5
        if abs(statistics.mean(differences)) <= 2 * error:
            near.append(point)
    return near


def with_spread(values: Sequence[float], digits: int = 2) -> str:
    """Write the mean, and the standard deviation if there are several values."""
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text


def in_words(run: str, key: str, points: Sequence[Point]) -> list[str]:
    """Return a table of the points of a run as lines, and a line on the best of them."""
    names = list(points[0].scores)
    rows = [(key, *(COLUMNS[name].title for name in names), "ms an image")]
    for point in points:
        cells = [with_spread(point.scores[name], COLUMNS[name].digits) for name in names]
        rows.append((point.value, *cells, with_spread([1000 * s for s in point.seconds], 1)))
    score = names[0]
    best = best_of(points, score)
    noises = len(best.seconds)
    said = f"best {key}: {best.value}, {COLUMNS[score].title} {with_spread(best.scores[score])} over {noises} noises"
    near = not_told_apart(points, best, score)
    if noises == 1:
        said = f"best {key}: {best.value}; of one noise, whose spread is unknown: --noises 3"
    elif near:
        said += f"; as good within their spread: {', '.join(point.value for point in near)}"
    return [f"{run}:", *aligned(rows), said]


def draw(runs: Sequence[str], key: str, lines: Sequence[Sequence[Point]]):
    """Draw the scores that all runs have, and the time of an image, each over the values; a ring marks the best."""
    every_point = [point for points in lines for point in points]
    names = [name for name in SCORES if all(name in point.scores for point in every_point)]
    values = [as_number(point.value) for point in lines[0]]
    are_numbers = not any(isinstance(value, str) for value in values)
    positions = values if are_numbers else list(range(len(values)))
    figure, panels = plt.subplots(
        len(names) + 1, 1, figsize=(6.4, 2.4 * (len(names) + 1)), sharex=True, layout="constrained"
    )
    for axes, name in zip(panels, [*names, "milliseconds"]):
        drawn = []
        for number, (run, points) in enumerate(zip(runs, lines)):
            measured = [point.scores.get(name) for point in points]
            if name == "milliseconds":
                measured = [[1000 * seconds for seconds in point.seconds] for point in points]
            colour = f"C{number % 10}"
            drawn.append(Line(Path(run).name, dict(zip(positions, measured)), colour))
            if name == names[0]:
                best = points.index(best_of(points, name))
                mean = statistics.mean(measured[best])
                axes.plot(positions[best], mean, "o", markersize=10, fillstyle="none", color=colour)
        plot_lines(axes, drawn)
        axes.set_ylabel(COLUMNS[name].title if name in COLUMNS else "ms an image")
    panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel(f"{key} (ring: the best)")
    if not are_numbers:
        panels[-1].set_xticks(positions, [point.value for point in lines[0]])
    add_legend(figure, panels[0])
    return figure
