"""What a run reports: environment.jsonl, metrics.jsonl, tensorboard or wandb, a progress bar or lines, result files."""

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.tracking import TensorBoardTracker, WandBTracker
from tqdm import tqdm

from moh_vision.common.io import __version__, write_whole
from moh_vision.common.progress import Progress, say
from moh_vision.engine.step_times import StepTimes

UNITS = dict(images="img", tokens="tok")  # abbreviations for the screen
WANDB_ID = "wandb_id.txt"
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "diffusers",
    "accelerate",
    "transformers",
    "torch-fidelity",
)
STARTS = "environment.jsonl"  # an entry for each start of a run
NEXT = {  # commands to suggest after a run, by its wing; each follows "python -m moh_vision"
    "classification": (".classification.validate --checkpoint {run}", " predict {run} IMAGES"),
    "diffusion": (
        ".diffusion.sample --checkpoint {run} --num-images 100 {sampling_options} --grid grid.png",
    ),
    "text": (" publish {run} --output FOLDER", " table {run}"),
}
OF_FILES = {  # further commands to suggest if the run's folder has the file
    "config.yaml": " report {run} --output report.html",
    "head_load.json": " head-load {run} --output heads.png",
    "gates.md": " gates {run} --output gates.png",
}


@dataclass
class RunLog:
    """Logs a run to metrics.jsonl, a tracker and the screen.

    Args:
        path: path of metrics.jsonl. Entries of later steps than `start` are dropped: the run does these steps again.
        start: number of steps done before.
        total: number of steps of the whole run.
        enabled: whether this is the main process; others log nothing.
        title: title of the run on the screen.
        tracker: what `open_tracker` returned.
        tracker_goes_on: whether the run has logged to this tracker before.
        unit: what the rate counts, a key of UNITS.
        ends_with_validation: whether the run validates after its last step. If it is resumed there, it validates again.
        times: measures the parts of the steps, until the first interval after the first step is logged.
    """

    path: Path
    start: int
    total: int
    enabled: bool
    title: str
    tracker: Any = None
    tracker_goes_on: bool = False
    unit: str = "images"
    ends_with_validation: bool = True
    times: StepTimes = field(default_factory=StepTimes)

    def __post_init__(self):
        self.pause()
        # End of this process's first step, which compiles and fills caches; 0 before.
        self.warm = 0.0
        # Whether a finished run validates again. The tracker, which takes nothing back, then keeps the first validation.
        self.validates_again = False
        if self.enabled:
            entries = list(logged(self.path))
            kept = [entry for entry in entries if self._stays(entry)]
            self.validates_again = any(
                entry["step"] == self.start and "validation" in entry and entry not in kept
                for entry in entries
            )
            write_whole(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))
            self.file = open(self.path, "a", buffering=1)
        else:
            self.file = open(os.devnull, "a", buffering=1)
        self.bar = tqdm(
            total=self.total,
            initial=self.start,
            desc=self.title,
            bar_format="{desc} {n}/{total} |{bar:10}| {elapsed}<{remaining}{postfix}",
            dynamic_ncols=True,
            disable=not (self.enabled and sys.stderr.isatty()),
        )

    def _stays(self, entry: dict) -> bool:
        """Return whether an entry of the log stays: whether it is about work that this process will not do again."""
        if not self.start:
            return False
        finished = self.start == self.total and self.ends_with_validation
        if finished and "validation" in entry:
            return entry["step"] < self.start
        return entry["step"] <= self.start

    def step(self, count: int) -> None:
        """Count a step with `count` images or tokens."""
        self.count += count
        self.steps += 1
        self.times.end_step(count)
        if not self.warm:  # the first step is left out of the estimate of the time left
            self.warm = time.monotonic()
            self.steps = 0
            self.times.restart()
        self.bar.update()

    def metrics(self, step: int, values: dict, show: str) -> None:
        """Write the entry {"step": step, **values}; print the text `show`, the rate, peak memory and the time left."""
        now = time.monotonic()
        rate = self.count / max(now - self.since, 1e-9)
        memory = peak_memory_mib()
        remaining = ""
        if self.steps:
            seconds = now - max(self.since, self.warm)
            left = (self.total - step) * seconds / self.steps
            remaining = f", {timedelta(seconds=round(left))} left"
        pace = ""
        if self.times.on and self.times.steps:
            pace = self.times.pace().line(UNITS[self.unit])
            self.times.on = False
        self.pause()
        measured = {f"{self.unit}_per_s": round(rate, 1), "peak_memory_mib": round(memory)}
        self._write(step, values | measured)
        speed = f"{rate:.0f} {UNITS[self.unit]}/s"
        if self.bar.disable:
            done = f"{self.title} {step}/{self.total}"
            self.say(f"{done}: {show}, {speed}, peak {memory:.0f} MiB{remaining}")
        if pace:
            self.say(f"{self.title}: {pace}")
        if self.bar.disable:
            return
        # Put the loss and the rate first: a narrow terminal cuts the end off.
        loss, comma, more = show.partition(", ")
        self.bar.set_postfix_str(f"{loss}, {speed}, {memory / 1024:.1f} GiB{comma}{more}")

    def event(self, step: int, values: dict, show: str) -> None:
        """Log an event such as a validation in metrics.jsonl, and print the text `show`."""
        self._write(step, values)
        self.say(show)

    def stopped(self, done: int, signum: int) -> None:
        """Print that a signal ended the run after `done` steps, which are saved."""
        name = signal.Signals(signum).name
        self.say(f"{name}: stopped after {done} steps, which are saved; the same command goes on")

    def pictures(self, step: int, name: str, images: torch.Tensor) -> None:
        """Log images [N, C, h, w] uint8 in the tracker, if there is one."""
        if not self.tracker:
            return
        layout = {}
        if self.tracker.name == "tensorboard":
            layout = dict(dataformats="NHWC")
        self.tracker.log_images({name: images.permute(0, 2, 3, 1).numpy()}, step=step, **layout)

    def _write(self, step: int, values: dict) -> None:
        plain, _ = without_nan(values)  # the loss of a skipped step may be NaN
        self.file.write(json.dumps({"step": step, **plain}) + "\n")
        again = self.validates_again and self.tracker_goes_on and "validation" in values
        if self.tracker and not again:
            self.tracker.log(numbers(plain), step=step)

    def say(self, text: str) -> None:
        if self.enabled:
            say(text)

    def progress(self, batches, title: str):
        """Return an iterator over batches that shows a `Progress` of its own, for work other than training."""
        return Progress.over(batches, title, enabled=self.enabled)

    def pause(self) -> None:
        """Restart the rate's counts and clock; call it after work that is not training."""
        self.count = 0  # images or tokens since `self.since`
        self.steps = 0
        self.since = time.monotonic()
        self.times.restart()

    def close(self) -> None:
        self.bar.close()
        self.file.close()
        if self.tracker:
            self.tracker.finish()


def check_tracker(name: str | None) -> None:
    """Raise ValueError if the tracker's package is not installed."""
    if name is not None and find_spec(name) is None:
        raise ValueError(
            f"tracker {name}: the package is not installed (pip install {name}); or leave tracker out"
        )


def open_tracker(name: str | None, run: Path, start: int, title: str, config: dict, enabled: bool):
    """Return accelerate's tracker for a run, started; None without a name, or if not `enabled`.

    Args:
        name: "tensorboard" or "wandb"; None: no tracker.
        run: the run's folder.
        start: number of steps done. tensorboard drops what an interrupted run logged after them; wandb cannot.
        title: name of the project in wandb.
        config: the run's configuration, which wandb shows.
        enabled: whether this is the main process.
    """
    if name is None or not enabled:
        return None
    if name == "tensorboard":
        first_dropped = start + 1
        if not start:
            first_dropped = 0  # the run begins anew
        tracker = TensorBoardTracker("tensorboard", run, purge_step=first_dropped)
    else:
        tracker = WandBTracker(title, dir=str(run), name=run.name, id=wandb_id(run), resume="allow")
    tracker.start()
    if name == "wandb":
        tracker.store_init_configuration(config)
    return tracker


def wandb_id(run: Path) -> str:
    """Return the id by which wandb resumes a run: drawn when the run first logs there, and kept in its folder."""
    file = run / WANDB_ID
    if not file.exists():
        write_whole(file, uuid.uuid4().hex)
    return file.read_text()


def numbers(values: dict, prefix: str = "") -> dict:
    """Return the numbers in nested dicts as one dict: {"a": 1, "b": {"c": 2.0}, "d": [...]} -> {"a": 1, "b/c": 2.0}."""
    result = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result[prefix + name] = value
    return result


def logged(metrics: Path) -> Iterator[dict]:
    """Yield the entries of metrics.jsonl, without torn lines; raise ValueError, naming the file, if it is not a log."""
    if not metrics.exists():
        return
    remedy = "move the file away to go on without it"
    try:
        lines = metrics.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{metrics}: not the log of a run ({error.reason}); {remedy}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a kill or a full disk
        if not isinstance(entry, dict) or type(entry.get("step")) is not int:
            raise ValueError(f"{metrics}, line {number}: not an entry with its step; {remedy}")
        yield entry


def record_start(folder: Path, **start) -> None:
    """Append an entry for a start of a run to environment.jsonl in the folder: `start`, date, commit, versions and cores."""
    start["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    start["commit"] = commit(Path(__file__).parents[2])
    start["versions"] = versions()
    start["cores"] = os.cpu_count()
    file = folder / STARTS
    earlier = b""
    if file.exists():
        earlier = file.read_bytes()
    write_whole(file, earlier + json.dumps(start).encode() + b"\n")


def imports_said(folder: Path, imports: dict[str, str]) -> list[str]:
    """Return a line for each file that a run imports: its SHA-256, and whether it has changed since the run's last start.

    A change is said and not refused, as a change of the package is.

    Args:
        folder: the run's folder; its environment.jsonl has the earlier starts.
        imports: file -> SHA-256.
    """
    if not imports:
        return []
    earlier: dict[str, str] = {}
    for start in logged(folder / STARTS):
        earlier = dict(start.get("imports", {}))
    lines = []
    for file, digest in imports.items():
        line = f"imports {file} (sha256 {digest[:12]})"
        if earlier.get(file, digest) != digest:
            line += f", which has changed since the run's last start (sha256 {earlier[file][:12]})"
        lines.append(line)
    return lines


def versions() -> dict[str, str]:
    """Return versions of this package and of the packages that affect its results."""
    found = {"moh_vision": __version__}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # an extra may not be installed
            found[name] = version(name)
    return found


def commit(clone: Path) -> str | None:
    """Return the commit of a git clone, with "-dirty" if tracked files have changed; None if it is not a clone."""
    git = ["git", "-C", str(clone), "--git-dir=.git", "--no-optional-locks"]
    words = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or not our clone
        return None
    return done.stdout.strip()


def ending(wing: str, run: Path, sampling_options: str = "", imports: Sequence[str] = ()) -> str:
    """Return the last lines that a run prints: its files, and commands to run next.

    Args:
        wing: of the run.
        run: the run's folder.
        sampling_options: options of sample.py, for a diffusion run.
        imports: files of the user's own that the run imported, and the commands may need.
    """
    files = ", ".join(sorted(path.name for path in run.iterdir() if not path.name.startswith(".")))
    names = dict(run=shlex.quote(str(run)), sampling_options=sampling_options)
    commands = list(NEXT[wing])
    commands += [command for name, command in OF_FILES.items() if (run / name).exists()]
    more = "".join(f" --imports {shlex.quote(file)}" for file in imports)
    following = [f"  python -m moh_vision{command.format(**names)}{more}" for command in commands]
    return "\n".join([f"{run} has {files}", "next", *following])


def without_nan(values: dict) -> tuple[dict, list[str]]:
    """Return values with None for NaN and infinity, which JSON lacks, and the names of the replaced values."""
    replaced = {}  # used as an ordered set of names

    def plain(value, name: str):
        if isinstance(value, dict):
            prefix = ""
            if name:
                prefix = f"{name}."
            return {k: plain(v, f"{prefix}{k}") for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v, name) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            replaced[name] = None
            return None
        return value

    return plain(values, ""), list(replaced)


def write_json(path: Path, values: dict) -> None:
    """Write values to a JSON file, whole or not at all; NaN and infinity become null, and a line says so."""
    values, replaced = without_nan(values)
    write_whole(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if replaced:
        say(f"{path}: null stands for a number that is not finite: {', '.join(replaced)}")


def peak_memory_mib() -> float:
    """Return PyTorch's peak memory on the GPU; without one, the process's peak resident memory, libraries included."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return psutil.Process().memory_info().peak_wset / 2**20
    unit = 2**10
    if sys.platform == "darwin":
        unit = 1  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
