"""What the gates of language models do with a text: entropy, load of the experts, and the tokens that they prefer.

python -m moh_vision gates RUN RUN ... --output gates.png > gates.md

RUN is the folder of a finished run of train_text.py; all are of one kind. Each model reads its data.val (--split test: its
data.test) once more. Printed, as Markdown:

- mean entropy of the gates, of encoder and decoder apart, and for translation the BLEU with one expert in each attention of
  the encoder, from results.json (generate.gate_modes): Peng 2020 (MAE), section 5.1 and table 5. Runs that differ in nothing
  but the seed make one row: the mean and the standard deviation.
- of each run the load of the experts (Peng 2020, table 8) and the tokens of largest PMI with each expert (Peng 2020, table
  6; Zhang 2022, table 4). Experts of different seeds have no common numbers, so these are not averaged.

The figure has the entropy of every layer, gates.json all numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from moh_vision.commands.figures import check_figure, write_figure
from moh_vision.commands.gate_figures import draw_gate_entropy
from moh_vision.commands.runs import TEXT, ScoredRun, grouped, mean_and_spread, read_runs
from moh_vision.commands.table import Table, markdown
from moh_vision.engine.commands import Parser, exit_code, say
from moh_vision.language.evaluation.gates import (
    GateReading,
    layer_entropies,
    part_entropies,
    reading_text,
)

Reading = Tuple[ScoredRun, List[GateReading]]


def entropy_table(groups: Sequence[Tuple[str, List[Reading]]]) -> Table:
    """Mean entropies, and BLEU with one expert in each attention of the encoder (Peng 2020, section 5.1 and table 5).

    Args:
        groups: runs that differ in nothing but the seed, by their name.
    """
    rows: List[Dict[str, str]] = []
    for name, group in groups:
        entropies = [part_entropies(readings) for _, readings in group]
        row = {"model": name, "runs": str(len(group))}
        for part in entropies[0]:
            row[f"entropy, {part}"] = mean_and_spread([found[part] for found in entropies], 2)
        experts = [E for _, readings in group for r in readings for E in r.statistics.experts]
        if experts:
            row["uniform"] = " to ".join(f"{math.log(E):.2f}" for E in sorted({min(experts), max(experts)}))
        scores = [run.scores for run, _ in group]
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
    notes = ["Entropy in nats. Mean ± standard deviation over runs that differ in nothing but the seed."]
    for name, group in groups:
        notes.append(f"{name}: {', '.join(str(run.folder) for run, _ in group)}; {group[0][0].how}.")
    return Table(titles, [[row.get(title, "-") for title in titles] for row in rows], notes)


def as_numbers(groups: Sequence[Tuple[str, List[Reading]]], split: str) -> dict:
    """All that the command finds, for its JSON file."""
    found = []
    for name, group in groups:
        for run, readings in group:
            about = dict(run=str(run.folder), name=name, seed=run.config.get("seed"))
            scores = {key: value for key, value in run.scores.items() if key.startswith("bleu") and value is not None}
            layers = [
                dict(name=layer, part=r.part, reads=r.text, experts=E, entropy=entropy, load=load.tolist())
                for r in readings
                for layer, E, entropy, load in zip(
                    r.layers, r.statistics.experts, r.statistics.entropy(), r.statistics.load()
                )
            ]
            tokens = {r.layers[0]: r.tokens for r in readings}
            found.append(dict(about, mean_entropy=part_entropies(readings), layers=layers, tokens=tokens, **scores))
    return dict(split=split, runs=found)


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision gates", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run of train_text.py")
    add("--output", required=True, type=Path, metavar="FILE", help=".png or .svg; FILE.json has the numbers")
    add("--split", default="val", choices=("val", "test"), help="of the run's data (%(default)s)")

    def work() -> None:
        options = parser.parse(argv)
        check_figure("--output", options.output)
        runs = read_runs(options.runs)
        if runs[0].kind not in TEXT.values():
            raise ValueError(f"{runs[0].folder} ({runs[0].kind}): expected runs of train_text.py")
        if options.split == "test":
            for run in runs:
                if run.config.get("data.test") is None:
                    raise ValueError(f"--split test: {run.folder} has no data.test")
        opener = registered("gates", "text")
        read = {run.folder: opener(run.folder, options.split) for run in runs}
        if not any(read.values()):
            raise ValueError(
                f"{', '.join(str(run.folder) for run in runs)}: none has a gate with a distribution over experts"
            )
        groups = [(name, [(run, read[run.folder]) for run in group]) for name, group in grouped(runs)]
        entropies: Dict[str, Dict[str, List[float]]] = {}
        experts = []
        for name, group in groups:
            for _, readings in group:
                experts += [E for r in readings for E in r.statistics.experts]
                for layer, value in layer_entropies(readings).items():
                    entropies.setdefault(name, {}).setdefault(layer, []).append(value)
        title = f"entropy of the gates, {options.split}"
        write_figure(draw_gate_entropy(entropies, experts, title), options.output, as_numbers(groups, options.split))
        say(markdown(entropy_table(groups)) + "\n")
        for name, group in groups:
            for run, readings in group:
                if readings:
                    say(reading_text(readings, f"## {name}, seed {run.config.get('seed')}"))

    return exit_code("gates", work)


if __name__ == "__main__":
    raise SystemExit(main())
