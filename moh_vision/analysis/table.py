"""A table of runs as the papers print them: scores, parameters, MACs, active heads.

python -m moh_vision.analysis.table RUN RUN ...
python -m moh_vision.analysis.table --latex RUN RUN ... > table.tex

RUN is the folder of a finished run of train_cls.py, train_dit.py or train_text.py; all are of one kind. Runs that differ in
nothing but the seed make one row: the mean, the standard deviation (of n - 1) and how many there are. Rows of the papers
stand below the runs of the same model.

Scores are read from the run's folder: results.json; for diffusion scores.json, which sample.py --score writes, else the last
scores while training; for the suites of language models scores*.json, the --out of
moh_vision.language.evaluation.lm. LaTeX needs the package booktabs.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import yaml
from torch import nn

from moh_vision.analysis.counting import count_macs, count_parameters, without_memory
from moh_vision.attention import HeadMixtureAttention, head_budget
from moh_vision.engine.commands import Parser, exit_code, reason_of, say
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.registry import registered
from moh_vision.models.weight_files import read_safetensors, weights_file
from moh_vision.models.weights import from_run, load_run

# Numbers of a run, and of a row in paper_rows.yaml: title and digits. The order is that of the columns.
COLUMNS = {
    "top1": ("top-1, %", 2), "top5": ("top-5, %", 2),
    "fid": ("FID", 2), "fd": ("FD", 2), "sfid": ("sFID", 2), "spatial_fd": ("spatial FD", 2),
    "inception_score": ("IS", 2), "class_score": ("class score", 2), "kid": ("KID", 5),
    "kernel_distance": ("kernel distance", 5), "precision": ("precision", 3), "recall": ("recall", 3),
    "recognised": ("recognised, %", 2), "frechet_distance": ("Frechet distance", 2),
    "bleu": ("BLEU", 2), "sacrebleu": ("sacreBLEU", 2), "bleu_argmax": ("BLEU, argmax", 2), "bleu_random": ("BLEU, random", 2),
    "bleu_random_std": ("BLEU, random: std of draws", 2),
    "perplexity": ("val. perplexity", 2), "test_perplexity": ("test perplexity", 2),
    "word_perplexity": ("val. word perplexity", 2), "test_word_perplexity": ("test word perplexity", 2),
}  # fmt: skip
SIZES = {"parameters": "parameters, M", "macs": "MACs, M", "active": "active heads, %"}
TEXT = {"mt": "translation", "mlm": "masked language models", "clm": "causal language models"}
NAMES = "one for each RUN (the model, and what tells it from the others); runs of one row have the first's"  # --names
FEW = 10  # classes, of which top-5 says little
WORDS = 10  # of the source and of the target whose translation is counted, as in Zhang 2022, table 1
# Keys, or sections, of a configuration that change neither the weights nor how they are scored. How samples were scored is
# compared by what the scores say.
WITHOUT_EFFECT = (
    "output", "seed", "log_every", "save_every", "keep_checkpoints", "keep_weights_every", "tracker", "preview", "score", "data.workers",
    "data.eval_batch_size", "checkpointing",
)  # fmt: skip
# Arguments of a model that make it another one than the papers'. Their translation models have one name in two sizes.
OWN = {"attention", "head_budget", "router", "scope", "router_kwargs", "embed_dim", "depth", "num_heads", "patch_size"}


class ScoredRun(NamedTuple):
    """A run and its scores.

    Attributes:
        folder: of the run.
        kind: "classification", "diffusion" or one of TEXT.
        config: its config.yaml, with dotted keys.
        steps: that were done.
        scores: by key of COLUMNS, or by the title of a task in a suite.
        how: what the scores are of.
        suites: names of the suites among them.
        sampling: how the images that they are of were drawn: sampler, steps, cfg_scale, and head_budget where that is not
            the run's own.
        error: of the scores of this run alone, as a note says it.
    """

    folder: Path
    kind: str
    config: Dict[str, Any]
    steps: int
    scores: Dict[str, Optional[float]]
    how: str
    suites: Tuple[str, ...] = ()
    sampling: Dict[str, Any] = {}
    error: str = ""

    @property
    def model(self) -> str:
        return self.config["model.name"]

    def settings(self, over: Optional[str] = None) -> Dict[str, Any]:
        """The configuration without the seed, what has no effect, and the key `over`."""
        return {
            key: value
            for key, value in self.config.items()
            if key not in (*WITHOUT_EFFECT, over) and key.split(".")[0] not in WITHOUT_EFFECT
        }

    def identity(self, over: Optional[str] = None) -> str:
        """The same text for runs that differ in nothing but the seed; with `over` neither in that key nor in their steps."""
        ended = self.kind in TEXT.values()  # with patience the seed decides after how many steps
        rest = [self.how] if over or ended else [self.steps, self.how]
        return json.dumps([self.settings(over), *rest], sort_keys=True, default=str)


class Table(NamedTuple):
    """A table as text: the titles of its columns, its rows, and sentences below it."""

    titles: List[str]
    rows: List[List[str]]
    notes: List[str]


class NoScores(ValueError):
    """A run that has no scores yet; the message says what makes them."""


def open_run(folder: Path) -> ScoredRun:
    """The run in a folder, without its scores.

    Raises:
        ValueError, FileNotFoundError: naming the folder or file, for a folder that is no run.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is no run: it has no config.yaml")
    tree = read_json(folder / "config.yaml")
    sections = {key: value for key, value in tree.items() if isinstance(value, dict)}
    config = {key: value for key, value in tree.items() if key not in sections}
    config.update({f"{key}.{inner}": value for key, section in sections.items() for inner, value in section.items()})
    name = config.get("model.name")
    if not isinstance(name, str):
        raise ValueError(f"{folder / 'config.yaml'}: model.name {name!r}; expected the name of a model")
    if "learn_sigma" in config:
        return ScoredRun(folder, "diffusion", config, 0, {}, "")
    if "generate.beam" not in config:
        return ScoredRun(folder, "classification", config, 0, {}, "")
    kind = TEXT.get(config["model.name"].partition("_")[0])
    if kind is None:
        names = " or ".join(f"{start}_" for start in TEXT)
        raise ValueError(f"{folder / 'config.yaml'}: model.name {config['model.name']!r}; expected one with {names}")
    return ScoredRun(folder, kind, config, 0, {}, "")


def read_run(folder: Path) -> ScoredRun:
    """The run in a folder, with its scores.

    Raises:
        NoScores: if there are none.
        ValueError, FileNotFoundError: naming the folder or file, for a folder that is no run.
    """
    run = open_run(folder)
    readers = dict(classification=_classification, diffusion=_diffusion)
    try:
        return readers.get(run.kind, _text)(run)
    except (KeyError, TypeError, AttributeError) as error:  # files that were written by hand
        raise ValueError(f"{folder}: its scores are not as a run writes them ({reason_of(error)})") from None


def read_metrics(folder: Path) -> List[dict]:
    """The lines of a run's metrics.jsonl, none if it has no such file; a last line that is still being written is left out.

    Raises:
        ValueError: naming the file, for a line that is not readable.
    """
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if file.is_file() else []
    return [read_json(file, line) for line in lines if line.endswith("\n")]


def _classification(run: ScoredRun) -> ScoredRun:
    results = _results(run.folder)
    keys = ("top1",) if 0 < len(results.get("top1_by_class", ())) <= FEW else ("top1", "top5")
    scores = {key: number_at(results, (key,), run.folder) for key in keys}
    how = f"{results.get('images')} validation images of {run.config.get('data.root')}"
    top1, images, error = scores["top1"], number_at(results, ("images",), run.folder), ""
    if images and 0 < (top1 or 0) < 100:
        error = f"; one standard error of top-1 over these images is {(top1 * (100 - top1) / images) ** 0.5:.2g} points"
    return run._replace(steps=results["step"], scores=scores, how=how, error=error)


def _diffusion(run: ScoredRun) -> ScoredRun:
    folder, config = run.folder, run.config
    entries = read_metrics(folder)
    if (folder / "scores.json").is_file():
        found = read_json(folder / "scores.json")
        steps = (
            number_at(found, ("step",), folder) or _steps_of_weights(folder) or (entries[-1]["step"] if entries else 0)
        )
        sampling = found.get("sampling", {})
    else:
        scored = [entry for entry in entries if "error" not in entry.get("scores", {"error": ""})]
        if not scored:
            raise NoScores(f"{folder} has no scores yet: python sample.py --checkpoint {folder} --score REFERENCE")
        found, steps = scored[-1]["scores"], scored[-1]["step"]
        sampling = found.get("sampling") or {k: config.get(f"score.{k}") for k in ("sampler", "steps", "cfg_scale")}
    scores = {key: number_at(found, (key,), folder) for key in COLUMNS}
    if scores["recognised"] is not None:
        scores["recognised"] *= 100
    by = found.get("label") or found.get("feature_space")
    if found.get("extractor"):
        by = f"{by} by {found['extractor']}"
    drawn = [f"{k} {v}" for k, v in sampling.items() if k != "seed" and not k.endswith("_sha256") and v is not None]
    how = [f"{found.get('num_generated')} images against {found.get('num_reference')} of {found.get('reference')}", by]
    text = "; ".join([*map(str, how), ", ".join(drawn)])
    return run._replace(steps=steps, scores=scores, how=text, sampling=sampling)


def _steps_of_weights(folder: Path) -> int:
    """Steps of a run's weights, which metrics.jsonl need not have as a line; 0 if there are none, or they do not say."""
    try:
        file = weights_file(str(folder))
    except FileNotFoundError:
        return 0
    return number_at(read_safetensors(file, lambda name: False)[1], ("step",), file) or 0


def _text(run: ScoredRun) -> ScoredRun:
    folder, config = run.folder, run.config
    known = registered("suites", "text")
    suites: Dict[str, Path] = {}
    scores: Dict[str, Optional[float]] = {}
    how = []
    for file in sorted(folder.glob("scores*.json")):
        record = read_json(file)
        for name, found in record.get("suites", {}).items():
            if name not in known or name in suites:
                reason = f"and {suites[name]} both have scores of {name}" if name in suites else f"has a suite {name!r}"
                raise ValueError(f"{file} {reason}; expected one of {', '.join(known)} once")
            suites[name] = file
            titles = [row.title for row in known[name].rows]
            values = found["values"]
            if len(values) != len(titles):
                raise ValueError(f"{file}: {len(values)} values of {name}; expected {len(titles)}")
            numbered = dict(zip([*titles, f"average of {name}"], [*values, found["average"]]))
            scores.update({title: number_at(numbered, (title,), file) for title in numbered})
            part = f", --limit {record['limit']:g}" if record.get("limit") is not None else ""
            how.append(f"{name}{part}")
    results = {} if suites and not (folder / "results.json").exists() else _results(folder)
    places = {
        "bleu": ("bleu", "soft", "tokenised_bleu", "bleu"),
        "sacrebleu": ("bleu", "soft", "bleu", "bleu"),
        "bleu_argmax": ("bleu", "argmax", "tokenised_bleu", "bleu"),
        "bleu_random": ("bleu", "random", "tokenised_bleu", "bleu"),
        "bleu_random_std": ("bleu", "random", "tokenised_bleu", "std"),
        "perplexity": ("validation", "perplexity"),
        "test_perplexity": ("test", "perplexity"),
        "word_perplexity": ("validation", "word_perplexity"),
        "test_word_perplexity": ("test", "word_perplexity"),
    }
    scores.update({key: number_at(results, place, folder) for key, place in places.items()})
    splits = [config[f"data.{key}"] for key in ("val", "test") if config.get(f"data.{key}")]
    how.insert(0, f"{config.get('data.root')}, splits {' and '.join(splits)}")
    if "bleu_split" in results:
        lowercase = results.get("bleu_lowercase", config.get("data.lowercase"))
        case = ", lower-cased data" if lowercase else ""
        how.insert(1, f"BLEU of {results['bleu_pairs']} pairs of {results['bleu_split']}{case}")
    return run._replace(steps=results.get("step", 0), scores=scores, how="; ".join(how), suites=tuple(suites))


def _results(folder: Path) -> dict:
    if not (folder / "results.json").is_file():
        raise NoScores(f"{folder} has no results.json: the run has not ended yet; its command goes on with it")
    return {"step": 0, **read_json(folder / "results.json")}


def read_json(file: Path, text: Optional[str] = None) -> dict:
    """The keys and values in a JSON or YAML file, or in a line of it.

    Raises:
        ValueError: naming the file, if there are none.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if text is None else text
    try:
        tree = yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable ({reason_of(error)})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: expected keys and values, found {type(tree).__name__}")
    return tree


def number_at(tree: Any, place: Tuple[str, ...], file: Path) -> Optional[float]:
    """The number at nested keys, or None if there is none."""
    for key in place:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if tree is not None and (isinstance(tree, bool) or not isinstance(tree, (int, float))):
        raise ValueError(f"{file}: {'.'.join(place)} {tree!r}; expected a number")
    return tree


def sizes(run: ScoredRun) -> Dict[str, float]:
    """Parameters and MACs in millions, and active heads in percent; nothing if the run keeps no weights.

    MACs are those of `count_macs` with the active heads alone, for the inputs of `model_of`.

    Raises:
        ValueError: naming the file, for weights that are not the run's.
    """
    try:
        model, inputs, named = model_of(run)
    except FileNotFoundError:
        return {}
    macs = count_macs(model, *inputs, **named)
    return dict(
        parameters=count_parameters(model) / 1e6,
        macs=(macs.linears + macs.scores) / 1e6,
        active=100 * _active_share(model),
    )


def model_of(run: ScoredRun) -> Tuple[nn.Module, List[torch.Tensor], Dict[str, torch.Tensor]]:
    """The model of a run on the meta device, and arguments of one forward of it.

    They are an image (for diffusion with timestep and class), a block of text (data.block), or WORDS tokens translated into
    as many.

    Raises:
        FileNotFoundError: if the run keeps no weights.
        ValueError: naming the file, for weights that are not the run's.
    """
    weights_file(str(run.folder))
    named: Dict[str, torch.Tensor] = {}
    if run.kind in ("classification", "diffusion"):
        model, about = from_run(str(run.folder), None)
        if run.sampling.get("head_budget") is not None:
            set_head_budget(model, run.sampling["head_budget"])
        size = about["arguments"]["img_size"]
        inputs = [torch.zeros(1, about["arguments"]["in_chans"], size, size)]
        if run.kind == "diffusion":
            inputs += [torch.zeros(1, dtype=torch.long)] * 2  # timestep and class
    else:
        model = load_run(run.folder)
        translates = run.kind == TEXT["mt"]
        ids = torch.zeros(1, WORDS if translates else run.config["data.block"], dtype=torch.long)
        inputs, named = [ids], dict(decoder_input_ids=ids) if translates else {}
    return without_memory(model), inputs, named


def _active_share(model: nn.Module) -> float:
    routed = any(isinstance(module, HeadMixtureAttention) for module in model.modules())
    return head_budget(model)["share"] if routed else 1.0


def paper_rows(run: ScoredRun) -> List[Dict[str, str]]:
    """The rows of the papers for the model of a run, as printed: by key of SIZES and COLUMNS, or title of a task.

    There is none for a model that is built otherwise than its name says.
    """
    given = {key for key in OWN if run.config.get(f"model.{key}") is not None}
    if given or OWN & set(run.config.get("model.kwargs") or ()):
        return []
    known = registered("suites", "text")
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


def read_runs(folders: Sequence[Path]) -> List[ScoredRun]:
    """See `read_run`.

    Raises:
        ValueError, FileNotFoundError: also for runs of different kinds.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if run.kind != runs[0].kind:
            kinds = " and ".join(f"{other.folder} ({other.kind})" for other in (runs[0], run))
            raise ValueError(f"{kinds} are of different kinds; a table has runs of one")
    return runs


def grouped(
    runs: Sequence[ScoredRun], over: Optional[str] = None, names: Optional[Sequence[str]] = None
) -> List[Tuple[str, List[ScoredRun]]]:
    """Runs that differ in nothing but the seed, with a name: the model's, and what tells their settings from others of it.

    Groups of a model stand together.

    Args:
        over: key of the configuration in which the runs of a group may differ too.
        names: instead, one for each run; a group has that of its first.

    Raises:
        ValueError: for a run that is there twice, and for another number of names.
    """
    if names and len(names) != len(runs):
        raise ValueError(f"--names: {len(names)} for {len(runs)} runs; expected one for each RUN")
    given = {run.folder: name for run, name in zip(runs, names or ())}
    groups: Dict[str, List[ScoredRun]] = {}
    for run in runs:
        group = groups.setdefault(run.identity(over), [])
        for other in group:
            if all(other.config.get(key) == run.config.get(key) for key in ("seed", over)):
                seed = run.config.get("seed")
                raise ValueError(f"{other.folder} and {run.folder} are the same run with the same seed, {seed}")
        group.append(run)
    named = []
    for model in dict.fromkeys(run.model for run in runs):
        own = [group for group in groups.values() if group[0].model == model]
        for group in own:
            label = model + _difference(group[0], [other[0] for other in own], over)
            named.append((given.get(group[0].folder, label), group))
    return named


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
    suites = registered("suites", "text")
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
        "with attention scores; the papers leave these out or count them twice (moh_vision.analysis.macs)."
    ]
    return ["Mean ± standard deviation over runs that differ in nothing but the seed.", *notes] if averaged else notes


def _difference(run: ScoredRun, others: List[ScoredRun], over: Optional[str]) -> str:
    """What tells the settings of a run from those of others of its model, without what it leaves to the defaults."""
    own, every = run.settings(over), [other.settings(over) for other in others]
    keys = sorted({key for one in every for key in one if any(other.get(key) != one[key] for other in every)})
    return "".join(f", {key} {own[key]}" for key in keys if own.get(key) is not None)


def _shown(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def mean_and_spread(values: Sequence[Optional[float]], digits: int) -> str:
    """The mean, of several values with their standard deviation (of n - 1), and how many there are if some are None."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    spread = f" ± {statistics.stdev(there):.{digits}f}" if len(there) > 1 else ""
    count = f" ({len(there)})" if len(there) < len(values) else ""
    return f"{statistics.mean(there):.{digits}f}{spread}{count}"


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
    parser = Parser("python -m moh_vision.analysis.table", __doc__)
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
