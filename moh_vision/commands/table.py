"""A table of runs as the papers print them: scores, parameters, MACs, active heads.

python -m moh_vision table RUN RUN ...
python -m moh_vision table --latex RUN RUN ... > table.tex

RUN is the folder of a finished run of train_cls.py, train_dit.py or train_text.py; all are of one kind. Runs that differ in
nothing but the seed make one row: the mean, the standard deviation (of n - 1) and how many there are. Rows of the papers
stand below the runs of the same model.

Scores are read from the run's folder: results.json; for diffusion scores.json, which sample.py --score writes, else the last
scores while training; for the suites of language models scores*.json, the --out of
moh_vision.language.evaluation.lm. LaTeX needs the package booktabs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

import yaml

from moh_vision.commands.runs import COLUMNS, NAMES, SIZES, TEXT, ScoredRun, grouped, mean_and_spread, read_runs, sizes
from moh_vision.engine.commands import Parser, exit_code, say
from moh_vision.language.evaluation.lm_suites import SUITES
from moh_vision.language.opening import WORDS

# Arguments of a model that make it another one than the papers'. Their translation models have one name in two sizes.
OWN = {"attention", "head_budget", "router", "scope", "router_kwargs", "embed_dim", "depth", "num_heads", "patch_size"}


class Table(NamedTuple):
    """A table as text: the titles of its columns, its rows, and sentences below it."""

    titles: List[str]
    rows: List[List[str]]
    notes: List[str]


def paper_rows(run: ScoredRun) -> List[Dict[str, str]]:
    """The rows of the papers for the model of a run, as printed: by key of SIZES and COLUMNS, or title of a task.

    There is none for a model that is built otherwise than its name says.
    """
    given = {key for key in OWN if run.config.get(f"model.{key}") is not None}
    if given or OWN & set(run.config.get("model.kwargs") or ()):
        return []
    known = SUITES
    rows = yaml.safe_load((Path(__file__).parent / "paper_rows.yaml").read_text(encoding="utf-8"))
    pair = f"{run.config.get('data.source')}-{run.config.get('data.target')}"
    found = []
    for row in rows:
        if row["model"] != run.model or row.get("pair", pair) != pair:
            continue
        if "suite" in row:
            name, column = row["suite"]
            if run.model == "clm_pretrained" and name not in run.suites:
                continue  # any pre-trained model has this name
            suite = known[name]
            titles = [task.title for task in suite.rows]
            row = row | {title: f"{v:.1f}" for title, v in zip(titles, suite.paper[column])}
            row[f"average of {name}"] = f"{suite.averages[column]:.1f}"
        found.append(row)
    return found


def make_table(folders: Sequence[Path], names: Optional[Sequence[str]] = None) -> Table:
    """The table of some runs; a column that no run has is left out, a missing number is a dash.

    Args:
        folders: of the runs.
        names: of their rows, see `grouped`.

    Raises:
        ValueError, FileNotFoundError: one line, for what `read_run` refuses, runs of different kinds, and a run that is
            given twice.
    """
    runs = read_runs(folders)
    groups = grouped(runs, names=names)
    suites = SUITES
    tasks = [title for n, suite in suites.items() for title in [*(row.title for row in suite.rows), f"average of {n}"]]
    digits = {key: places for key, (_, places) in COLUMNS.items()} | dict.fromkeys(tasks, 2)
    shown = [key for key in digits if any(run.scores.get(key) is not None for run in runs)]
    scored = [COLUMNS[key][0] if key in COLUMNS else key for key in shown]
    rows, notes = [], []
    for model in dict.fromkeys(run.model for run in runs):
        printed: List[Dict[str, str]] = []
        for label, group in groups:
            if group[0].model != model:
                continue
            size = sizes(group[0])
            cells = [_shown(size.get(key)) for key in SIZES]
            scores = [mean_and_spread([run.scores.get(key) for run in group], digits[key]) for key in shown]
            done = sorted(run.steps for run in group)
            steps = " to ".join(f"{count:,}" for count in sorted({done[0], done[-1]})) if done[-1] else "-"
            rows.append([label, str(len(group)), steps, *cells, *scores])
            seeds = ", ".join(f"{run.folder} (seed {run.config.get('seed')}{_of_all_steps(run)})" for run in group)
            notes.append(f"{label}: {seeds}; {group[0].how}{group[0].error if len(group) == 1 else ''}.")
            comparable = [row for row in paper_rows(group[0]) if any(key in row for key in shown)]
            printed += [row for row in comparable if row not in printed]
        for row in printed:
            cells = [row.get(key, "-") for key in ("steps", *SIZES, *shown)]
            rows.append([f"{row['row']} ({row['source']}; {row['data']})", "paper", *cells])
    notes = [*_general_notes(runs[0].kind, len(groups) < len(runs)), *notes]
    return Table(["model", "runs", "steps", *SIZES.values(), *scored], rows, notes)


def _of_all_steps(run: ScoredRun) -> str:
    planned = run.config.get("max_steps")
    return f", {run.steps:,} of {planned:,} steps" if planned and 0 < run.steps < planned else ""


def _general_notes(kind: str, averaged: bool) -> List[str]:
    """What holds for all rows."""
    inputs = dict(classification="an image", diffusion="an image")
    inputs[TEXT["mt"]] = f"{WORDS} source and {WORDS} target tokens"
    notes = [
        f"MACs: one forward of {inputs.get(kind, 'a block of text')}, active heads alone (ideal in --dry-run), "
        "with attention scores; the papers leave these out or count them twice (moh_vision.commands.macs)."
    ]
    return ["Mean ± standard deviation over runs that differ in nothing but the seed.", *notes] if averaged else notes


def _shown(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def markdown(table: Table) -> str:
    """A table for Markdown, its notes as a list below it."""
    lines = [table.titles, ["---", *["---:"] * (len(table.titles) - 1)], *table.rows]
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*text, "", *(f"- {note}" for note in table.notes)])


LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
)


def latex(table: Table) -> str:
    """A tabular for LaTeX with booktabs, its notes as comments below it."""
    titles, *rows = (
        " & ".join(cell.translate(LATEX) for cell in line) + r" \\" for line in (table.titles, *table.rows)
    )
    begin, end = f"\\begin{{tabular}}{{l{'r' * (len(table.titles) - 1)}}}", r"\end{tabular}"
    return "\n".join(
        [begin, r"\toprule", titles, r"\midrule", *rows, r"\bottomrule", end, *(f"% {note}" for note in table.notes)]
    )


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision table", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--names", nargs="+", metavar="NAME", help=NAMES)
    parser.add_argument("--latex", action="store_true", help="print LaTeX instead of Markdown")

    def work() -> None:
        options = parser.parse(argv)
        table = make_table(options.runs, options.names)
        say(latex(table) if options.latex else markdown(table))

    return exit_code("table", work)


if __name__ == "__main__":
    raise SystemExit(main())
