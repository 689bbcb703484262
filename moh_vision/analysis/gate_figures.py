"""Pictures of gates and of training: load per layer and expert, entropy per layer, learning curves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Dict, Iterable, List, Sequence, Tuple

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from moh_vision.analysis.figures import plt, save_figure

Curve = Tuple[List[int], List[float]]  # steps, losses

MOST_LABELLED = 16  # experts whose cells have room for a number


def draw_gate_load(load: Sequence[Tensor], names: Sequence[str], path: str, title: str) -> None:
    """Write a PNG: one row a layer, one column an expert, colour the share of attributions (Peng 2020, table 8).

    Args:
        load: [E] of each layer, from `GateStatistics.load`.
        names: of the layers.
        path: of the PNG.
        title: above the figure.
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
    axes.set_xticks(range(0, most, step), range(1, most + 1, step), fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("expert")
    axes.set_title(title, fontsize=10)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.colorbar(image, ax=axes, label="% of attributions")
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
        places = [layers.index(layer) + shift for layer in values]
        spread = [np.std(found, ddof=1) if len(found) > 1 else 0.0 for found in values.values()]
        axes.errorbar(places, [np.mean(found) for found in values.values()], spread, marker="o", capsize=3, label=name)
    experts = sorted(set(experts))
    for number in experts:
        text = f"uniform (ln {number} = {math.log(number):.2f})"
        axes.axhline(math.log(number), color="grey", linestyle="--", label=text)
    axes.set_xticks(range(len(layers)), names, fontsize=8, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_ylabel("gate entropy, nats")
    axes.set_ylim(0, 1.06 * math.log(experts[-1]))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    return figure


def read_curves(path: str, train: str = "loss") -> Tuple[Curve, Curve]:
    """Training and validation loss of a run, with the steps that were done by then.

    Args:
        path: the run's metrics.jsonl.
        train: which number of a step's line.

    Raises:
        ValueError: naming the file, for a line that is no JSON, or if there is no such number.
    """
    curves: Tuple[Curve, Curve] = (([], []), ([], []))
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}, line {number}: not JSON") from None
        validation = entry.get("validation") or {}
        for (steps, losses), value in zip(curves, (entry.get(train), validation.get("loss"))):
            if value is not None:  # a skipped step has null
                steps.append(entry["step"] + 1)
                losses.append(value)
    for (steps, _), key in zip(curves, (train, "validation.loss")):
        if not steps:
            raise ValueError(f"{path}: no line has {key}")
    return curves


def draw_learning_curves(
    runs: Dict[str, str],
    path: str,
    title: str,
    train: str = "loss",
    first_step: int = 0,
    window: int = 1,
) -> None:
    """Write a PNG: training loss (thin) and validation loss (marked) of several runs over steps (Peng 2020, figure 3).

    Args:
        runs: metrics.jsonl of each run by the name to call it.
        path: of the PNG.
        title: above the figure.
        train: see `read_curves`; it should be the same quantity as the validation's loss, which has no smoothed labels.
        first_step: what lies before is left out, so that the high losses at the start do not flatten the rest.
        window: every training loss is the mean of so many logged ones, the last of them at its step: batches of sentences
            of one length differ more than the models.

    Raises:
        ValueError: as `read_curves`.
    """
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    for number, (name, metrics) in enumerate(runs.items()):
        looks = (dict(linewidth=1, alpha=0.7, linestyle=":"), dict(linewidth=1.8, marker="o", markersize=3.5))
        (logged, raw), validated = read_curves(metrics, train)
        means = [float(np.mean(raw[max(0, i + 1 - window) : i + 1])) for i in range(len(raw))]
        for (steps, losses), kind, look in zip(((logged, means), validated), ("train", "dev"), looks):
            shown = [i for i, step in enumerate(steps) if step >= first_step]
            x, y = [steps[i] for i in shown], [losses[i] for i in shown]
            axes.plot(x, y, color=f"C{number}", label=f"{name}, {kind}", **look)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=1 if len(runs) < 4 else 2)
    save_figure(figure, path)
