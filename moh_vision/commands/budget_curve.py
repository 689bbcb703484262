"""Score and latency of trained models over the share of active heads.

python -m moh_vision budget-curve RUN [RUN ...] --output curve.png

RUN comes first: runs of classifiers, scored on validation images, of language models, on validation
text, or of diffusion models, on samples. Options of validate.py are taken too, for text only --data.*
and precision; diffusion takes those of sample.py and needs --score REFERENCE. Shared heads stay; see
`set_head_budget` for how a share is spread. A ring marks the saved share; a dense model is one point.
Latency: median and quartiles of a batch's forward, over rounds in which all models and shares take turns.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from moh_vision.attention import (
    HeadBudget,
    ModelBudgets,
    attention_layers,
    budgets_at,
    model_budgets,
    running,
)
from moh_vision.attention.budget import parse_share
from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import plt
from moh_vision.commands.runs import COLUMNS
from moh_vision.commands.search import refuse_budget
from moh_vision.common.io import run_of
from moh_vision.common.progress import say
from moh_vision.engine.opened import Opened
from moh_vision.models.pretrained import is_dense
from moh_vision.opening import kind_of, open_run

REST = "RUN"
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
ROUNDS = 15
VISIT = 0.1  # seconds of one look at the clock
DRAWN = ("top1", "fid", "fd", "frechet_distance", "recognised", "perplexity")  # the first one found


class Timed(NamedTuple):
    """A model that is timed at one share of its heads."""

    milliseconds: list[float]
    """One number a round, in the end their quartiles."""
    model: nn.Module
    budgets: ModelBudgets
    forward: Callable[[], object]
    """Runs the model on one batch."""


def budgets_of(model: nn.Module, shares: Sequence[str] | None) -> dict[float, ModelBudgets]:
    """Find budgets by the share of heads that they run, the model's own among them.

    Shares are rounded to whole heads. A plain number keeps the shape of the model's budget. None: the allowed ones of
    SHARES. A dense model has one share. Groups of routed MLPs run at the same share as the heads.
    """
    saved = model_budgets(model)
    if is_dense(model):
        return {1.0: saved}
    if not any(budget.candidates for budget in saved.chosen):
        raise ValueError(
            f"{type(model).__name__} has no routed heads to be chosen; moh_vision.convert gives it some"
        )
    heads = sum(budget.heads for budget in saved.chosen)

    def allowed(share: str) -> ModelBudgets | None:
        try:
            return budgets_at(model, share)
        except ValueError:
            return None

    found = {share: allowed(share) for share in shares or map(str, SHARES)}
    for share in shares or ():
        if found[share] is None:
            shape, colon, _ = share.rpartition(":")
            every_share = (k / heads for k in range(1, heads + 1))
            least = next(one for one in every_share if allowed(f"{shape}{colon}{one}"))
            raise ValueError(
                f"--shares {share}: with the shared heads of this model allowed is {least:.3f} to 1"
            )
    by_share = {}
    for budgets in (*filter(None, found.values()), saved):
        by_share[budgets.share] = budgets
    return dict(sorted(by_share.items()))


def measure(
    names: Sequence[str], opened: Sequence[Opened], shares: Sequence[str] | None
) -> list[dict]:
    """Score and time the models of runs at `budgets_of`; check all budgets first."""
    passes = [one.forward() for one in opened]  # also opens what scores
    budgets = []
    for name, one in zip(names, opened):
        try:
            budgets.append(budgets_of(one.model, shares))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    data = [one.scored_on.format(c=one.config) for one in opened]
    for name, one, text in zip(names, opened, data):
        say(f"{name}: weights of {one.metadata['weights']}; scored on {text}")
    lines = []
    timed: list[Timed] = []
    for name, one, text, (forward, size), by_share in zip(names, opened, data, passes, budgets):
        first = attention_layers(one.model)[0]
        line = dict(
            run=name,
            weights=one.metadata["weights"],
            model=one.metadata["architecture"],
            data=text,
            batch_size=size,
            scope=first.scope,
            executor=first.executor,
            share=model_budgets(one.model).share,
            shares=list(by_share),
            layers=[pairs(budgets.heads) for budgets in by_share.values()],
            mlps=[pairs(budgets.groups) for budgets in by_share.values()],
            scores=[],
            milliseconds=[[] for _ in by_share],
        )
        for (share, chosen), times in zip(by_share.items(), line["milliseconds"]):
            with running(one.model, chosen):
                scores = one.scores()
            line["scores"].append(plain_values(scores))
            texts = []
            for key in DRAWN:
                if scores.get(key) is not None:
                    texts.append(f"{COLUMNS[key].title} {scores[key]:.4g}")
            say(f"{name}: {100 * share:5.1f} % of the heads, {', '.join(texts)}")
            timed.append(Timed(times, one.model, chosen, forward))
        lines.append(line)
    take_turns(timed)
    for line in lines:
        for share, (low, middle, high) in zip(line["shares"], line["milliseconds"]):
            say(
                f"{line['run']}: {100 * share:5.1f} % of the heads, {middle:.4g} ({low:.4g} to {high:.4g}) ms a batch"
            )
    return lines


def pairs(budgets: Sequence[HeadBudget]) -> list[list[int]]:
    """Return [shared, routed] of every layer."""
    return [[budget.shared, budget.routed] for budget in budgets]


def plain_values(scores: dict) -> dict:
    """Keep the numbers and texts of scores; lists are long, and nothing draws them."""
    return {key: value for key, value in scores.items() if isinstance(value, (int, float, str))}


def take_turns(timed: Sequence[Timed]) -> None:
    """Time forward passes in rounds, each in another order; write quartiles into their `milliseconds`."""
    from torch.utils.benchmark import Timer  # warns of a CUDA toolkit without a GPU

    threads = torch.get_num_threads()
    for number in range(ROUNDS + 1):
        for one in random.Random(number).sample(timed, len(timed)):
            timer = Timer("run()", globals={"run": one.forward}, num_threads=threads)
            with running(one.model, one.budgets), torch.no_grad():
                seconds = timer.blocked_autorange(min_run_time=VISIT).mean  # waits for a GPU
            if number:  # the first round warms up
                one.milliseconds.append(1000 * seconds)
    for one in timed:
        one.milliseconds[:] = np.quantile(one.milliseconds, [0.25, 0.5, 0.75]).tolist()


def draw(lines: Sequence[dict]):
    """Draw the results of `measure`: scores above, latency below, one colour per model."""
    every = [scores for line in lines for scores in line["scores"]]
    key = next(key for key in DRAWN if all(scores.get(key) is not None for scores in every))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(6.4, 6.4), sharex=True, layout="constrained"
    )
    for number, line in enumerate(lines):
        percents = [100 * share for share in line["shares"]]
        values = [scores[key] for scores in line["scores"]]
        low, middle, high = zip(*line["milliseconds"])
        look = dict(color=f"C{number}", marker="o")
        label = f"{Path(line['run']).name}, {line['scope']} scope"
        if line["shares"] == [1.0]:
            label = f"{Path(line['run']).name}, all heads"
        above.plot(percents, values, markersize=4, label=label, **look)
        quartiles = (np.subtract(middle, low), np.subtract(high, middle))
        below.errorbar(percents, middle, quartiles, markersize=4, capsize=3, **look)
        saved = line["shares"].index(line["share"])
        for axes, value in ((above, values[saved]), (below, middle[saved])):
            axes.plot(percents[saved], value, markersize=10, fillstyle="none", **look)
    above.set_ylabel(COLUMNS[key].title)
    above.legend(fontsize=8)
    below.set_ylabel(f"forward pass, ms per batch of {lines[0]['batch_size']}")
    below.set_ylim(bottom=0)
    below.set_xlabel("active heads, % (ring: as saved)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    return figure


def options(add) -> None:
    add("runs", nargs="+", metavar="RUN", help="a run, or its checkpoint; they come first")
    known = ", ".join(f"{share:g}" for share in SHARES)
    add(
        "--shares",
        nargs="+",
        metavar="S",
        help=f"share of active heads, or uniform:S (those allowed of {known})",
    )


def figure(options) -> Drawn:
    for share in options.shares or ():
        try:
            # parse_share also reads a share of shared heads: those stay as they are.
            understood = parse_share(share).shared is None
        except ValueError:
            understood = False
        if not understood:
            raise ValueError(
                f"--shares {share}: expected above 0 and up to 1, or uniform:S or ramp:S"
            )
    wings = [kind_of(run, options.rest) for run in options.runs]
    if len(set(wings)) > 1:
        raise ValueError(
            f"{', '.join(options.runs)} are runs of {', '.join(wings)}: one figure has one kind"
        )
    opened: list[Opened] = []
    for run in options.runs:
        given = options.rest
        if opened and wings[0] == "classification" and not (run_of(run) / "config.yaml").is_file():
            # A folder that is no run has neither data nor a precision: take the first run's.
            first = opened[0].config
            root = ["--data.root", first.data.root]
            given = [*root, "--mixed_precision", first.mixed_precision, *given]
        opened.append(
            open_run(run, options=given, split="val", scores=True, command="budget-curve")
        )
        refuse_budget(opened[-1], "--shares")
    data = {one.config.data.root for one in opened if one.kind != "diffusion"}
    if len(data) > 1:
        raise ValueError(
            f"runs would be scored on {' and on '.join(sorted(data))}; --data.root says one for all"
        )
    lines = measure(options.runs, opened, options.shares)
    return Drawn(draw(lines), dict(rounds=ROUNDS, torch=torch.__version__, lines=lines))
