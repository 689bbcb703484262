"""Checkpoints that are whole or not there.

    RUN/checkpoints/step_200/        accelerate's state of model and optimiser, what the script adds
                             manifest.json    step, format, sha256 of every file
    RUN/model.safetensors, ema.safetensors    the newest weights for users, with the configuration in the metadata

A checkpoint is written into a hidden folder, flushed, and renamed; only then are old ones deleted. Loading walks from
the newest to the oldest and takes the first whose files have the sums of its manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Callable, Dict, Optional, Tuple

import torch
from safetensors.torch import load_file, save_file

from moh_vision.engine.ema import gathered

FORMAT = 1
MANIFEST = "manifest.json"
EMA = "ema.safetensors"


def save_training(accelerator, run: Path, step: int, model, ema, metadata: Dict[str, object], keep: int) -> None:
    """A checkpoint, and the weights for users beside it.

    Args:
        accelerator, run, step, keep: see `save_checkpoint`.
        model: the unwrapped model.
        ema: a `ModelEma`, or None.
        metadata: what is needed to build the model again; the step is added.
    """
    save_checkpoint(
        accelerator, run, step, lambda folder: ema and save_file(ema.module.state_dict(), folder / EMA), keep
    )
    main, about = accelerator.is_main_process, dict(metadata, step=step)
    export_weights(model, run / "model.safetensors", about, main)
    if ema:
        export_weights(ema.module, run / EMA, about, main)
    elif main and (run / EMA).exists():
        (run / EMA).rename(run / f"old_{EMA}")  # of an earlier setting; nobody should take it for the newest


def load_training(accelerator, folder: Path, model, ema, say: Callable[[str], None] = print) -> None:
    """Restore what `save_training` saved into the prepared `model` and optimiser, and into `ema`."""
    accelerator.load_state(str(folder))
    if ema and not (folder / EMA).exists():
        say(f"{folder} has no EMA; it starts from the weights of that step")
        ema.set(model)
    elif ema:
        ema.module.load_state_dict(load_file(folder / EMA))


def save_checkpoint(accelerator, run: Path, step: int, write_extra: Callable[[Path], None], keep: int) -> Path:
    """Save the state after `step` steps, on all processes together.

    Args:
        accelerator: holds the wrapped model and optimiser.
        run: folder of the run.
        step: steps done.
        write_extra: writes further files into the folder it is given; called on the main process.
        keep: checkpoints that stay.
    """
    parent = run / "checkpoints"
    hidden, final = parent / f".step_{step}.tmp", parent / f"step_{step}"
    if accelerator.is_main_process:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(hidden))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for file in hidden.glob("random_states_*.pkl"):
            file.unlink()  # random numbers are functions of the step
        write_extra(hidden)
        files = sorted(p for p in hidden.rglob("*") if p.is_file())
        sums = {str(p.relative_to(hidden)): _sha256(p) for p in files}
        (hidden / MANIFEST).write_text(json.dumps(dict(format=FORMAT, step=step, sha256=sums), indent=1))
        for path in [*files, hidden / MANIFEST, hidden]:
            _fsync(path)
        if final.exists():
            shutil.rmtree(final)
        hidden.rename(final)
        _fsync(parent)
        # Only steps up to this one: newer folders are damaged ones that this run passed over, and take no place.
        for old in [path for number, path in _steps(parent) if number <= step][keep:]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def latest_checkpoint(run: Path, say: Callable[[str], None] = print) -> Optional[Tuple[int, Path]]:
    """(step, folder) of the newest whole checkpoint, or None if there is none at all.

    Raises:
        ValueError: if there are checkpoints and every one is damaged; starting over in silence would lose the run.
    """
    candidates = _steps(run / "checkpoints")
    for step, folder in candidates:
        reason = _damage(folder, step)
        if reason is None:
            return step, folder
        say(f"checkpoint {folder} is skipped: {reason}")
    if candidates:
        raise ValueError(
            f"every checkpoint in {run / 'checkpoints'} is damaged; --fresh moves the run aside and starts over"
        )
    return None


def resume_point(
    run: Path, max_steps: int, fresh: bool, say: Callable[[str], None] = print
) -> Optional[Tuple[int, Path]]:
    """What a run started now goes on from: `latest_checkpoint`, or None for a fresh one.

    Raises:
        ValueError: if more than `max_steps` are done already, or every checkpoint is damaged.
    """
    found = None if fresh else latest_checkpoint(run, say)
    if found and found[0] > max_steps:
        raise ValueError(f"--max-steps {max_steps}: {run} has already done {found[0]} steps")
    return found


def export_weights(module: torch.nn.Module, path: Path, metadata: Dict[str, object], write: bool = True) -> None:
    """Write a module's weights as one safetensors file, whole or not at all; metadata values are stored as JSON.

    With FSDP every process calls it, because shards are gathered, one tensor at a time, and one of them says `write`.
    """
    tensors = {}
    for name, value in gathered(module):
        if write:
            tensors[name] = value.detach().contiguous().cpu()
    if not write:
        return
    hidden = path.with_name(f".{path.name}.tmp")
    save_file(tensors, hidden, metadata={"format": "pt", **{k: json.dumps(v) for k, v in metadata.items()}})
    hidden.chmod(0o644)  # safetensors makes it private
    _fsync(hidden)
    hidden.rename(path)


def _steps(parent: Path):
    found = []
    for folder in parent.glob("step_*"):
        number = folder.name.removeprefix("step_")
        if folder.is_dir() and number.isdigit():
            found.append((int(number), folder))
    return sorted(found, reverse=True)


def _damage(folder: Path, step: int) -> Optional[str]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        form, recorded, sums = manifest["format"], manifest["step"], dict(manifest["sha256"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is not readable ({error})"
    if form != FORMAT:
        return f"{MANIFEST} has format {form}, this version reads {FORMAT}"
    if recorded != step:
        return f"{MANIFEST} is of step {recorded}"
    for name, expected in sums.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != expected:
            return f"{name} does not have the sha256 of its manifest"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
