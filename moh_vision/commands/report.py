"""Write one HTML page about runs: scores, curves, heads, samples, errors, sizes, environment.

python -m moh_vision report RUN RUN ... --output report.html

RUN is a run of train_cls.py, train_dit.py or train_text.py, finished or not; kinds may be mixed. The
page loads nothing else: it can be sent and printed. Parts that a run lacks are left out; for usual
ones a line says what makes them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np

from moh_vision.attention import head_budget
from moh_vision.commands import report_figures as figures
from moh_vision.commands.head_load import draw
from moh_vision.commands.runs import (
    COLUMNS,
    TEXT,
    NoScores,
    ScoredRun,
    find_run,
    having,
    number_at,
    read_json,
    read_lines,
    starts_of,
    text_of,
    with_scores,
)
from moh_vision.commands.table import Table, make_table
from moh_vision.common.errors import message_of
from moh_vision.common.io import __version__, write_whole
from moh_vision.common.progress import say
from moh_vision.language.data.sources import find_pairs
from moh_vision.models.describe import describe, full_name
from moh_vision.models.head_load import FILE, HeadLoad

ENDINGS = (".html",)
SENTENCES = 5  # sentences whose translations are shown
PAIRS = 20  # the most confused pairs of classes that are listed
SAMPLES = 480  # largest side of a picture of samples, in pixels

# The figures of training: title -> path of keys to the value in a line of metrics.jsonl.
PANELS = {
    "training loss": ("loss",),
    "validation loss": ("validation", "loss"),
    "validation: top-1, %": ("validation", "top1"),
    **{f"score: {column.title}": ("scores", key) for key, column in COLUMNS.items()},
    "balance loss, share of the loss": ("balance_share",),
    "learning rate": ("lr",),
}

Named = dict[str, ScoredRun]  # name on the page -> run


class Section(NamedTuple):
    """A part of the page; report.html leaves it out if its blocks are empty and nothing is missing."""

    title: str
    blocks: list[tuple[str, str, Any]]  # (form, which report.html or `drawn` knows; name; content)
    missing: Sequence[str] = ()  # lines on what makes a part that a run lacks

    def drawn(self) -> "Section":
        """Return the section with its figures drawn: a block of the form "figures" holds functions that draw them."""
        blocks = []
        for form, name, content in self.blocks:
            if form == "figures":
                form = "pictures"
                content = [draw_one() for draw_one in content]
            blocks.append((form, name, content))
        return self._replace(blocks=blocks)


class FromFiles(NamedTuple):
    """What the files of runs of one task hold."""

    scores: Section
    training: Section
    loads: dict[str, HeadLoad]  # by the run's name on the page
    outputs: list[Section]  # samples, confusions or translations


def make_report(folders: Sequence[Path]) -> str:
    """Return the page about these runs as HTML."""
    runs = dict(zip(short_names(folders), map(find_run, folders)))
    by_task: dict[str, Named] = {}
    for name, run in runs.items():
        by_task.setdefault(run.task, {})[name] = run
    # All files are read before a model is built and a figure drawn, so that a bad one is refused at once.
    read = {task: read_files(task, of_task) for task, of_task in by_task.items()}
    started = environment(runs)
    parts = []
    with figures.svg_settings():
        for task, of_task in by_task.items():
            drawn = [section.drawn() for section in sections(read[task], of_task)]
            parts.append((task.capitalize(), drawn))
    parts.append(("Environment", [started]))
    page = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    title = f"Report of {len(runs)} runs"
    if len(runs) == 1:
        (name,) = runs
        title = f"Report of {name}"
    return page.from_string(text_of(Path(__file__).with_name("report.html"))).render(
        title=title,
        about=f"moh_vision {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        parts=parts,
    )


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that still differ."""
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders):
        if paths.count(path) > 1:
            raise ValueError(f"{folder} is given twice")
    for count in itertools.count(1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names


def read_files(task: str, runs: Named) -> FromFiles:
    """Read the files of runs of one task; raise ValueError for a damaged one."""
    outputs = []
    if task == "diffusion":
        outputs.append(samples(runs))
    if task == "classification":
        outputs.append(confusions(runs))
    if task == TEXT["mt"]:
        outputs.append(translations(runs))
    loads = {}
    for name, run in runs.items():
        if (run.folder / FILE).is_file():
            loads[name] = HeadLoad.read(run.folder / FILE)
    return FromFiles(scores(runs), training(runs), loads, outputs)


def sections(read: FromFiles, runs: Named) -> Iterator[Section]:
    """Make the sections about runs of one task."""
    models, unweighted = describe_models(runs)
    yield read.scores
    yield read.training
    yield heads(runs, models, read.loads)
    yield from read.outputs
    texts = [("text", ", ".join(names), text) for names, _, text in models]
    yield Section("Parameters and multiply-accumulates", texts, unweighted)


def describe_models(runs: Named) -> tuple[list[tuple], list[str]]:
    """Describe the models of runs; runs that differ only in the seed have one description.

    Returns:
        A list of (names of the runs, `head_budget` of the model, description), and a line for each run without weights.
    """
    alike: dict[str, Named] = {}
    for name, run in runs.items():
        alike.setdefault(run.identity(), {})[name] = run
    models = []
    missing = []
    for group in alike.values():
        for run in group.values():
            try:
                model, inputs, named = run.forward()
            except FileNotFoundError as error:
                missing.append(message_of(error))
                continue
            text = describe(full_name(run.model, run.arguments()), model, *inputs, **named)
            models.append((list(group), head_budget(model), text))
            break
    return models, missing


def scores(runs: Named) -> Section:
    """Make the table that the command `table` prints."""
    scored = []
    unscored = []
    for run in runs.values():
        try:
            scored.append(with_scores(run))
        except NoScores as error:
            unscored.append(str(error))
    table = None
    if scored:
        table = make_table(scored)
    return Section("", [("table", "", table)], unscored)


def training(runs: Named) -> Section:
    """Draw the values in metrics.jsonl over steps, one figure for each of PANELS."""
    palette = matplotlib.colormaps["tab10" if len(runs) <= 10 else "tab20"].colors
    colours = {
        name: matplotlib.colors.to_hex(colour)
        for name, colour in zip(runs, itertools.cycle(palette))
    }
    panels: dict[str, dict] = {title: {} for title in PANELS}
    for name, run in runs.items():
        file = run.folder / "metrics.jsonl"
        for entry in read_lines(file):
            for title, keys in PANELS.items():
                value = number_at(entry, keys, file)
                if value is not None:  # a missing or non-finite value is None
                    steps, values = panels[title].setdefault(name, ([], []))
                    steps.append(number_at(entry, ("step",), file) or 0)
                    values.append(value)
    drawn = []
    for title, curves in panels.items():
        # The balance loss of dense models is 0 at every step.
        if any(value for _, values in curves.values() for value in values):
            log = title == "training loss"
            drawn.append(partial(figures.draw_curves, title, curves, colours, log=log))
    return Section("Training", [("legend", "", drawn and colours), ("figures", "", drawn)])


def heads(runs: Named, models: list[tuple], loads: dict[str, HeadLoad]) -> Section:
    """Draw the budgets of `describe_models`, and the head loads that runs have counted."""
    budgets = []
    maps = []
    dense = []
    missing = []
    for names, budget, _ in models:
        layers = budget["layers"]
        mlps = budget.get("mlp", {}).get("layers", [])
        name = ", ".join(names)
        if leave_out(layers):
            caption = f"{name}: heads of each layer"
            budgets.append(partial(figures.draw_budget, layers, caption))
        if leave_out(mlps):
            caption = f"{name}: groups of each MLP"
            budgets.append(partial(figures.draw_budget, mlps, caption, "groups"))
        if not leave_out([*layers, *mlps]):
            dense += names
    for name, run in runs.items():
        # A dense model and MAE's models, whose runs have gates.json, run every head: there is no load to count.
        every_head_runs = name in dense or (run.folder / "gates.json").is_file()
        if name in loads:
            maps += load_maps(name, loads[name])
        elif not every_head_runs:
            maker = "training of classifiers and text writes it at its end, for diffusion python sample.py ... --head-load"
            missing.append(f"{name} has no {FILE}: {maker} RUN/{FILE}")
    return Section("Heads", [("figures", "", budgets), ("figures", "", maps)], missing)


def load_maps(name: str, load: HeadLoad) -> Iterator[Callable[[], figures.Picture]]:
    """Yield a function that draws the head load of a run for each kind of groups; nothing if no head is chosen."""
    if not load.choosing():
        return
    part = "head"
    if load.layers_of("groups"):
        part = "head and group of an MLP"

    def draw_map(by: str) -> figures.Picture:
        caption = f"{name}: share of tokens that run each {part}, by {by}"
        return figures.inline_svg(draw(load, "map", by).figure, caption)

    for by in load.groups:
        yield partial(draw_map, by)


def leave_out(layers: Sequence[dict]) -> bool:
    """Return whether one of these layers does not run all its heads or groups."""
    return any(layer["active"] < layer["heads"] for layer in layers)


def samples(runs: Named) -> Section:
    """Show the first, a middle and the last preview of each run, and its newest grid of samples."""
    blocks = []
    missing = []
    for name, run in runs.items():
        previews = []  # (step, file)
        for file in run.folder.glob("previews/step_*.png"):
            step = file.stem.removeprefix("step_")
            if step.isdecimal():
                previews.append((int(step), file))
        previews.sort()
        shown = {}
        if previews:
            for step, file in (previews[0], previews[len(previews) // 2], previews[-1]):
                shown[f"after {step:,} steps"] = file
        grids = sorted(run.folder.glob("*grid*.png"), key=lambda file: file.stat().st_mtime)
        for grid in grids[-1:]:
            shown[grid.name] = grid
        pictures = [figures.embed(file, SAMPLES, text) for text, file in shown.items()]
        blocks.append(("pictures", name, pictures))
        if not shown:
            missing.append(
                f"{name} has no samples: --preview.every N draws some of the same noise while it trains"
            )
    return Section("Samples over training", blocks, missing)


def confusions(runs: Named) -> Section:
    """Draw confusion matrices, or list the most confused pairs of many classes."""
    maker = "a run writes it at its end; its command, given again, does too"
    files, missing = having(runs, "confusion.json", maker)
    drawn = []
    blocks = []
    for name, file in files.items():
        classes, counts = read_confusion(file)
        if len(classes) <= figures.MOST_CLASSES:
            matrix = np.zeros((len(classes), len(classes)), int)
            matrix[counts[:, 0], counts[:, 1]] = counts[:, 2]
            caption = f"{name}: images of each class by what they were taken for"
            drawn.append(partial(figures.draw_confusion, matrix, classes, caption))
            continue
        images = np.bincount(counts[:, 0], counts[:, 2], len(classes))
        confused = counts[counts[:, 0] != counts[:, 1]]
        worst = confused[np.argsort(-confused[:, 2], kind="stable")[:PAIRS]]
        rows = []
        for label, taken_for, count in worst.tolist():
            percent = f"{100 * count / images[label]:.1f}"
            rows.append((classes[label], classes[taken_for], count, percent))
        table = Table(["class", "taken for", "images", "% of the class"], rows, [])
        blocks.append(("table", f"{name}: the most confused pairs of classes", table))
    return Section("Confusion", [("figures", "", drawn), *blocks], missing)


def read_confusion(file: Path) -> tuple[list[str], np.ndarray]:
    """Read confusion.json: the names of classes, and counts [n, 3] of (class, predicted class, number of images)."""
    tree = read_json(file)
    classes = tree.get("classes")
    try:
        counts = np.array(tree.get("counts"), dtype=np.int64).reshape(-1, 3)
        fits = (
            isinstance(classes, list) and counts[:, :2].max() < len(classes) and counts.min() >= 0
        )
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(
            f"{file}: expected classes, and counts [class, predicted class, images] of these"
        )
    return [str(name) for name in classes], counts


def translations(runs: Named) -> Section:
    """Show a few sentences, each with its reference and the translations of all runs."""
    files, missing = having(runs, "translations.txt", "a run writes it at its end")
    alike: dict[tuple, dict[str, list[str]]] = {}  # text -> run -> the run's translations of it
    for name, file in files.items():
        config = runs[name].config
        results = runs[name].json("results.json")
        left_out = results.get("left_out")
        # Line i of the translations belongs to line i of the data only if the results say that no pair was left out.
        whole = bool(left_out) and not any(left_out.values())
        text = [config.get(f"data.{key}") for key in ("root", "source", "target")]
        lines = text_of(file).split("\n")[:-1]
        alike.setdefault((*text, results.get("bleu_split"), whole), {})[name] = lines
    blocks = []
    for (root, source, target, split, whole), translated in alike.items():
        count = min(map(len, translated.values()))
        pairs = []
        if whole and split:
            pairs = read_pairs(root, split, source, target)
        numbers = {i * count // SENTENCES for i in range(SENTENCES)} if count else ()
        for number in sorted(numbers):
            rows = [(name, lines[number]) for name, lines in translated.items()]
            if len(pairs) == count:  # the data set has not changed since
                original, reference = pairs[number]
                rows.insert(0, (f"{source} (source)", original))
                rows.insert(1, (f"{target} (reference)", reference))
            blocks.append(("rows", "", rows))
    return Section("Translations", blocks, missing)


def read_pairs(root: str, split: str, source: str, target: str) -> list[tuple[str, str]]:
    """Read the sentence pairs of a split; return an empty list if this machine no longer has them."""
    try:
        if not Path(root).is_dir():
            return []
        return list(zip(*find_pairs(root, split, source, target)))
    except (ValueError, OSError):
        return []


def environment(runs: Named) -> Section:
    """Make the section on how runs were started, with their configurations."""
    starts, missing = starts_of(runs)
    blocks = [("starts", "", starts)]
    for name, run in runs.items():
        blocks.append(("text", f"configuration of {name}", run.saved.text))
    return Section("", blocks, missing)


def options(add) -> None:
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add("--output", required=True, metavar="FILE.html", help="the page; a new file")


def work(options) -> None:
    page = make_report(options.runs)
    write_whole(Path(options.output), page.encode("utf-8", "replace"))
    say(f"{options.output}: {len(page) / 1e6:.2f} MB")
