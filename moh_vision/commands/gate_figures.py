"""Pictures of gates: load per layer and expert, entropy per layer."""

from __future__ import annotations

import math
import textwrap
from typing import Dict, Iterable, Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from moh_vision.commands.figures import add_legend, plt, save_figure

MOST_LABELLED = 16  # experts whose cells have room for a number


def draw_gate_load(load: Sequence[Tensor], names: Sequence[str], path: str, title: str, note: str = "") -> None:
    """Write a PNG: one row a layer, one column an expert, colour the share of attributions (Peng 2020, table 8).

    Args:
        load: [E] of each layer, from `GateStatistics.load`.
        names: of the layers.
        path: of the PNG.
        title: above the figure.
        note: below it: what E1, E2, ... are.
    """
    most = max(len(shares) for shares in load)
    grid = np.full((len(load), most), np.nan)
    for row, shares in zip(grid, load):
        row[: len(shares)] = 100 * shares.numpy()
    numbered = most <= MOST_LABELLED
    width = 2.8 + (0.55 if numbered else 0.24) * most
    figure, axes = plt.subplots(figsize=(max(5.0, width), max(2.4, 1.5 + 0.34 * len(load))), layout="constrained")
    top = np.nanmax(grid)
    image = axes.imshow(grid, cmap="viridis", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    if numbered:
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                colour = "black" if value > 0.6 * top else "white"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    step = 1 if numbered else 4
    axes.set_xticks(range(0, most, step), [f"E{n}" for n in range(1, most + 1, step)], fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    lines = [textwrap.fill(line, int(13 * figure.get_figwidth()), break_on_hyphens=False) for line in note.splitlines()]
    axes.set_xlabel("\n".join(lines), fontsize=8)
    axes.set_title(title, fontsize=10)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.colorbar(image, ax=axes, label="% (a row adds up to 100)")
    save_figure(figure, path)


def draw_gate_entropy(entropies: Dict[str, Dict[str, Sequence[float]]], experts: Iterable[int], title: str) -> Figure:
    """A figure of the mean entropy of the gates over the layers: one line a model, bars of the standard deviation over
    its seeds, and the entropy of uniform gates.

    Args:
        entropies: of each model by its name: name of a layer -> nats in each seed, from `GateStatistics.entropy`.
        experts: E of the layers.
        title: above the figure.
    """
    layers = list(dict.fromkeys(name for values in entropies.values() for name in values))
    names = [name.replace(".layers.", " ").replace("_attn", "").replace(".", " ") for name in layers]
    figure, axes = plt.subplots(figsize=(max(5.6, 2.5 + 0.5 * len(layers)), 4.0), layout="constrained")
    for number, (name, values) in enumerate(entropies.items()):
        shift = 0.06 * (number - (len(entropies) - 1) / 2)  # bars of the same layer stand side by side
        ordered = sorted(values, key=layers.index)  # models name their layers in other orders
        places = [layers.index(layer) + shift for layer in ordered]
        several = any(len(found) > 1 for found in values.values())
        spread = [np.std(values[n], ddof=1) if len(values[n]) > 1 else 0.0 for n in ordered] if several else None
        axes.errorbar(places, [np.mean(values[n]) for n in ordered], spread, marker="o", capsize=3, label=name)
    experts = sorted(set(experts))
    for number in experts:
        text = f"uniform (ln {number} = {math.log(number):.2f})"
        axes.axhline(math.log(number), color="grey", linestyle="--", label=text)
    axes.set_xticks(range(len(layers)), names, fontsize=8, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_ylabel("gate entropy, nats")
    axes.set_ylim(0, 1.06 * math.log(experts[-1]))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    add_legend(figure, axes, loc="lower left")
    return figure
