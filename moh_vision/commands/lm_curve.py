"""Scores of causal language models over training tokens (Jin 2024, figure 2).

    python -m moh_vision lm-curve RUN RUN ... --output curve.png --tasks moh-llama3 --batch-size 8

RUN comes first, then options of the command lm, which scores each RUN/weights/step_N once.
`accelerate launch -m` shares the questions among GPUs. The figure has the average of each suite, or
the perplexity; the JSON also has each task. Runs that differ only in the seed make one line, in a
band of one standard deviation.
"""

import hashlib
import json
from pathlib import Path

from moh_vision.commands.command import Drawn
from moh_vision.commands.figures import draw_lines, lines_of
from moh_vision.commands.runs import TEXT, ScoredRun, find_run, grouped, read_json
from moh_vision.engine.io import by_age
from moh_vision.engine.ranks import say
from moh_vision.engine.run import finish, make_accelerator
from moh_vision.language.evaluation import lm
from moh_vision.language.evaluation.lm_suites import SUITES

REST = "RUN"


def options(add) -> None:
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run of train_text.py with keep_weights_every")


def figure(options) -> Drawn | None:
    runs = [find_run(folder) for folder in options.runs]
    kept = {run.folder: kept_weights(run) for run in runs}
    for option in ("--model", "--out", "--head-load"):
        if any(given.split("=")[0] == option for given in options.rest):
            raise ValueError(f"{option}: the weights that a run has kept are scored, and their records lie beside them")
    asked = lm.parse(["--model", str(runs[0].folder), *options.rest])
    strange = [task for task in (asked.tasks or "").split(",") if task.strip() not in SUITES]
    if asked.perplexity is None and strange:
        raise ValueError(f"--tasks {strange[0]}: expected suites, {', '.join(SUITES)}")
    accelerator = make_accelerator("no")  # one process, or those that accelerate started
    points: dict[str, list[tuple[str, int, float]]] = {}  # by title
    for name, group in grouped(runs):
        for tokens, folder in (weights for run in group for weights in kept[run.folder]):
            for title, value in scores_of(folder, options.rest, accelerator).items():
                points.setdefault(title, []).append((name, tokens, value))
    lines = {title: lines_of(values) for title, values in points.items()}
    drawn = [title for title in lines if title == "perplexity" or title.startswith("average of ")]
    shown, y = lines[drawn[0]], drawn[0] if asked.perplexity else f"{drawn[0]}, %"
    if len(drawn) > 1:
        y = "accuracy, %, mean of the tasks"
        shown = [line._replace(name=f"{line.name}, {title}") for title in drawn for line in lines[title]]
    numbers = dict(x="tokens", runs=[str(run.folder) for run in runs], options=options.rest)
    numbers["scores"] = {title: [line.numbers() for line in own] for title, own in lines.items()}
    finish(accelerator)
    if not accelerator.is_main_process:
        return None
    return Drawn(draw_lines(shown, "tokens", y), numbers, f": {', '.join(drawn)}")


def kept_weights(run: ScoredRun) -> list[tuple[int, Path]]:
    """Return (training tokens, folder) of all kept weights, the oldest first."""
    if run.kind != TEXT["clm"]:
        raise ValueError(f"{run.folder}: model.name {run.model}; expected runs of {TEXT['clm']}, clm_*")
    tokens = run.config["optim.batch_size"] * run.config["data.block"]  # of a step
    place = run.folder / "weights"
    kept = [(step * tokens, folder) for step, folder in by_age(place) if (folder / "model.safetensors").is_file()]
    if not kept:
        raise ValueError(f"{run.folder} has kept no weights in {place}: train it with keep_weights_every")
    return kept[::-1]


def scores_of(folder: Path, argv: list[str], accelerator) -> dict[str, float]:
    """Return scores of a folder by title; `lm` keeps its record there.

    Every process calls it. Titles: "perplexity", or a suite's average and tasks.
    """
    name = f"lm-{hashlib.sha256(json.dumps(argv).encode()).hexdigest()[:12]}.json"  # other options, other scores
    if not (folder / name).is_file():
        say(f"{folder}:")
        lm.score(lm.parse(["--model", str(folder), *argv, "--out", str(folder / name)]), accelerator)
        accelerator.wait_for_everyone()  # the main process has written it
    record = read_json(folder / name)
    if "perplexity" in record:
        return dict(perplexity=record["perplexity"])
    scores = {}
    for suite, results in record["suites"].items():
        scores[f"average of {suite}"] = results["average"]
        scores.update(zip((f"{suite}: {row.title}" for row in SUITES[suite].rows), results["values"]))
    return {title: value for title, value in scores.items() if value is not None}
