"""Find a head budget for a trained model on a calibration set: which layers can spare heads.

python -m moh_vision search RUN --share 0.75 --output budget.yaml

RUN comes first: a run of a classifier, diffusion or causal language model (dense ones are converted,
the strongest heads shared), or a classifier's weights with --model.NAME. Options of validate.py are
taken too, such as --data.root. budget.yaml has one [shared, routed] per layer:
--model.head_budget "$(cat budget.yaml)". As many other images, or blocks of text, of the training
split compare it with the uniform budget and the papers' ramp of equally many heads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from moh_vision.attention import HeadBudget, attention_layers, layer_budgets, running
from moh_vision.attention.budget import spread
from moh_vision.attention.model_heads import head_groups
from moh_vision.engine.io import write_whole
from moh_vision.engine.opened import Opened
from moh_vision.engine.progress import Progress, say
from moh_vision.models.convert import convert
from moh_vision.models.pretrained import is_dense
from moh_vision.opening import open_run

REST = "RUN"
# For dense models: with half of the heads, few are shared, which stay and leave no choice.
CONVERTED = "uniform:0.5"
LossOf = Callable[[nn.Module], float]
Losses = dict[int, float]  # of a layer: its active heads -> loss, with all heads in other layers


def search_budget(
    model: nn.Module,
    loss_of: LossOf,
    share: float,
    progress: Callable[[int, Losses], None] = lambda layer, losses: None,
) -> tuple[list[int], list[Losses]]:
    """Find the active heads of each layer for the least sum of losses, measured layer by layer; return both.

    With L_l(k) the loss if layer l runs k heads and the others all, and L the loss of all heads, minimise

        sum_l (L_l(k_l) - L)    where  sum_l k_l = round(share * sum_l H_l),  shared_l < k_l <= H_l

    over all budgets, in 1 + sum_l (H_l - shared_l - 1) measurements: the loss itself, if layers act apart.
    Greedy removal needs convex L_l; measured ones are not. `progress` is called after each layer. The
    model is restored.
    """
    full = all_heads_of(model)
    fixed = any(layer.router.all_heads for layer in attention_layers(model))
    if fixed or not any(b.candidates for b in full):
        raise ValueError(
            f"{type(model).__name__} has no routed heads to be chosen; moh_vision.convert gives it some"
        )
    allowed = [
        range(b.shared + g, b.heads + 1, g) if b.candidates else [b.heads]
        for b, g in zip(full, head_groups(model))
    ]
    heads = sum(b.heads for b in full)
    total = math.floor(share * heads + 0.5)
    least = sum(counts[0] for counts in allowed)
    if total < least:
        raise ValueError(
            f"share {share:g} of {heads} heads is {total}: the shared heads and one routed choice per layer are {least} "
            f"already, a share of {least / heads:.3f}"
        )

    def measured(budgets: Sequence[HeadBudget], where: str) -> float:
        with running(model, budgets):
            loss = float(loss_of(model))
        if not math.isfinite(loss):
            raise ValueError(f"the loss with {where} is {loss}")
        return loss

    all_heads = measured(full, "all heads")
    losses = []
    for number, (b, counts) in enumerate(zip(full, allowed)):
        by_heads = {}
        for k in counts[:-1]:
            fewer = [*full[:number], replace(b, routed=k - b.shared), *full[number + 1 :]]
            by_heads[k] = measured(fewer, f"{k} of {b.heads} heads in layer {number}")
        losses.append({**by_heads, b.heads: all_heads})
        progress(number, losses[-1])
    return cheapest(losses, total), losses


def cheapest(costs: Sequence[Losses], total: int) -> list[int]:
    """Choose each layer's heads at the least cost, `total` in all or the nearest below.

    costs: per layer, any numbers of heads -> cost. The smallest must fit in `total`.
    """
    best: dict[int, tuple[float, list[int]]] = {
        0: (0.0, [])
    }  # heads so far -> (cost, heads per layer)
    for layer in costs:
        longer: dict[int, tuple[float, list[int]]] = {}
        for heads, (cost, chosen) in best.items():
            for k, more in layer.items():
                if heads + k <= total and (
                    heads + k not in longer or cost + more < longer[heads + k][0]
                ):
                    longer[heads + k] = (cost + more, [*chosen, k])
        best = longer
    return best[max(best)][1]


def compare(model: nn.Module, active: Sequence[int], loss_of: LossOf) -> dict[str, dict]:
    """Measure "searched" (`active`), "uniform" and "ramp" of equally many heads: dict(active, loss)."""
    before = layer_budgets(model)
    groups = head_groups(model)
    wide = [
        HeadBudget(b.heads // g, 1, b.shared // g, b.candidates // g)
        for b, g in zip(before, groups)
    ]
    counts = {"searched": list(active)}
    compared = {}
    for name in ("uniform", "ramp"):
        chosen = spread(name, sum(k // g for k, g in zip(active, groups)), wide)
        counts[name] = [k * g for k, g in zip(chosen, groups)]
    for name, of in counts.items():
        with running(model, [replace(b, routed=k - b.shared) for b, k in zip(before, of)]):
            compared[name] = dict(active=of, loss=float(loss_of(model)))
    return compared


def all_heads_of(model: nn.Module) -> list[HeadBudget]:
    """Return the budgets that run all routed heads."""
    return [replace(b, routed=b.candidates) for b in layer_budgets(model)]


def refuse_budget(opened: Opened, option: str) -> None:
    """Refuse a run opened with another head budget than `option` says."""
    for key in ("model.head_budget", "head_budget"):
        if key in getattr(opened.config, "given", ()) and opened.metadata.get("of_run", True):
            raise ValueError(f"{key} has no effect: {option} says how many heads run")


def options(add) -> None:
    add(
        "run",
        metavar="RUN",
        help="run, its checkpoint, folder of timm, or weights for --model.NAME; it comes first",
    )
    add("--share", type=float, required=True, metavar="S", help="active heads over all heads")
    add("--output", required=True, metavar="FILE", help="YAML, one [shared, routed] per layer")
    add(
        "--images",
        type=int,
        default=512,
        metavar="N",
        help="images, or blocks of text, that the search looks at (%(default)s)",
    )


def work(options) -> None:
    if options.images < 1:
        raise ValueError(f"--images {options.images}: expected 1 or more")
    if not 0 < options.share <= 1:
        raise ValueError(f"--share {options.share:g}: expected above 0, up to 1")
    opened = open_run(options.run, options=options.rest, split="train", command="search")
    refuse_budget(opened, "--share")
    searched, others = opened.halves(options.images)
    weights = opened.metadata["weights"]
    unit = opened.unit
    if is_dense(opened.model):
        batches = [opened.inputs(batch) for batch in searched]
        opened.model = convert(opened.model, CONVERTED, calibrate=batches).eval()
        weights += ", converted with its strongest heads shared"
    model = opened.model
    full = all_heads_of(model)
    runs = 1 + sum(b.candidates - 1 for b in full if b.candidates)
    say(f"{weights}: {opened.loss_name} of {options.images} {unit}, about {runs} times")
    say("layer  loss above that of all heads, by the heads that run")

    def show(number: int, losses: Losses) -> None:
        top, *fewer = sorted(losses, reverse=True)
        rises = {
            heads: round(losses[heads] - losses[top], 4) + 0.0 for heads in fewer
        }  # + 0.0: no -0.0000
        text = "  ".join(f"{heads}: {rise:+.4f}" for heads, rise in rises.items())
        say(f"{number:5d}  {text or 'no routed heads'}")

    with Progress(
        "search", runs + 6, "measurement"
    ) as progress:  # three budgets are compared, on both halves

        def measured(batches: list[dict], _: nn.Module) -> float:
            loss = opened.mean_loss(batches)
            progress.add()
            return loss

        loss_of = partial(measured, searched)
        active, losses = search_budget(model, loss_of, options.share, show)
        compared = compare(model, active, loss_of)
        elsewhere = compare(model, active, partial(measured, others))
    say(
        f"{'budget':10}{'heads':>6}{'share':>8}{'loss':>9}{f'on other {unit}':>17}  active heads per layer"
    )
    heads = sum(b.heads for b in full)
    for name, budget in compared.items():
        count = sum(budget["active"])
        there = elsewhere[name]["loss"]
        row = f"{name:10}{count:6d}{100 * count / heads:6.1f} %{budget['loss']:9.4f}{there:17.4f}"
        say(f"{row}  {' '.join(map(str, budget['active']))}")
    best = min(elsewhere, key=lambda name: elsewhere[name]["loss"])
    if elsewhere[best]["loss"] < elsewhere["searched"]["loss"]:
        say(f"the {best} budget is better on other {unit}: head_budget={best}:{options.share:g}")
    all_heads = losses[0][full[0].heads]
    on_others = ", ".join(f"{name} {budget['loss']:.6f}" for name, budget in elsewhere.items())
    lines = [
        f"# {sum(active)} heads by python -m moh_vision search: {weights}",
        f"# {opened.loss_name} of all heads {all_heads:.6f}; on others of {opened.config.data.root}: {on_others}",
        *(f"- {[b.shared, k - b.shared]}" for b, k in zip(full, active)),
    ]
    write_whole(Path(options.output), "\n".join(lines) + "\n")
    say(f'{options.output}: --model.head_budget "$(cat {options.output})"')
