"""Where and how a run was started: command, versions, device. One line of JSON for every start."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Dict, List, Optional

import torch

from moh_vision.engine.io import __version__, write_whole

RECORD = "environment.jsonl"
PACKAGES = ("torch", "torchvision", "timm", "diffusers", "accelerate", "transformers", "torch-fidelity")


def add_environment(folder: Path, step: int, command: List[str], accelerator, processor: str) -> None:
    """Append this start of a run to FOLDER/environment.jsonl; the main process calls it.

    A line has: step (the first one to do), date (UTC), command, commit of the clone (None outside of one; "-dirty" where
    files differ from it), versions, device, cores, processes.

    Args:
        command: script and arguments.
        accelerator: accelerate's Accelerator.
        processor: the name of the processor's model.
    """
    cuda = accelerator.device.type == "cuda"
    start = dict(
        step=step,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(command),
        commit=commit(Path(__file__).parents[2]),
        versions=versions(),
        device=torch.cuda.get_device_name(accelerator.device) if cuda else processor,
        cores=os.cpu_count(),
        processes=accelerator.num_processes,
    )
    file = folder / RECORD
    earlier = file.read_text() if file.exists() else ""
    write_whole(file, earlier + json.dumps(start) + "\n")


def versions() -> Dict[str, str]:
    """Of this package and of those that its numbers depend on."""
    found = {"moh_vision": __version__}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # of an extra
            found[name] = version(name)
    return found


def commit(clone: Path) -> Optional[str]:
    """The commit that a clone is at, with "-dirty" if tracked files differ; None for a folder that is no clone."""
    if not (clone / ".git").exists():
        return None
    words = ["git", "--no-optional-locks", "-C", str(clone)]
    words += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a clone of somebody else
        return None
