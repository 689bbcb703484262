"""What heads are worth and what they cost: score and latency of trained models over the share of their heads that runs.

python -m moh_vision budget-curve RUN [RUN ...] --output curve.png

RUN is a run of a classifier, scored on its validation images, of a diffusion model, whose samples are scored, or of a
language model, scored on its validation text; runs of one kind are lines of one figure. They come first. --data.root
and the other options of validate.py are taken too, of text --data.* and precision, for diffusion those of sample.py:
--score REFERENCE is needed, --num-images and --steps say how long it takes. The shared heads of a model stay, so that
it cannot run fewer than these and one routed head per layer; `set_head_budget` says how a share is spread over the
layers. A dense model is one point at 100 %. A ring marks the share that the run was saved with.

Latency is that of one forward pass of a batch, as the model's executor computes it: the median over rounds in which all
models and shares take turns, with quartiles.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

from moh_vision.attention import HeadBudget, attention_layers, head_budget, running
from moh_vision.attention.budget import change_routed, parse_share
from moh_vision.commands.figures import check_figure, plt, write_figure
from moh_vision.commands.runs import COLUMNS
from moh_vision.commands.search import kind_of
from moh_vision.engine.commands import Parser, exit_code, say

SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
ROUNDS = 15
VISIT = 0.1  # seconds of one look at the clock
DRAWN = ("top1", "fid", "fd", "frechet_distance", "recognised", "perplexity")  # the first of these that there is


class Scored(NamedTuple):
    """A model and what scores it, opened for a curve."""

    model: nn.Module
    scores_of: Callable[[], Dict[str, object]]  # of the model with the heads that run at that moment
    forward: Callable[[], object]  # one pass of a batch
    about: dict  # weights, model, batch_size, and what the scores are of


def budgets_of(model: nn.Module, shares: Optional[Sequence[str]]) -> Dict[float, Tuple[HeadBudget, ...]]:
    """The budgets of a curve by the share of heads that they run, which is as near to the share asked for as whole heads
    come; the model's own among them.

    Args:
        shares: each as `set_head_budget` takes it, such as "0.5" or "uniform:0.5". A plain number is spread over the
            layers as the model's own share: uniform where it was made so, else as the papers' ramp. None: those of
            SHARES that the model allows. A model that always runs all heads has this share alone.

    Raises:
        ValueError: for a model without routed heads, or a share that its shared heads do not allow, naming the least.
    """
    layers = attention_layers(model)
    own = tuple(layer.budget for layer in layers)
    if all(layer.router.all_heads for layer in layers):
        return {1.0: own}
    if not any(b.candidates for b in own):
        raise ValueError(f"{type(model).__name__} has no routed heads to be chosen; moh_vision.convert gives it some")
    groups = [getattr(layer.router, "group", 1) for layer in layers]
    heads = sum(b.heads for b in own)
    spec = getattr(model, "head_budget_spec", None)  # language models keep pairs alone
    uniform = len({(b.heads, b.active) for b in own}) == 1 if spec is None else str(spec).startswith("uniform:")
    kind = "uniform:" if uniform else "ramp:"

    def spread(share: str) -> Optional[Tuple[HeadBudget, ...]]:
        try:
            return change_routed(share if ":" in share else kind + share, own, groups)
        except ValueError:
            return None

    found = {share: spread(share) for share in shares or map(str, SHARES)}
    for share in shares or ():
        if found[share] is None:
            of = share.rpartition(":")[0] + ":" if ":" in share else kind
            least = next(f"{k / heads:.3f}" for k in range(1, heads + 1) if spread(f"{of}{k / heads}"))
            raise ValueError(f"--shares {share}: with the shared heads of this model allowed is {least} to 1")
    every = {sum(b.active for b in budgets) / heads: budgets for budgets in [*filter(None, found.values()), own]}
    return {share: every[share] for share in sorted(every)}


def latencies(
    opened: Sequence[Scored], budgets: Sequence[Dict[float, Tuple[HeadBudget, ...]]]
) -> List[List[List[float]]]:
    """Milliseconds of a forward pass: the lower quartile, the median and the upper one, by model and share."""
    places = [(i, share) for i, of in enumerate(budgets) for share in of]
    taken: Dict[Tuple[int, float], List[float]] = {place: [] for place in places}
    for number in range(ROUNDS + 1):
        for i, share in random.Random(number).sample(places, len(places)):
            one = opened[i]
            with running(one.model, budgets[i][share]), torch.no_grad():
                milliseconds = 1000 * seconds_of(one.forward)
            if number:  # the first round warms up
                taken[i, share].append(milliseconds)
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return [
        [torch.tensor(taken[i, share], dtype=torch.float64).quantile(quartiles).tolist() for share in of]
        for i, of in enumerate(budgets)
    ]


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds that `run` takes, repeated for a moment; on a GPU the device is waited for."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=VISIT).mean


def measure(names: Sequence[str], opened: Sequence[Scored], shares: Optional[Sequence[str]]) -> List[dict]:
    """Scores and latency of each model.

    Args:
        names: of the runs.
        opened: their models.
        shares: see `budgets_of`.

    Returns:
        for each model a dict of run (its name), what `Scored.about` says, scope, executor, share (its own), and lists over
        the shares: shares, layers ([shared, routed] of each layer), scores, milliseconds ([lower quartile, median, upper
        quartile] of a forward pass of one batch).

    Raises:
        ValueError: naming the run, before anything is scored, see `budgets_of`.
    """
    budgets = []
    for name, one in zip(names, opened):
        try:
            budgets.append(budgets_of(one.model, shares))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name, one in zip(names, opened):
        say(f"{name}: weights of {one.about['weights']}")
    scores: List[List[dict]] = []
    for name, one, of in zip(names, opened, budgets):
        scores.append([])
        for share, chosen in of.items():
            with running(one.model, chosen):
                found = one.scores_of()
            scores[-1].append({key: value for key, value in found.items() if isinstance(value, (int, float, str))})
            shown = ", ".join(f"{COLUMNS[key][0]} {found[key]:.4g}" for key in DRAWN if found.get(key) is not None)
            say(f"{name}: {100 * share:5.1f} % of the heads, {shown}")
    times = latencies(opened, budgets)
    lines = []
    for name, one, of, found, milliseconds in zip(names, opened, budgets, scores, times):
        layers = attention_layers(one.model)
        about = dict(run=name, **one.about, scope=layers[0].scope, executor=layers[0].executor)
        pairs = [[[b.shared, b.routed] for b in chosen] for chosen in of.values()]
        own = head_budget(one.model)["share"]
        lines.append(
            {**about, "share": own, "shares": list(of), "layers": pairs, "scores": found, "milliseconds": milliseconds}
        )
    return lines


def draw(lines: Sequence[dict]):
    """The figure of what `measure` found: scores above, latency below, one colour a model."""
    every = [scores for line in lines for scores in line["scores"]]
    key = next(key for key in DRAWN if all(scores.get(key) is not None for scores in every))
    figure, (above, below) = plt.subplots(2, 1, figsize=(6.4, 6.4), sharex=True, layout="constrained")
    for number, line in enumerate(lines):
        x, colour = [100 * share for share in line["shares"]], f"C{number}"
        own = line["shares"].index(line["share"])
        y = [scores[key] for scores in line["scores"]]
        low, middle, high = zip(*line["milliseconds"])
        which = "all heads" if line["shares"] == [1.0] else f"{line['scope']} scope"
        above.plot(x, y, color=colour, marker="o", markersize=4, label=f"{Path(line['run']).name}, {which}")
        below.plot(x, middle, color=colour, marker="o", markersize=4)
        below.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        for axes, value in ((above, y[own]), (below, middle[own])):
            axes.plot(x[own], value, color=colour, marker="o", markersize=10, fillstyle="none")
    above.set_ylabel(COLUMNS[key][0])
    below.set_ylabel(f"forward pass, ms per batch of {lines[0]['batch_size']}")
    below.set_ylim(bottom=0)
    below.set_xlabel("active heads, % (ring: as saved)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend(fontsize=8)
    return figure


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision budget-curve", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run, or its checkpoint; they come first")
    add("--output", type=Path, required=True, metavar="FILE", help="PNG or SVG; the numbers go to a JSON beside it")
    shares = ", ".join(f"{share:g}" for share in SHARES)
    add(
        "--shares",
        nargs="+",
        metavar="S",
        help=f"active heads over all heads, or uniform:S (those allowed of {shares})",
    )

    def work() -> None:
        options, rest = parser.parse_with_rest(argv, "RUN")
        for share in options.shares or ():
            try:
                understood = parse_share(share)[2] is None  # the share of shared heads, which stay
            except ValueError:
                understood = False
            if not understood:
                raise ValueError(f"--shares {share}: expected above 0 and up to 1, or uniform:S or ramp:S")
        check_figure("--output", options.output)
        kinds = [kind_of(run, rest) for run in options.runs]
        for run, kind in zip(options.runs, kinds):
            if kind != kinds[0]:
                raise ValueError(f"{options.runs[0]} is a {kinds[0]} run, {run} a {kind} run: one figure has one kind")
        opener = registered("scores", kinds[0])
        if opener is None:
            raise ValueError(
                f"{options.runs[0]} is a {kinds[0]} run; expected runs of a classifier or a diffusion model"
            )
        opened = [opener(["--checkpoint", run, *rest]) for run in options.runs]
        lines = measure(options.runs, opened, options.shares)
        say(write_figure(draw(lines), options.output, dict(rounds=ROUNDS, torch=torch.__version__, lines=lines)))

    return exit_code("budget_curve", work)


if __name__ == "__main__":
    raise SystemExit(main())
