"""The folders of a run's checkpoints. After the first save, a run has a whole checkpoint at all times.

    step_200          a checkpoint: .safetensors files, and step.json with the step, plain values and SHA-256 sums
    .step_200.tmp     a save that is running or was interrupted
    .step_200.gone    a checkpoint that is being deleted

A checkpoint is written into a hidden folder, flushed, and renamed; only then are old checkpoints deleted. A run resumes
from the newest checkpoint whose files match the sums in its step.json. The main process alone decides which one that is;
a network disk may show another process an older state of the folder.
"""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from moh_vision.common.errors import reason_of
from moh_vision.common.io import (
    TensorFiles,
    __version__,
    by_age,
    fsync,
    give_name,
    hidden_path,
    sha256_of,
)
from moh_vision.engine.ranks import by_all, from_first

FORMAT = 5
RECORD = "step.json"
# Files of the newest checkpoint that RUN has too, see `export`.
EXPORTED = ("model.safetensors", "ema.safetensors")


def seal(folder: Path, step: int, sums: dict[str, str], plain: dict[str, object]) -> None:
    """Write step.json into a checkpoint's folder whose other files are on the disk, and flush both.

    Args:
        folder: the folder.
        step: number of steps done.
        sums: SHA-256 of each file by its name.
        plain: further entries of step.json.
    """
    (folder / RECORD).write_text(record_text(dict(step=step, sha256=sums, **plain)))
    fsync(folder / RECORD)
    fsync(folder)


def record_text(body: dict) -> str:
    """Return the text of a step.json with the entries `body`; its entry own_sha256 is the SHA-256 of all others."""
    body = dict(format=FORMAT, version=__version__) | body
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps(dict(body, own_sha256=digest), indent=1) + "\n"


def damage(folder: Path, step: int) -> str | None:
    """Return why a folder is not a whole checkpoint of `step`, or None if it is one."""
    try:
        text = (folder / RECORD).read_text()
        record = json.loads(text)
        written_format = record["format"]
        version = record["version"]
        recorded_step = record["step"]
        if written_format != FORMAT:
            written = f"format {written_format} of moh_vision {version}"
            return f"{RECORD} has {written}; this is {__version__}, which reads {FORMAT}"
        sums = dict(record["sha256"])
        # If writing the entries again gives the same text, none is missing, added or changed.
        body = {key: value for key, value in record.items() if key != "own_sha256"}
        if text != record_text(body):
            return f"{RECORD} does not have its own sha256"
    except FileNotFoundError:
        return f"{RECORD} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{RECORD} is not readable ({error})"
    if recorded_step != step:
        return f"{RECORD} is of step {recorded_step}"
    for name, expected in sums.items():
        if name != Path(name).name:
            return f"{RECORD} names {name}, which is outside of the folder"
        try:
            if sha256_of(folder / name) != expected:
                return f"{name} does not have the sha256 of {RECORD}"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} is not readable ({error.strerror})"
    # Files that step.json does not name would be loaded as well.
    unnamed = {path.name for path in folder.glob("*.safetensors")} - sums.keys()
    if unnamed:
        return f"{min(unnamed)} is not in {RECORD}"
    return None


def latest_checkpoint(run: Path, say: Callable[[str], None] = print) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest whole checkpoint, or None if the run has not saved any.

    Raise ValueError if there are checkpoints but none is whole, or if there are exported weights but no checkpoint:
    starting over would overwrite the run.
    """
    parent = run / "checkpoints"
    candidates = by_age(parent)
    for step, folder in candidates:
        reason = damage(folder, step)
        if reason is None:
            return step, folder
        say(f"checkpoint {folder} is skipped: {reason}")
    if candidates:
        problem = f"every checkpoint in {parent} is damaged, or of another version"
    elif (run / EXPORTED[0]).exists():
        problem = f"{run} holds {EXPORTED[0]}, but {parent} no checkpoint"
    else:
        return None
    raise ValueError(f"{problem}; --fresh moves the run aside and starts over")


def resume_point(
    run: Path, max_steps: int, fresh: bool, say: Callable = print
) -> tuple[int, Path] | None:
    """Return (step, folder) of the checkpoint from which a run of `max_steps` resumes, or None for a new run.

    Raise ValueError as `latest_checkpoint` does, and if the run has already done more than `max_steps`.
    """
    if fresh:
        return None
    latest = latest_checkpoint(run, say)
    if latest and latest[0] > max_steps:
        raise ValueError(f"--max-steps {max_steps}: {run} has already done {latest[0]} steps")
    return latest


def refuse_other_views(folders: Sequence[Path]) -> None:
    """Raise ValueError on every process if any of them does not see the checkpoints that the main process has chosen.

    A process compares step.json with that of the main process, and looks up the files that it names; it hashes none.
    """
    records = from_first(lambda: [(folder / RECORD).read_text() for folder in folders])

    def look() -> None:
        for folder, record in zip(folders, records, strict=True):
            problem = _other_view(folder, record)
            if problem:
                host = socket.gethostname()
                raise ValueError(
                    f"{folder} is not on {host} what the main process sees, which goes on from it: {problem}. "
                    "All processes must see the same folder: wait until a network disk shows it, or take a shared one"
                )

    by_all(look)


def _other_view(folder: Path, record: str) -> str | None:
    """Return how a checkpoint differs here from that of a process that has read `record`, or None if it does not."""
    try:
        if (folder / RECORD).read_text() != record:
            return f"{RECORD} is another one"
    except (OSError, ValueError) as error:
        return f"{RECORD} is not readable ({reason_of(error)})"
    missing = [name for name in json.loads(record)["sha256"] if not (folder / name).exists()]
    if missing:
        return f"{missing[0]} is missing"
    return None


def tidy(run: Path) -> None:
    """Delete what interrupted saves, exports and deletions left."""
    checkpoints = run / "checkpoints"
    exports = [hidden_path(run / name) for name in EXPORTED]
    for path in (*checkpoints.glob(".step_*.tmp"), *checkpoints.glob(".step_*.gone"), *exports):
        _delete(path)


def put_in_place(hidden: Path, step: int) -> Path:
    """Rename a sealed folder to step_N, and return the new path; if step_N is whole already, keep that one instead."""
    final = hidden.with_name(f"step_{step}")
    if not damage(final, step):
        _delete(hidden)
        return final
    if final.exists():
        _discard(final)  # a damaged checkpoint, which was skipped when this run resumed
    give_name(hidden, final)
    return final


def rotate(run: Path, step: int, keep: int, every: int) -> None:
    """Delete old checkpoints, so that with the new one of `step` there are `keep`.

    Regular checkpoints are `every` steps apart. A checkpoint between two of them is left by a signal that stopped the
    run, and is deleted first: in the end a run has the same checkpoints as without the stop. Folders of later steps
    are left alone: they are damaged, and were skipped when this run resumed.
    """
    folders = [(number, path) for number, path in by_age(run / "checkpoints") if number <= step]

    def is_irregular(folder: tuple[int, Path]) -> bool:
        return folder[0] != step and folder[0] % every > 0

    # `by_age` has the newest first. The sort is stable, so both groups keep that order.
    for _, superfluous in sorted(folders, key=is_irregular)[keep:]:
        _discard(superfluous)


def export(run: Path, folder: Path, join: bool) -> None:
    """Export a checkpoint's weights as RUN/model.safetensors and RUN/ema.safetensors, by hard links where possible.

    A sharded model has one file per process in the checkpoint. With `join` they are joined in main memory; without, no
    file is exported, and `io.tensor_files` finds the parts in the checkpoint.
    """
    for name in EXPORTED:
        saved = folder / name
        exported = run / name
        hidden = hidden_path(exported)
        _delete(hidden)
        if saved.exists():
            if exported.exists() and exported.samefile(saved):
                continue  # exported already; renaming a hard link to another link of its file would do nothing
            try:
                os.link(saved, hidden)
            except OSError:  # not every file system has hard links
                shutil.copyfile(saved, hidden)
                fsync(hidden)
            give_name(hidden, exported)
            continue
        if name == EXPORTED[1] and exported.exists():  # an EMA from before ema.decay was set to 0
            exported.rename(run / f"old_{name}")
            continue
        parts = TensorFiles(saved)
        if parts.files and join:
            parts.join(exported)
        elif parts.files:
            _delete(exported)  # joined when the run last ended; the parts are newer


def _discard(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first: an interrupted deletion then leaves no damaged checkpoint."""
    _delete(folder.rename(folder.with_name(f".{folder.name}.gone")))


def _delete(path: Path) -> None:
    """Delete a file or a folder if it exists; what cannot be deleted from a folder stays."""
    shutil.rmtree(path, ignore_errors=True)
    if not path.is_dir():
        path.unlink(missing_ok=True)
