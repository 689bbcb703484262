"""Scores of a causal language model: tasks of the lm-evaluation-harness, or the perplexity of a text.

    python -m moh_vision lm --model RUN --tasks moh-llm
    python -m moh_vision lm --model RUN --tasks hellaswag,my_task --include-path FOLDER --num-fewshot 5
    python -m moh_vision lm --model RUN --perplexity FILE.txt --context 2048 --stride 512
    python -m moh_vision lm --list

Also by `accelerate launch -m moh_vision lm ...`: each process holds the model, and they share the
questions or windows.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from moh_vision.attention import head_budget
from moh_vision.engine.commands import Parser, Progress, exit_code, reason_of, refuse_output, say
from moh_vision.engine.logging import write_json
from moh_vision.engine.ranks import total_over_processes
from moh_vision.engine.run import finish, make_accelerator
from moh_vision.language.evaluation import lm_harness
from moh_vision.language.evaluation.lm_suites import SUITES, average, suite_table
from moh_vision.language.evaluation.perplexity import causal_losses, per_unit, perplexity, summary
from moh_vision.models.head_load import HeadLoad

DTYPES = ("auto", "float32", "bfloat16", "float16")
OF_TASKS, OF_TEXTS = ("num_fewshot", "include_path", "limit", "head_load"), ("context", "stride")
LEAST = dict(num_fewshot=0, context=1, stride=1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options in `argv`; None: those of this process."""
    parser = Parser("python -m moh_vision lm", __doc__)
    add = parser.add_argument
    model = "folder that AutoModelForCausalLM reads: a run of train_text.py or a saved model"
    add("--model", metavar="RUN", help=model)
    add("--tokenizer", metavar="FOLDER", help="where its tokenizer is (the model's folder)")
    add("--moh-llama3", action="store_true", help="RUN is the released MoH-LLaMA3-8B, or laid out as it")
    add("--tasks", metavar="A,B", help="suites (see --list), or tasks, groups and tags of the harness")
    add("--perplexity", metavar="FILE", help="instead of --tasks: the perplexity of a UTF-8 text")
    add("--list", action="store_true", help="print the suites with the paper's numbers, and stop")
    add("--num-fewshot", type=int, help="examples before each question, of tasks (each task's own number)")
    add("--include-path", metavar="FOLDER", help="with task files (YAML), which come before the harness' own")
    add("--limit", type=float, help="only the first so many questions of each task; below 1: a share of them")
    add("--context", type=int, help="tokens of a window for --perplexity (2048, or what the model allows if less)")
    add("--stride", type=int, help="tokens from window to window (a quarter of the context)")
    add("--batch-size", default="1", help="questions or windows at a time on each process; for tasks also auto (1)")
    add("--device", help="where the model runs (a GPU if there is one)")
    add("--dtype", default="auto", choices=DTYPES, help="of the weights (auto: as they were saved)")
    add("--out", metavar="FILE", help="write numbers and circumstances as JSON; must not exist")
    add("--head-load", metavar="FILE", help="write as JSON which heads the tokens of each task ran; must not exist")
    options = parser.parse(argv)
    if options.list:
        return options
    if (options.tasks is None) == (options.perplexity is None):
        raise ValueError("give one of --tasks NAMES, --perplexity FILE or --list")
    if options.model is None:
        raise ValueError("--model RUN is missing")
    for name in OF_TASKS if options.perplexity else OF_TEXTS:
        if getattr(options, name) is not None:
            other = "--tasks" if options.perplexity else "--perplexity"
            raise ValueError(f"--{name.replace('_', '-')} belongs to {other}")
    if options.batch_size != "auto" or options.perplexity:
        if not options.batch_size.isdecimal() or int(options.batch_size) < 1:
            allowed = "1 or more" + ("" if options.perplexity else ", or auto")
            raise ValueError(f"--batch-size {options.batch_size}: expected {allowed}")
        options.batch_size = int(options.batch_size)
    if options.limit is not None and not (0 < options.limit < 1 or options.limit >= 1 and options.limit % 1 == 0):
        raise ValueError(f"--limit {options.limit:g}: expected a number of questions, or a share between 0 and 1")
    for name, least in LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    if options.include_path and not Path(options.include_path).is_dir():
        raise ValueError(f"--include-path {options.include_path}: no such folder")
    if options.perplexity and not Path(options.perplexity).is_file():
        raise ValueError(f"--perplexity {options.perplexity}: no such file")
    if options.head_load and options.batch_size != 1:
        padded = "--head-load counts padding too where there is some"
        raise ValueError(f"{padded}; --batch-size {options.batch_size}: expected 1")
    refuse_output("--out", options.out)
    refuse_output("--head-load", options.head_load)
    return options


def _device(asked: str | None, accelerator) -> torch.device:
    if accelerator.num_processes > 1:
        if asked:
            raise ValueError(f"--device {asked}: processes of accelerate launch have their own; leave it out")
        return accelerator.device
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's, for a wrong name and for a backend not built
        raise ValueError(f"--device {asked}: {reason_of(error)}") from None
    return device


def _tasks(options: argparse.Namespace, accelerator) -> tuple[dict, list[str]]:
    """Return (what --out gets, lines to print) on the main process."""
    from moh_vision.language.evaluation.lm_model import counted, load_model, load_tokenizer

    items = [item.strip() for item in options.tasks.split(",") if item.strip()]
    rows = lm_harness.plan(items, options.num_fewshot)
    device = _device(options.device, accelerator)
    tokenizer = load_tokenizer(options.tokenizer or options.model, text=False)
    with accelerator.main_process_first():  # the others find the data sets fetched
        tasks, manager = lm_harness.load_tasks(rows, options.include_path)
    if 1 <= (options.limit or math.inf) < accelerator.num_processes:
        processes = f"fewer questions than processes ({accelerator.num_processes})"
        raise ValueError(f"--limit {options.limit:g}: {processes}")
    model, about = load_model(options.model, options.dtype, device, tokenizer, options.moh_llama3)
    load, counting = None, lambda row: contextlib.nullcontext()
    if options.head_load:
        load = HeadLoad(head_budget(model)["layers"], {"task": [row.title for row in rows]})
        if not load.choosing():
            raise ValueError(f"--head-load: every head of {options.model} runs for every token")
        counting = partial(counted, model, load)
    harness = lm_harness.harness_model(model, tokenizer, options.batch_size, accelerator)
    ways = dict(task_manager=manager, batch_size=options.batch_size, limit=options.limit)
    scored = lm_harness.evaluate_rows(tasks, harness, counting, **ways)
    if load:
        load.reduce(total_over_processes(accelerator))
        load.of = dict(model=options.model, data="lm-eval", split=", ".join(items), limit=options.limit)
        if accelerator.is_main_process:
            load.save(Path(options.head_load))
    lines = [f"head load: {options.head_load}"] if load else []
    if options.limit is not None:
        part = "these are scores of a part of each task, not to be compared with the paper's"
        lines.append(f"--limit {options.limit:g}: {part}")
    values = {(row["title"], *row["tasks"]): row["value"] for row, _ in scored}
    suites: dict[str, dict] = {}
    for name in dict.fromkeys(item for item in items if item in SUITES and scored):
        own = [values[(row.title, *row.tasks)] for row in SUITES[name].rows]
        suites[name] = dict(average=average(own), values=own)
        lines.append(suite_table(name, own) + "\n")
    lines += [lm_harness.table(result) for row, result in scored if row["metric"] is None]
    named = ("num_fewshot", "include_path", "limit")
    how = dict({name: getattr(options, name) for name in named}, seeds=lm_harness.SEEDS)
    versions = {task: version for _, result in scored for task, version in result["versions"].items()}
    about["versions"].update(lm_eval=metadata.version("lm_eval"), tasks=versions)
    return dict(suites=suites, rows=[row for row, _ in scored], tasks=items, **how, **about), lines


def _perplexity(options: argparse.Namespace, accelerator) -> tuple[dict, list[str]]:
    """Do as `_tasks`, for a text."""
    from moh_vision.language.evaluation.lm_model import load_model, load_tokenizer, read_text, sliding_windows

    device = _device(options.device, accelerator)
    tokenizer = load_tokenizer(options.tokenizer or options.model, text=True)
    model, about = load_model(options.model, options.dtype, device, tokenizer, options.moh_llama3)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # None: it does not say
    context = options.context or min(2048, most or 2048)
    stride = options.stride or max(1, context // 4)
    if most is not None and context > most:
        raise ValueError(f"--context {context}: {options.model} has positions for {most} tokens")
    if stride > context:
        raise ValueError(f"--stride {stride}: allowed are 1 to the context, {context}")
    text = read_text(Path(options.perplexity), tokenizer)
    share = dict(process=accelerator.process_index, processes=accelerator.num_processes)
    windows = sliding_windows(text.ids, context, stride, options.batch_size, **share)
    windows = Progress.over(windows, "perplexity", enabled=accelerator.is_main_process)
    try:
        scores = perplexity(causal_losses(model), windows, device, total_over_processes(accelerator))
    except ValueError as error:
        raise ValueError(f"{options.perplexity}: {error}") from None
    scores.update(per_unit(scores, text.words, text.bytes))
    lines = [
        f"{options.perplexity}: {summary(scores)} (windows of {context}, {stride} apart)",
        f"a word {scores['word_perplexity']:.6g}, {text.words} words (a line's end is one)",
        f"a byte {scores['byte_perplexity']:.6g}, {scores['bits_per_byte']:.4f} bits, {text.bytes} bytes",
    ]
    file = str(Path(options.perplexity).resolve())
    return dict(scores, file=file, sha256=text.sha256, context=context, stride=stride, **about), lines


def score(options: argparse.Namespace, accelerator) -> None:
    """Score a model, write --out and print the scores; every process calls it."""
    scores, lines = (_tasks if options.tasks else _perplexity)(options, accelerator)
    if not accelerator.is_main_process:
        return
    if options.out:
        circumstances = dict(batch_size=options.batch_size, processes=accelerator.num_processes)
        write_json(Path(options.out), dict(scores, **circumstances))
        lines.append(f"scores: {options.out}")
    say("\n".join(lines))


def _work(options: argparse.Namespace) -> None:
    if options.list:
        say("\n\n".join(suite_table(name) for name in SUITES))
        return
    accelerator = make_accelerator("no")  # one process, or those that accelerate started
    score(options, accelerator)
    finish(accelerator)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 for a user's mistake."""
    return exit_code("lm", lambda: _work(parse(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
