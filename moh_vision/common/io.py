"""Paths in run folders, locks, safetensors files, and files that are written whole or not at all."""

import contextlib
import csv
import hashlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

import psutil
import torch
from filelock import lock_descriptor
from torch import Tensor

__version__ = "0.3.0"  # of moh_vision; pyproject.toml reads it from here
RUN_CONFIG = "config.yaml"  # a run's configuration
LOCK = ".lock"
# Matches what DDP ("module.") and torch.compile ("_orig_mod.") add to names of tensors: prefixes in any order, and
# inside the name the "_orig_mod." of a compiled block.
WRAPPED = re.compile(r"^(module\.|_orig_mod\.)+|_orig_mod\.")
# Attempts to get a lock. A process that has just been killed may hold its lock for a moment, and so may its children.
ATTEMPTS = 20
PAUSE = 0.1  # seconds between attempts
# Files of this process's locks that no child shall hold, see `only_one`.
OF_THIS_PROCESS: set[TextIO] = set()


def cache_folder() -> Path:
    """Return the cache folder: $MOH_VISION_CACHE, else $XDG_CACHE_HOME/moh_vision, else ~/.cache/moh_vision."""
    cache = os.environ.get("MOH_VISION_CACHE")
    if not cache:
        user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        cache = os.path.join(user_cache, "moh_vision")
    return Path(os.path.abspath(cache))


def run_of(path: str | Path) -> Path:
    """Return RUN if a path is RUN, RUN/checkpoints/step_N, or a file in one of the two."""
    folder = Path(path)
    if not folder.is_dir():
        folder = folder.parent
    if step_of(folder) is not None:
        return folder.resolve().parents[1]
    return folder


def step_of(folder: Path) -> int | None:
    """Return N if a folder is the checkpoint RUN/checkpoints/step_N of a run, else None."""
    match = re.fullmatch(r"(.*)/checkpoints/step_([0-9]+)", folder.resolve().as_posix())
    if not match or not Path(match[1], RUN_CONFIG).is_file():
        return None
    return int(match[2])


def by_age(parent: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of all folders step_N in `parent`, the highest step first; a checkpoint may be damaged."""
    folders = [
        path
        for path in parent.glob("step_*")
        if re.fullmatch("step_[0-9]+", path.name) and path.is_dir()
    ]
    return sorted(((int(folder.name[5:]), folder) for folder in folders), reverse=True)


def memory_limit(device) -> int | None:
    """Return how many bytes of a torch device's memory a process can have, or None if that is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    limits = [psutil.virtual_memory().total]
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max" in it: no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


@contextlib.contextmanager
def only_one(folder: Path, option: str, with_children: bool = False) -> Iterator[None]:
    """Lock a folder for the `with` block, so that one process at a time writes into it.

    Raise ValueError if another process has locked the folder.

    The lock is on the file `folder`/.lock, which names the owner's process and host. The system releases the lock
    however the process ends; a .lock file that a killed process left is not locked, and does no harm. On NFS the server
    keeps the lock for all clients, and a crashed machine loses it with its lease. On a file system without locks there
    is only a warning, and a second process is not noticed.

    Args:
        folder: an existing folder.
        option: the option that named the folder, for messages.
        with_children: hold the lock until forked children, which write into the folder, have ended too.
    """
    path = Path(folder) / LOCK
    with contextlib.ExitStack() as opened:
        for attempt in itertools.count(1):
            file = opened.enter_context(open(path, "a+"))
            try:
                locked = lock_descriptor(file.fileno(), blocking=False)
            except OSError as error:
                problem = f"{folder} cannot be locked ({error.strerror}): start one run there"
                logging.getLogger(__name__).warning(problem)
                break
            # Only a file that still has its name counts: the former owner may have removed this one meanwhile.
            if locked and _is_named(file, path):
                break
            if not locked and attempt == ATTEMPTS:
                problem = f"{_owner(file)} is writing there; wait, or take another folder"
                raise ValueError(f"{option} {folder}: {problem}")
            opened.pop_all().close()
            time.sleep(PAUSE)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        if not with_children:
            OF_THIS_PROCESS.add(file)
        try:
            yield
        finally:
            OF_THIS_PROCESS.discard(file)
            # It is closed in a forked child that leaves the `with` block too.
            if not file.closed and _is_named(file, path):
                with contextlib.suppress(PermissionError):  # Windows keeps a file that is open
                    path.unlink()


def _leave_locks_to_the_parent() -> None:
    """Close the files of locks in a forked child: a lock is released when no process has its file open any more."""
    for file in OF_THIS_PROCESS:
        file.close()
    OF_THIS_PROCESS.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


def _owner(file: TextIO) -> str:
    """Return what the owner of a lock has written into its file."""
    try:
        file.seek(0)
        return file.read(200).strip() or "another process"
    except PermissionError:  # Windows lets nobody else read a locked file
        return "another process"


def _is_named(file, path: Path) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def whole_file(path: Path, shared: bool = False) -> Iterator[BinaryIO]:
    """Open a hidden file for writing, and rename it to `path` at the end of the `with` block.

    After an error the hidden file is deleted, and `path` is as before. The folder of `path` is made if needed. With
    `shared`, several processes may write `path` at once: the last one to rename wins. A raised OSError always has a
    filename.
    """
    hidden = hidden_path(path, shared)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(hidden, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        give_name(hidden, path)
    except OSError as error:
        if error.errno and not error.filename:  # for example on a full disk
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            hidden.unlink()


def write_whole(path: Path, data: str | bytes, shared: bool = False) -> None:
    """Write a file as `whole_file` does, text as UTF-8; do nothing if it holds the same data already."""
    if isinstance(data, str):
        data = data.encode()
    if not path.exists() or path.read_bytes() != data:
        with whole_file(path, shared) as file:
            file.write(data)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as CSV; bytes in a file name that are not UTF-8 are escaped."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    write_whole(path, table.getvalue().encode("utf-8", "backslashreplace"))


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, object], shared: bool = False
) -> None:
    """Write contiguous CPU tensors, and metadata as JSON, to a safetensors file, whole or not at all."""
    # Write inside a hidden folder, because safetensors makes a temporary file of its own beside the file.
    folder = hidden_path(path, shared)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_tensors(folder / path.name, tensors, metadata)
        fsync(folder / path.name)
        give_name(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, object]) -> None:
    """Write a safetensors file, not atomically; metadata is stored as JSON."""
    # Imported here because attention imports this module, and must not need safetensors.
    from safetensors.torch import save_file

    texts = {name: json.dumps(value) for name, value in metadata.items()}
    save_file(tensors, path, metadata={"format": "pt", **texts})
    path.chmod(0o644)  # safetensors makes files that only their owner can read


def tensor_files(path: Path) -> list[Path]:
    """Return [NAME.safetensors] if it exists, else the parts NAME-00000.safetensors, ... that a sharded run writes.

    The parts are in the same folder or, for a run that has not ended, in its newest checkpoint.
    """
    if path.exists():
        return [path]
    for folder in [path.parent, *(folder for _, folder in by_age(path.parent / "checkpoints"))]:
        parts = sorted(folder.glob(f"{path.stem}-[0-9][0-9][0-9][0-9][0-9].safetensors"))
        if parts:
            return parts
    return []


class TensorFiles:
    """Reads the tensors of a safetensors file, or of its parts, see `tensor_files`.

    A tensor is in one part, or split by rows over several parts. Metadata come from the first part.

    Attributes:
        files: the open parts.
        metadata: metadata values by name.
        parts: slices of each tensor, by its name.
        shapes: shape of each whole tensor, by its name.
    """

    def __init__(self, path: Path):
        from safetensors import safe_open

        self.files = [safe_open(part, "pt") for part in tensor_files(path)]
        self.metadata: dict[str, object] = {}
        if self.files:
            metadata = self.files[0].metadata() or {}
            self.metadata = {name: _json(text) for name, text in metadata.items()}
        self.parts: dict[str, list] = {}
        for file in self.files:
            for name in file.keys():
                self.parts.setdefault(name, []).append(file.get_slice(name))
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, parts in self.parts.items():
            shape = tuple(parts[0].get_shape())
            if shape:
                rows = sum(part.get_shape()[0] for part in parts)
                shape = (rows, *shape[1:])
            self.shapes[name] = shape

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        if len(self.parts[name]) > 1:
            return self.rows(name, 0, self.shapes[name][0])
        return self.parts[name][0][...]

    def join(self, path: Path) -> None:
        """Write all tensors to one file; all of them must fit into main memory."""
        write_tensors(path, {name: self.read(name) for name in self.shapes}, self.metadata)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` - 1 of a tensor."""
        pieces = []
        begin = 0  # row of the whole tensor with which the part begins
        for part in self.parts[name]:
            # Clamp the range to this part's rows; it may be empty.
            count = part.get_shape()[0]
            first = min(max(start - begin, 0), count)
            last = min(max(stop - begin, 0), count)
            pieces.append(part[first:last])
            begin += count
        return torch.cat(pieces)


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC): macOS stores an umlaut in a file name as two characters."""
    return unicodedata.normalize("NFC", name)


def class_names(file: Path) -> list[str]:
    """Return the class names in a classes.txt, which has one per line; an empty file means images without classes."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error})") from None
    names: dict[str, int] = {}
    for number, line in enumerate(text.rstrip().splitlines(), 1):
        name = composed(line.strip())
        if not name:
            raise ValueError(f"{file}: line {number} is empty, expected the name of a class")
        if name in names:
            raise ValueError(f"{file}: lines {names[name]} and {number} are both {name!r}")
        names[name] = number
    return list(names)


def _json(text: str) -> object:
    """Return a metadata value: parsed if it is JSON, as this package writes it, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def hidden_path(path: Path, shared: bool = False) -> Path:
    """Return the hidden path beside `path` at which a file or folder is written; see `whole_file`."""
    writer = ""
    if shared:  # include the host, because process ids repeat in containers
        writer = f".{socket.gethostname()}.{os.getpid()}"
    return path.with_name(f".{path.name}{writer}.tmp")


def give_name(hidden: Path, path: Path) -> None:
    """Rename a finished file or folder to `path`, and wait until the new name is on the disk."""
    hidden.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file's data, or the names in a folder, are on the disk.

    Windows cannot flush a folder: there a power cut may lose a file that was renamed just before.
    """
    access = os.O_RDONLY
    if os.name == "nt":
        if path.is_dir():
            return
        access = os.O_RDWR  # Windows flushes only a file that is open for writing
    descriptor = os.open(path, access)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_pread(source: Path) -> None:
    """Raise ValueError, naming `source`, on a system where Python lacks os.pread.

    Other processes and threads may use the same open file: only pread leaves its position alone.
    """
    if not hasattr(os, "pread"):
        raise ValueError(
            f"{source}: shards are read by os.pread, which Python has on Linux and macOS, not on {sys.platform}"
        )


def sha256_of(*paths: Path) -> str:
    """Return the SHA-256, as hex, of the concatenated contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)  # adds the file to the same digest
    return digest.hexdigest()


def places_beside(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the two paths that an index of a folder's files may have: in the folder, and in the user's cache."""
    # A hash of the whole path tells folders of the same name apart.
    path_hash = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return folder / name, cache_folder() / "index" / f"{folder.name}-{path_hash}" / name


def writable_place(folder: Path, name: str) -> Path:
    """Return where to write an index of a folder's files: in the folder, or in the user's cache if it is read-only."""
    inside, cached = places_beside(folder, name)
    # Check the mode too: root may write into a folder that is meant to be read-only.
    if folder.stat().st_mode & stat.S_IWUSR and os.access(folder, os.W_OK):
        return inside
    return cached


def kept_beside(folder: Path, name: str) -> Path:
    """Return the path of an index of a folder's files: in the folder if it exists there, else as `writable_place`."""
    inside, _ = places_beside(folder, name)
    if inside.exists():
        return inside
    return writable_place(folder, name)
