"""The folders of a run's checkpoints: once one was whole, one always is.

    step_200          a checkpoint: .safetensors files, and step.json with the step, plain values and sums
    .step_200.tmp     of a save that did not end
    .step_200.gone    being deleted

A checkpoint is written into a hidden folder, flushed, and renamed; only then are old ones deleted. The newest one whose
files have the sums of its step.json is loaded.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from moh_vision.common.io import (
    TensorFiles,
    __version__,
    by_age,
    fsync,
    give_name,
    hidden_path,
    sha256_of,
)

FORMAT = 4
RECORD = "step.json"
EXPORTED = ("model.safetensors", "ema.safetensors")  # what RUN has of its newest checkpoint


def seal(folder: Path, step: int, sums: dict[str, str], plain: dict[str, object]) -> None:
    """Write and flush the record of a folder whose files are on the disk."""
    (folder / RECORD).write_text(record_text(dict(step=step, sha256=sums, **plain)))
    fsync(folder / RECORD)
    fsync(folder)


def record_text(body: dict) -> str:
    """Return the one text of a record; its entry own_sha256 is the sum of the rest."""
    body = dict(format=FORMAT, version=__version__) | body
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps(dict(body, own_sha256=digest), indent=1) + "\n"


def damage(folder: Path, step: int) -> str | None:
    """Return why a folder is not the whole checkpoint of `step`, or None if it is."""
    try:
        text = (folder / RECORD).read_text()
        record = json.loads(text)
        written_format = record["format"]
        version = record["version"]
        recorded = record["step"]
        if written_format != FORMAT:
            written = f"format {written_format} of moh_vision {version}"
            return f"{RECORD} has {written}; this is {__version__}, which reads {FORMAT}"
        sums = dict(record["sha256"])
        # The same text after reading and writing: nothing is missing, added or changed.
        body = {key: value for key, value in record.items() if key != "own_sha256"}
        if text != record_text(body):
            return f"{RECORD} does not have its own sha256"
    except FileNotFoundError:
        return f"{RECORD} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{RECORD} is not readable ({error})"
    if recorded != step:
        return f"{RECORD} is of step {recorded}"
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
    # Further files would be loaded too.
    strangers = {path.name for path in folder.glob("*.safetensors")} - sums.keys()
    if strangers:
        return f"{min(strangers)} is not in {RECORD}"
    return None


def latest_checkpoint(run: Path, say: Callable[[str], None] = print) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest whole checkpoint, or None if there is none.

    Refuse checkpoints of which none can be read, and weights that only a checkpoint can have left: starting over
    would lose the run.
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
    """Return where a run of `max_steps` resumes: `latest_checkpoint`, or None for a new run."""
    if fresh:
        return None
    latest = latest_checkpoint(run, say)
    if latest and latest[0] > max_steps:
        raise ValueError(f"--max-steps {max_steps}: {run} has already done {latest[0]} steps")
    return latest


def tidy(run: Path) -> None:
    """Delete leftovers of interrupted saves."""
    checkpoints = run / "checkpoints"
    exports = [hidden_path(run / name) for name in EXPORTED]
    for path in (*checkpoints.glob(".step_*.tmp"), *checkpoints.glob(".step_*.gone"), *exports):
        _delete(path)


def put_in_place(hidden: Path, step: int) -> Path:
    """Give a sealed folder its name, and return it. A whole checkpoint of the same step stays."""
    final = hidden.with_name(f"step_{step}")
    if not damage(final, step):
        _delete(hidden)
        return final
    if final.exists():
        _discard(final)  # what this run passed over when it resumed
    give_name(hidden, final)
    return final


def rotate(run: Path, step: int, keep: int, every: int) -> None:
    """Delete what the checkpoint of `step` makes superfluous, so that `keep` stay.

    The checkpoint of a stop between two saves, which are `every` steps apart, goes first: the run ends with the same
    checkpoints as without a stop. Newer folders are damaged ones that this run passed over.
    """
    folders = [(number, path) for number, path in by_age(run / "checkpoints") if number <= step]

    def is_of_a_stop(folder: tuple[int, Path]) -> bool:
        return folder[0] != step and folder[0] % every > 0

    # The newest come first, and the sort keeps that order.
    for _, superfluous in sorted(folders, key=is_of_a_stop)[keep:]:
        _discard(superfluous)


def export(run: Path, folder: Path, join: bool) -> None:
    """Give a checkpoint's weights their names in the run: as links, where the file system has them.

    Parts of a sharded model are put together in main memory, if `join` says so; until then `io.tensor_files` finds them.
    """
    for name in EXPORTED:
        saved = folder / name
        exported = run / name
        hidden = hidden_path(exported)
        _delete(hidden)
        if saved.exists():
            if exported.exists() and exported.samefile(saved):
                continue  # a rename of one name of a file to another one does nothing
            try:
                os.link(saved, hidden)
            except OSError:  # not every file system has links
                shutil.copyfile(saved, hidden)
                fsync(hidden)
            give_name(hidden, exported)
            continue
        if name == EXPORTED[1] and exported.exists():  # of an earlier setting: it is not the newest
            exported.rename(run / f"old_{name}")
            continue
        parts = TensorFiles(saved)
        if parts.files and join:
            parts.join(exported)
        elif parts.files:
            _delete(exported)  # of an earlier end: no longer the newest


def _discard(folder: Path) -> None:
    # Renamed first: an interrupted deletion leaves rubbish, not a damaged checkpoint.
    _delete(folder.rename(folder.with_name(f".{folder.name}.gone")))


def _delete(path: Path) -> None:
    """Delete a file or a folder that may be there, as far as that goes."""
    shutil.rmtree(path, ignore_errors=True)
    if not path.is_dir():
        path.unlink(missing_ok=True)
