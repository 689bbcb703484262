"""Checkpoints that are whole or not there.

    RUN/checkpoints/step_200/        accelerate's state of model and optimiser, what the script adds
                             manifest.json    step, format, sha256 of every file and of itself
    RUN/model.safetensors, ema.safetensors    the newest weights, with the configuration as metadata

A checkpoint is written into a hidden folder, flushed, and renamed; only then are old ones deleted. The newest one
whose files have the sums of its manifest is loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path
from typing import Callable, Dict, Optional, Tuple

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from moh_vision.engine.commands import reason_of
from moh_vision.engine.ema import gathered
from moh_vision.engine.io import give_name, hidden_path, write_aside, write_tensors
from moh_vision.engine.manifest import MANIFEST, Seal, damage, other_version
from moh_vision.engine.ranks import attempt
from moh_vision.engine.sharded_files import foreign_objects
from moh_vision.engine.step_folders import by_age, hidden_folder, put_in_place, rotate, tidy

WEIGHTS, EMA = "model.safetensors", "ema.safetensors"
RANDOM_STATES = "random_states_*.pkl"  # accelerate's, one of every process


def _nothing(point: str = "") -> None:
    pass


def save_training(
    accelerator, run: Path, step: int, model, ema, metadata: Dict[str, object], keep: int, at=_nothing, every: int = 1
) -> Optional[str]:
    """Save a checkpoint after `step` steps, and weights for users; all processes call it together.

    Args:
        accelerator: holds the wrapped model and optimiser.
        run: folder of the run.
        step: steps done.
        model, ema: the unwrapped model, and a `ModelEma` or None.
        metadata: what is needed to build the model again; the step is added.
        keep, every: checkpoints that stay, and steps between saves, see `rotate`.
        at: called after every write, flush and rename; a test may end the process there, or raise OSError.

    Returns:
        None if everything was saved, else what went wrong, the same on every process: earlier checkpoints
        stay, and what was half written is removed.
    """
    parent, main = run / "checkpoints", accelerator.is_main_process
    hidden = hidden_folder(parent, step)
    about = dict(metadata, step=step)

    def begin():
        tidy(parent)
        hidden.mkdir(parents=True)
        at(f"made {hidden.name}")
        if ema:
            save_file(_whole(ema.module, True), hidden / EMA)
            at(f"wrote {EMA} of the state")
            seal.add(hidden / EMA)

    def write_state():
        try:
            with _without_crc32(), _without_a_word_on_tied_weights():
                accelerator.save_state(str(hidden))
        except (RuntimeError, CheckpointException) as error:  # torch.save's and FSDP's, for a full disk
            raise OSError(_why_not_written(error, hidden)) from error
        at("wrote the state")
        if main:  # random numbers follow from the step; other processes may be writing theirs still
            written = (p for p in hidden.rglob("*") if p.is_file() and not p.match(RANDOM_STATES))
            seal.add(*(p for p in written if p != hidden / EMA))

    def finish():
        for file in hidden.glob(RANDOM_STATES):
            file.unlink()
        seal.close(step)
        put_in_place(hidden, step, at)
        seal.meanwhile(rotate, parent, step, keep, every, at)

    def export():
        tensors = _whole(model, main)
        if main:
            _export(run, tensors, ema, about, seal, at)

    with Seal(hidden, at) as seal:
        for part, by_all in ((begin, False), (write_state, True), (finish, False), (export, True)):
            problem = attempt(part if main or by_all else _nothing)
            if problem:
                break
    if problem and main:
        with contextlib.suppress(OSError):
            tidy(parent)
            for name in (WEIGHTS, EMA):
                shutil.rmtree(hidden_path(run / name), ignore_errors=True)
    return problem


def _export(run: Path, tensors: Dict[str, torch.Tensor], ema, about: dict, seal: Seal, at) -> None:
    """Write the weights for users."""
    exports = {WEIGHTS: tensors}
    if ema:
        exports[EMA] = _whole(ema.module, True)
    elif (run / EMA).exists():
        (run / EMA).rename(run / f"old_{EMA}")  # of an earlier setting: it is not the newest
        at(f"moved {EMA} aside")
    written = {}
    for name in exports:
        written[name] = write_aside(run / name, exports[name], about)
        at(f"wrote {name}")
        seal.flush(written[name])
    seal.wait()
    for name, file in written.items():
        give_name(file, run / name)
        at(f"renamed {name}")
        file.parent.rmdir()


def load_training(accelerator, folder: Path, model, ema, say: Callable[[str], None] = print) -> None:
    """Restore what `save_training` saved into the prepared `model`, optimiser and `ema`."""
    try:
        accelerator.load_state(str(folder))
        if ema and not (folder / EMA).exists():
            say(f"{folder} has no EMA; it starts from the weights of that step")
            ema.set(model)
        elif ema:
            ema.module.load_state_dict(load_file(folder / EMA))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        version = json.loads((folder / MANIFEST).read_text())["version"]
        reason = reason_of(error)
        raise ValueError(f"{folder}, of moh_vision {version}, cannot be loaded into this model ({reason})") from error


def latest_checkpoint(run: Path, say: Callable[[str], None] = print) -> Optional[Tuple[int, Path]]:
    """Return (step, folder) of the newest whole checkpoint, or None if there is none.

    Refuse checkpoints of which none can be read, and weights that only a checkpoint can have left: starting over
    would lose the run.
    """
    candidates = by_age(run / "checkpoints")
    others = [other_version(folder) for _, folder in candidates]
    if others and all(others):
        raise ValueError(f"{candidates[0][1]}: {others[0]}; take that version, or --fresh to start over")
    for step, folder in candidates:
        reason = damage(folder, step) or foreign_objects(folder)
        if reason is None:
            return step, folder
        say(f"checkpoint {folder} is skipped: {reason}")
    if candidates:
        raise ValueError(
            f"every checkpoint in {run / 'checkpoints'} is damaged; --fresh moves the run aside and starts over"
        )
    if (run / WEIGHTS).exists():
        raise ValueError(
            f"{run} holds model.safetensors, but {run / 'checkpoints'} no checkpoint; "
            "--fresh moves the run aside and starts over"
        )
    return None


def resume_point(
    run: Path, max_steps: int, fresh: bool, say: Callable[[str], None] = print
) -> Optional[Tuple[int, Path]]:
    """Return where a run of `max_steps` resumes: `latest_checkpoint`, or None for a new run."""
    found = None if fresh else latest_checkpoint(run, say)
    if found and found[0] > max_steps:
        raise ValueError(f"--max-steps {max_steps}: {run} has already done {found[0]} steps")
    return found


def export_weights(module: torch.nn.Module, path: Path, metadata: Dict[str, object], write: bool = True) -> None:
    """Write a module's weights as one safetensors file, whole or not at all; metadata is stored as JSON.

    With FSDP every process calls it, as shards are gathered tensor by tensor; one of them says `write`.
    """
    tensors = _whole(module, write)
    if write:
        write_tensors(path, tensors, metadata)


def _whole(module: torch.nn.Module, keep: bool) -> Dict[str, torch.Tensor]:
    """Gather the state dict in main memory, on all processes; empty where it is not kept.

    Tied tensors stand there once, under their first name, as in transformers' files.
    """
    names = {parameter: name for name, parameter in reversed(list(module.named_parameters(remove_duplicate=False)))}
    tied = {name for name, p in module.named_parameters(remove_duplicate=False) if names[p] != name}
    tensors = {}
    for name, value in gathered(module):
        if keep and name not in tied:
            tensors[name] = value.detach().contiguous().cpu()
    return tensors


@contextlib.contextmanager
def _without_crc32():
    """The manifest's sums are better than torch.save's own, which take half of its time."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def _without_a_word_on_tied_weights():
    """accelerate warns at every save that tied weights are stored once, as loading expects."""
    log = logging.getLogger("accelerate.utils.other")

    def keep(record: logging.LogRecord) -> bool:
        return "Removed shared tensor" not in record.getMessage()

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def _why_not_written(error: BaseException, folder: Path) -> str:
    """Return the system's reason why torch.save or FSDP could not write into `folder`, if known."""
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    # torch.save names a line of its own code; writing again tells the reason.
    torn = max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_mtime_ns, default=None)
    if torn:
        try:
            with open(torn, "ab") as file:
                file.write(bytes(2**20))
        except OSError as cause:
            return f"{cause}: {torn}"
    return str(error)
