"""How the scores of causal language models change with the tokens that they have learnt from (Jin 2024, figure 2).

    python -m moh_vision lm-curve RUN RUN ... --output curve.png --tasks moh-llama3 --batch-size 8
    python -m moh_vision lm-curve RUN RUN ... --output curve.png --perplexity FILE.txt

RUN comes first: the folder of a run of train_text.py with keep_weights_every. Each of its RUN/weights/step_N is scored as
`python -m moh_vision lm` does, whose options are taken too. A record that is there is not made again, so that the same
command goes on after an interruption, and with a run that has more steps by then. `accelerate launch -m` shares the questions among GPUs. The figure has the average of each suite, or the perplexity, over
tokens; NAME.json beside it also has each task. Runs that differ in nothing but the seed make one line: the mean, in a band of one standard deviation.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from moh_vision.commands.curves import Line, draw_lines
from moh_vision.commands.figures import check_figure, write_figure
from moh_vision.commands.runs import TEXT, ScoredRun, find_run, grouped, read_json
from moh_vision.engine.commands import Parser, exit_code
from moh_vision.engine.ranks import say
from moh_vision.engine.run import finish, make_accelerator
from moh_vision.engine.step_folders import by_age
from moh_vision.language.evaluation import lm
from moh_vision.language.evaluation.lm_suites import SUITES


def kept_weights(run: Path) -> List[Tuple[int, Path]]:
    """(step, folder) of the weights that a run has kept, the oldest first."""
    found = [(step, folder) for step, folder in by_age(run / "weights") if (folder / "model.safetensors").is_file()]
    if not found:
        raise ValueError(f"{run} has kept no weights in {run / 'weights'}: train it with keep_weights_every")
    return found[::-1]


def tokens_a_step(run: ScoredRun) -> int:
    """Tokens that a causal language model learns from in a step: blocks times their length."""
    if run.kind != TEXT["clm"]:
        raise ValueError(f"{run.folder}: model.name {run.model}; expected runs of {TEXT['clm']}, clm_*")
    return run.config["optim.batch_size"] * run.config["data.block"]


def scores_of(folder: Path, argv: List[str], accelerator) -> Dict[str, float]:
    """Score the model of a folder with options of `lm`, whose record stays there; every process calls it. Return
    scores by title: the average and the tasks of each suite, or "perplexity".
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
    for suite, found in record["suites"].items():
        scores[f"average of {suite}"] = found["average"]
        scores.update(zip((f"{suite}: {row.title}" for row in SUITES[suite].rows), found["values"]))
    return {title: value for title, value in scores.items() if value is not None}


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision lm-curve", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; it comes first")
    add("--output", required=True, type=Path, metavar="FILE", help=".png or .svg; NAME.json has the numbers")

    def work() -> None:
        options, rest = parser.parse_with_rest(argv, "RUN")
        check_figure("--output", options.output)
        runs = [find_run(folder) for folder in options.runs]
        kept = {run.folder: (tokens_a_step(run), kept_weights(run.folder)) for run in runs}
        for option in ("--model", "--out", "--head-load"):
            if any(given.split("=")[0] == option for given in rest):
                raise ValueError(
                    f"{option}: the weights that a run has kept are scored, and their records lie beside them"
                )
        asked = lm.parse(["--model", str(runs[0].folder), *rest])
        strange = [task for task in (asked.tasks or "").split(",") if task.strip() not in SUITES]
        if asked.perplexity is None and strange:
            raise ValueError(f"--tasks {strange[0]}: expected suites, {', '.join(SUITES)}")
        accelerator = make_accelerator("no")  # one process, or those that accelerate started
        values: Dict[str, Dict[str, Dict[float, List[float]]]] = {}  # title -> name of a group -> tokens -> scores
        for name, group in grouped(runs):
            for run in group:
                tokens, folders = kept[run.folder]
                for step, folder in folders:
                    for title, value in scores_of(folder, rest, accelerator).items():
                        values.setdefault(title, {}).setdefault(name, {}).setdefault(step * tokens, []).append(value)
        lines = {
            title: [Line(name, dict(sorted(v.items()))) for name, v in own.items()] for title, own in values.items()
        }
        drawn = [title for title in lines if title == "perplexity" or title.startswith("average of ")]
        several = len(drawn) > 1
        shown = [
            line._replace(name=f"{line.name}, {title}") if several else line for title in drawn for line in lines[title]
        ]
        y = "accuracy, %, mean of the tasks" if several else drawn[0] if asked.perplexity else f"{drawn[0]}, %"
        numbers = dict(x="tokens", runs=[str(run.folder) for run in runs], options=rest)
        numbers["scores"] = {title: [line.numbers() for line in own] for title, own in lines.items()}
        if accelerator.is_main_process:
            written = write_figure(draw_lines(shown, "tokens", y), options.output, numbers)
            say(f"{written}: {', '.join(drawn)}")
        finish(accelerator)

    return exit_code("lm_curve", work)


if __name__ == "__main__":
    raise SystemExit(main())
