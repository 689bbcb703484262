"""Runs as their folders say they are: configuration, scores, sizes, starts."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import yaml
from torch import nn

from moh_vision.attention import HeadMixtureAttention, head_budget
from moh_vision.engine.commands import reason_of
from moh_vision.language.evaluation.lm_suites import SUITES
from moh_vision.models.counts import count_macs, count_parameters, without_memory
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.weight_files import read_safetensors, weights_file
from moh_vision.opening import kind_of, open_run

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


class NoScores(ValueError):
    """A run that has no scores yet; the message says what makes them."""


def find_run(folder: Path) -> ScoredRun:
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
    name, kind = config.get("model.name"), kind_of(folder)
    if not isinstance(name, str):
        raise ValueError(f"{folder / 'config.yaml'}: model.name {name!r}; expected the name of a model")
    if kind == "text":
        kind = TEXT.get(name.partition("_")[0])
    if kind is None:
        names = " or ".join(f"{start}_" for start in TEXT)
        raise ValueError(f"{folder / 'config.yaml'}: model.name {name!r}; expected one with {names}")
    return ScoredRun(folder, kind, config, 0, {}, "")


def read_run(folder: Path) -> ScoredRun:
    """The run in a folder, with its scores.

    Raises:
        NoScores: if there are none.
        ValueError, FileNotFoundError: naming the folder or file, for a folder that is no run.
    """
    run = find_run(folder)
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
    known = SUITES
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
    opened = open_run(run.folder)
    if run.sampling.get("head_budget") is not None:
        set_head_budget(opened.model, run.sampling["head_budget"])
    return without_memory(opened.model), *opened.example()


def _active_share(model: nn.Module) -> float:
    routed = any(isinstance(module, HeadMixtureAttention) for module in model.modules())
    return head_budget(model)["share"] if routed else 1.0


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


def _difference(run: ScoredRun, others: List[ScoredRun], over: Optional[str]) -> str:
    """What tells the settings of a run from those of others of its model, without what it leaves to the defaults."""
    own, every = run.settings(over), [other.settings(over) for other in others]
    keys = sorted({key for one in every for key in one if any(other.get(key) != one[key] for other in every)})
    return "".join(f", {key} {own[key]}" for key in keys if own.get(key) is not None)


def mean_and_spread(values: Sequence[Optional[float]], digits: int) -> str:
    """The mean, of several values with their standard deviation (of n - 1), and how many there are if some are None."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    spread = f" ± {statistics.stdev(there):.{digits}f}" if len(there) > 1 else ""
    count = f" ({len(there)})" if len(there) < len(values) else ""
    return f"{statistics.mean(there):.{digits}f}{spread}{count}"


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def starts_of(runs: Dict[str, ScoredRun]) -> Tuple[List[dict], List[str]]:
    """How runs were started, and lines about those that do not say it."""
    starts, missing = [], []
    for name, run in runs.items():
        file = run.folder / "environment.jsonl"
        if not file.is_file():
            missing.append(f"{name} has no {file.name}: every start of a run adds a line to it")
            continue
        alike: Dict[str, dict] = {}
        for line in text_of(file).splitlines():
            start = dict.fromkeys(("device", "cores", "processes", "versions", "commit", "command")) | read_json(
                file, line
            )
            step, date = start.pop("step", None), start.pop("date", None)
            versions = start["versions"] if isinstance(start["versions"], dict) else {}
            shown = ", ".join(f"{package} {version}" for package, version in versions.items())
            same = alike.setdefault(json.dumps(start), dict(start, name=name, versions=shown, steps=[], dates=[]))
            same["steps"].append(step)
            same["dates"].append(date)
        starts += alike.values()
    return starts, missing
