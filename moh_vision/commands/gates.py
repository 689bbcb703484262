"""The gates of language models on a text: entropy, load of the experts, and preferred tokens.

    python -m moh_vision gates RUN RUN ... --output gates.png > gates.md

Prints Markdown: the mean entropy of the gates (Peng 2020 (MAE), section 5.1), for translation also
BLEU with one expert in each attention of the encoder (generate.gate_modes; table 5). Runs that
differ only in the seed share a row. Then, for each run, the load of the experts (table 8) and
the tokens of largest PMI with each (table 6; Zhang 2022, table 4).
"""

import math
from collections.abc import Sequence
from pathlib import Path

from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import Line, draw_lines, lines_of
from moh_vision.commands.runs import ScoredRun, grouped, mean_and_spread, read_runs
from moh_vision.commands.table import Table, markdown
from moh_vision.language.evaluation.gates import gate_text, read_gates
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights


def options(add) -> None:
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a finished run of train_text.py",
    )
    add("--split", default="val", choices=("val", "test"), help="of the run's data (%(default)s)")


def figure(options) -> Drawn:
    runs = read_runs(options.runs)
    if runs[0].wing != "text":
        raise ValueError(f"{runs[0].folder} ({runs[0].task}): expected runs of train_text.py")
    for run in runs:
        if options.split == "test" and run.config.get("data.test") is None:
            raise ValueError(f"--split test: {run.folder} has no data.test")
    groups = grouped(runs)
    records = {}
    texts = []
    for name, group in groups:
        for run in group:
            gates = read_split(run, options.split)
            seed = run.config.get("seed")
            if gates["layers"]:
                texts.append(gate_text(gates, f"## {name}, seed {seed}"))
            del gates["columns"]  # only `gate_text` needs them
            scores = {
                key: value
                for key, value in run.scores.items()
                if key.startswith("bleu") and value is not None
            }
            records[run.folder] = dict(run=str(run.folder), name=name, seed=seed, **gates, **scores)
    if not texts:
        raise ValueError(
            f"{', '.join(str(run.folder) for run in runs)}: none has a gate with a distribution over experts"
        )
    numbers = dict(split=options.split, runs=list(records.values()))
    text = "\n".join([markdown(entropy_table(groups, records)) + "\n", *texts])
    return Drawn(draw_gate_entropy(numbers), numbers, text, alone=True)


def read_split(run: ScoredRun, split: str) -> dict:
    """Read the gates of a run's scored weights on a split of its data, see `read_gates`."""
    given = ["--mixed_precision", "no"]
    found = find_weights(run.folder)
    opened = open_weights(found, given, command="gates", saved=run.saved)
    text = opened.text()
    accelerator = opened.accelerator
    batches = text.eval_batches(
        getattr(text, split), accelerator.process_index, accelerator.num_processes
    )
    return read_gates(opened.model.to(accelerator.device), batches, text.vocabularies, accelerator)


def entropy_table(
    groups: Sequence[tuple[str, list[ScoredRun]]], records: dict[Path, dict]
) -> Table:
    """Make a table of gate entropies, with BLEU when each attention of the encoder runs only one expert."""
    rows: list[dict[str, str]] = []
    notes = [
        "Entropy in nats. Mean ± standard deviation over runs that differ in nothing but the seed."
    ]
    order = [
        "model",
        "runs",
        "entropy, encoder",
        "entropy, decoder",
        "entropy, model",
        "uniform",
        "BLEU",
    ]
    for name, group in groups:
        notes.append(
            f"{name}: {', '.join(str(run.folder) for run in group)}; {group[0].scored_on}."
        )
        of_group = [records[run.folder] for run in group]
        row = dict(model=name, runs=str(len(group)))
        for stack in of_group[0]["mean_entropy"]:
            entropies = [record["mean_entropy"][stack] for record in of_group]
            row[f"entropy, {stack}"] = mean_and_spread(entropies, 2)
        experts = {layer["experts"] for record in of_group for layer in record["layers"]}
        if experts:
            ends = sorted({min(experts), max(experts)})
            row["uniform"] = " to ".join(f"{math.log(number):.2f}" for number in ends)
        row["BLEU"] = mean_and_spread([record.get("bleu") for record in of_group], 2)
        for key, title in (
            ("bleu_argmax", "most probable expert"),
            ("bleu_random", "random expert"),
        ):
            scored = [record for record in of_group if key in record]
            row[title] = mean_and_spread([record[key] for record in scored], 2)
            changes = [record[key] - record["bleu"] for record in scored]
            row[f"{title}, change"] = mean_and_spread(changes, 2)
        deviations = [record.get("bleu_random_std") for record in of_group]
        row["random expert, std of draws"] = mean_and_spread(deviations, 2)
        rows.append(row)
    # `order` comes first, then the further columns, which all rows have; empty columns are left out.
    titles = [
        title
        for title in dict.fromkeys([*order, *rows[-1]])
        if any(row.get(title, "-") != "-" for row in rows)
    ]
    return Table(titles, [[row.get(title, "-") for title in titles] for row in rows], notes)


def draw_gate_entropy(numbers: dict):
    """Draw the gate entropies in the numbers of this command over the layers, a line per model."""
    layers = [(run["name"], layer) for run in numbers["runs"] for layer in run["layers"]]
    names = list(dict.fromkeys(layer["name"] for _, layer in layers))
    lines = lines_of(
        (model, names.index(layer["name"]), layer["entropy"]) for model, layer in layers
    )
    experts = sorted({layer["experts"] for _, layer in layers})
    for number in experts:
        nats = [math.log(number)]
        ends = {-0.5: nats, len(names) - 0.5: nats}
        lines.append(Line(f"uniform (ln {number} = {nats[0]:.2f})", ends, "grey", dotted=True))
    figure = draw_lines(lines, "", "gate entropy, nats")
    axes = figure.axes[0]
    short = [name.replace(".layers.", " ").replace("_attn", "").replace(".", " ") for name in names]
    axes.set_xticks(
        range(len(names)), short, fontsize=8, rotation=30, ha="right", rotation_mode="anchor"
    )
    axes.set_ylim(0, 1.06 * math.log(experts[-1]))
    axes.set_title(f"entropy of the gates, {numbers['split']}", fontsize=10)
    return figure
