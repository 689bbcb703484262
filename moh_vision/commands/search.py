"""Find a budget for a trained model on a calibration set: which layers can spare heads, or groups of MLPs.

python -m moh_vision search RUN --share 0.75 --output budget.yaml
python -m moh_vision search RUN --mlp-share 0.5 --output mlp_budget.yaml

RUN comes first: a run of a classifier, diffusion or causal language model (dense ones are converted,
the strongest heads shared), or a classifier's weights with --model.NAME. Options of validate.py are
taken too, such as --data.root. budget.yaml has one [shared, routed] per layer:
--model.head_budget "$(cat budget.yaml)", or --model.mlp_budget after --mlp-share. As many other
images, or blocks of text, of the training split compare it with the uniform budget and the papers'
ramp of equally many heads. Groups of MLPs stay as they are while heads are searched, and heads
while groups are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from torch import nn

from moh_vision.attention import (
    HeadBudget,
    RoutedLayer,
    attention_layers,
    mlp_layers,
    model_budgets,
    running,
)
from moh_vision.attention.budget import spread
from moh_vision.attention.model_heads import active_share, head_groups
from moh_vision.common.io import write_whole
from moh_vision.common.progress import Progress, say
from moh_vision.common.wings import CLASSIFICATION
from moh_vision.engine.opened import Opened
from moh_vision.models.convert import convert
from moh_vision.models.pretrained import is_dense
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights

REST = "RUN"
# Budget that a dense model is converted with. A budget of half of the heads has few shared heads, and the search can
# choose among all others.
CONVERTED = "uniform:0.5"
# What can be searched, by the names of ModelBudgets -> the key that takes the budget.
KEYS = {"heads": "head_budget", "groups": "mlp_budget"}
LossOf = Callable[[nn.Module], float]
# For one layer: number of its active heads, or groups, -> loss, while the other layers run all of theirs.
Losses = dict[int, float]


def search_budget(
    model: nn.Module,
    loss_of: LossOf,
    share: float,
    progress: Callable[[int, Losses], None] = lambda layer, losses: None,
    parts: str = "heads",
) -> tuple[list[int], list[Losses]]:
    """Find how many heads, or groups of its MLP, each layer should run.

    The loss is measured with one layer changed at a time. What is said of heads holds for groups.

    Let L be the loss of all heads, and L_l(k) the loss where layer l runs k heads and the others run all. The search
    minimises over all budgets

        sum_l (L_l(k_l) - L)    where  sum_l k_l = round(share * sum_l H_l),  shared_l < k_l <= H_l

    It takes 1 + sum_l (H_l - shared_l - 1) measurements. The sum is the rise of the loss itself if the effects of layers
    add up. All budgets are compared, by `cheapest`, because removing heads one by one would need convex L_l, and
    measured ones are not convex.

    Args:
        model: the model; its budget is restored at the end.
        loss_of: computes the loss of the model at its current budget.
        share: active heads over all heads.
        progress: called after each layer with the layer's number and its losses.
        parts: "heads" or "groups": what is searched; the others stay as they are.

    Returns:
        The active heads of each layer, and the losses of each layer.
    """
    full = all_of(model, parts)
    refuse_nothing_to_search(model, full, parts)
    allowed = []  # for each layer, the numbers of heads that it may run
    for budget, group in zip(full, chosen_together(model, parts)):
        if budget.candidates:
            allowed.append(range(budget.shared + group, budget.heads + 1, group))
        else:
            allowed.append([budget.heads])
    heads = sum(budget.heads for budget in full)
    total = math.floor(share * heads + 0.5)
    least = sum(counts[0] for counts in allowed)
    if total < least:
        raise ValueError(
            f"share {share:g} of {heads} {parts} is {total}: the shared {parts} and one routed choice per layer are {least} "
            f"already, a share of {least / heads:.3f}"
        )

    def measured(budgets: Sequence[HeadBudget], where: str) -> float:
        with running(model, model_budgets(model)._replace(**{parts: tuple(budgets)})):
            return finite(loss_of(model), where)

    loss_of_all = measured(full, f"all {parts}")
    losses = []
    for number, (budget, counts) in enumerate(zip(full, allowed)):
        by_heads = {}
        for k in counts[:-1]:
            fewer = list(full)
            fewer[number] = replace(budget, routed=k - budget.shared)
            by_heads[k] = measured(fewer, f"{k} of {budget.heads} {parts} in layer {number}")
        by_heads[budget.heads] = loss_of_all
        losses.append(by_heads)
        progress(number, by_heads)
    return cheapest(losses, total), losses


def finite(loss: float, where: str) -> float:
    """Return a loss; raise ValueError, which names `where`, if it is not finite."""
    loss = float(loss)
    if not math.isfinite(loss):
        raise ValueError(f"the loss with {where} is {loss}")
    return loss


def cheapest(costs: Sequence[Losses], total: int) -> list[int]:
    """Choose the number of heads, or groups, of each layer at the least sum of costs, by dynamic programming.

    Args:
        costs: for each layer, number of heads -> cost. The smallest numbers must fit in `total`.
        total: number of heads over all layers; if no choice has exactly so many, the next smaller possible number.
    """
    # For the layers so far: sum of their numbers -> (least cost, number of each layer).
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for layer in costs:
        longer: dict[int, tuple[float, list[int]]] = {}
        for sum_before, (cost_before, chosen) in best.items():
            for k, cost_of_layer in layer.items():
                running_sum = sum_before + k
                cost = cost_before + cost_of_layer
                if running_sum > total:
                    continue
                if running_sum not in longer or cost < longer[running_sum][0]:
                    longer[running_sum] = (cost, [*chosen, k])
        best = longer
    _, numbers = best[max(best)]
    return numbers


def refuse_nothing_to_search(model: nn.Module, full: Sequence[HeadBudget], parts: str) -> None:
    """Raise ValueError if no layer of a model chooses among its heads or groups; `full` has all of them running."""
    name = type(model).__name__
    all_run = any(layer.router.all_heads for layer in layers_of(model, parts))
    if all_run and not is_dense(model):
        raise ValueError(f"{name} has no routed {parts} to be chosen: its router runs all {parts}")
    if all_run or not any(budget.candidates for budget in full):
        advice = "moh_vision.convert gives it some"
        if parts == "groups" and not is_dense(model):
            advice = "train it with model.mlp_budget, or convert its dense model"
        raise ValueError(f"{name} has no routed {parts} to be chosen; {advice}")


def compare(
    model: nn.Module, active: Sequence[int], loss_of: LossOf, parts: str = "heads"
) -> dict[str, dict]:
    """Measure three budgets with equally many heads: "searched", which is `active`, "uniform" and "ramp".

    Args:
        model, loss_of, parts: see `search_budget`.
        active: heads, or groups, of each layer.

    Returns:
        By name of the budget, dict(active=heads of each layer, loss=...).
    """
    saved = budgets_of(model, parts)
    together = chosen_together(model, parts)
    # Heads that share keys and values are chosen together, so budgets are spread over choices, not over heads.
    choices = [
        HeadBudget(budget.heads // g, 1, budget.shared // g, budget.candidates // g)
        for budget, g in zip(saved, together)
    ]
    active_choices = sum(k // g for k, g in zip(active, together))
    counts = {"searched": list(active)}
    for shape in ("uniform", "ramp"):
        chosen = spread(shape, active_choices, choices)
        counts[shape] = [k * g for k, g in zip(chosen, together)]
    compared = {}
    for name, heads in counts.items():
        budgets = [replace(budget, routed=k - budget.shared) for budget, k in zip(saved, heads)]
        with running(model, model_budgets(model)._replace(**{parts: tuple(budgets)})):
            compared[name] = dict(active=heads, loss=finite(loss_of(model), f"the {name} budget"))
    return compared


def layers_of(model: nn.Module, parts: str) -> Sequence[RoutedLayer]:
    """Return the layers that choose heads, or groups."""
    if parts == "heads":
        return attention_layers(model)
    return mlp_layers(model)


def budgets_of(model: nn.Module, parts: str) -> tuple[HeadBudget, ...]:
    """Return the budgets of the heads, or of the groups."""
    return getattr(model_budgets(model), parts)


def chosen_together(model: nn.Module, parts: str) -> list[int]:
    """Return for each layer how many heads it chooses together; groups are chosen one by one."""
    if parts == "heads":
        return head_groups(model)
    return [1] * len(mlp_layers(model))


def all_of(model: nn.Module, parts: str) -> list[HeadBudget]:
    """Return the budgets of the heads, or of the groups, with all of them active."""
    return [budget.all_active for budget in budgets_of(model, parts)]


def refuse_budget(opened: Opened, option: str, budgets: Sequence[str] = ("head_budget",)) -> None:
    """Raise ValueError if the options give a budget of their own, where `option` says how many heads or groups run.

    Args:
        opened: of a command.
        option: of the command.
        budgets: the keys that give what `option` decides.
    """
    given = getattr(opened.config, "given", ())
    if opened.kind == CLASSIFICATION.name and not opened.weights.brings_model:
        return  # these keys say what the model of the weights is
    for parts, budget in KEYS.items():
        for key in (f"model.{budget}", budget):
            if budget in budgets and key in given:
                value = attrgetter(key)(opened.config)
                raise ValueError(f"{key} {value} has no effect: {option} says how many {parts} run")


def say_table(
    compared: dict[str, dict], elsewhere: dict[str, dict], heads: int, unit: str, parts: str
) -> None:
    """Print the losses of budgets on the data of the search and on unseen data.

    Args:
        compared, elsewhere: what `compare` returned on the data of the search, and on unseen data.
        heads: number of heads, or groups, of the model.
        unit: what the data consist of, such as "images".
        parts: "heads" or "groups".
    """
    unseen = f"on other {unit}"
    say(f"{'budget':10}{parts:>6}{'share':>8}{'loss':>9}{unseen:>17}  active {parts} per layer")
    for name, budget in compared.items():
        count = sum(budget["active"])
        percent = 100 * count / heads
        unseen_loss = elsewhere[name]["loss"]
        row = f"{name:10}{count:6d}{percent:6.1f} %{budget['loss']:9.4f}{unseen_loss:17.4f}"
        say(f"{row}  {' '.join(map(str, budget['active']))}")


def options(add) -> None:
    add(
        "run",
        metavar="RUN",
        help="run, its checkpoint, folder of timm, or weights for --model.NAME; it comes first",
    )
    add("--share", type=float, metavar="S", help="active heads over all heads")
    add("--mlp-share", type=float, metavar="S", help="active groups of the MLPs over all groups")
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
    parts, option, share = asked_share(options)
    found = find_weights(options.run, key="RUN")
    opened = open_weights(found, options.rest, split="train", command="search")
    refuse_budget(opened, option, (KEYS[parts],))
    searched, unseen = opened.halves(options.images)
    weights = opened.metadata["weights"]
    unit = opened.unit
    converted = is_dense(opened.model)
    if converted:
        batches = [opened.inputs(batch) for batch in searched]
        opened.model = convert_dense(opened.model, parts, batches).eval()
        weights += f", converted with its strongest {parts} shared"
    model = opened.model
    full = all_of(model, parts)
    refuse_nothing_to_search(model, full, parts)
    measurements = 1 + sum(budget.candidates - 1 for budget in full if budget.candidates)
    say(f"{weights}: {opened.loss_name} of {options.images} {unit}, about {measurements} times")
    budgets = model_budgets(model)
    if parts == "heads" and budgets.groups:
        say(f"groups of MLPs stay: {100 * active_share(budgets.groups):.1f} % of them run")
    elif parts == "groups":
        say(f"heads stay: {100 * active_share(budgets.heads):.1f} % of them run")
    say(f"layer  loss above that of all {parts}, by the {parts} that run")

    def show(number: int, losses: Losses) -> None:
        top, *fewer = sorted(losses, reverse=True)
        rises = []
        for count in fewer:
            rise = round(losses[count] - losses[top], 4) + 0.0  # adding 0.0 turns -0.0 into 0.0
            rises.append(f"{count}: {rise:+.4f}")
        say(f"{number:5d}  {'  '.join(rises) or f'no routed {parts}'}")

    comparisons = 6  # three budgets on both halves of the data
    with Progress("search", measurements + comparisons, "measurement") as progress:

        def measured(batches: list[dict], _: nn.Module) -> float:
            loss = opened.mean_loss(batches)
            progress.add()
            return loss

        loss_of = partial(measured, searched)
        active, losses = search_budget(model, loss_of, share, show, parts)
        compared = compare(model, active, loss_of, parts)
        elsewhere = compare(model, active, partial(measured, unseen), parts)
    say_table(compared, elsewhere, sum(budget.heads for budget in full), unit, parts)
    key = KEYS[parts]
    best = min(elsewhere, key=lambda name: elsewhere[name]["loss"])
    if elsewhere[best]["loss"] < elsewhere["searched"]["loss"]:
        say(f"the {best} budget is better on other {unit}: {key}={best}:{share:g}")
    loss_of_all = losses[0][full[0].heads]
    unseen_losses = ", ".join(f"{name} {budget['loss']:.6f}" for name, budget in elsewhere.items())
    lines = [
        f"# {sum(active)} {parts} by python -m moh_vision search: {weights}",
        f"# {opened.loss_name} of all {parts} {loss_of_all:.6f}; on others of {opened.config.data.root}: {unseen_losses}",
        *(f"- {[budget.shared, k - budget.shared]}" for budget, k in zip(full, active)),
    ]
    write_whole(Path(options.output), "\n".join(lines) + "\n")
    use = f'--model.{key} "$(cat {options.output})"'
    if converted and parts == "groups":
        # The groups are of channels that were sorted, and are chosen for whole images.
        use += f" --model.convert.scope sample --calibrate-images {options.images}"
    say(f"{options.output}: {use}")


def asked_share(options) -> tuple[str, str, float]:
    """Return what is searched, "heads" or "groups", the option that asks for it, and its share."""
    asked = dict(heads=("--share", options.share), groups=("--mlp-share", options.mlp_share))
    given = {parts: pair for parts, pair in asked.items() if pair[1] is not None}
    if len(given) != 1:
        raise ValueError("search: give --share for heads, or --mlp-share for groups of the MLPs")
    ((parts, (option, share)),) = given.items()
    if not 0 < share <= 1:
        raise ValueError(f"{option} {share:g}: expected above 0, up to 1")
    return parts, option, share


def convert_dense(model: nn.Module, parts: str, batches: list) -> nn.Module:
    """Convert a dense model into one that chooses heads, or groups; see CONVERTED."""
    if parts == "heads":
        return convert(model, CONVERTED, calibrate=batches)
    return convert(model, scope="sample", mlp_budget=CONVERTED, calibrate=batches)
