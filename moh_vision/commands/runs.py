"""Read runs from their folders: configuration, scores, sizes, starts."""

import contextlib
import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moh_vision.common.errors import reason_of
from moh_vision.engine.command_line import SavedConfig, load_as, saved_config
from moh_vision.language.evaluation.lm_suites import SUITES
from moh_vision.models.counts import without_memory
from moh_vision.models.head_budgets import set_head_budget, set_share
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights, wing_said


class Column(NamedTuple):
    """A column of scores, filled from the files of a run or a row of paper_rows.yaml."""

    title: str
    digits: int = 2  # decimals
    keys: tuple[str, ...] = ()  # path to the value in a file of scores; empty: the column's own key


COLUMNS = {  # in the order of a table
    "top1": Column("top-1, %"),
    "top5": Column("top-5, %"),
    "fid": Column("FID"),
    "fd": Column("FD"),
    "sfid": Column("sFID"),
    "spatial_fd": Column("spatial FD"),
    "inception_score": Column("IS"),
    "class_score": Column("class score"),
    "kid": Column("KID", 5),
    "kernel_distance": Column("kernel distance", 5),
    "precision": Column("precision", 3),
    "recall": Column("recall", 3),
    "recognised": Column("recognised, %"),
    "frechet_distance": Column("Frechet distance"),
    "bleu": Column("BLEU", 2, ("bleu", "soft", "tokenised_bleu", "bleu")),
    "sacrebleu": Column("sacreBLEU", 2, ("bleu", "soft", "bleu", "bleu")),
    "bleu_argmax": Column("BLEU, argmax", 2, ("bleu", "argmax", "tokenised_bleu", "bleu")),
    "bleu_random": Column("BLEU, random", 2, ("bleu", "random", "tokenised_bleu", "bleu")),
    "bleu_random_std": Column(
        "BLEU, random: std of draws", 2, ("bleu", "random", "tokenised_bleu", "std")
    ),
    "perplexity": Column("val. perplexity", 2, ("validation", "perplexity")),
    "test_perplexity": Column("test perplexity", 2, ("test", "perplexity")),
    "word_perplexity": Column("val. word perplexity", 2, ("validation", "word_perplexity")),
    "test_word_perplexity": Column("test word perplexity", 2, ("test", "word_perplexity")),
}
TEXT = {"mt": "translation", "mlm": "masked language models", "clm": "causal language models"}
NAMES = "one for each RUN (the model, and what tells it from the others); runs of one row have the first's"  # --names
FEW = 10  # most classes for which top-5 is left out, because it says little
# Keys of a line in environment.jsonl.
STARTED = ("device", "cores", "processes", "versions", "commit", "command")
# Keys or sections of a configuration that change neither weights nor scores. `score` is one of them because a file of
# scores records the settings that it was made with.
WITHOUT_EFFECT = (
    "output",
    "seed",
    "log_every",
    "save_every",
    "save_in_background",
    "keep_checkpoints",
    "keep_weights_every",
    "tracker",
    "imports",
    "preview",
    "score",
    "data.workers",
    "data.eval_batch_size",
    "checkpointing",
)


class ScoredRun(NamedTuple):
    """A run and its scores."""

    folder: Path
    wing: str  # a name in WINGS
    task: str  # the wing's name, or one of TEXT: runs of one task are in one table
    config: dict[str, Any]  # config.yaml with dotted keys
    steps: int  # steps done
    scores: dict[str, float | None]  # by key of COLUMNS, or title of a suite's task
    scored_on: str  # the data and settings of the scores, in words
    # How images were drawn. It has `head_budget` and `mlp_budget` only if they were drawn with others than the run's, and
    # `share` for the scores at one share of an elastic budget.
    sampling: dict[str, Any] = {}
    error: str = ""  # the standard error of top-1, in words, for a note on a single run
    saved: SavedConfig | None = None  # config.yaml as it was read

    @property
    def model(self) -> str:
        return self.config["model.name"]

    def settings(self, over: str | None = None) -> dict[str, Any]:
        """Return the configuration without the keys of WITHOUT_EFFECT, such as the seed, and without the key `over`."""
        left_out = (*WITHOUT_EFFECT, over)
        return {
            key: value
            for key, value in self.config.items()
            if key not in left_out and key.split(".")[0] not in left_out
        }

    def identity(self, over: str | None = None) -> str:
        """Return a text that is equal for runs to be averaged.

        Such runs differ only in the seed; with `over` they may also differ in that key and in the number of steps.
        """
        compared = [self.settings(over), self.scored_on]
        # Text runs may differ in steps: where patience ends them, the number of steps depends on the seed.
        steps_must_agree = not over and self.wing != "text"
        if steps_must_agree:
            compared.append(self.steps)
        return json.dumps(compared, sort_keys=True, default=str)

    def arguments(self) -> dict[str, Any]:
        """Return the model's arguments by the configuration: the section `model`, with its `kwargs` merged in."""
        arguments = {
            key.removeprefix("model."): value
            for key, value in self.config.items()
            if key.startswith("model.")
        }
        return {**arguments, **(arguments.get("kwargs") or {})}

    def json(self, name: str) -> dict:
        """Read a JSON file of the run's folder; return an empty dict if the file does not exist."""
        file = self.folder / name
        if not file.is_file():
            return {}
        return read_json(file)

    def forward(self) -> tuple[nn.Module, list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the model without values, and the inputs and named arguments of one forward; no tensor is read.

        Raises FileNotFoundError if the run has no weights.
        """
        opened = open_weights(find_weights(self.folder), device="meta", saved=self.saved)
        shares = {key: self.sampling.get(key) for key in ("head_budget", "mlp_budget")}
        if any(share is not None for share in shares.values()):
            set_head_budget(opened.model, shares["head_budget"], mlp=shares["mlp_budget"])
        if "share" in self.sampling:
            set_share(opened.model, self.sampling["share"])
        return without_memory(opened.model), *opened.example()


class NoScores(ValueError):
    """Raised for a run that has no scores yet; the message says which command makes them."""


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def read_json(file: Path, text: str | None = None) -> dict:
    """Read the mapping in a JSON or YAML file; if `text` is given, it is a line of the file, and is read instead."""
    if text is None:
        text = text_of(file)
    return mapping(file, load_as(file, text))


def mapping(file: Path, tree: Any) -> dict:
    """Return what was read from a file, `tree`; raise ValueError unless it is a dict."""
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: expected keys and values, found {type(tree).__name__}")
    return tree


def read_lines(file: Path) -> list[dict]:
    """Read the lines of a .jsonl file; return an empty list if the file does not exist.

    A last line without a newline is left out, because a run may still be writing it.
    """
    if not file.is_file():
        return []
    lines = text_of(file).splitlines(keepends=True)
    return [read_json(file, line) for line in lines if line.endswith("\n")]


def number_at(tree: Any, keys: Sequence[str], file: Path) -> float | None:
    """Return the number at nested keys of `tree`, or None if a key is missing or its value is null."""
    value = tree
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{file}: {'.'.join(keys)} {value!r}; expected a number")
    return value


@contextlib.contextmanager
def as_written(subject: str) -> Iterator[None]:
    """Turn errors from the unexpected content of a file into a ValueError.

    `subject` is the beginning of its message, such as "RUN: its scores are".
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{subject} not as a run writes them ({reason_of(error)})") from None


def having(runs: dict[str, ScoredRun], file: str, maker: str) -> tuple[dict[str, Path], list[str]]:
    """Return the path of `file` in each run that has it, and a line for each run that lacks it.

    The line ends in `maker`, a text that says what makes the file.
    """
    found = {}
    missing = []
    for name, run in runs.items():
        path = run.folder / file
        if path.is_file():
            found[name] = path
        else:
            missing.append(f"{name} has no {file}: {maker}")
    return found, missing


def find_run(folder: Path) -> ScoredRun:
    """Read the configuration of a run, not its scores."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    saved = saved_config(folder)
    if saved is None:
        raise ValueError(f"{folder} is no run: it has no config.yaml")
    file = saved.file
    config = {}
    for key, value in mapping(file, saved.values).items():
        if isinstance(value, dict):  # a section
            config.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            config[key] = value
    wing = wing_said(saved)
    name = config.get("model.name")
    if not isinstance(name, str):
        raise ValueError(f"{file}: model.name {name!r}; expected the name of a model")
    task = wing
    if wing == "text":
        task = TEXT.get(name.partition("_")[0])
    if task is None:
        beginnings = " or ".join(f"{beginning}_" for beginning in TEXT)
        raise ValueError(
            f"{file}: model.name {name!r}; expected a text model's, which begins with {beginnings}"
        )
    return ScoredRun(folder, wing, task, config, steps=0, scores={}, scored_on="", saved=saved)


def read_run(folder: Path) -> ScoredRun:
    """Read a run and its scores; raise NoScores if it has none."""
    return with_scores(find_run(folder))


def with_scores(run: ScoredRun) -> ScoredRun:
    """Add its scores to a run that `find_run` returned; raise NoScores if it has none."""
    folder = run.folder
    with as_written(f"{folder}: its scores are"):
        scores, suites = _suites(folder)
        if run.wing == "diffusion":
            results = _scored_samples(run)
        else:
            results = run.json("results.json")
        if not results and not suites:
            raise NoScores(
                f"{folder} has no results.json: the run has not ended yet; its command goes on with it"
            )
        scores |= {
            key: number_at(results, column.keys or (key,), folder)
            for key, column in COLUMNS.items()
        }
        steps = number_at(results, ("step",), folder) or 0
        run = run._replace(steps=steps, scores=scores)
        if run.wing == "classification":
            run = _of_images(run, results)
        elif run.wing == "diffusion":
            run = _of_samples(run, results)
        else:
            run = _of_text(run, results)
    return run._replace(scored_on="; ".join([run.scored_on, *suites]))


def read_runs(folders: Sequence[Path]) -> list[ScoredRun]:
    """Read runs and their scores; raise ValueError unless all runs are of one task."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if run.task != runs[0].task:
            tasks = " and ".join(f"{one.folder} ({one.task})" for one in (runs[0], run))
            raise ValueError(f"{tasks} are of different kinds; a table has runs of one")
    return runs


def _scored_samples(run: ScoredRun) -> dict:
    """Read the scores that sample.py wrote, or else the last ones that training logged."""
    scores = run.json("scores.json")
    if scores:
        return scores
    entries = read_lines(run.folder / "metrics.jsonl")
    scored = [entry for entry in entries if "error" not in entry.get("scores", ["error"])]
    if not scored:
        raise NoScores(
            f"{run.folder} has no scores yet: python sample.py --checkpoint {shlex.quote(str(run.folder))} --score REFERENCE"
        )
    return scored[-1]["scores"] | dict(step=scored[-1]["step"])


def _of_images(run: ScoredRun, results: dict) -> ScoredRun:
    """Return a classifier's run with `scored_on` and the standard error of top-1."""
    if 0 < len(results.get("top1_by_class", ())) <= FEW:
        run.scores["top5"] = None
    top1 = run.scores["top1"] or 0
    images = results.get("images")
    error = ""
    if images and 0 < top1 < 100:
        deviation = (top1 * (100 - top1) / images) ** 0.5
        error = f"; one standard error of top-1 over these images is {deviation:.2g} points"
    scored_on = f"{images} validation images of {run.config.get('data.root')}"
    return run._replace(scored_on=scored_on, error=error)


def _of_samples(run: ScoredRun, results: dict) -> ScoredRun:
    """Return a diffusion model's run with `scored_on` and `sampling`."""
    sampling = results.get("sampling", {})
    scorer = results.get("label") or results.get("feature_space")
    if run.scores["recognised"] is not None:
        run.scores["recognised"] *= 100
    if results.get("extractor"):
        scorer = f"{scorer} by {results['extractor']}"
    drawn = [
        f"{key} {value}"
        for key, value in sampling.items()
        if key != "seed" and not key.endswith("_sha256") and value is not None
    ]
    images = f"{results.get('num_generated')} images against {results.get('num_reference')} of {results.get('reference')}"
    scored_on = f"{images}; {scorer}; {', '.join(drawn)}"
    return run._replace(scored_on=scored_on, sampling=sampling)


def _of_text(run: ScoredRun, results: dict) -> ScoredRun:
    """Return a language model's run with `scored_on`."""
    splits = [run.config[f"data.{key}"] for key in ("val", "test") if run.config.get(f"data.{key}")]
    scored_on = f"{run.config.get('data.root')}, splits {' and '.join(splits)}"
    if "bleu_split" in results:
        scored_on += f"; BLEU of {results['bleu_pairs']} pairs of {results['bleu_split']}"
        if results.get("bleu_lowercase"):
            scored_on += ", lower-cased data"
        if results.get("bleu_joined"):
            scored_on += ", pieces of words joined"
    return run._replace(scored_on=scored_on)


def at_shares(group: Sequence[ScoredRun]) -> dict[str, list[ScoredRun]]:
    """Return {share of heads: the runs of the group, with their scores at this share}.

    The runs have an elastic budget and differ only in the seed. The shares are those that all of them were scored at;
    without such shares the dict is empty. The last share is the one that the runs are saved with: there they have all
    scores. At the other shares they have the scores of a validation alone.
    """
    found = [run.json("results.json").get("by_share") or {} for run in group]
    with as_written(f"{group[0].folder}: its scores by share are"):
        shares = [share for share in found[0] if all(share in scores for scores in found)]
        split = {}
        for share in shares:
            split[share] = []
            for run, scores in zip(group, found):
                sampling = dict(run.sampling, share=share)
                at_share = run._replace(sampling=sampling)
                if share != shares[-1]:
                    at_share = at_share._replace(scores=_at_share(run, scores[share]))
                split[share].append(at_share)
    return split


def _at_share(run: ScoredRun, scores: dict) -> dict[str, float | None]:
    """Return the scores of a validation at one share, by key of COLUMNS."""
    # COLUMNS finds some scores at the top, others under "validation"; results.json has both at a share in one dict.
    tree = {**scores, "validation": scores}
    file = run.folder / "results.json"
    return {
        key: number_at(tree, column.keys or (key,), file)
        for key, column in COLUMNS.items()
        if run.scores.get(key) is not None
    }


def suite_titles(name: str) -> list[str]:
    """Return the titles of a suite's tasks, and that of their average at the end."""
    return [*(row.title for row in SUITES[name].rows), f"average of {name}"]


def _suites(folder: Path) -> tuple[dict[str, float | None], list[str]]:
    """Return the scores of suites by title, and each suite's name, with its --limit if it had one."""
    scores = {}
    suites = []
    files = {}
    for file in sorted(folder.glob("scores*.json")):
        record = read_json(file)
        limit = record.get("limit")
        for name, result in record.get("suites", {}).items():
            if name not in SUITES or name in files:
                reason = f"has a suite {name!r}"
                if name in files:
                    reason = f"and {files[name]} both have scores of {name}"
                raise ValueError(f"{file} {reason}; expected one of {', '.join(SUITES)} once")
            *tasks, average = suite_titles(name)
            values = result["values"]
            if len(values) != len(tasks):
                raise ValueError(f"{file}: {len(values)} values of {name}; expected {len(tasks)}")
            numbered = dict(zip(tasks, values)) | {average: result["average"]}
            scores |= {title: number_at(numbered, (title,), file) for title in numbered}
            files[name] = file
            suites.append(name if limit is None else f"{name}, --limit {limit:g}")
    return scores, suites


def grouped(
    runs: Sequence[ScoredRun], over: str | None = None, names: Sequence[str] | None = None
) -> list[tuple[str, list[ScoredRun]]]:
    """Group runs that differ only in the seed, or also in the key `over`; groups of one model follow one another.

    `names` has one name for each run, and a group takes that of its first run. Without `names` a group is called by
    its model and the settings that differ from those of the model's other groups.
    """
    if names and len(names) != len(runs):
        raise ValueError(f"--names: {len(names)} for {len(runs)} runs; expected one for each RUN")
    given = dict(zip([run.folder for run in runs], names or ()))
    groups: dict[str, list[ScoredRun]] = {}
    for run in runs:
        group = groups.setdefault(run.identity(over), [])
        for other in group:
            if all(other.config.get(key) == run.config.get(key) for key in ("seed", over)):
                seed = run.config.get("seed")
                raise ValueError(
                    f"{other.folder} and {run.folder} are the same run with the same seed, {seed}"
                )
        group.append(run)
    named = []
    for model in dict.fromkeys(run.model for run in runs):
        of_model = [group for group in groups.values() if group[0].model == model]
        settings = [group[0].settings(over) for group in of_model]
        keys = sorted(set().union(*settings))
        differ = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
        for group, config in zip(of_model, settings):
            name = model
            for key in differ:
                if config.get(key) is not None:
                    name += f", {key} {config[key]}"
            named.append((given.get(group[0].folder, name), group))
    return named


def mean_and_spread(values: Sequence[float | None], digits: int) -> str:
    """Return mean ± standard deviation (n - 1) as text, with the number of known values if some are None."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = f"{statistics.mean(known):.{digits}f}"
    if len(known) > 1:
        text += f" ± {statistics.stdev(known):.{digits}f}"
    if len(known) < len(values):
        text += f" ({len(known)})"
    return text


def starts_of(runs: dict[str, ScoredRun]) -> tuple[list[dict], list[str]]:
    """Return the starts of runs by environment.jsonl, and a line for each run that lacks this file.

    Starts of a run that differ only in step and date are one entry, with all steps and dates.
    """
    starts: dict[str, dict] = {}
    files, missing = having(runs, "environment.jsonl", "every start of a run adds a line to it")
    for name, file in files.items():
        for line in read_lines(file):
            start = dict.fromkeys(STARTED) | line
            step = start.pop("step", None)
            date = start.pop("date", None)
            shown = ""
            if isinstance(start["versions"], dict):
                versions = start["versions"].items()
                shown = ", ".join(f"{package} {version}" for package, version in versions)
            new = dict(start, name=name, versions=shown, steps=[], dates=[])
            same = starts.setdefault(json.dumps([name, start]), new)
            same["steps"].append(step)
            same["dates"].append(date)
    return list(starts.values()), missing
