"""Tasks of EleutherAI's lm-evaluation-harness (Gao et al. 2024), which makes prompts, few-shot examples and scores."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import nn

from moh_vision.engine.commands import nearest, reason_of
from moh_vision.language.evaluation.lm_suites import SUITES, Row

SEEDS = dict(random_seed=0, numpy_random_seed=1234, torch_random_seed=1234, fewshot_random_seed=1234)  # its defaults


def plan(items: Sequence[str], shots: int | None) -> list[Row]:
    """List what to score, each (task, shots) once: suites, or tasks of the harness with `shots` (None: their own)."""
    rows: list[Row] = []
    for item in items:
        if item.startswith("moh-") and item not in SUITES:
            raise ValueError(unknown_name(item, list(SUITES)))
        if item in SUITES and shots is not None:
            raise ValueError(f"--num-fewshot {shots}: the suite {item} has its own shots; name its tasks instead")
        own = SUITES[item].rows if item in SUITES else [Row(item, -1 if shots is None else shots, "", (item,))]
        rows += [row for row in own if row not in rows]
    if not rows:
        raise ValueError(f"--tasks: expected suites ({', '.join(SUITES)}) or the harness' tasks, with commas between")
    return rows


def unknown_name(name: str, known: Sequence[str]) -> str:
    """Return the message for a name that is neither a suite nor a task."""
    near = nearest(name, [*SUITES, *known], 1)
    hint = f"did you mean {near[0]}?" if near else f"suites are {', '.join(SUITES)}"
    return f"--tasks: no suite or task is named {name}; {hint}"


def load_tasks(rows: Sequence[Row], include_path: str | None = None) -> tuple[dict[Row, list], object]:
    """Return (row -> the harness' tasks and groups, its TaskManager), and fetch all data.

    Task files (YAML) in `include_path` come before the harness' own.
    """
    from lm_eval import tasks

    names = [(row, task) for row in rows for task in row.tasks]
    manager = tasks.TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if manager is None or not {task for _, task in names} <= {*manager.all_subtasks}:
        manager = tasks.TaskManager(include_path=include_path)  # reads 14,000 files
    for _, task in names:
        if task not in manager.all_tasks:
            raise ValueError(unknown_name(task, manager.all_tasks))
    opened: dict[Row, list] = {row: [] for row in rows}
    for row, task in names:
        try:
            loaded = manager.load([task])  # per row: it keeps its shots
        except Exception as error:  # of the hub's client, a data builder or a task's own code
            data = (manager.task_index[task].cfg or {}).get("dataset_path", "one of several")
            raise ValueError(f"task {task}: its data set ({data}) cannot be loaded: {reason_of(error)}") from None
        groups = loaded.get("groups", {})
        opened[row] += [groups[task]] if task in groups else loaded["tasks"].values()
    return opened, manager


def harness_model(model: nn.Module, tokenizer, batch_size: int | str, accelerator):
    """Wrap a causal language model on its device for the harness; the processes of `accelerator` share the questions."""
    from lm_eval.models.huggingface import HFLM

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of a model that is loaded already
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    logger.setLevel(level)
    if accelerator.num_processes > 1:  # HFLM does so itself only when it loads the model, and only on GPUs
        wrapped.accelerator = accelerator
        wrapped._rank, wrapped._world_size = accelerator.process_index, accelerator.num_processes
    return wrapped


def evaluate_rows(
    tasks: dict[Row, list], harness, counting: Callable[[int], AbstractContextManager], **options
) -> list[tuple[dict, dict]]:
    """Score a model of `harness_model`; every process calls it. `options` are those of `lm_eval.simple_evaluate`.

    Returns (row, the harness' result) of each row on the main process, else nothing. A row has title, tasks, shots,
    metric, value in percent (None: not a number), metrics of each task, and samples: task -> questions scored. It is
    scored inside `counting(its number)`.
    """
    from lm_eval import simple_evaluate

    found = []
    for number, (row, objects) in enumerate(tasks.items()):
        shots = None if row.shots < 0 else row.shots
        with counting(number):
            # Of bootstrapped errors only those of perplexities are drawn.
            more = dict(num_fewshot=shots, bootstrap_iters=1000, log_samples=False, **SEEDS)
            result = simple_evaluate(model=harness, tasks=objects, **more, **options)
        if result is None:  # not the main process
            continue
        metrics = {name: _numbers(values) for name, values in result["results"].items()}
        scores = [metrics.get(name, {}).get(row.metric) for name in row.tasks]
        found.append((dict(
            title=row.title, tasks=list(row.tasks), shots=shots,
            used_shots={name: result["n-shot"].get(name) for name in metrics},
            metric=row.metric or None, value=None if None in scores else 100 * sum(scores) / len(scores),
            metrics=metrics, samples={name: count["effective"] for name, count in result["n-samples"].items()},
        ), result))  # fmt: skip
    return found


def table(result: dict) -> str:
    """Format a result of the harness as it does; of a group, without the tasks inside."""
    from lm_eval.utils import make_table

    return make_table(result, "groups" if result.get("groups") else "results")


def _numbers(values: dict) -> dict[str, float]:
    """Keep the finite numbers among a task's results, without its name and N/A."""
    numbers = {k: float(v) for k, v in values.items() if "," in k and isinstance(v, (int, float))}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
