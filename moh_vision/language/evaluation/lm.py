"""Scores of a causal language model: tasks of the lm-evaluation-harness.

    python -m moh_vision lm --model RUN --tasks moh-llm
    python -m moh_vision lm --model RUN --tasks hellaswag,my_task --include-path FOLDER --num-fewshot 5
    python -m moh_vision lm --list

Also by `accelerate launch -m moh_vision lm ...`: each process holds the model, and they share the
questions.
"""

import contextlib
import logging
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from torch import nn

from moh_vision.attention import head_budget
from moh_vision.common.cli import refuse_output
from moh_vision.common.errors import nearest, reason_of
from moh_vision.common.progress import say
from moh_vision.engine.accelerator import finish, make_accelerator
from moh_vision.engine.logging import write_json
from moh_vision.engine.ranks import total
from moh_vision.language.evaluation.lm_suites import SUITES, Row, average, suite_table
from moh_vision.models.head_load import HeadLoad

DTYPES = ("auto", "float32", "bfloat16", "float16")
# The harness' defaults.
SEEDS = dict(
    random_seed=0, numpy_random_seed=1234, torch_random_seed=1234, fewshot_random_seed=1234
)


def options(add: Callable) -> None:
    model = "folder that AutoModelForCausalLM reads: a run of train_text.py or a saved model"
    add("--model", metavar="RUN", help=model)
    add("--tokenizer", metavar="FOLDER", help="where its tokenizer is (the model's folder)")
    add(
        "--moh-llama3",
        action="store_true",
        help="RUN is the released MoH-LLaMA3-8B, or laid out as it",
    )
    add(
        "--tasks",
        metavar="A,B",
        help="suites (see --list), or tasks, groups and tags of the harness",
    )
    add("--list", action="store_true", help="print the suites with the paper's numbers, and stop")
    add("--num-fewshot", type=int, help="examples before each question (each task's own number)")
    add(
        "--include-path",
        metavar="FOLDER",
        help="with task files (YAML), which come before the harness' own",
    )
    add(
        "--limit",
        type=float,
        help="only the first so many questions of each task; below 1: a share of them",
    )
    add("--batch-size", default="1", help="questions at a time on each process, or auto (1)")
    add("--dtype", default="auto", choices=DTYPES, help="of the weights (auto: as they were saved)")
    add("--out", metavar="FILE", help="write numbers and circumstances as JSON; must not exist")
    add(
        "--head-load",
        metavar="FILE",
        help="write as JSON which heads the tokens of each task ran; must not exist",
    )


def check(options: Namespace) -> None:
    """Raise ValueError for wrong options, or options that do not go together, before anything is loaded."""
    if options.tasks is None:
        raise ValueError("give --tasks NAMES or --list")
    if options.model is None:
        raise ValueError("--model RUN is missing")
    if options.batch_size != "auto":
        if not options.batch_size.isdecimal() or int(options.batch_size) < 1:
            raise ValueError(f"--batch-size {options.batch_size}: expected 1 or more, or auto")
        options.batch_size = int(options.batch_size)
    if options.limit is not None:
        is_share = 0 < options.limit < 1
        is_number = options.limit >= 1 and options.limit % 1 == 0
        if not is_share and not is_number:
            raise ValueError(
                f"--limit {options.limit:g}: expected a number of questions, or a share between 0 and 1"
            )
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise ValueError(f"--num-fewshot {options.num_fewshot}: expected 0 or more")
    if options.include_path and not Path(options.include_path).is_dir():
        raise ValueError(f"--include-path {options.include_path}: no such folder")
    if options.head_load and options.batch_size != 1:
        padded = "--head-load counts padding too where there is some"
        raise ValueError(f"{padded}; --batch-size {options.batch_size}: expected 1")
    refuse_output("--out", options.out)
    refuse_output("--head-load", options.head_load)


def _tasks(options: Namespace, accelerator) -> tuple[dict, list[str]]:
    """Score the tasks; return what --out gets and lines to print, which only the main process has in full."""
    from moh_vision.language.evaluation.lm_model import counted, load_model, load_tokenizer

    items = [item.strip() for item in options.tasks.split(",") if item.strip()]
    rows = plan(items, options.num_fewshot)
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    from lm_eval import utils

    with accelerator.main_process_first():  # it fetches the data sets for all
        tasks, manager = load_tasks(rows, options.include_path)
    if 1 <= (options.limit or math.inf) < accelerator.num_processes:
        processes = f"fewer questions than processes ({accelerator.num_processes})"
        raise ValueError(f"--limit {options.limit:g}: {processes}")
    model, circumstances = load_model(
        options.model, options.dtype, accelerator.device, tokenizer, options.moh_llama3
    )
    load = None
    counting = _not_counted
    if options.head_load:
        load = HeadLoad(head_budget(model)["layers"], {"task": [row.title for row in rows]})
        if not load.choosing():
            raise ValueError(f"--head-load: every head of {options.model} runs for every token")
        counting = partial(counted, model, load)
    harness = harness_model(model, tokenizer, options.batch_size, accelerator)
    scored = evaluate_rows(
        tasks,
        harness,
        counting,
        task_manager=manager,
        batch_size=options.batch_size,
        limit=options.limit,
    )
    if load:
        load.reduce(total)
        load.of = dict(
            model=options.model, data="lm-eval", split=", ".join(items), limit=options.limit
        )
        if accelerator.is_main_process:
            load.save(Path(options.head_load))
    scores, lines = _report(options, items, scored, circumstances)
    for row, result in scored:
        if row["metric"] is None:
            # Of a group, print a table without its tasks.
            column = "groups" if result.get("groups") else "results"
            lines.append(utils.make_table(result, column))
    return scores, lines


def _report(
    options: Namespace, items: list[str], scored: list[tuple[dict, dict]], circumstances: dict
) -> tuple[dict, list[str]]:
    """Return what --out gets and lines about the suites, from what `evaluate_rows` and `load_model` return."""
    lines = []
    if options.head_load:
        lines.append(f"head load: {options.head_load}")
    if options.limit is not None:
        warning = "these are scores of a part of each task, not to be compared with the paper's"
        lines.append(f"--limit {options.limit:g}: {warning}")
    suites = _suites(items, scored)
    for name, suite in suites.items():
        lines.append(suite_table(name, suite["values"]) + "\n")
    versions = {
        task: version for _, result in scored for task, version in result["versions"].items()
    }
    circumstances["versions"].update(lm_eval=metadata.version("lm_eval"), tasks=versions)
    scores = dict(
        suites=suites,
        rows=[row for row, _ in scored],
        tasks=items,
        num_fewshot=options.num_fewshot,
        include_path=options.include_path,
        limit=options.limit,
        seeds=SEEDS,
        **circumstances,
    )
    return scores, lines


def _not_counted(row: int) -> contextlib.AbstractContextManager:
    """Do nothing, in place of `counted`."""
    return contextlib.nullcontext()


def _suites(items: Sequence[str], scored: list[tuple[dict, dict]]) -> dict[str, dict]:
    """Return average and values of each suite among `items`; {} on a process that has no scores."""
    if not scored:
        return {}
    values = {(row["title"], *row["tasks"]): row["value"] for row, _ in scored}
    suites = {}
    for name in items:
        if name in SUITES:
            of_rows = [values[(row.title, *row.tasks)] for row in SUITES[name].rows]
            suites[name] = dict(average=average(of_rows), values=of_rows)
    return suites


def score(options: Namespace, accelerator) -> None:
    """Score a model, write --out and print the scores. Collective: every process must call it."""
    scores, lines = _tasks(options, accelerator)
    if not accelerator.is_main_process:
        return
    if options.out:
        circumstances = dict(batch_size=options.batch_size, processes=accelerator.num_processes)
        write_json(Path(options.out), dict(scores, **circumstances))
        lines.append(f"scores: {options.out}")
    say("\n".join(lines))


def work(options: Namespace) -> None:
    if options.list:
        say("\n\n".join(suite_table(name) for name in SUITES))
        return
    check(options)
    accelerator = make_accelerator("no")  # one process, or those that accelerate started
    score(options, accelerator)
    finish(accelerator)


def plan(items: Sequence[str], shots: int | None) -> list[Row]:
    """Return the rows to score, each once: those of suites, and tasks of the harness with `shots` (None: their own)."""
    rows: list[Row] = []
    for item in items:
        if item.startswith("moh-") and item not in SUITES:
            raise ValueError(unknown_name(item, list(SUITES)))
        if item in SUITES and shots is not None:
            raise ValueError(
                f"--num-fewshot {shots}: the suite {item} has its own shots; name its tasks instead"
            )
        if item in SUITES:
            item_rows = SUITES[item].rows
        else:
            item_rows = [Row(item, -1 if shots is None else shots, "", (item,))]
        rows += [row for row in item_rows if row not in rows]
    if not rows:
        raise ValueError(
            f"--tasks: expected suites ({', '.join(SUITES)}) or the harness' tasks, with commas between"
        )
    return rows


def unknown_name(name: str, known: Sequence[str]) -> str:
    """Return the message for a name that is neither a suite nor a task."""
    near = nearest(name, [*SUITES, *known], 1)
    hint = f"suites are {', '.join(SUITES)}"
    if near:
        hint = f"did you mean {near[0]}?"
    return f"--tasks: no suite or task is named {name}; {hint}"


def load_tasks(
    rows: Sequence[Row], include_path: str | None = None
) -> tuple[dict[Row, list], object]:
    """Return (row -> the harness' tasks and groups, its TaskManager), and fetch all data.

    Task files (YAML) in `include_path` come before the harness' own.
    """
    from lm_eval import tasks

    pairs = [(row, task) for row in rows for task in row.tasks]
    manager = None
    if include_path:
        manager = tasks.TaskManager(include_path=include_path, include_defaults=False)
    wanted = {task for _, task in pairs}
    if manager is None or not wanted <= {*manager.all_subtasks}:
        manager = tasks.TaskManager(include_path=include_path)  # slow: reads 14,000 files
    for _, task in pairs:
        if task not in manager.all_tasks:
            raise ValueError(unknown_name(task, manager.all_tasks))
    opened: dict[Row, list] = {row: [] for row in rows}
    for row, task in pairs:
        try:
            loaded = manager.load([task])  # once per row, because a task keeps the row's shots
        except Exception as error:  # of the hub's client, a data builder or a task's own code
            data = (manager.task_index[task].cfg or {}).get("dataset_path", "one of several")
            raise ValueError(
                f"task {task}: its data set ({data}) cannot be loaded: {reason_of(error)}"
            ) from None
        groups = loaded.get("groups", {})
        if task in groups:
            opened[row].append(groups[task])
        else:
            opened[row] += loaded["tasks"].values()
    return opened, manager


def harness_model(model: nn.Module, tokenizer, batch_size: int | str, accelerator):
    """Wrap a causal language model, which is on its device, for the harness.

    The processes of `accelerator` share the questions.
    """
    from moh_vision.language.evaluation.harness import Harness

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)  # HFLM would warn that the model is loaded already
    wrapped = Harness(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    logger.setLevel(level)
    if accelerator.num_processes > 1:
        # HFLM sets these itself only if it loads the model, and only on GPUs.
        wrapped.accelerator = accelerator
        wrapped._rank = accelerator.process_index
        wrapped._world_size = accelerator.num_processes
    return wrapped


def evaluate_rows(
    tasks: dict[Row, list],
    harness,
    counting: Callable[[int], contextlib.AbstractContextManager],
    **options,
) -> list[tuple[dict, dict]]:
    """Score a model of `harness_model`. Collective: every process must call it.

    Args:
        tasks: row -> the harness' tasks and groups, of `load_tasks`.
        harness: of `harness_model`.
        counting: returns a context manager for the index of a row, in which the row is scored.
        **options: of `lm_eval.simple_evaluate`.

    Returns:
        (record, the harness' result) of each row; on other processes than the main one []. A record has title, tasks,
        shots, metric, value in percent (None: not a number), metrics of each task, and samples: task -> questions
        scored.
    """
    from lm_eval import simple_evaluate

    scored = []
    for row_index, (row, objects) in enumerate(tasks.items()):
        shots = None if row.shots < 0 else row.shots
        with counting(row_index):
            result = simple_evaluate(
                model=harness,
                tasks=objects,
                num_fewshot=shots,
                bootstrap_iters=1000,  # used for the standard errors of perplexities alone
                log_samples=False,
                **SEEDS,
                **options,
            )
        if result is None:  # not the main process
            continue
        metrics = {name: _numbers(values) for name, values in result["results"].items()}
        scores = [metrics.get(name, {}).get(row.metric) for name in row.tasks]
        value = None
        if None not in scores:
            value = 100 * sum(scores) / len(scores)
        record = dict(
            title=row.title,
            tasks=list(row.tasks),
            shots=shots,
            used_shots={name: result["n-shot"].get(name) for name in metrics},
            metric=row.metric or None,
            value=value,
            metrics=metrics,
            samples={name: count["effective"] for name, count in result["n-samples"].items()},
        )
        scored.append((record, result))
    return scored


def _numbers(values: dict) -> dict[str, float]:
    """Return the finite metrics among a task's results, which also hold the task's name and "N/A"."""
    numbers = {}
    for name, value in values.items():
        if "," in name and isinstance(value, (int, float)) and math.isfinite(value):
            numbers[name] = float(value)
    return numbers
