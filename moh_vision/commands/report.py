"""One HTML page about some runs: scores, curves, heads, samples, confusion or translations, sizes, environment.

python -m moh_vision report RUN RUN ... --output report.html

RUN is the folder of a run of train_cls.py, train_dit.py or train_text.py, finished or not; they may be of several kinds. The
page loads nothing else: it can be sent and printed. What a run does not have is left out, and a line says what would make
it where most runs of its kind have it.
"""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import jinja2
import matplotlib
import numpy as np

from moh_vision.attention import attention_layers, head_budget
from moh_vision.commands.head_load import draw
from moh_vision.commands.report_figures import (
    MOST_CLASSES,
    Curve,
    Picture,
    draw_budget,
    draw_confusion,
    draw_curves,
    embed,
    inline_svg,
    svg_settings,
)
from moh_vision.commands.runs import (
    COLUMNS,
    TEXT,
    NoScores,
    ScoredRun,
    find_run,
    model_of,
    number_at,
    read_json,
    read_metrics,
    read_run,
    starts_of,
    text_of,
)
from moh_vision.commands.table import make_table
from moh_vision.engine.commands import Parser, exit_code, message_of, refuse_output, say
from moh_vision.engine.io import __version__, write_whole
from moh_vision.language.data.sources import find_pairs
from moh_vision.models.describe import describe
from moh_vision.models.head_load import FILE, HeadLoad

SENTENCES = 5  # that are shown with their translations
PAIRS = 20  # of classes that are confused most
SAMPLES, LOADS = 480, 1040  # pixels of pictures, at most

# Curves: title -> the place of the value in a line of metrics.jsonl.
PANELS = {
    "training loss": ("loss",),
    "validation loss": ("validation", "loss"),
    "validation: top-1, %": ("validation", "top1"),
    **{f"score: {title}": ("scores", key) for key, (title, _) in COLUMNS.items()},
    "balance loss, share of the loss": ("balance_share",),
    "learning rate": ("lr",),
}

Named = Dict[str, ScoredRun]


def make_report(folders: Sequence[Path]) -> str:
    """The page as text.

    Raises:
        ValueError, FileNotFoundError: one line, for a folder that is no run, one that is given twice, and files in it that
            are not as a run writes them.
    """
    runs = dict(zip(short_names(folders), map(find_run, folders)))
    kinds = list(dict.fromkeys(run.kind for run in runs.values()))
    with svg_settings():
        parts = [_part(kind, {name: run for name, run in runs.items() if run.kind == kind}) for kind in kinds]
    starts, without = starts_of(runs)
    names = list(runs)
    several = f"{len(names)} runs" if len(names) > 1 else names[0]
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = page.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.render(
        title=f"Report of {several}",
        about=f"moh_vision {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        parts=parts,
        starts=starts,
        without_environment=without,
        configs=[(name, text_of(run.folder / "config.yaml")) for name, run in runs.items()],
    )


def short_names(folders: Sequence[Path]) -> List[str]:
    """As much of the end of each path as tells it from the others.

    Raises:
        ValueError: for a folder that is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders):
        if paths.count(path) > 1:
            raise ValueError(f"{folder} is given twice")
    ends = [
        ["/".join(path.parts[-count:]) for path in paths] for count in range(1, max(len(p.parts) for p in paths) + 1)
    ]
    return next(names for names in ends if len(set(names)) == len(names))


def _part(kind: str, runs: Named) -> Dict[str, Any]:
    """What the template shows of the runs of one kind."""
    scored, unscored = [], []
    for run in runs.values():
        try:
            read_run(run.folder)
            scored.append(run.folder)
        except NoScores as error:
            unscored.append(str(error))
    palette = matplotlib.colormaps["tab10" if len(runs) <= 10 else "tab20"].colors
    colours = {name: matplotlib.colors.to_hex(c) for name, c in zip(runs, itertools.cycle(palette))}
    models, budgets, unweighted, dense = _models(runs)
    part: Dict[str, Any] = dict(
        title=kind.capitalize(),
        table=make_table(scored) if scored else None,
        unscored=unscored,
        legend=[(colour, name) for name, colour in colours.items()],
        curves=_curves(runs, colours),
        budgets=budgets,
        models=models,
        unweighted=unweighted,
    )
    part.update(_loads(runs, dense))
    part.update(_samples(runs if kind == "diffusion" else {}))
    part.update(_confusions(runs if kind == "classification" else {}))
    part.update(_translations(runs if kind == TEXT["mt"] else {}))
    return part


def _curves(runs: Named, colours: Dict[str, str]) -> List[Picture]:
    panels: Dict[str, Dict[str, Curve]] = {title: {} for title in PANELS}
    for name, run in runs.items():
        for entry in read_metrics(run.folder):
            for title, place in PANELS.items():
                value = number_at(entry, place, run.folder / "metrics.jsonl")
                if value is not None:  # not there, or not finite
                    steps, values = panels[title].setdefault(name, ([], []))
                    steps.append(number_at(entry, ("step",), run.folder / "metrics.jsonl") or 0)
                    values.append(value)
    return [
        draw_curves(title, curves, colours, log=title == "training loss")
        for title, curves in panels.items()
        if any(value for _, values in curves.values() for value in values)  # dense models have nothing to balance
    ]


def _models(runs: Named) -> Tuple[List[Tuple[str, str]], List[Picture], List[str], List[str]]:
    """(names of runs, description) of each model, pictures of budgets, lines about runs without weights, names of runs
    whose tokens run every head."""
    alike: Dict[str, Named] = {}
    for name, run in runs.items():
        alike.setdefault(json.dumps(run.settings(), sort_keys=True, default=str), {})[name] = run
    models, budgets, missing, dense = [], [], [], []
    for group in alike.values():
        names = ", ".join(group)
        for run in group.values():
            try:
                model, inputs, named = model_of(run)
                break
            except FileNotFoundError as error:
                missing.append(message_of(error))
        else:
            continue
        if not attention_layers(model):
            continue
        models.append((names, describe(run.model, model, *inputs, **named)))
        layers = head_budget(model)["layers"]
        if any(layer["active"] < layer["heads"] for layer in layers):
            budgets.append(draw_budget(layers, f"{names}: heads of each layer"))
        else:
            dense += group
    return models, budgets, missing, dense


def _loads(runs: Named, dense: Sequence[str]) -> Dict[str, list]:
    loads, missing = [], []
    for name, run in runs.items():
        usage, gates = run.folder / "head_usage.png", run.folder / "gate_load.png"
        if (run.folder / FILE).is_file():
            load = HeadLoad.read(run.folder / FILE)
            for by in load.groups if load.choosing() else ():
                loads.append(
                    inline_svg(draw(load, "map", by)[0], f"{name}: share of tokens that run each head, by {by}")
                )
        elif usage.is_file() and name not in dense:  # sample.py's
            loads.append(embed(usage, LOADS, f"{name}: share of tokens that run each head"))
        elif name not in dense and not gates.is_file():
            missing.append(
                f"{name} has no {FILE}: training of classifiers and text writes it at its end, sample.py has --head-load"
            )
        if gates.is_file():
            loads.append(embed(gates, LOADS, f"{name}: load of the gates"))
    return dict(loads=loads, without_load=missing)


def _samples(runs: Named) -> Dict[str, list]:
    samples, missing = [], []
    for name, run in runs.items():
        steps = {int(f.stem[5:]): f for f in run.folder.glob("previews/step_*.png") if f.stem[5:].isdecimal()}
        done = sorted(steps)
        shown = [
            (steps[n], f"after {n:,} steps") for n in dict.fromkeys(done[i] for i in (0, len(done) // 2, -1) if done)
        ]
        grids = sorted(run.folder.glob("*grid*.png"), key=lambda file: file.stat().st_mtime)
        shown += [(file, file.name) for file in grids[-1:]]
        if shown:
            samples.append((name, [embed(file, SAMPLES, caption) for file, caption in shown]))
        else:
            missing.append(f"{name} has no samples: --preview.every N draws some of the same noise while it trains")
    return dict(samples=samples, without_samples=missing)


def _confusions(runs: Named) -> Dict[str, list]:
    drawn, pairs, missing = [], [], []
    for name, run in runs.items():
        file = run.folder / "confusion.json"
        if not file.is_file():
            missing.append(f"{name} has no {file.name}: a run writes it at its end; its command, given again, does too")
            continue
        classes, counts = _confusion(file)
        if len(classes) <= MOST_CLASSES:
            matrix = np.zeros((len(classes), len(classes)), int)
            matrix[counts[:, 0], counts[:, 1]] = counts[:, 2]
            drawn.append(draw_confusion(matrix, classes, f"{name}: images of each class by what they were taken for"))
            continue
        images = np.bincount(counts[:, 0], counts[:, 2], len(classes))
        wrong = counts[counts[:, 0] != counts[:, 1]]
        worst = wrong[np.argsort(-wrong[:, 2], kind="stable")[:PAIRS]]
        pairs.append((name, [(classes[a], classes[b], n, f"{100 * n / images[a]:.1f}") for a, b, n in worst.tolist()]))
    return dict(confusions=drawn, confused=pairs, without_confusion=missing)


def _confusion(file: Path) -> Tuple[List[str], np.ndarray]:
    """(classes, [n, 3] class, predicted class, images) of a confusion.json."""
    tree = read_json(file)
    classes, counts = tree.get("classes"), tree.get("counts")
    try:
        found = np.array(counts, dtype=np.int64).reshape(-1, 3)
        fits = isinstance(classes, list) and len(found) and found[:, :2].max() < len(classes) and found.min() >= 0
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{file}: expected classes, and counts [class, predicted class, images] of these")
    return [str(name) for name in classes], found


def _translations(runs: Named) -> Dict[str, list]:
    translated: Dict[Tuple, Dict[str, List[str]]] = {}
    missing = []
    for name, run in runs.items():
        if not (run.folder / "translations.txt").is_file():
            missing.append(f"{name} has no translations.txt: a run writes it at its end")
            continue
        place = tuple(run.config.get(f"data.{key}") for key in ("root", "source", "target"))
        results = read_json(run.folder / "results.json") if (run.folder / "results.json").is_file() else {}
        whole = not any((results.get("left_out") or {"": 1}).values())  # else lines are not those of the files
        key = (*place, results.get("bleu_split"), whole)
        translated.setdefault(key, {})[name] = text_of(run.folder / "translations.txt").split("\n")[:-1]
    shown: List[List[Tuple[str, str]]] = []
    for (root, source, target, split, whole), lines in translated.items():
        common = min(map(len, lines.values()))
        pairs = _pairs(root, split, source, target) if whole and split else None
        pairs = pairs if pairs and len(pairs) == common else None  # of other text, there since
        for number in sorted({i * common // SENTENCES for i in range(SENTENCES)} if common else ()):
            rows = list(zip((f"{source} (source)", f"{target} (reference)"), pairs[number])) if pairs else []
            shown.append([*rows, *((name, text[number]) for name, text in lines.items())])
    return dict(translations=shown, without_translations=missing)


def _pairs(root: str, split: str, source: str, target: str) -> Optional[List[Tuple[str, str]]]:
    """The sentences of a split and their translations, or None where they are not on this machine any more."""
    if not Path(root).is_dir():
        return None
    try:
        return list(zip(*find_pairs(root, split, source, target)))
    except (ValueError, OSError):
        return None


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    parser = Parser("python -m moh_vision report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", required=True, metavar="FILE.html", help="the page; a new file")

    def work() -> None:
        options = parser.parse(argv)
        if not options.output.endswith(".html"):
            raise ValueError(f"--output {options.output}: expected a name that ends in .html")
        refuse_output("--output", options.output)
        page = make_report(options.runs)
        write_whole(Path(options.output), page.encode("utf-8", "replace"))
        say(f"{options.output}: {len(page) / 1e6:.2f} MB")

    return exit_code("report", work)


if __name__ == "__main__":
    raise SystemExit(main())
