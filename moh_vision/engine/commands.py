"""What commands share: options, mistyped names, one line for every mistake of the user, and progress. It needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from difflib import get_close_matches
from typing import Callable, Iterable, List, Optional, Tuple

from tqdm import tqdm

EXTRAS = {  # packages that a plain install does not bring, and the extra that does
    **dict.fromkeys(("transformers", "tokenizers", "sacrebleu"), "text"),
    "lm_eval": "lm",
    "datasets": "hub",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
}
MISTAKES = (ValueError, OSError)  # during set-up an OSError is of a file or folder that the user named
LINE_EVERY = 60  # seconds between lines of progress in a log


class BadData(ValueError):
    """Data that turns out to be unusable while a command is at work; the message names it."""


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are ValueErrors.

    Args:
        prog: the command.
        description: for --help, printed as it is.
    """

    def __init__(self, prog: str, description: str):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=form)

    def error(self, message: str):
        raise ValueError(message)

    def print_help(self, file=None) -> None:
        say(self.format_help().rstrip())

    def parse(self, argv: Optional[List[str]] = None) -> argparse.Namespace:
        """The options in `argv`; None: those of this process.

        Raises:
            ValueError: one line; an unknown option is named with the nearest known one.
        """
        options, unknown = self.parse_known_args(argv)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            near = nearest(unknown[0].split("=")[0], known, 1)
            raise ValueError(f"unknown argument {unknown[0]}{f', did you mean {near[0]}?' if near else ''}")
        return options

    def parse_with_rest(self, argv: Optional[List[str]], first: str) -> Tuple[argparse.Namespace, List[str]]:
        """The options in `argv`, and those of another parser that follow them.

        Args:
            argv: None: of this process.
            first: the positional argument, as --help calls it; else it could be the value of an unknown option.

        Raises:
            ValueError: one line; also where `first` does not come first, or --checkpoint would take its place.
        """
        argv = sys.argv[1:] if argv is None else list(argv)
        if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
            raise ValueError(f"{first} comes before {argv[0]}")
        options, rest = self.parse_known_args(argv)
        if any(option.partition("=")[0] == "--checkpoint" for option in rest):
            raise ValueError(f"--checkpoint has no effect: {first} says what is opened")
        return options, rest


def refuse_output(option: str, path: Optional[str]) -> None:
    """Raise ValueError for a file that cannot be a new one: it is there, or its folder is not. None is left out."""
    if path and os.path.exists(path):
        raise ValueError(f"{option} {path} exists; give another path")
    if path and not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise ValueError(f"{option} {path}: no such folder")


def refuse_missing(option: str, path: str) -> None:
    """Raise FileNotFoundError for a path that is not there, naming a folder beside it that has nearly the same name."""
    if os.path.exists(path):
        return
    folder, name = os.path.split(os.path.normpath(path))
    beside = [e.name for e in os.scandir(folder or ".") if e.is_dir()] if os.path.isdir(folder or ".") else []
    near = [os.path.join(folder, other) for other in nearest(name, beside, 1)]
    raise FileNotFoundError(f"{option} {path}: no such file or folder{f', did you mean {near[0]}?' if near else ''}")


def say(text: str) -> None:
    """Print a line that is read at once, also through a pipe; end the process where nobody reads it any more, as after `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


class Progress:
    """Progress of a long work, in a `with` block: a bar on a terminal, in a log a line every minute.

    Args:
        title, total, unit: what is done, how many steps there are, and what a step is called.
        done: steps that were there before.
        enabled: whether this process shows it.
    """

    def __init__(self, title: str, total: int, unit: str, done: int = 0, enabled: bool = True):
        self.terminal, self.enabled = sys.stderr.isatty(), enabled
        self.title, self.total, self.unit, self.first, self.done = title, total, unit, done, done
        self.started = self.said = time.monotonic()

    def __enter__(self):
        off = not (self.enabled and self.terminal)
        self.bar = tqdm(
            total=self.total,
            initial=self.first,
            desc=self.title,
            unit=self.unit,
            disable=off,
            dynamic_ncols=True,
            leave=None,
        )  # leave: unless it stands below the bar of a run
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    @property
    def rate(self) -> float:
        """Steps per second."""
        return (self.done - self.first) / max(time.monotonic() - self.started, 1e-9)

    def add(self, count: int = 1) -> None:
        """So many steps more are done."""
        self.done += count
        self.bar.update(count)
        if count and self.enabled and not self.terminal and time.monotonic() - self.said >= LINE_EVERY:
            self.said = time.monotonic()
            left = tqdm.format_interval((self.total - self.done) / self.rate)
            say(f"{self.title}: {self.done} of {self.total} {self.unit}s, {left} left")

    def note(self, text: str) -> None:
        """Show a text behind the bar."""
        self.bar.set_postfix_str(text)


def nearest(name: str, allowed: Iterable[str], most: int = 3) -> List[str]:
    """The allowed names that a mistyped one may mean, the likeliest first; empty if none is near."""
    allowed = list(allowed)
    if name in allowed:
        return [name]
    # Similarity alone takes 'optim.ets' for 'optim.betas', where one letter makes it 'optim.eps'.
    near = get_close_matches(name, [a for a in allowed if _one_edit_apart(name, a)], most, cutoff=0)
    near = near or [a for a in allowed if name and a.startswith(name)][:most]
    return near or get_close_matches(name, allowed, most, cutoff=0.5)


def closest(name: str, allowed: Iterable[str]) -> str:
    """'did you mean ...?', or all that is allowed where nothing is near."""
    allowed = list(allowed)
    near = nearest(name, allowed)
    return f"did you mean {' or '.join(near)}?" if near else f"only {', '.join(allowed)}"


def _one_edit_apart(a: str, b: str) -> bool:
    """Whether a letter too many, too few, another, or two neighbours swapped tell one from the other."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = len(os.path.commonprefix([a, b]))
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix([a[::-1], b[::-1]]))
    a, b = a[: len(a) - end], b[: len(b) - end]
    return len(a) <= 1 and len(b) <= 1 or len(a) == 2 and a == b[::-1]


def message_of(error: BaseException) -> str:
    """What an exception says, on one line; without the traceback that a worker of a loader puts before it."""
    if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)) and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        text = str(error)
    brought = re.match(r"Caught (\w+) in DataLoader worker process \d+\.", text)
    if brought:
        text = re.split(rf"^(?:\w+\.)*{brought[1]}: ", text, maxsplit=1, flags=re.MULTILINE)[-1]
    return " ".join(text.split()) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """The first 300 characters of what an exception says, to be quoted in the message of another."""
    return message_of(error)[:300]


@contextlib.contextmanager
def user_errors(command: str, kinds: tuple = MISTAKES, every_rank: bool = False, code: int = 2):
    """Turn a user's mistake into one line and exit code 2.

    Args:
        command: its name.
        kinds: exceptions to handle.
        every_rank: print on every process that has the error; otherwise once on each machine.
        code: exit code.
    """
    try:
        with extras_named():
            yield
    except kinds as error:
        # Once on every machine: a folder may be missing on one of them.
        if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
            rank = os.environ.get("RANK", "0")
            where = "" if rank == "0" else f"(rank {rank}) "
            print(f"{command}: error: {where}{message_of(error)}", file=sys.stderr)
        raise SystemExit(code) from None


@contextlib.contextmanager
def extras_named():
    """Raise ValueError, naming what to install, where a package of an extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name)
        if extra is None:
            raise
        raise ValueError(f"the package {error.name} is missing: pip install 'moh_vision[{extra}]'") from None


def exit_code(command: str, work: Callable[[], None], kept: str = "") -> int:
    """Do the work of a command; returns 0, 2 for a user's mistake (printed as one line), 130 when interrupted.

    Args:
        command: its name.
        work: what it does.
        kept: what the same command finds finished after an interruption, such as "shards".
    """
    try:
        with user_errors(command, every_rank=True):
            work()
    except SystemExit as end:
        return end.code or 0
    except KeyboardInterrupt:
        goes_on = f"; finished {kept} are kept, the same command goes on" if kept else ""
        print(f"{command}: interrupted{goes_on}", file=sys.stderr)
        return 130
    return 0
