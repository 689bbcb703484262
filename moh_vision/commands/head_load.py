"""Draw the head load that a training run, validate.py, sample.py or the evaluation of a language model counted.

python -m moh_vision head-load RUN --output load.png
python -m moh_vision head-load FILE --output load.png --kind bars --groups desk goldfish "ice cream"

RUN is a run's folder, whose head_load.json is read. --kind map: every head of every layer, a row a group (class, timestep,
text or task). bars: the heads of one layer for a few groups (MoH, figures 3, A and B). curves: the routed heads of each
layer from the most to the least loaded one (MoA, figures 3 and 4). The numbers go into a JSON beside the figure.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from scipy.cluster.hierarchy import leaves_list, linkage
from torch import Tensor

from moh_vision.commands.figures import check_figure, plt, save_figure, write_figure
from moh_vision.engine.commands import Parser, closest, exit_code, nearest, say
from moh_vision.models.head_load import FILE, HeadLoad

SHOWN = 3  # groups of bars, unless they are named
NAME = 0.15  # inches that a head's number or a group's name needs
ALWAYS = "0.75"  # colour of heads that every token runs
LEGEND = 12  # curves that a legend can name; of more the colour tells the depth
Drawn = Tuple[object, dict]  # a figure of matplotlib, and the numbers it shows


def draw_map(load: HeadLoad, by: str, groups: Sequence[int], layers: Sequence[int]) -> Drawn:
    """Draw a column a head, layer by layer, and a row a group; the colour is the share of tokens that ran the head.

    Heads that every token runs are grey: the shared ones, and all of a layer that leaves none out.

    The PNG has at most 2,600 x 2,080 pixels, whatever the numbers of heads and groups. Where it has no room for the numbers
    of all heads, the shared ones are left out. Where it has none for the names of all groups, groups of similar loads stand
    side by side (Ward's clustering), and every n-th has its name; timesteps stay in their order.

    Args:
        load: the counts.
        by: which kind of groups.
        groups: numbers of those that are drawn, in this order.
        layers: numbers of those that are drawn.
    """
    abouts, first = [load.layers[layer] for layer in layers], [0] * len(layers)
    columns = sum(about["heads"] + 1 for about in abouts) - 1
    numbered = NAME * columns <= 20 - 2.2
    choosing = [layer for layer in layers if layer in load.choosing()]
    if not numbered and choosing:
        layers = choosing
        abouts = [load.layers[layer] for layer in layers]
        first = [about["shared"] for about in abouts]
    parts = [load.share(by)[layer][groups, start:] for layer, start in zip(layers, first)]
    rows = len(groups)
    height = min(max(2.8, 1.5 + 0.24 * rows), 16.0)  # inches
    nth = math.ceil(NAME * rows / (height - 1.3))
    about = by
    if nth > 1 and by != "timestep":
        order = leaves_list(linkage(torch.cat(parts, 1).numpy(), "ward")).tolist()
        parts, groups = [part[order] for part in parts], [groups[row] for row in order]
        about = f"{by} (similar ones side by side, 1 of {nth} is named)"
    widths = [part.shape[1] for part in parts]
    gap, cells = np.full((rows, 1), np.nan), []
    for layer, start, part in zip(layers, first, parts):
        always = load.layers[layer]["shared" if layer in choosing else "heads"] - start
        cells += [np.full((rows, always), -1.0), part[:, always:].numpy(), gap]  # -1 is below the scale
    grid = np.concatenate(cells[:-1], axis=1)
    starts = list(itertools.accumulate((width + 1 for width in widths[:-1]), initial=0))
    inches = min(max(6.0, 2.2 + 0.2 * grid.shape[1]), 20.0)
    titles = short_names([about["name"] for about in abouts], layers)
    wordy = max(map(len, titles)) > 3
    height = min(height + wordy, 16.0)
    figure, axes = plt.subplots(figsize=(inches, height), layout="constrained")
    colours = plt.get_cmap("viridis").with_extremes(bad="white", under=ALWAYS)
    image = axes.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    names = [load.groups[by][group] for group in groups]
    axes.set_yticks(range(0, rows, nth), [shortened(name) for name in names[::nth]], fontsize=8)
    axes.set_ylabel(about)
    if numbered:
        ticks = [start + head for start, width in zip(starts, widths) for head in range(width)]
        heads = ["s" if h < about["shared"] else str(h) for about in abouts for h in range(about["heads"])]
        axes.set_xticks(ticks, heads, fontsize=7)
        axes.set_xlabel("head (grey: runs for every token; s: shared)")
    else:
        axes.set_xticks([])
        axes.set_xlabel("routed heads of each layer; those that are always on are left out")
    axes.set_title(title_of(load, inches), fontsize=10)
    above = axes.secondary_xaxis("top")
    above.set_xlabel("layer")
    middles = [start + (width - 1) / 2 for start, width in zip(starts, widths)]
    above.set_xticks(middles, titles, fontsize=8, rotation=45 if wordy else 0, ha="left" if wordy else "center")
    for side in (*axes.spines.values(), *above.spines.values()):
        side.set_visible(False)
    figure.colorbar(image, ax=axes, label="share of tokens", shrink=0.9)
    shown = [
        dict(name=about["name"], first_head=start, share_of_tokens=rounded(part, 3))
        for about, start, part in zip(abouts, first, parts)
    ]
    return figure, dict(by=by, groups=names, layers=shown)


def draw_bars(load: HeadLoad, by: str, groups: Sequence[int], layer: int) -> Drawn:
    """Draw a panel a group: the share of its tokens that ran each head of a layer, shared heads in grey.

    Jin 2024, figures 3, A and B, with the last layer, whose axis "density" has the shares of the routed heads alone. The
    dashed line is where all routed heads would be with equal loads.
    """
    about, share = load.layers[layer], 100 * load.share(by)[layer]  # [groups, H]
    heads, shared = about["heads"], about["shared"]
    even = share[groups, shared:].sum(1) / max(heads - shared, 1)  # [groups shown]
    width = min(max(5.0, 1.5 + 0.22 * heads), 16.0)
    figure, panels = plt.subplots(
        len(groups), figsize=(width, 0.9 + 1.5 * len(groups)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, group, level in zip(panels[:, 0], groups, even.tolist()):
        colours = [ALWAYS] * shared + ["C0"] * (heads - shared)
        axes.bar(range(heads), share[group].numpy(), color=colours, width=0.8)
        axes.axhline(level, color="black", linestyle="--", linewidth=0.8)
        axes.set_title(shortened(f"{by} {load.groups[by][group]}", 60), fontsize=9, loc="left")
        axes.set_ylim(0, 105)
        axes.set_ylabel("% of tokens", fontsize=8)
        axes.tick_params(labelsize=8)
    nth = math.ceil(0.25 * heads / (width - 1.5))  # a number needs 0.25 inches
    axes.set_xticks(range(0, heads, nth))
    axes.set_xlabel("head" + (" (grey: shared, always on)" if shared else "") + ", dashed: equal loads")
    figure.suptitle(title_of(load, width, f"layer {layer} ({about['name']})"), fontsize=10)
    names = [load.groups[by][group] for group in groups]
    shares = {name: rounded(share[group], 2) for name, group in zip(names, groups)}
    return figure, dict(by=by, layer=about, percent_of_tokens=shares)


def draw_curves(load: HeadLoad, by: str, groups: Sequence[int], layers: Sequence[int]) -> Drawn:
    """Draw a line a layer: the share of the routed choices that each routed head got, in descending order.

    Zhang 2022, figures 3 and 4, where every head is routed. All shares of a layer sum to 100 %; dashed lines are equal
    loads, one for every number of heads. Layers that choose no heads are left out.

    Raises:
        ValueError: if that leaves no layer, or nothing was counted.
    """
    runs, curves = load.runs(by), {}
    for layer in layers:
        counts = runs[layer][groups, load.layers[layer]["shared"] : -1].sum(0)  # [routed candidates]
        if layer in load.choosing() and counts.sum() > 0:
            curves[layer] = (100 * counts / counts.sum()).sort(descending=True)
    if not curves:
        raise ValueError("no layer chose among heads for these groups, so there are no loads to compare")
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    names = short_names([load.layers[layer]["name"] for layer in curves], list(curves))
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(curves)))
    for colour, name, (percent, _) in zip(colours, names, curves.values()):
        axes.plot(range(1, len(percent) + 1), percent.numpy(), color=colour, marker="o", markersize=2.5, label=name)
    for heads in sorted({len(percent) for percent, _ in curves.values()}):
        axes.plot([1, heads], [100 / heads] * 2, color="grey", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("routed heads of a layer, from the most loaded one; dashed: equal loads")
    axes.set_ylabel("% of the layer's choices")
    axes.set_title(title_of(load, 7.0), fontsize=10)
    if len(curves) <= LEGEND:
        axes.legend(title="layer", fontsize=8, title_fontsize=8)
    else:
        depth = plt.Normalize(min(curves), max(curves) / 0.92)
        bar = figure.colorbar(plt.cm.ScalarMappable(depth, "viridis"), ax=axes, label="layer")
        bar.ax.set_ylim(min(curves), max(curves))
        bar.ax.yaxis.get_major_locator().set_params(integer=True)
        if max(map(len, names)) > 3:  # words, such as encoder 0
            nth = math.ceil(len(names) / 24)
            bar.set_ticks(list(curves)[::nth], labels=names[::nth], fontsize=7)
    found = {
        load.layers[layer]["name"]: dict(
            percent=rounded(percent, 3), heads=[load.layers[layer]["shared"] + head for head in order.tolist()]
        )
        for layer, (percent, order) in curves.items()
    }
    return figure, dict(by=by, groups=[load.groups[by][group] for group in groups], layers=found)


def draw_usage(load: HeadLoad, path: str) -> None:
    """Write the map of all groups of the first kind as a PNG."""
    save_figure(draw(load, "map")[0], path)


def most_different(share: Tensor, tokens: Tensor, count: int = SHOWN) -> List[int]:
    """Groups that differ most, in their order: the farthest from the mean, then each time the one farthest from all chosen.

    Args:
        share: [groups, H]; distances are sums over heads of absolute differences.
        tokens: [groups]; groups without tokens are left out.
        count: how many.
    """
    there = tokens.nonzero().flatten()
    share = share[there]
    far, chosen = (share - share.mean(0)).abs().sum(1), []
    for _ in range(min(count, len(there))):
        chosen.append(int(far.argmax()))
        apart = (share - share[chosen[-1]]).abs().sum(1)
        far = apart if len(chosen) == 1 else far.minimum(apart)
        far[chosen] = -1
    return sorted(there[chosen].tolist())


def short_names(names: Sequence[str], numbers: Sequence[int]) -> List[str]:
    """Layers as an axis can show them: their numbers, or, where names differ in more, what tells the names apart."""
    if len({re.sub(r"\d+", "", name) for name in names}) == 1:
        return [str(number) for number in numbers]
    parts = [name.split(".") for name in names]
    common = set.intersection(*map(set, parts))
    return [" ".join(p for p in part if p.isdecimal() or p not in common) for part in parts]


def shortened(name: str, most: int = 24) -> str:
    return name if len(name) <= most else name[: most - 3] + "..."


def title_of(load: HeadLoad, width: float, more: str = "") -> str:
    """What was counted, in lines for a figure so many inches wide."""
    heads = [(layer["shared"] + layer["routed"], layer["heads"]) for layer in load.layers]
    active, candidates = map(sum, zip(*heads))
    texts = [load.of.get("run"), f"{100 * active / candidates:.3g} % of the heads"]
    texts += [*(load.of.get(key) for key in ("model", "data", "split")), more]
    title = textwrap.fill(", ".join(str(text) for text in texts if text), int(11 * width), break_on_hyphens=False)
    return title.replace("$", r"\$")  # no formulas


def rounded(values: Tensor, digits: int = 4) -> list:
    return values.double().numpy().round(digits).tolist()


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision head-load", __doc__)
    add = parser.add_argument
    add("load", type=Path, metavar="RUN|FILE", help=f"folder of a run with {FILE}, or such a file")
    add(
        "--output", type=Path, required=True, metavar="FIGURE", help="NAME.png or NAME.svg; the numbers go to NAME.json"
    )
    add("--kind", default="map", choices=("map", "bars", "curves"), help="what to draw (%(default)s)")
    add("--by", metavar="KIND", help="what the file tells apart, such as timestep (the first: class, text or task)")
    add("--groups", nargs="+", metavar="NAME", help=f"only these (all; for bars the {SHOWN} that differ most)")
    add("--layer", type=int, metavar="N", help="only this one, from 0 (all; for bars the last that leaves heads out)")

    def work() -> None:
        options = parser.parse(argv)
        file = options.load / FILE if options.load.is_dir() else options.load
        check_figure("--output", options.output)
        if not file.is_file():
            raise ValueError(
                f"{file}: no such file; a run writes it at its end, and --head-load FILE makes validate.py, sample.py and "
                "moh_vision.language.evaluation.lm write one"
            )
        load = HeadLoad.read(file)
        if not load.choosing():
            raise ValueError(f"{file}: every token ran every head, so there is nothing to draw")
        load.of["run"] = file.resolve().parent.name if file.name == FILE else file.stem
        figure, numbers = draw(load, options.kind, options.by, options.groups, options.layer)
        written = write_figure(figure, options.output, dict(file=str(file), of=load.of, **numbers))
        say(f"{written}: {options.kind} by {numbers['by']}")

    return exit_code("head_load", work)


def draw(
    load: HeadLoad,
    kind: str,
    by: Optional[str] = None,
    names: Optional[Sequence[str]] = None,
    layer: Optional[int] = None,
) -> Drawn:
    """A figure of a load, with its numbers.

    Args:
        load: the counts.
        kind: "map", "bars" or "curves".
        by: a kind of groups; None: the first.
        names: of the groups; None: all, or for bars those that differ most.
        layer: None: all, or for bars the last whose tokens choose among heads.

    Raises:
        ValueError: for a kind of groups, a group or a layer that there is not.
    """
    by = by or next(iter(load.groups))
    if by not in load.groups:
        raise ValueError(f"--by {by}: {closest(by, load.groups)}")
    if layer is not None and not 0 <= layer < len(load.layers):
        raise ValueError(f"--layer {layer}: expected 0 to {len(load.layers) - 1}")
    places: Dict[str, int] = {name: place for place, name in enumerate(load.groups[by])}
    for name in names or ():
        if name not in places:
            likely = nearest(name, places) or list(places)[:5]
            raise ValueError(
                f"--groups {name}: no {by} has this name; there are {len(places)}, such as {', '.join(likely)}"
            )
    groups = [places[name] for name in names] if names else list(range(len(places)))
    if kind == "bars":
        layer = [len(load.layers) - 1, *load.choosing()][-1] if layer is None else layer
        if not names:
            groups = most_different(load.share(by)[layer], load.runs(by)[layer][:, -1])
        return draw_bars(load, by, groups, layer)
    layers = range(len(load.layers)) if layer is None else [layer]
    return (draw_map if kind == "map" else draw_curves)(load, by, groups, layers)


if __name__ == "__main__":
    raise SystemExit(main())
