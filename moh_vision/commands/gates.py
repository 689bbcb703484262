"""What the gates of language models do with a text: entropy, load of the experts, and the tokens that they prefer.

python -m moh_vision gates RUN RUN ... --output gates.png > gates.md

RUN is the folder of a finished run of train_text.py; all are of one kind, and read their data once more. Printed, as
Markdown, is first the mean entropy of the gates (Peng 2020 (MAE), section 5.1), and for translation the BLEU with one
expert in each attention of the encoder (generate.gate_modes; table 5). Runs that differ in nothing but the seed make
one row. Then come the load of the experts (table 8) and the tokens of largest PMI with each (table 6; Zhang 2022,
table 4) of each run: experts of different seeds have no common numbers. The JSON beside the figure has all numbers.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import numpy as np
from matplotlib.figure import Figure

from moh_vision.commands.figures import add_legend, check_figure, plt, write_figure
from moh_vision.commands.runs import TEXT, ScoredRun, grouped, mean_and_spread, read_json, read_runs
from moh_vision.commands.table import Table, markdown
from moh_vision.engine.commands import say
from moh_vision.language.evaluation.gates import GateReading, numbers_of, numbers_on, read_gates, reading_text
from moh_vision.opening import open_run

MOST_LABELLED = 16  # experts whose cells have room for a number


def options(add) -> None:
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run of train_text.py")
    add("--output", required=True, type=Path, metavar="FILE", help=".png or .svg; FILE.json has the numbers")
    add("--kind", default="entropy", choices=("entropy", "load"), help="the figure; load is of one RUN (%(default)s)")
    add("--split", default="val", choices=("val", "test"), help="of the run's data (%(default)s)")


def work(options) -> None:
    check_figure("--output", options.output)
    runs = read_runs(options.runs)
    if runs[0].kind not in TEXT.values():
        raise ValueError(f"{runs[0].folder} ({runs[0].kind}): expected runs of train_text.py")
    if options.kind == "load" and len(runs) > 1:
        raise ValueError(f"--kind load: {len(runs)} runs; expected one")
    for run in runs:
        if options.split == "test" and run.config.get("data.test") is None:
            raise ValueError(f"--split test: {run.folder} has no data.test")
    groups = grouped(runs)
    read = {run.folder: read_split(run, options.split) for run in runs}
    if not any(read.values()):
        raise ValueError(f"{', '.join(map(str, read))}: none has a gate with a distribution over experts")
    numbers = dict(split=options.split, runs=[])
    for name, group in groups:
        for run in group:
            about = dict(run=str(run.folder), name=name, seed=run.config.get("seed"))
            scores = {key: value for key, value in run.scores.items() if key.startswith("bleu") and value is not None}
            numbers["runs"].append(dict(about, **numbers_of(read[run.folder]), **scores))
    if options.kind == "load":
        numbers = numbers_on(options.split, read[runs[0].folder])
        drawn = draw_gate_load(numbers)
    else:
        drawn = draw_gate_entropy(numbers)
    write_figure(drawn, options.output, numbers)
    say(markdown(entropy_table(groups, read)) + "\n")
    for name, group in groups:
        for run in group:
            if read[run.folder]:
                say(reading_text(read[run.folder], f"## {name}, seed {run.config.get('seed')}"))


def read_split(run: ScoredRun, split: str) -> List[GateReading]:
    """Read what the gates of the weights that the run's scores are of do with a split; empty for a model without."""
    weights = run.folder / read_json(run.folder / "results.json")["weights"]
    opened = open_run(weights, options=["--mixed_precision", "no"], command="gates")
    text, accelerator = opened.text(), opened.accelerator
    batches = text.eval_batches(getattr(text, split), accelerator.process_index, accelerator.num_processes)
    return read_gates(opened.model.to(accelerator.device), batches, text.vocabularies, accelerator)


def entropy_table(groups: Sequence[Tuple[str, List[ScoredRun]]], read: Dict[Path, List[GateReading]]) -> Table:
    """Make a table of mean entropies, and BLEU with one expert in each attention of the encoder."""
    rows: List[Dict[str, str]] = []
    notes = ["Entropy in nats. Mean ± standard deviation over runs that differ in nothing but the seed."]
    for name, group in groups:
        notes.append(f"{name}: {', '.join(str(run.folder) for run in group)}; {group[0].how}.")
        row = dict(model=name, runs=str(len(group)))
        found = [numbers_of(read[run.folder]) for run in group]
        for part in found[0]["mean_entropy"]:
            row[f"entropy, {part}"] = mean_and_spread([one["mean_entropy"][part] for one in found], 2)
        experts = {layer["experts"] for one in found for layer in one["layers"]}
        if experts:
            row["uniform"] = " to ".join(f"{math.log(E):.2f}" for E in sorted({min(experts), max(experts)}))
        scores = [run.scores for run in group]
        row["BLEU"] = mean_and_spread([score.get("bleu") for score in scores], 2)
        for key, title in (("bleu_argmax", "most probable expert"), ("bleu_random", "random expert")):
            pairs = [(score["bleu"], score[key]) for score in scores if score.get(key) is not None]
            row[title] = mean_and_spread([one for _, one in pairs], 2)
            row[f"{title}, change"] = mean_and_spread([one - whole for whole, one in pairs], 2)
        row["random expert, std of draws"] = mean_and_spread([score.get("bleu_random_std") for score in scores], 2)
        rows.append(row)
    order = ["model", "runs", *(f"entropy, {part}" for part in ("encoder", "decoder", "model")), "uniform", "BLEU"]
    order += dict.fromkeys(title for row in rows for title in row if "expert" in title)
    titles = [title for title in order if any(row.get(title, "-") != "-" for row in rows)]
    return Table(titles, [[row.get(title, "-") for title in titles] for row in rows], notes)


def draw_gate_load(numbers: dict) -> Figure:
    """Draw what RUN/gates.json has: a row a layer, a column an expert, its colour the share (Peng 2020, table 8)."""
    loads = [layer["load"] for layer in numbers["layers"]]
    most = max(map(len, loads))
    grid = np.array([[100 * share for share in load] + [np.nan] * (most - len(load)) for load in loads])
    numbered = most <= MOST_LABELLED
    step = 1 if numbered else 4
    width = max(5.0, 2.8 + (0.55 if numbered else 0.24) * most)
    figure, axes = plt.subplots(figsize=(width, max(2.4, 1.5 + 0.34 * len(loads))), layout="constrained")
    top = np.nanmax(grid)
    image = axes.imshow(grid, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="% (a row adds up to 100)")
    for (row, column), value in np.ndenumerate(grid):
        if numbered and not np.isnan(value):
            colour = "black" if value > 0.6 * top else "white"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(0, most, step), [f"E{n}" for n in range(1, most + 1, step)], fontsize=8)
    axes.set_yticks(range(len(loads)), [layer["name"] for layer in numbers["layers"]], fontsize=8)
    read: Dict[str, List[str]] = {}
    for by, sentence in numbers["columns"].items():
        read.setdefault(sentence, []).append(by)
    notes = [f"{'; '.join(by)}: {sentence}" if len(read) > 1 else sentence for sentence, by in read.items()]
    lines = [textwrap.fill(note, int(13 * width), break_on_hyphens=False) for note in notes]
    axes.set_xlabel("\n".join(lines), fontsize=8)
    axes.set_title(f"load of the experts, {numbers['split']}", fontsize=10)
    axes.set_frame_on(False)
    return figure


def draw_gate_entropy(numbers: dict) -> Figure:
    """Draw the mean entropy of the gates over the layers, as the JSON of this command has it.

    A line is a model, with bars of the standard deviation over its seeds; dashed is the entropy of uniform gates.
    """
    models: Dict[str, Dict[str, List[float]]] = {}  # name -> layer -> nats in each seed
    experts = set()
    for run in numbers["runs"]:
        for layer in run["layers"]:
            experts.add(layer["experts"])
            models.setdefault(run["name"], {}).setdefault(layer["name"], []).append(layer["entropy"])
    layers = list(dict.fromkeys(name for values in models.values() for name in values))
    names = [name.replace(".layers.", " ").replace("_attn", "").replace(".", " ") for name in layers]
    figure, axes = plt.subplots(figsize=(max(5.6, 2.5 + 0.5 * len(layers)), 4.0), layout="constrained")
    for number, (name, values) in enumerate(models.items()):
        shift = 0.06 * (number - (len(models) - 1) / 2)  # bars of the same layer stand side by side
        ordered = sorted(values, key=layers.index)  # models name their layers in other orders
        places = [layers.index(layer) + shift for layer in ordered]
        seeds = [values[layer] for layer in ordered]
        spread = [np.std(found, ddof=1) if len(found) > 1 else 0.0 for found in seeds]
        means = [np.mean(found) for found in seeds]
        axes.errorbar(places, means, spread if any(spread) else None, marker="o", capsize=3, label=name)
    for number in sorted(experts):
        text = f"uniform (ln {number} = {math.log(number):.2f})"
        axes.axhline(math.log(number), color="grey", linestyle="--", label=text)
    axes.set_xticks(range(len(layers)), names, fontsize=8, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_ylabel("gate entropy, nats")
    axes.set_ylim(0, 1.06 * math.log(max(experts)))
    axes.set_title(f"entropy of the gates, {numbers['split']}", fontsize=10)
    axes.grid(alpha=0.3)
    add_legend(figure, axes, loc="lower left")
    return figure
