"""What commands share: options, mistyped names, one-line messages and progress. Needs no torch."""

import argparse
import contextlib
import errno
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from tqdm import tqdm

EXTRAS = {  # packages that a plain install does not bring, and the extra that does
    **dict.fromkeys(("transformers", "tokenizers", "sacrebleu"), "text"),
    "lm_eval": "lm",
    "datasets": "hub",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
}
MISTAKES = (ValueError, OSError)  # during set-up an OSError is of a path that the user named
BUILD = "MOH_VISION_BUILD"  # "auto": the first model on a CPU builds the operators; "later": a set-up goes on
LIKE = 0.6  # from this likeness on a name may be meant, where 1 is the same one
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz")  # of files of weights
LINE_EVERY, FIRST_LINE = 60, 10  # seconds between lines in a log, and until the first


class BadData(ValueError):
    """Unusable data that a command finds while at work; the message names it."""


class Parser(argparse.ArgumentParser):
    """argparse that raises ValueError for mistakes, and prints a description as it stands."""

    def __init__(self, prog: str, description: str):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=form)

    def error(self, message: str):
        raise ValueError(message)

    def print_help(self, file=None) -> None:
        say(self.format_help().rstrip())

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """Read options; None: of this process. For an unknown option, name the nearest known one."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            near = nearest(unknown[0].split("=")[0], self._option_string_actions, 1)
            raise ValueError(
                f"unknown argument {unknown[0]}{f', did you mean {near[0]}?' if near else ''}"
            )
        return options

    def parse_with_rest(self, argv: list[str], first: str) -> tuple[argparse.Namespace, list[str]]:
        """Read options behind the positional argument `first`; return those of another parser too."""
        if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
            raise ValueError(f"{first} comes before {argv[0]}")
        options, rest = self.parse_known_args(argv)
        if any(option.partition("=")[0] == "--checkpoint" for option in rest):
            raise ValueError(f"--checkpoint has no effect: {first} says what is opened")
        return options, rest


def refuse_output(option: str, path: str | None) -> None:
    """Raise ValueError for a file that is there already, or whose folder is not."""
    if path and os.path.exists(path):
        raise ValueError(f"{option} {path} exists; give another path")
    if path and not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise ValueError(f"{option} {path}: no such folder")
    if path:
        refuse_unwritable(option, path)


def refuse_unwritable(option: str, path: Path | str) -> None:
    """Raise ValueError, with the system's reason, if a path or the first folder above it is not writable."""
    place = path = Path(path).absolute()
    try:
        while not place.exists() or place == path and place.is_file():
            place = place.parent
        with tempfile.TemporaryFile(
            dir=place
        ) as file:  # permissions miss root, /proc and full disks
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {place}: {error.strerror}") from None


def refuse_missing(option: str, path: str) -> None:
    """Raise FileNotFoundError for a missing path, naming a folder beside it with nearly the same name."""
    if os.path.exists(path):
        return
    near = near_folder(path)
    meant = f", did you mean {near}?" if near else ""
    raise FileNotFoundError(f"{option} {path}: no such file or folder{meant}")


def refuse_missing_source(option: str, source: str) -> None:
    """Do as `refuse_missing` for what may also be a name of timm's or the hub's, where it is written as a path."""
    path = source.removeprefix("local-dir:")
    folder = os.path.dirname(path)
    written_as_path = (
        path != source
        or path.startswith((".", "/", "~"))
        or path.endswith(("/", *WEIGHT_SUFFIXES))
        or (folder and os.path.isdir(folder))  # a name of the hub has a / too
        or path.count("/") > 1
    )
    if written_as_path and ":" not in path:
        refuse_missing(option, path)


def near_folder(path: str) -> str | None:
    """Return the folder beside a missing path that has nearly the same name, if there is one."""
    folder, name = os.path.split(os.path.normpath(path))
    if not os.path.isdir(folder or "."):
        return None
    beside = [entry.name for entry in os.scandir(folder or ".") if entry.is_dir()]
    near = nearest(name, beside, 1)
    return os.path.join(folder, near[0]) if near else None


def say(text: str) -> bool:
    """Print a line above the bars, flushed; return False where nobody reads, as after `| head`."""
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


class Progress(contextlib.AbstractContextManager):
    """Progress of long work, in a `with` block: a bar on a terminal, else a line after 10 s and every minute.

    `total` steps (None: unknown) of a `unit`; `done` were there before. A `scaled` bar writes 1.5M.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        done: int = 0,
        enabled: bool = True,
        scaled: bool = False,
    ):
        self.title, self.total, self.unit = title, total, unit
        self.first = self.done = done
        self.started = time.monotonic()
        self.next_line = self.started + min(FIRST_LINE, LINE_EVERY)
        terminal = sys.stderr.isatty()
        self.writes_lines = enabled and not terminal
        shape = dict(
            total=total, initial=done, desc=title, unit=unit, unit_scale=scaled, dynamic_ncols=True
        )
        # leave: unless it stands below the bar of a run
        self.bar = tqdm(**shape, disable=not (enabled and terminal), leave=None)

    def __exit__(self, *_) -> None:
        self.bar.close()

    @property
    def rate(self) -> float:
        """Steps per second."""
        return (self.done - self.first) / max(time.monotonic() - self.started, 1e-9)

    def add(self, count: int = 1) -> None:
        """Count so many steps more."""
        self.done += count
        self.bar.update(count)
        if count and self.writes_lines and time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + LINE_EVERY
            if self.total is None:
                say(f"{self.title}: {self.done} {self.unit}s")
            else:
                left = tqdm.format_interval((self.total - self.done) / self.rate)
                say(f"{self.title}: {self.done} of {self.total} {self.unit}s, {left} left")

    @classmethod
    def over(cls, things: Iterable, title: str, unit: str = "step", **options) -> Iterator:
        """The same things, one step each."""
        with cls(
            title, len(things) if isinstance(things, Sized) else None, unit, **options
        ) as progress:
            for item in things:
                yield item
                progress.add()

    def note(self, text: str) -> None:
        """Show a text behind the bar."""
        self.bar.set_postfix_str(text)


def nearest(name: str, allowed: Iterable[str], most: int = 3) -> list[str]:
    """Return allowed names that a mistyped one may mean, the likeliest first."""
    allowed = list(allowed)
    if name in allowed:
        return [name]
    # Similarity prefers 'optim.betas' for 'optim.ets'; one edit gives 'optim.eps'.
    near = get_close_matches(
        name, [a for a in allowed if _one_edit_apart(name, a)], most, cutoff=LIKE
    )
    near = near or [a for a in allowed if len(name) > 2 and a.startswith(name)][:most]
    if near:
        return near
    alike = {a: _likeness(name, a) for a in allowed}
    return sorted((a for a in alike if alike[a] >= LIKE), key=alike.get, reverse=True)[:most]


def some_of(names: Iterable[str], most: int) -> str:
    """Return the first `most` names, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def closest(name: str, allowed: Iterable[str]) -> str:
    """'did you mean ...?', or all that is allowed where nothing is near."""
    allowed = list(allowed)
    near = nearest(name, allowed)
    return f"did you mean {' or '.join(near)}?" if near else f"only {', '.join(allowed)}"


def _likeness(a: str, b: str) -> float:
    """Return the likeness from 0 to 1, without the section, folder or dashes that both begin with."""
    common = os.path.commonprefix([a, b])
    start = max(map(common.rfind, "./-")) + 1
    return SequenceMatcher(None, a[start:], b[start:]).ratio()


def _one_edit_apart(a: str, b: str) -> bool:
    """Whether one letter added, lost or changed, or two neighbours swapped, makes a into b."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = len(os.path.commonprefix([a, b]))
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix([a[::-1], b[::-1]]))
    a, b = a[: len(a) - end], b[: len(b) - end]
    return len(a) <= 1 and len(b) <= 1 or len(a) == 2 and a == b[::-1]


def message_of(error: BaseException) -> str:
    """Return an exception's text on one line, without colours and the traceback of a loader's worker."""
    if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)) and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        text = str(error)
    brought = re.match(r"Caught (\w+) in DataLoader worker process \d+\.", text)
    if brought:
        text = re.split(rf"^(?:\w+\.)*{brought[1]}: ", text, maxsplit=1, flags=re.MULTILINE)[-1]
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(text.split()) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return the first 300 characters of an exception's text, for another's message."""
    return message_of(error)[:300]


@contextlib.contextmanager
def user_errors(
    command: str,
    kinds: tuple = MISTAKES,
    every_rank: bool = False,
    code: int = 2,
    resumes: bool = False,
):
    """Turn a user's mistake into one line and an exit code, on `every_rank` with it or once a machine.

    Where another process of the same launch has ended, this one says so in one line and ends with code 1; `resumes`:
    the same command goes on where it was.
    """
    # Say once that a hub cannot be reached, not at each of five retries.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    try:
        yield
    except (*kinds, ModuleNotFoundError) as error:
        text = message_of(error)
        if isinstance(error, ModuleNotFoundError):
            if error.name not in EXTRAS:
                raise
            text = f"the package {error.name} is missing: pip install 'moh_vision[{EXTRAS[error.name]}]'"
        # Once on every machine: a folder may be missing on one of them.
        if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
            rank = os.environ.get("RANK", "0")
            where = "" if rank == "0" else f"(rank {rank}) "
            print(f"{command}: error: {where}{text}", file=sys.stderr)
        raise SystemExit(code) from None
    except RuntimeError as error:
        if not lost_a_process(error):
            raise
        again = "resumes the run" if resumes else "starts again"
        text = f"another process has ended (its own lines say why, if it was not killed); the same command {again}"
        sys.stdout.flush()
        os.write(2, f"{command}: error: (rank {os.environ.get('RANK', '0')}) {text}\n".encode())
        os._exit(1)  # to clean up might wait for the process that is no more


def lost_a_process(error: BaseException | None) -> bool:
    """Return whether an error is that of a collective whose other processes are no more."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "DistBackendError" or "gloo/transport" in str(error)
    )


def exit_code(command: str, work: Callable[[], None], kept: str = "") -> int:
    """Do the work of a command; return 0, 2 for a user's mistake (one line), 130 when interrupted; `kept` is what stays."""
    os.environ.setdefault(BUILD, "auto")
    goes_on = f"; finished {kept} are kept, the same command goes on" if kept else ""
    try:
        with user_errors(command, every_rank=True):
            try:
                work()
            except (OSError, BadData) as error:
                at_work = isinstance(error, BadData) or error.errno in (
                    errno.ENOSPC,
                    errno.EDQUOT,
                    errno.EFBIG,
                )
                raise ValueError(message_of(error) + goes_on * at_work) from None
    except SystemExit as end:
        return end.code or 0
    except KeyboardInterrupt:
        print(f"{command}: interrupted{goes_on}", file=sys.stderr)
        return 130
    return 0
