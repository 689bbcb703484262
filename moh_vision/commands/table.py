"""Print runs as the papers print theirs: scores, parameters, MACs, active heads, and groups of routed MLPs.

python -m moh_vision table RUN RUN ...

RUN is a finished run of train_cls.py, train_dit.py or train_text.py; all are of one kind. Runs that
differ only in the seed make one row: mean, standard deviation (n - 1) and number; with an elastic
budget one for each share of heads that they were scored at. The papers' rows follow the runs of the
same model, with as many parameters, or classes of images.

Scores are in the run's folder: results.json; for diffusion scores.json by sample.py --score, else
the training's last; for suites scores*.json, the --out of `python -m moh_vision lm`.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import yaml

from moh_vision.attention import head_budget
from moh_vision.commands.runs import (
    COLUMNS,
    NAMES,
    TEXT,
    Column,
    ScoredRun,
    at_shares,
    grouped,
    mean_and_spread,
    read_runs,
    suite_titles,
)
from moh_vision.common.progress import say
from moh_vision.language.config import WORDS
from moh_vision.language.evaluation.lm_suites import SUITES
from moh_vision.models.counts import count_macs, count_parameters

PAPER_ROWS = yaml.safe_load(Path(__file__).with_name("paper_rows.yaml").read_text(encoding="utf-8"))
# A model may differ so much from a paper's row in its number of parameters: 39 M and 41 M are one model with two
# vocabularies, 61 M is another model.
TOLERANCE = 0.1
IMAGENET_CLASSES = 1000
SIZES = {
    "parameters": "parameters, M",
    "macs": "MACs, M",
    "active": "active heads, %",
    "groups": "active groups, %",
}
# A run that sets one of these arguments has another model than the paper's model of the same name.
ANOTHER_MODEL = {
    "attention",
    "head_budget",
    "mlp_budget",
    "router",
    "scope",
    "router_kwargs",
    "embed_dim",
    "depth",
    "num_heads",
    "patch_size",
}
INPUTS = dict.fromkeys(("classification", "diffusion"), "an image")
INPUTS[TEXT["mt"]] = f"{WORDS} source and {WORDS} target tokens"
MACS = (
    "MACs: one forward of {}, active {} alone (ideal in --dry-run), with attention scores; the papers leave these out "
    "or count them twice (docs/reference/models.md)."
)


class Sizes(NamedTuple):
    """The columns of SIZES for a model, and its number of image classes."""

    parameters: float | None  # in millions
    macs: float | None  # in millions
    active: float | None  # in percent of the heads
    groups: float | None  # in percent of the groups of the MLPs; None: these are dense
    classes: int | None  # None: the model has no classes


class Table(NamedTuple):
    """The cells of a table as text, and the notes below the table."""

    titles: list[str]
    rows: list[list[str]]
    notes: list[str]


def paper_rows(run: ScoredRun, sizes: Sizes) -> list[dict[str, str]]:
    """Return the papers' rows to compare a run with; a row is a dict of texts, by column or title of a suite's task.

    A model whose arguments the run changed has none.
    """
    given = {key for key in ANOTHER_MODEL if run.config.get(f"model.{key}") is not None}
    if given or ANOTHER_MODEL.intersection(run.config.get("model.kwargs") or ()):
        return []
    pair = f"{run.config.get('data.source')}-{run.config.get('data.target')}"
    rows = []
    for row in PAPER_ROWS:
        if row["model"] != run.model or row.get("pair", pair) != pair or not _alike(row, sizes):
            continue
        if "suite" in row:
            name, column = row["suite"]
            *tasks, average = suite_titles(name)
            if run.model == "clm_pretrained" and average not in run.scores:
                continue  # any pre-trained model has this name: compare only models that were scored on the suite
            values = [*SUITES[name].paper[column], SUITES[name].averages[column]]
            row = row | {title: f"{value:.1f}" for title, value in zip([*tasks, average], values)}
        rows.append(row)
    return rows


def _alike(row: dict[str, str], sizes: Sizes) -> bool:
    """Return whether a model of these sizes may be the model of a paper's row.

    On ImageNet the number of classes decides, elsewhere the number of parameters: a text model has the same name with
    any vocabulary and in any size.
    """
    if sizes.classes is not None and row["data"].startswith("ImageNet"):
        return sizes.classes == IMAGENET_CLASSES
    if sizes.parameters is None or "parameters" not in row:
        return True
    theirs = float(row["parameters"].replace(",", ""))
    return abs(sizes.parameters / theirs - 1) <= TOLERANCE


def sizes_of(run: ScoredRun) -> Sizes:
    """Return the sizes of a run's model, with the MACs of active heads and groups alone; all None if the run has no weights."""
    try:
        model, inputs, named = run.forward()
    except FileNotFoundError:
        return Sizes(None, None, None, None, None)
    macs = count_macs(model, *inputs, **named)
    classes = getattr(model, "num_classes", None)
    if classes is None:
        classes = getattr(model.config, "num_classes", None)
    budget = head_budget(model)
    groups = None
    if "mlp" in budget:
        groups = 100 * budget["mlp"]["share"]
    return Sizes(
        parameters=count_parameters(model) / 1e6,
        macs=(macs.linears + macs.scores) / 1e6,
        active=100 * budget["share"],
        groups=groups,
        classes=classes,
    )


def make_table(runs: Sequence[ScoredRun], names: Sequence[str] | None = None) -> Table:
    """Make the table of runs and the papers' rows, without empty columns; a missing number is a dash."""
    groups = grouped(runs, names=names)
    columns = COLUMNS | {title: Column(title) for name in SUITES for title in suite_titles(name)}
    shown = [key for key in columns if any(run.scores.get(key) is not None for run in runs)]
    rows = []
    notes = []
    if len(groups) < len(runs):
        notes.append("Mean ± standard deviation over runs that differ in nothing but the seed.")
    macs_note = len(notes)
    # `grouped` puts the groups of one model one after another; the papers' rows follow them.
    for _, groups_of_model in groupby(groups, lambda named: named[1][0].model):
        printed: list[dict[str, str]] = []
        for label, group in groups_of_model:
            sizes_of_group = sizes_of(group[0])
            by_name = {f"{label}, at a share of {s}": runs for s, runs in at_shares(group).items()}
            for name, runs_at_share in (by_name or {label: group}).items():
                sizes = sizes_of_group
                if runs_at_share is not group:
                    sizes = sizes_of(runs_at_share[0])
                cells = [_shown(getattr(sizes, key)) for key in SIZES]
                for key in shown:
                    values = [run.scores.get(key) for run in runs_at_share]
                    cells.append(mean_and_spread(values, columns[key].digits))
                rows.append([name, str(len(group)), _steps_done(group), *cells])
            seeds = ", ".join(
                f"{run.folder} (seed {run.config.get('seed')}{_of_all_steps(run)})" for run in group
            )
            note = f"{label}: {seeds}; {group[0].scored_on}"
            if len(group) == 1:
                note += group[0].error
            notes.append(f"{note}.")
            theirs = paper_rows(group[0], sizes_of_group)
            comparable = [row for row in theirs if any(key in row for key in shown)]
            printed += [row for row in comparable if row not in printed]
        for row in printed:
            cells = [row.get(key, "-") for key in ("steps", *SIZES, *shown)]
            rows.append([f"{row['row']} ({row['source']}; {row['data']})", "paper", *cells])
    titles = ["model", "runs", "steps", *SIZES.values(), *(columns[key].title for key in shown)]
    parts = "heads and groups"
    column = titles.index(SIZES["groups"])
    if all(row[column] == "-" for row in rows):  # every MLP is dense
        parts = "heads"
        for cells in (titles, *rows):
            del cells[column]
    notes.insert(macs_note, MACS.format(INPUTS.get(runs[0].task, "a block of text"), parts))
    return Table(titles, rows, notes)


def _steps_done(group: Sequence[ScoredRun]) -> str:
    """Return the steps of runs as text: one number, or the fewest and the most."""
    fewest = min(run.steps for run in group)
    most = max(run.steps for run in group)
    if most == 0:
        return "-"
    if fewest == most:
        return f"{most:,}"
    return f"{fewest:,} to {most:,}"


def _of_all_steps(run: ScoredRun) -> str:
    """Return a text on how far a run came if it ended early, else ""."""
    planned = run.config.get("max_steps")
    if planned and 0 < run.steps < planned:
        return f", {run.steps:,} of {planned:,} steps"
    return ""


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def markdown(table: Table) -> str:
    """Return a table as Markdown, with a list of its notes."""
    lines = [table.titles, ["---", *["---:"] * (len(table.titles) - 1)], *table.rows]
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*text, "", *(f"- {note}" for note in table.notes)])


def options(add) -> None:
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add("--names", nargs="+", metavar="NAME", help=NAMES)


def work(options) -> None:
    say(markdown(make_table(read_runs(options.runs), options.names)))
