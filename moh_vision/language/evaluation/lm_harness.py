"""Tasks of EleutherAI's lm-evaluation-harness (Gao et al. 2024) for a loaded model.

The harness makes prompts, few-shot examples and scores; here its errors become one line.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from importlib import metadata
from typing import Callable, ContextManager, Dict, List, Optional, Sequence, Tuple, Union

from torch import nn

from moh_vision.engine.commands import nearest, reason_of
from moh_vision.language.evaluation.lm_suites import SUITES, Row

SEEDS = dict(random_seed=0, numpy_random_seed=1234, torch_random_seed=1234, fewshot_random_seed=1234)  # its defaults


def require_harness() -> str:
    """Its version; raises ValueError, saying how to get it, if it is missing."""
    try:
        import lm_eval  # noqa: F401

        return metadata.version("lm_eval")
    except ImportError as error:
        missing = getattr(error, "name", None) or "lm_eval"
        raise ValueError(f"the package {missing} is needed: pip install 'moh_vision[lm]'") from None


def plan(items: Sequence[str], shots: Optional[int]) -> List[Row]:
    """List what to score, each (task, shots) once. `items` name suites, or the harness' tasks, groups and
    tags, with `shots` examples; None: their own number.
    """
    rows: List[Row] = []
    for item in items:
        if item in SUITES:
            if shots is not None:
                raise ValueError(f"--num-fewshot {shots}: the suite {item} has its own shots; name its tasks instead")
            rows += [row for row in SUITES[item].rows if row not in rows]
        elif item.startswith("moh-"):
            raise ValueError(unknown_name(item, list(SUITES)))
        else:
            row = Row(item, -1 if shots is None else shots, "", (item,))
            rows += [row] if row not in rows else []
    if not rows:
        raise ValueError(f"--tasks: expected suites ({', '.join(SUITES)}) or the harness' tasks, with commas between")
    return rows


def unknown_name(name: str, known: Sequence[str]) -> str:
    """The message for a name that is neither a suite nor a task."""
    near = nearest(name, [*SUITES, *known], 1)
    hint = f"did you mean {near[0]}?" if near else f"suites are {', '.join(SUITES)}"
    return f"--tasks: no suite or task is named {name}; {hint}"


def load_tasks(rows: Sequence[Row], include_path: Optional[str] = None) -> Tuple[Dict[Row, list], object]:
    """Return (row -> the harness' tasks and groups, its TaskManager), and fetch all data. Task files (YAML) in
    `include_path` come before the harness' own.
    """
    from lm_eval.tasks import TaskManager

    names = [task for row in rows for task in row.tasks]
    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if manager is None or not {*names} <= {*manager.all_subtasks}:  # 14,000 files
        manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(unknown_name(name, manager.all_tasks))
    opened: Dict[Row, list] = {row: [] for row in rows}
    for row in rows:
        for name in row.tasks:
            try:
                loaded = manager.load([name])  # per row: it keeps its shots
            except Exception as error:  # of the hub's client, a data builder or a task's own code
                data = ", ".join(_data_sets(manager.task_index, name)[:3]) or "unknown"
                reason = reason_of(error)
                raise ValueError(f"task {name}: its data set ({data}) cannot be loaded: {reason}") from None
            group = loaded.get("groups", {}).get(name)
            opened[row] += [group] if group is not None else list(loaded["tasks"].values())
    return opened, manager


def evaluate_rows(
    tasks: Tuple[Dict[Row, list], object],
    model: nn.Module,
    tokenizer,
    *,
    batch_size: Union[int, str],
    limit: Optional[float],
    accelerator,
    counting: Callable[[int], ContextManager] = lambda row: nullcontext(),
) -> Optional[Tuple[List[dict], dict]]:
    """Score a model; every process calls it and scores a share of the questions.

    Args:
        tasks: of `load_tasks`.
        model: a transformers causal language model, in eval mode on its device.
        tokenizer: of transformers.
        batch_size: questions at a time on each process, or "auto".
        limit: first questions of each task, a number, or below 1 a share; None: all.
        accelerator: accelerate's Accelerator.
        counting: row number -> its context manager.

    Returns:
        On the main process (rows as dicts, versions of tasks), else None. A row has title, tasks, shots, metric,
        value in percent (None: not a number), metrics: task -> its harness metrics, samples: task -> questions
        scored.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of a model that is loaded already
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    logger.setLevel(level)
    processes = accelerator.num_processes
    if limit is not None and 1 <= limit < processes:
        raise ValueError(f"--limit {limit:g}: fewer questions than processes ({processes})")
    if processes > 1:  # HFLM does so itself only when it loads the model, and only on GPUs
        harness.accelerator = accelerator
        harness._rank, harness._world_size = accelerator.process_index, processes
    found, versions = [], {}
    rows, manager = tasks
    for number, (row, objects) in enumerate(rows.items()):
        shots = None if row.shots < 0 else row.shots
        with counting(number):
            result = simple_evaluate(
                model=harness,
                tasks=objects,
                task_manager=manager,
                num_fewshot=shots,
                batch_size=batch_size,
                limit=limit,
                bootstrap_iters=1000,  # for perplexities; errors of means are not drawn
                log_samples=False,
                **SEEDS,
            )
        if result is None:
            continue
        metrics = {name: _plain(values) for name, values in result["results"].items()}
        versions.update(result["versions"])
        scores = [metrics.get(name, {}).get(row.metric) for name in row.tasks]
        value = None if None in scores else 100 * sum(scores) / len(scores)
        counts = {name: count["effective"] for name, count in result["n-samples"].items()}
        used = {name: result["n-shot"].get(name) for name in metrics}
        found.append(
            dict(title=row.title, tasks=list(row.tasks), shots=shots, used_shots=used, metric=row.metric or None,
                 value=value, metrics=metrics, samples=counts)
        )  # fmt: skip
    return (found, versions) if accelerator.is_main_process else None


def metrics_table(rows: Sequence[dict]) -> str:
    """Format metrics of tasks outside suites, a line each, without those inside a group."""
    lines = []
    for row in rows:
        for task in row["metrics"]:
            if task not in row["tasks"] and row["tasks"][0] in row["metrics"]:
                continue
            for metric, value in row["metrics"][task].items():
                name, _, kind = metric.partition(",")
                if name.endswith("_stderr"):
                    continue
                error = row["metrics"][task].get(f"{name}_stderr,{kind}")
                text = f"{value:.4f}" + (f" +- {error:.4f}" if isinstance(error, float) else "")
                label = name + (f" ({kind})" if kind not in ("", "none") else "")
                shots = row["used_shots"].get(task)
                lines.append(f"{task:28}{'' if shots is None else shots:>6}  {label:28}{text}")
    return "\n".join([f"{'task':28}{'shots':>6}  metric", *lines])


def _plain(values: dict) -> Dict[str, float]:
    """Keep the numbers among a task's results, without its name and N/A."""
    kept = {k: float(v) for k, v in values.items() if "," in k and isinstance(v, (int, float))}
    return {k: v for k, v in kept.items() if math.isfinite(v)}


def _data_sets(index: dict, name: str) -> List[str]:
    """The data sets of a task, or of all that a group or tag holds."""
    entry = index.get(name)
    if entry is None:
        return []
    config = entry.cfg or {}
    inside = config.get("task") if isinstance(config.get("task"), list) else sorted(entry.tags or ())
    found = [str(config["dataset_path"])] if config.get("dataset_path") else []
    for child in inside if not found else []:
        child = child if isinstance(child, str) else child.get("task") or child.get("group")
        found += [d for d in _data_sets(index, child) if d not in found] if isinstance(child, str) else []
    return found
