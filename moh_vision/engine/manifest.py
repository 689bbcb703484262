"""What makes a checkpoint whole: a manifest with the sum of every file, and its own.

    {"format": 3, "version": "0.1.0", "step": 200, "sha256": {"ema.safetensors": "...", ...}, "own_sha256": "..."}

safetensors and pickles hold no sums: a flipped bit in a weight would load unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, List, Optional

from moh_vision.engine.io import __version__, fsync, sha256_of

FORMAT = 3
MANIFEST = "manifest.json"


class Seal:
    """Flushes a folder's files to the disk and sums them, in threads, while others are written.

    Files are read back from memory. hashlib and fsync let other threads run.

    Args:
        folder: where the files are.
        at: called after every flush and write, see `save_training`; also from threads.
    """

    def __init__(self, folder: Path, at: Callable[[str], None]):
        self.folder, self.at = folder, at
        self.pool = ThreadPoolExecutor(8)
        self.sums: Dict[str, Future] = {}
        self.pending: List[Future] = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pool.shutdown(cancel_futures=True)

    def add(self, *paths: Path) -> None:
        """Files that are written."""
        for path in sorted(paths, key=lambda path: -path.stat().st_size):  # longest first
            self.flush(path)
            self.sums[path.relative_to(self.folder).as_posix()] = self.pool.submit(sha256_of, path)

    def flush(self, path: Path) -> None:
        """Begin to flush a file that may be elsewhere."""
        self.meanwhile(self._flush, path)

    def meanwhile(self, work: Callable, *args) -> None:
        """Begin something that `wait` waits for."""
        self.pending.append(self.pool.submit(work, *args))

    def wait(self) -> None:
        for future in self.pending:
            future.result()

    def close(self, step: int) -> None:
        """Add remaining files, wait, and write and flush the manifest of `step`."""
        inside = sorted(self.folder.rglob("*"))
        self.add(*(p for p in inside if p.is_file() and p.relative_to(self.folder).as_posix() not in self.sums))
        sums = {name: self.sums[name].result() for name in sorted(self.sums)}
        self.wait()
        for path in inside:
            if path.is_dir():
                self._flush(path)
        manifest = self.folder / MANIFEST
        manifest.write_text(manifest_text(step, sums))
        self.at(f"wrote {MANIFEST}")
        self._flush(manifest)
        self._flush(self.folder)

    def _flush(self, path: Path) -> None:
        fsync(path)
        self.at(f"flushed {path.name}")


def manifest_text(step: int, sums: Dict[str, str]) -> str:
    """The one text of a manifest; `own_sha256` is of the rest."""
    return _sealed(dict(format=FORMAT, version=__version__, step=step, sha256=sums))


def _sealed(body: dict) -> str:
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps(dict(body, own_sha256=own), indent=1) + "\n"


def other_version(folder: Path) -> Optional[str]:
    """Return the version of a checkpoint that this version does not read; else None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        form, version = manifest["format"], str(manifest["version"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # it is damaged
    if form == FORMAT:
        return None
    return f"{MANIFEST} has format {form} of moh_vision {version}; this is {__version__}, which reads {FORMAT}"


def damage(folder: Path, step: int) -> Optional[str]:
    """Why a folder is not the whole checkpoint of `step`, or None if it is."""
    other = other_version(folder)
    if other:
        return other
    try:
        text = (folder / MANIFEST).read_text()
        manifest = json.loads(text)
        _, _, recorded, sums = (manifest[key] for key in ("format", "version", "step", "sha256"))
        sums = dict(sums)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is not readable ({error})"
    # The same text after reading and writing: nothing is missing, added or changed.
    if text != _sealed({key: value for key, value in manifest.items() if key != "own_sha256"}):
        return f"{MANIFEST} does not have its own sha256"
    if recorded != step:
        return f"{MANIFEST} is of step {recorded}"
    return _first_damaged(folder, sums)


def _first_damaged(folder: Path, sums: Dict[str, str]) -> Optional[str]:
    for name, expected in sums.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"{MANIFEST} names {name}, which is outside of the folder"
        if not (folder / name).is_file():
            return f"{name} is missing"
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            return f"{name} is not readable ({error.strerror})"
        if found != expected:
            return f"{name} does not have the sha256 of its manifest"
    # accelerate loads what it finds under the names it knows.
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    strangers = sorted(name for name in found - sums.keys() - {MANIFEST} if not Path(name).name.startswith("."))
    return f"{strangers[0]} is not in its manifest" if strangers else None
