"""Score and latency of trained models over the share of active heads, and of groups where MLPs are routed.

python -m moh_vision budget-curve RUN [RUN ...] --output curve.png

RUN comes first: runs of classifiers, scored on validation images, of language models, on validation
text, or of diffusion models, on samples. Options of validate.py are taken too, for text only --data.*
and precision; diffusion takes those of sample.py and needs --score REFERENCE. Shared heads stay; see
`set_head_budget` for how a share is spread. A ring marks the saved share; a dense model is one point.
Latency: median and quartiles of a batch's forward, of diffusion of a step of drawing, guidance included,
over rounds in which all models and shares take turns.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

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
from moh_vision.attention.measure import collect, measured_table
from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import plt
from moh_vision.commands.runs import COLUMNS
from moh_vision.commands.search import refuse_budget
from moh_vision.commands.timing import Timed, take_turns
from moh_vision.common.progress import say
from moh_vision.engine.attention_record import keep_settings
from moh_vision.engine.opened import Opened
from moh_vision.models.pretrained import runs_all_heads
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights, wing_of

REST = "RUN"
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
ROUNDS = 15
# The score that is drawn is the first of these that all runs have.
DRAWN = ("top1", "fid", "fd", "frechet_distance", "recognised", "perplexity")
# Of each run: a forward pass and its batch size, and the budgets by share.
Passes = Sequence[tuple[Callable[[], object], int]]
Budgets = Sequence[dict[float, ModelBudgets]]


def budgets_of(model: nn.Module, shares: Sequence[str] | None) -> dict[float, ModelBudgets]:
    """Return {share of heads: budgets of the layers}, sorted by share, the model's own budgets included.

    A model whose router runs all heads has one entry. Groups of routed MLPs run at the same share as the heads.

    Args:
        model: the model.
        shares: shares such as "0.75", which keeps the shape of the model's budget, or "uniform:0.75"; they are rounded
            to whole heads. None: those of SHARES that the model allows.
    """
    saved = model_budgets(model)
    if runs_all_heads(model) and not saved.groups:
        return {1.0: saved}
    if not any(budget.candidates for budget in saved.chosen):
        raise ValueError(
            f"{type(model).__name__} has no routed heads to be chosen; moh_vision.convert gives it some"
        )
    heads = sum(budget.heads for budget in saved.chosen)

    def allowed(share: str) -> ModelBudgets | None:
        """Return the budgets at a share, or None if the model's shared heads do not allow it."""
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
    names: Sequence[str],
    opened: Sequence[Opened],
    shares: Sequence[str] | None,
    rounds: int = ROUNDS,
) -> list[dict]:
    """Score and time the models of runs, in so many rounds, at the budgets that `budgets_of` returns.

    All budgets are checked before the first model is scored.
    """
    passes = [run.make_forward() for run in opened]  # this also opens the data for the scores
    budgets = []
    for name, run in zip(names, opened):
        try:
            budgets.append(budgets_of(run.model, shares))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    data = [run.scored_on.format(c=run.config) for run in opened]
    for name, run, text in zip(names, opened, data):
        say(f"{name}: weights of {run.metadata['weights']}; scored on {text}")
    with measured_calls(opened, passes, budgets):
        return _score_and_time(names, opened, passes, budgets, data, rounds)


@contextlib.contextmanager
def measured_calls(opened: Sequence[Opened], passes: Passes, budgets: Budgets) -> Iterator[None]:
    """Measure at every share for which attention calls skipping heads saves time; `auto` follows that in the context.

    Args:
        opened: the runs.
        passes: what `make_forward` of each returns.
        budgets: what `budgets_of` returns for each.
    """

    def table() -> tuple[dict, str]:
        calls: dict = {}
        seconds = 0.0
        for run, (forward, _), by_share in zip(opened, passes, budgets):
            for chosen in by_share.values():
                with running(run.model, chosen):
                    seconds += collect(calls, run.model, forward, training=False)
            for networks, scoring in run.passes_beside():
                collect(calls, networks, scoring, training=False)
        return measured_table(calls, seconds)

    accelerator = opened[0].accelerator
    with contextlib.ExitStack() as held:
        record = keep_settings(None, accelerator, held)
        if record and record.table is None:
            record.measure(table, None, accelerator)
        yield


def _score_and_time(
    names: Sequence[str],
    opened: Sequence[Opened],
    passes: Passes,
    budgets: Budgets,
    data: Sequence[str],
    rounds: int,
) -> list[dict]:
    """Return the results of `measure`; `data` says in words what each run is scored on."""
    lines = []
    timed: list[Timed] = []
    for name, run, text, (forward, size), by_share in zip(names, opened, data, passes, budgets):
        first = attention_layers(run.model)[0]
        line = dict(
            run=name,
            weights=run.metadata["weights"],
            model=run.metadata["architecture"],
            data=text,
            batch_size=size,
            scope=first.scope,
            executor=first.executor,
            parts=model_budgets(run.model).parts,
            share=model_budgets(run.model).share,
            shares=list(by_share),
            layers=[pairs(budgets.heads) for budgets in by_share.values()],
            mlps=[pairs(budgets.groups) for budgets in by_share.values()],
            scores=[],
            milliseconds=[[] for _ in by_share],
        )
        for chosen, times in zip(by_share.values(), line["milliseconds"]):
            with running(run.model, chosen):
                scores = run.scores()
            line["scores"].append(plain_values(scores))
            texts = []
            for key in DRAWN:
                if scores.get(key) is not None:
                    texts.append(f"{COLUMNS[key].title} {scores[key]:.4g}")
            say(f"{name}: {chosen}, {', '.join(texts)}")
            timed.append(Timed(times, forward, partial(running, run.model, chosen)))
        lines.append(line)
    with torch.no_grad():
        take_turns(timed, rounds)
    for line, by_share in zip(lines, budgets):
        for chosen, (low, middle, high) in zip(by_share.values(), line["milliseconds"]):
            say(f"{line['run']}: {chosen}, {middle:.4g} ({low:.4g} to {high:.4g}) ms a batch")
    return lines


def pairs(budgets: Sequence[HeadBudget]) -> list[list[int]]:
    """Return [shared, routed] of every layer."""
    return [[budget.shared, budget.routed] for budget in budgets]


def plain_values(scores: dict) -> dict:
    """Return the scores that are numbers or texts, for the JSON; lists are left out because they are long."""
    return {key: value for key, value in scores.items() if isinstance(value, (int, float, str))}


def draw(lines: Sequence[dict]):
    """Draw the results of `measure`: scores above, latency below, one colour per model."""
    all_scores = [scores for line in lines for scores in line["scores"]]
    key = next(key for key in DRAWN if all(scores.get(key) is not None for scores in all_scores))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(6.4, 6.4), sharex=True, layout="constrained"
    )
    for number, line in enumerate(lines):
        percents = [100 * share for share in line["shares"]]
        values = [scores[key] for scores in line["scores"]]
        low, middle, high = zip(*line["milliseconds"])
        look = dict(color=f"C{number}", marker="o")
        label = f"{Path(line['run']).name}, {line['scope']} scope"
        if line["parts"] != "heads":
            label += f", {line['parts']}"
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
    parts = "heads"
    if any(line["parts"] != "heads" for line in lines):
        parts = "heads or groups of MLPs"
    below.set_xlabel(f"active {parts}, % (ring: as saved)")
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
        help=f"share of active heads, and of the groups of routed MLPs, or uniform:S (those allowed of {known})",
    )
    add("--rounds", type=int, default=ROUNDS, metavar="N", help="of timing (%(default)s)")


def figure(options) -> Drawn:
    if options.rounds < 1:
        raise ValueError(f"--rounds {options.rounds}: expected 1 or more")
    for share in options.shares or ():
        try:
            # parse_share also accepts a share of shared heads, which this command does not change.
            understood = parse_share(share).shared is None
        except ValueError:
            understood = False
        if not understood:
            raise ValueError(
                f"--shares {share}: expected above 0 and up to 1, or uniform:S or ramp:S"
            )
    found = [find_weights(run, key="RUN") for run in options.runs]
    wings = [wing_of(weights, options.rest) for weights in found]
    if len(set(wings)) > 1:
        raise ValueError(
            f"{', '.join(options.runs)} are runs of {', '.join(wings)}: one figure has one kind"
        )
    opened: list[Opened] = []
    for weights in found:
        given = options.rest
        if opened and wings[0] == "classification" and weights.run is None:
            # A folder without config.yaml, such as a published one, names no data and no precision: take the first run's.
            first = opened[0].config
            root = ["--data.root", first.data.root]
            given = [*root, "--mixed_precision", first.mixed_precision, *given]
        opened.append(
            open_weights(weights, given, split="val", scores=True, command="budget-curve")
        )
        refuse_budget(opened[-1], "--shares", ("head_budget", "mlp_budget"))
        cache = getattr(opened[-1].config, "cache", "none")
        if cache != "none":
            raise ValueError(
                f"cache {cache} leaves blocks out in some steps, and budget-curve times one step with all of them: "
                "sampling-curve --over cache compares caches"
            )
    data = {one.config.data.root for one in opened if one.kind != "diffusion"}
    if len(data) > 1:
        raise ValueError(
            f"runs would be scored on {' and on '.join(sorted(data))}; --data.root says one for all"
        )
    lines = measure(options.runs, opened, options.shares, options.rounds)
    return Drawn(draw(lines), dict(rounds=options.rounds, torch=torch.__version__, lines=lines))
