"""Draw the head load counted by training, validate.py, sample.py or the command lm.

    python -m moh_vision head-load FILE --output load.png --kind bars --groups desk goldfish "ice cream"

--kind map: every head of every layer, a row per group (class, timestep, text or task).
bars: one layer, a few groups (MoH, figures 3, A and B). curves: each layer's routed heads
sorted by load (MoA, figures 3 and 4).

A routed MLP is a layer after its block's attention; its groups are drawn like heads.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.cluster.hierarchy import leaves_list, linkage
from torch import Tensor

from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import Line, draw_lines, plt
from moh_vision.common.errors import closest, nearest
from moh_vision.models.head_load import FILE, PARTS, HeadLoad

SHOWN = 3  # panels of bars, unless --groups names groups
NAME = 0.15  # inches that a head's number or a group's name takes
# Largest size of a map, and the part of its width that is no map, in inches.
WIDEST = 20.0
TALLEST = 16.0
SIDES = 2.2
ALWAYS = "0.75"  # grey, for heads that every token runs


def options(add) -> None:
    add("load", type=Path, metavar="RUN|FILE", help=f"folder of a run with {FILE}, or such a file")
    add(
        "--kind",
        default="map",
        choices=("map", "bars", "curves"),
        help="what to draw (%(default)s)",
    )
    add(
        "--by",
        metavar="KIND",
        help="what the file tells apart, such as timestep (the first: class, text or task)",
    )
    add(
        "--groups",
        nargs="+",
        metavar="NAME",
        help=f"only these (all; for bars the {SHOWN} that differ most)",
    )
    add(
        "--layer",
        type=int,
        metavar="N",
        help="only this one, from 0 (all; for bars the last that leaves heads out)",
    )


def figure(options) -> Drawn:
    file = options.load
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise ValueError(
            f"{file}: no such file; a run whose tokens choose heads (not MAE's: see gates) writes it at its end, and "
            "--head-load FILE makes validate.py, sample.py and python -m moh_vision lm write one"
        )
    load = HeadLoad.read(file)
    if not load.choosing():
        raise ValueError(f"{file}: every token ran every head, so there is nothing to draw")
    if file.name == FILE:
        load.of["run"] = file.resolve().parent.name
    else:
        load.of["run"] = file.stem
    drawn = draw(load, options.kind, options.by, options.groups, options.layer)
    numbers = dict(file=str(file), of=load.of, **drawn.numbers)
    return Drawn(drawn.figure, numbers, f": {options.kind} by {numbers['by']}")


def draw(
    load: HeadLoad,
    form: str,
    by: str | None = None,
    names: Sequence[str] | None = None,
    layer: int | None = None,
) -> Drawn:
    """Draw a figure of head load.

    Args:
        load: the counts.
        form: "map", "bars" or "curves".
        by: what the groups are, such as "class"; None: the first grouping in the file.
        names: the groups to draw; None: all, and for bars the most different ones.
        layer: the only layer to draw; None: all layers, and for bars the last one that leaves heads out.
    """
    by = by or next(iter(load.groups))
    if by not in load.groups:
        raise ValueError(f"--by {by}: {closest(by, load.groups)}")
    if layer is not None and not 0 <= layer < len(load.layers):
        raise ValueError(f"--layer {layer}: expected 0 to {len(load.layers) - 1}")
    known = load.groups[by]
    for name in names or ():
        if name not in known:
            examples = ", ".join(nearest(name, known) or known[:5])
            raise ValueError(
                f"--groups {name}: no {by} has this name; there are {len(known)}, such as {examples}"
            )
    groups = list(range(len(known)))
    if names:
        groups = [known.index(name) for name in names]
    if form == "bars":
        if layer is None:
            layer = [len(load.layers) - 1, *load.choosing()][-1]
        if not names:
            groups = most_different(load.share(by)[layer], load.runs(by)[layer][:, -1])
        return draw_bars(load, by, groups, layer)
    layers = range(len(load.layers))
    if layer is not None:
        layers = [layer]
    if form == "map":
        return draw_map(load, by, groups, layers)
    return draw_curves(load, by, groups, layers)


def draw_map(load: HeadLoad, by: str, groups: Sequence[int], layers: Sequence[int]) -> Drawn:
    """Draw a column per head and a row per group; grey: heads that every token runs.

    The figure has at most 2,600 x 2,080 pixels. If the head numbers do not fit, shared heads are left out. If the group
    names do not fit, only some are written, and similar groups are sorted next to each other (Ward's clustering);
    timesteps keep their order.
    """
    numbered = NAME * (sum(load.widths[layer] for layer in layers) - 1) <= WIDEST - SIDES
    choosing = [layer for layer in layers if layer in load.choosing()]
    first = dict.fromkeys(layers, 0)  # layer -> the first head that is drawn
    if choosing and not numbered:
        first = {layer: load.layers[layer]["shared"] for layer in choosing}
    share_of_layer = load.share(by)
    shares = {layer: share_of_layer[layer][groups, start:] for layer, start in first.items()}

    height = min(max(2.8, 1.5 + 0.24 * len(groups)), TALLEST)
    nth = math.ceil(NAME * len(groups) / (height - 1.3))  # every nth group's name is written
    label = by
    if nth > 1 and by != "timestep":
        order = similar_side_by_side(torch.cat(list(shares.values()), 1))
        shares = {layer: share[order] for layer, share in shares.items()}
        groups = [groups[row] for row in order]
        label = f"{by} (similar ones side by side, 1 of {nth} is named)"

    blocks = []  # of the map, one for each layer, with an empty column behind it
    heads = []  # labels of the columns, used if they fit
    shown = []
    for layer, share in shares.items():
        budget = load.layers[layer]
        shared = budget["shared"]
        always = shared if layer in choosing else budget["heads"]
        blocks.append(map_block(share, always - first[layer]))
        heads += ["s"] * shared
        heads += [str(head) for head in range(shared, budget["heads"])]
        shown.append(
            dict(name=budget["name"], first_head=first[layer], share_of_tokens=rounded(share, 3))
        )
    grid = np.hstack(blocks)[:, :-1]

    titles = layer_names(load, list(shares))
    slanted = max(map(len, titles)) > 3
    width = min(max(6.0, SIDES + 0.2 * grid.shape[1]), WIDEST)
    # Slanted names of layers need an inch more.
    figure, axes = plt.subplots(
        figsize=(width, min(height + slanted, TALLEST)), layout="constrained"
    )
    # Gaps are white, heads that every token runs are grey.
    colours = plt.get_cmap("viridis").with_extremes(bad="white", under=ALWAYS)
    image = axes.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of tokens", shrink=0.9)
    axes.set_title(title_of(load, width), fontsize=10)
    axes.set_frame_on(False)
    axes.set_ylabel(label)
    names = [load.groups[by][group] for group in groups]
    shown_names = [shortened(name) for name in names[::nth]]
    axes.set_yticks(range(0, len(names), nth), shown_names, fontsize=8)
    axes.set_xticks([])
    parts = parts_of(load, list(shares))
    axes.set_xlabel(f"routed {parts} of each layer; those that are always on are left out")
    if numbered:
        axes.set_xticks(np.flatnonzero(~np.isnan(grid[0])), heads, fontsize=7)
        axes.set_xlabel(f"{parts} (grey: run for every token; s: shared)")
    name_layers_above(axes, blocks, titles, slanted)
    return Drawn(figure, dict(by=by, groups=names, layers=shown))


def similar_side_by_side(shares: Tensor) -> list[int]:
    """Return an order of the rows [groups, columns] in which similar ones are neighbours."""
    return leaves_list(linkage(shares.numpy(), "ward")).tolist()


def map_block(share: Tensor, always: int) -> np.ndarray:
    """Return the block of a layer in a map: its share [groups, H], and an empty column behind.

    The first `always` heads run for every token. They are -1, below the colour scale, and drawn in ALWAYS.
    """
    one_behind = [(0, 0), (0, 1)]
    block = np.pad(share.numpy(), one_behind, constant_values=np.nan)
    block[:, :always] = -1
    return block


def name_layers_above(axes, blocks: Sequence[np.ndarray], titles: Sequence[str], slanted: bool):
    """Write the title of every layer above the middle of its block."""
    widths = np.array([block.shape[1] for block in blocks])
    middles = widths.cumsum() - widths / 2 - 1
    above = axes.secondary_xaxis("top")
    above.set_frame_on(False)
    above.set_xlabel("layer")
    if slanted:
        above.set_xticks(middles, titles, fontsize=8, rotation=45, ha="left")
    else:
        above.set_xticks(middles, titles, fontsize=8)


def draw_bars(load: HeadLoad, by: str, groups: Sequence[int], layer: int) -> Drawn:
    """Draw a panel per group: the share of its tokens that ran each head of a layer (Jin 2024, figures 3, A and B)."""
    budget = load.layers[layer]
    heads = budget["heads"]
    shared = budget["shared"]
    share = 100 * load.share(by)[layer]  # [groups, H]
    width = min(max(5.0, 1.5 + 0.22 * heads), 16.0)
    size = (width, 0.9 + 1.5 * len(groups))
    figure, panels = plt.subplots(
        len(groups), figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    percents = {}
    for axes, group in zip(panels.flat, groups):
        name = load.groups[by][group]
        percent = share[group].numpy()
        percents[name] = rounded(share[group], 2)
        axes.bar(range(heads), percent, color=[ALWAYS] * shared + ["C0"] * (heads - shared))
        equal = percent[shared:].sum() / max(heads - shared, 1)
        axes.axhline(equal, color="black", linestyle="--", linewidth=0.8)
        axes.set_title(shortened(f"{by} {name}", 60), fontsize=9, loc="left")
        axes.set_ylim(0, 105)
        axes.set_ylabel("% of tokens", fontsize=8)
        axes.tick_params(labelsize=8)
    nth = math.ceil(0.25 * heads / (width - 1.5))  # a number needs 0.25 inches
    axes.set_xticks(range(0, heads, nth))
    grey = " (grey: shared, always on)" if shared else ""
    axes.set_xlabel(f"{parts_of(load, [layer])}{grey}, dashed: equal loads")
    figure.suptitle(title_of(load, width, f"layer {layer} ({budget['name']})"), fontsize=10)
    return Drawn(figure, dict(by=by, layer=budget, percent_of_tokens=percents))


def draw_curves(load: HeadLoad, by: str, groups: Sequence[int], layers: Sequence[int]) -> Drawn:
    """Draw a line per layer: its routed heads sorted by load (Zhang 2022, figures 3 and 4)."""
    runs = load.runs(by)
    curves = {}
    for layer in layers:
        shared = load.layers[layer]["shared"]
        counts = runs[layer][groups, shared:-1].sum(0)  # [routed candidates]
        if layer in load.choosing() and counts.sum() > 0:
            curves[layer] = (100 * counts / counts.sum()).sort(descending=True)
    if not curves:
        raise ValueError(
            "no layer chose among heads for these groups, so there are no loads to compare"
        )
    names = layer_names(load, list(curves))
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(curves)))
    lines = []
    loads = {}
    for colour, name, (layer, (percent, order)) in zip(colours, names, curves.items()):
        budget = load.layers[layer]
        values = {rank: [value] for rank, value in enumerate(percent.tolist(), 1)}
        lines.append(Line(f"layer {name}", values, colour))
        loads[budget["name"]] = dict(
            percent=rounded(percent, 3), heads=(budget["shared"] + order).tolist()
        )
    for heads in sorted({len(line.by_x) for line in lines}):
        equal = [100 / heads]
        lines.append(Line(f"equal loads of {heads}", {1: equal, heads: equal}, "grey", dotted=True))
    figure = draw_lines(
        lines,
        f"routed {parts_of(load, list(curves))} of a layer, from the most loaded one",
        "% of the layer's choices",
    )
    (axes,) = figure.axes
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title_of(load, 7.0), fontsize=10)
    group_names = [load.groups[by][group] for group in groups]
    return Drawn(figure, dict(by=by, groups=group_names, layers=loads))


def most_different(share: Tensor, tokens: Tensor, count: int = SHOWN) -> list[int]:
    """Return the indices of `count` groups that differ most, sorted.

    The first one chosen is the farthest from the mean; each further one is the farthest from all that are chosen.

    Args:
        share: [groups, H], share of a group's tokens that ran each head.
        tokens: [groups], how many tokens were counted.
        count: how many groups are chosen.
    """
    counted = tokens.nonzero().flatten()  # a group without tokens has no share
    share = share[counted]
    chosen = []
    centres = share.mean(0, keepdim=True)
    for _ in range(min(count, len(counted))):
        far = torch.cdist(share, centres, p=1).amin(1)
        far[chosen] = -1
        chosen.append(int(far.argmax()))
        centres = share[chosen]
    return sorted(counted[chosen].tolist())


def short_names(names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Return short names of layers: their numbers, or the parts that differ if names differ in more than a number."""
    if len({re.sub(r"\d+", "", name) for name in names}) == 1:
        return [str(number) for number in numbers]
    parts = [name.split(".") for name in names]
    common = set.intersection(*map(set, parts))
    return [
        " ".join(word for word in words if word.isdecimal() or word not in common)
        for words in parts
    ]


def layer_names(load: HeadLoad, layers: Sequence[int]) -> list[str]:
    """Return the short names of some layers, which tell them apart from all layers that were counted."""
    names = short_names([layer["name"] for layer in load.layers], range(len(load.layers)))
    return [names[layer] for layer in layers]


def parts_of(load: HeadLoad, layers: Sequence[int]) -> str:
    """Say what these layers choose: "heads", "MLPs' groups" or both."""
    found = {load.layers[layer]["parts"] for layer in layers}
    return " or ".join(words for parts, words in PARTS.items() if parts in found)


def shortened(name: str, most: int = 24) -> str:
    if len(name) <= most:
        return name
    return name[: most - 3] + "..."


def title_of(load: HeadLoad, width: float, more: str = "") -> str:
    """Return a title that says what was counted, wrapped for a figure of `width` inches."""
    shares = []
    for parts, words in PARTS.items():
        layers = [load.layers[index] for index in load.layers_of(parts)]
        if layers:
            active = sum(layer["shared"] + layer["routed"] for layer in layers)
            share = 100 * active / sum(layer["heads"] for layer in layers)
            shares.append(f"{share:.3g} % of the {words}")
    texts = [load.of.get("run"), " and ".join(shares)]
    texts += [load.of.get(key) for key in ("model", "data", "split")]
    texts.append(more)
    title = ", ".join(str(text) for text in texts if text)
    title = textwrap.fill(title, int(11 * width), break_on_hyphens=False)
    return title.replace("$", r"\$")  # "$" would start a formula


def rounded(values: Tensor, digits: int) -> list:
    return values.double().numpy().round(digits).tolist()
