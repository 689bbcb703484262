"""Which layers can spare heads: a head budget found on a calibration set, for a model as it is, without training.

python -m moh_vision search RUN --share 0.75 --output budget.yaml

RUN comes first: a run of a classifier, a diffusion model or a causal language model (a dense one is converted, its strongest
heads shared), or for classifiers weights with --model.NAME as validate.py takes them. --data.root and the other options of
validate.py are taken too; what is left out is as in the run. budget.yaml is a list with one [shared, routed] per layer, as any head_budget may be:
--model.head_budget "$(cat budget.yaml)".

The images, or blocks of text, are of the training split, half of them for the search and as many others to compare what it
found with the uniform budget and the papers' ramp, of equally many heads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import timm
import torch
from torch import Tensor, nn

from moh_vision.attention import HeadBudget, attention_layers, head_budget, set_budgets
from moh_vision.attention.budget import spread
from moh_vision.engine.commands import Parser, Progress, exit_code, refuse_output, say
from moh_vision.engine.io import write_whole
from moh_vision.models.weight_files import read_safetensors, weights_file
from moh_vision.models.weights import FAMILIES

LossOf = Callable[[nn.Module], float]
# A dense model is converted as for half of its heads, of which few are shared: shared heads stay, and leave no choice.
CONVERTED = "uniform:0.5"


class Search(NamedTuple):
    """What `search_budget` found."""

    active: List[int]  # heads that run, of each layer
    losses: List[Dict[int, float]]  # of each layer: its active heads -> loss while the other layers run all heads
    all_heads: float  # loss while every layer does


class Calibration(NamedTuple):
    """A model and its data, opened for a search."""

    model: nn.Module
    loss_of: LossOf  # on the images of the search
    loss_elsewhere: LossOf  # on as many others
    about: dict  # what is said of both


def search_budget(
    model: nn.Module,
    loss_of: LossOf,
    share: float,
    progress: Callable[[int, Dict[int, float]], None] = lambda layer, losses: None,
) -> Search:
    """The active heads of each layer whose losses, measured one layer at a time, add up to the least.

    With L_l(k) the loss while layer l runs k heads and all others every head, and L the loss while all do, it minimises

        sum_l (L_l(k_l) - L)    where  sum_l k_l = round(share * sum_l H_l),  shared_l < k_l <= H_l

    over all budgets. That is the loss itself as far as layers act apart. Removing heads greedily, by the least loss per
    head, finds the minimum only where each L_l is convex, which measured ones are not; so `cheapest` looks at all of them.
    It measures 1 + sum_l (H_l - shared_l - 1) times, and then takes O(T * sum_l H_l) additions for T heads in all.

    Args:
        model: any model with routed heads, in eval mode; its budget is as before afterwards. Shared heads stay shared, and
            layers without routed heads stay as they are.
        loss_of: the loss of the model as it is at that moment, always of the same data and random numbers.
        share: active heads over all heads, above 0 and up to 1.
        progress: told of each layer when it is measured.

    Raises:
        ValueError: for a model without routed heads, a share that the shared heads do not allow, or a loss that is not
            finite, naming the layer.
    """
    layers = attention_layers(model)
    before = [layer.budget for layer in layers]
    full = [HeadBudget(b.heads, b.head_dim, b.shared, b.candidates) for b in before]
    groups = [getattr(layer.router, "group", 1) for layer in layers]
    if any(layer.router.all_heads for layer in layers) or not any(b.candidates for b in before):
        raise ValueError(f"{type(model).__name__} has no routed heads to be chosen; moh_vision.convert gives it some")
    allowed = [range(b.shared + g, b.heads + 1, g) if b.candidates else [b.heads] for b, g in zip(before, groups)]
    heads = sum(b.heads for b in before)
    if not 0 < share <= 1:
        raise ValueError(f"share {share!r} is out of range: above 0, up to 1")
    total, least = math.floor(share * heads + 0.5), sum(counts[0] for counts in allowed)
    if total < least:
        raise ValueError(
            f"share {share:g} of {heads} heads is {total}: the shared heads and one routed choice per layer are {least} "
            f"already, a share of {least / heads:.3f}"
        )

    def measured(where: str) -> float:
        loss = float(loss_of(model))
        if not math.isfinite(loss):
            raise ValueError(f"the loss with {where} is {loss}")
        return loss

    try:
        set_budgets(layers, full)
        all_heads, losses = measured("all heads"), []
        for number, (layer, counts) in enumerate(zip(layers, allowed)):
            b, found = full[number], {}
            for k in counts[:-1]:
                set_budgets([layer], [HeadBudget(b.heads, b.head_dim, b.shared, k - b.shared)])
                found[k] = measured(f"{k} of {b.heads} heads in layer {number}")
            set_budgets([layer], [b])
            losses.append({**found, b.heads: all_heads})
            progress(number, losses[-1])
    finally:
        set_budgets(layers, before)
    return Search(cheapest(losses, total), losses, all_heads)


@torch.no_grad()
def losses_without_heads(model: nn.Module, loss_of: LossOf) -> List[Dict[int, float]]:
    """The loss with one routed head left out while all others run: of each layer, routed head -> loss.

    A head is left out by setting its part of the output projection to zero, so the gates of the others stay. It measures
    once for every routed head; the model is as before afterwards.

    Args:
        model, loss_of: see `search_budget`.
    """
    layers, found = attention_layers(model), []
    before = [layer.budget for layer in layers]
    try:
        set_budgets(layers, [HeadBudget(b.heads, b.head_dim, b.shared, b.candidates) for b in before])
        for layer in layers:
            b, weight, losses = layer.budget, layer.proj.weight, {}
            kept = weight.clone()  # [C, H * D]
            for head in range(b.shared, b.heads):
                weight[:, head * b.head_dim : (head + 1) * b.head_dim] = 0
                try:
                    losses[head] = float(loss_of(model))
                finally:
                    weight.copy_(kept)
            found.append(losses)
    finally:
        set_budgets(layers, before)
    return found


def cheapest(costs: Sequence[Dict[int, float]], total: int) -> List[int]:
    """One number of heads per layer, of sum `total` (or else the nearest below) and the least sum of costs.

    Args:
        costs: of each layer: number of heads -> cost; any numbers, there may be gaps.
        total: not below the least sum.
    """
    best: Dict[int, Tuple[float, List[int]]] = {0: (0.0, [])}  # heads of the layers so far -> (cost, heads of each)
    for layer in costs:
        longer: Dict[int, Tuple[float, List[int]]] = {}
        for heads, (cost, chosen) in best.items():
            for k, more in layer.items():
                if heads + k <= total and (heads + k not in longer or cost + more < longer[heads + k][0]):
                    longer[heads + k] = (cost + more, [*chosen, k])
        best = longer
    return best[max(best)][1]


def compare(model: nn.Module, active: Sequence[int], loss_of: LossOf) -> Dict[str, dict]:
    """ "searched", "uniform" and "ramp": dict(active, loss) of budgets of equally many heads; the model's stays.

    Args:
        active: of each layer, from `search_budget`.
        loss_of: see there.
    """
    layers = attention_layers(model)
    before, groups = [layer.budget for layer in layers], [getattr(layer.router, "group", 1) for layer in layers]
    wide = [HeadBudget(b.heads // g, 1, b.shared // g, b.candidates // g) for b, g in zip(before, groups)]
    total, found = sum(a // g for a, g in zip(active, groups)), {}
    try:
        for name in ("searched", "uniform", "ramp"):
            of = [a // g for a, g in zip(active, groups)] if name == "searched" else spread(name, total, wide)
            counts = [a * g for a, g in zip(of, groups)]
            budgets = [HeadBudget(b.heads, b.head_dim, b.shared, k - b.shared) for b, k in zip(before, counts)]
            set_budgets(layers, budgets)
            found[name] = dict(active=counts, loss=float(loss_of(model)))
    finally:
        set_budgets(layers, before)
    return found


def mean_over(batches: Sequence[dict], loss: Callable[[dict], Tensor]) -> LossOf:
    """A loss for `search_budget`: the mean over batches, weighted by their images.

    Args:
        batches: dict(images [B, ...], ...).
        loss: mean loss of one batch by the model.
    """
    images = sum(len(batch["images"]) for batch in batches)

    @torch.no_grad()
    def loss_of(model: nn.Module) -> float:
        return sum(float(loss(batch)) * len(batch["images"]) for batch in batches) / images

    return loss_of


def search(opened: Calibration, share: float) -> dict:
    """Search, compare and print.

    Returns:
        dict(pairs, all_heads, compared, about): [shared, routed] of each layer, the loss of all heads, what `compare` found.
    """
    model = opened.model
    layers = head_budget(model)["layers"]
    converted = ", converted with its strongest heads shared" if opened.about["converted"] else ""
    routed = [layer["heads"] - layer["shared"] for layer in layers]
    runs = 1 + sum(2 * r - 1 for r in routed if r)
    kind = "images" if "images" in opened.about else "blocks"
    say(
        f"{opened.about['weights']}{converted}: {opened.about['loss']} of {opened.about[kind]} {kind}, about {runs} times"
    )
    say("layer  loss above that of all heads, by the heads that run")

    def show(number: int, losses: Dict[int, float]) -> None:
        top = losses[max(losses)]
        text = "  ".join(
            f"{k}: {round(loss - top, 4) + 0.0:+.4f}" for k, loss in sorted(losses.items(), reverse=True)[1:]
        )
        say(f"{number:5d}  {text or 'no routed heads'}")

    with Progress("search", runs + 6, "measurement") as progress:  # three budgets are compared, on both halves

        def told(loss_of: LossOf) -> LossOf:
            def loss(model: nn.Module) -> float:
                found = loss_of(model)
                progress.add()
                return found

            return loss

        loss_of = told(opened.loss_of)
        found = search_budget(model, loss_of, share, show)
        without = losses_without_heads(model, loss_of)
        searched, elsewhere = (compare(model, found.active, loss) for loss in (loss_of, told(opened.loss_elsewhere)))
    say("layer  loss above that of all heads, without one routed head")
    for number, losses in enumerate(without):
        text = "  ".join(f"{head}: {round(loss - found.all_heads, 4) + 0.0:+.4f}" for head, loss in losses.items())
        say(f"{number:5d}  {text or 'no routed heads'}")
    all_layers = [layer["heads"] for layer in layers]
    say(f"{'budget':10}{'heads':>6}{'share':>8}{'loss':>9}{f'on other {kind}':>17}  active heads per layer")
    for name, budget in searched.items():
        budget["loss_on_others"] = elsewhere[name]["loss"]
        active = sum(budget["active"])
        say(
            f"{name:10}{active:6d}{100 * active / sum(all_layers):6.1f} %{budget['loss']:9.4f}"
            f"{elsewhere[name]['loss']:17.4f}  {' '.join(map(str, budget['active']))}"
        )
    best = min(elsewhere, key=lambda name: elsewhere[name]["loss"])
    if elsewhere[best]["loss"] < elsewhere["searched"]["loss"]:
        say(f"the {best} budget is better on other {kind}: head_budget={best}:{share:g}")
    pairs = [[layer["shared"], k - layer["shared"]] for layer, k in zip(layers, found.active)]
    return dict(pairs=pairs, all_heads=found.all_heads, compared=searched, about=opened.about)


def as_yaml(found: dict) -> str:
    """What `search` found as a list of YAML, below what it is of."""
    about, losses = found["about"], found["compared"]
    text = f"# {sum(map(sum, found['pairs']))} heads by python -m moh_vision search: {about['weights']}"
    text += ", converted with its strongest heads shared" * about["converted"]
    text += f"\n# {about['loss']} of all heads {found['all_heads']:.6f}; on others of {about['data']}: "
    text += ", ".join(f"{name} {budget['loss_on_others']:.6f}" for name, budget in losses.items())
    return "\n".join([text, *(f"- {pair}" for pair in found["pairs"])]) + "\n"


def kind_of(path: str, options: Sequence[str]) -> str:
    """ "classifier", "diffusion" or "text": of the run at `path`, or of --model.name.

    Raises:
        ValueError, FileNotFoundError: for a run of another kind, or one that is not there.
    """
    file = Path(path)
    file = weights_file(path) if file.exists() else file
    name = next((b for a, b in zip(options, options[1:]) if a == "--model.name"), "")
    if file.is_file() and file.suffix == ".safetensors":
        metadata = read_safetensors(file, lambda _: False)[1]
        if any(registered("run", key) for key in metadata):
            return "text"
        name = str(metadata.get("architecture", name))
    diffusion = [n for module in FAMILIES["diffusion"] for n in timm.list_models(module=module)]
    return "diffusion" if name in diffusion else "classifier"


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision search", __doc__)
    add = parser.add_argument
    add(
        "checkpoint",
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

    def work() -> None:
        options, rest = parser.parse_with_rest(argv, "RUN")
        if options.images < 1:
            raise ValueError(f"--images {options.images}: expected 1 or more")
        if not 0 < options.share <= 1:
            raise ValueError(f"--share {options.share:g}: expected above 0, up to 1")
        refuse_output("--output", options.output)
        opener = registered("calibration", kind_of(options.checkpoint, rest))
        opened = opener(["--checkpoint", options.checkpoint, *rest], options.images)
        found = search(opened, options.share)
        write_whole(Path(options.output), as_yaml(found))
        say(f'{options.output}: --model.head_budget "$(cat {options.output})"')

    return exit_code("search", work)


if __name__ == "__main__":
    raise SystemExit(main())
