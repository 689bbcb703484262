"""How a script begins and ends: user errors as one line and exit code 2, and a clean shutdown."""

from __future__ import annotations

import contextlib
import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Callable, List, Optional, Tuple

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

from moh_vision.engine.checkpoint import resume_point
from moh_vision.engine.commands import MISTAKES, message_of, user_errors  # noqa: F401  imported from here too
from moh_vision.engine.failures import attempt
from moh_vision.engine.io import LOCK, only_one
from moh_vision.engine.saver import check_writable
from moh_vision.engine.tracking import check_tracker

CONFIG, HIDDEN_CONFIG = "config.yaml", ".config.yaml"


def index_dir(output: str) -> str:
    """Where a run keeps what belongs to data in read-only folders: beside its folder, for the runs beside it."""
    return str(Path(output).resolve().with_name(".index"))


def make_accelerator(mixed_precision: str, tf32: bool = False, tracker: Optional[str] = None) -> Accelerator:
    """accelerate's Accelerator; accumulation is the script's own.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
        tf32: let NVIDIA GPUs multiply float32 matrices in TF32.
        tracker: name of the package that the run will need for it.

    Raises:
        ValueError: if `accelerate launch` was told another precision than the configuration, or the package is missing.
    """
    check_tracker(tracker)
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", mixed_precision):
        raise ValueError(f"accelerate was launched with {launched}, but mixed_precision is {mixed_precision}: set both")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # Given as a plugin, because ACCELERATE_GRADIENT_ACCUMULATION_STEPS would override the plain argument.
    accumulation = GradientAccumulationPlugin(num_steps=1)
    # The others wait while the main process indexes shards, or encodes text; the default is 10 minutes.
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=4))
    return Accelerator(
        mixed_precision=mixed_precision, gradient_accumulation_plugin=accumulation, kwargs_handlers=[patient]
    )


def take_up(
    output: str, max_steps: int, fresh: bool, accelerator, held: contextlib.ExitStack, lock: bool = True
) -> Optional[Tuple[int, Path]]:
    """Lock the run that is in `output`, if there is one, and find the checkpoint it goes on from.

    Args:
        output, fresh: see `open_run`.
        max_steps: steps of the whole run.
        accelerator: its main process locks for all.
        held: releases the lock when it is closed.
        lock: if False, only read; another process may write to the run.

    Returns:
        (step, folder) of the checkpoint, or None for a run that begins.

    Raises:
        ValueError: if another process writes to the run, and see `checkpoint.resume_point`.
    """
    folder = Path(output).resolve()

    def lock_it():
        if lock and (folder / CONFIG).exists():
            check_writable(folder)
            held.enter_context(only_one(folder, "--output"))

    by_main(lock_it, accelerator)
    return resume_point(Path(output), max_steps, fresh, accelerator.print)


def open_run(
    output: str,
    config: dict,
    changed: Callable[[dict, dict], List[str]],
    fresh: bool,
    accelerator,
    held: contextlib.ExitStack,
    data=None,
) -> Path:
    """Make the folder of a run, or open the one that `take_up` has locked.

    Args:
        output: the folder.
        config: the resolved configuration, written to config.yaml.
        changed: (saved, new) -> descriptions of differences that make it another run.
        fresh: move an earlier run aside (to OUTPUT.1, .2, ...) and start over.
        accelerator: its main process writes, the others wait.
        held: releases the lock on the folder when it is closed.
        data: a `DataRecord`, compared with that of the run and written beside config.yaml.

    Raises:
        ValueError: if the folder holds something else, a run with another configuration or other data, or if another
            process writes to it.
    """
    folder = Path(output).resolve()
    saved = folder / CONFIG
    there = saved.exists() and not fresh
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {output} is a file")
    if there:
        try:
            earlier = yaml.safe_load(saved.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{saved}: not readable as YAML: {message_of(error)}") from None
        differences = changed(earlier, config)
        if differences:
            raise ValueError(
                f"--output {output} holds a run with another configuration: {'; '.join(differences)}. "
                "Take another folder, --allow-change KEY, or --fresh to move that run aside"
            )
        if data:
            data.check(folder, accelerator.print)
    elif folder.exists() and not fresh and any(path.name not in (LOCK, HIDDEN_CONFIG) for path in folder.iterdir()):
        raise ValueError(
            f"--output {output} is not empty and holds no run; nothing there is overwritten, take another folder"
        )
    accelerator.wait_for_everyone()  # all have looked before one writes

    def write():
        check_writable(folder)
        if fresh and folder.exists():
            number = 1
            while folder.with_name(f"{folder.name}.{number}").exists():
                number += 1
            aside = folder.rename(folder.with_name(f"{folder.name}.{number}"))
            (aside / LOCK).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        if not there:
            held.enter_context(only_one(folder, "--output"))
            if saved.exists():
                raise ValueError(f"--output {output}: another process has begun a run there meanwhile; start again")
        temporary = folder / HIDDEN_CONFIG
        temporary.write_text(yaml.safe_dump(config, sort_keys=False))
        temporary.rename(saved)
        if data:
            data.save(folder)

    by_main(write, accelerator)
    return Path(output)


def by_main(part: Callable[[], None], accelerator) -> None:
    """Let the main process do `part`. If it raises one of MISTAKES, every process raises a ValueError."""
    problem = attempt(part if accelerator.is_main_process else lambda: None, MISTAKES)
    if problem:
        raise ValueError(problem)


def claim_outputs(files, folders, overwrite: bool) -> None:
    """Make the parents of output paths, before any work.

    Args:
        files, folders: paths; None and "" are left out.
        overwrite: what is there may be replaced.

    Raises:
        ValueError: naming the path, if it is there, is of the other kind, is given twice, or cannot be written.
    """
    files, folders = ([Path(p) for p in paths if p] for paths in (files, folders))
    for path in (every := [*files, *folders]):
        if every.count(path) > 1:
            raise ValueError(f"{path} is given for two outputs")
        if path.is_dir() and path in files:
            raise ValueError(f"{path} is a folder, expected a file")
        if path.is_file() and path in folders:
            raise ValueError(f"{path} is a file, expected a folder")
        if not overwrite and (any(path.iterdir()) if path.is_dir() else path.exists()):
            raise ValueError(f"{path} exists; give another path, or --overwrite true")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror})") from None
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path} cannot be written")


def finish(accelerator, signum: int = 0) -> None:
    """End a run: wait for all, collect the wrapped task, destroy the process group.

    The caller has dropped its references to the wrapped task and optimiser. gloo with DistributedDataParallel
    otherwise aborts at exit about once in four times.

    Args:
        accelerator: accelerate's Accelerator.
        signum: number of the signal that ended the run, if one did.

    Raises:
        SystemExit: with code 128 + signum, as a shell has it.
    """
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if signum:
        raise SystemExit(128 + signum)
