"""Report users' mistakes: one line, the nearest allowed name, an exit code. Needs no torch."""

import contextlib
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher, get_close_matches

EXTRAS = {  # packages that a plain install does not bring, and the extra that does
    **dict.fromkeys(("transformers", "tokenizers", "sacrebleu"), "text"),
    "lm_eval": "lm",
    "datasets": "hub",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
}
MISTAKES = (ValueError, OSError)  # during set-up an OSError comes from a path that the user named
# Environment variable. "auto": the first model on a CPU builds the operators. "later": not yet, a set-up is running.
BUILD = "MOH_VISION_BUILD"
LIKE = 0.6  # names with at least this likeness, from 0 to 1, are suggested


class BadData(ValueError):
    """A command met unusable data while it was working; the message names the data."""


def nearest(name: str, allowed: Iterable[str], most: int = 3) -> list[str]:
    """Return up to `most` allowed names that a mistyped one may mean, the likeliest first."""
    allowed = list(allowed)
    if name in allowed:
        return [name]
    # Names one edit away come first: for 'optim.ets' likeness alone would prefer 'optim.betas' to 'optim.eps'.
    one_edit = [a for a in allowed if _one_edit_apart(name, a)]
    near = get_close_matches(name, one_edit, most, cutoff=LIKE)
    if not near and len(name) > 2:
        near = [a for a in allowed if a.startswith(name)][:most]
    if near:
        return near
    likeness = {a: _likeness(name, a) for a in allowed}
    alike = [a for a in likeness if likeness[a] >= LIKE]
    return sorted(alike, key=likeness.get, reverse=True)[:most]


def some_of(names: Iterable[str], most: int) -> str:
    """Return a text with the first `most` names, and the number of the others."""
    names = list(names)
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most} more"
    return shown


def closest(name: str, allowed: Iterable[str]) -> str:
    """Return "did you mean ...?" with the nearest names, or all allowed names if none is near."""
    allowed = list(allowed)
    near = nearest(name, allowed)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"only {', '.join(allowed)}"


def _likeness(a: str, b: str) -> float:
    """Return the likeness of two names from 0 to 1, ignoring a section, folder or dashes with which both begin."""
    common = os.path.commonprefix([a, b])
    start = max(map(common.rfind, "./-")) + 1
    return SequenceMatcher(None, a[start:], b[start:]).ratio()


def _one_edit_apart(a: str, b: str) -> bool:
    """Return whether adding, dropping or changing one letter, or swapping two neighbours, turns a into b."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = len(os.path.commonprefix([a, b]))
    a = a[start:]
    b = b[start:]
    end = len(os.path.commonprefix([a[::-1], b[::-1]]))
    a = a[: len(a) - end]
    b = b[: len(b) - end]
    swapped = len(a) == 2 and a == b[::-1]
    one_letter = len(a) <= 1 and len(b) <= 1
    return swapped or one_letter


def message_of(error: BaseException) -> str:
    """Return an exception's text on one line, without colours and without the traceback of a DataLoader worker."""
    if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)) and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        text = str(error)
    from_worker = re.match(r"Caught (\w+) in DataLoader worker process \d+\.", text)
    if from_worker:
        class_name = from_worker[1]
        text = re.split(rf"^(?:\w+\.)*{class_name}: ", text, maxsplit=1, flags=re.MULTILINE)[-1]
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(text.split()) or type(error).__name__


def class_and_message(error: BaseException) -> str:
    """Return an error's class and, on the same line, at most 200 characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def reason_of(error: BaseException) -> str:
    """Return the beginning of an exception's text, to be quoted in another message."""
    return quotable(message_of(error))


def quotable(text: str) -> str:
    """Return the first 300 characters of a text that another package wrote: torch's may print whole tensors."""
    return text[:300]


def missing_package(name: str) -> str:
    """Return the message for a package of EXTRAS that is not installed; it names the extra to install."""
    return f"the package {name} is missing: pip install 'moh_vision[{EXTRAS[name]}]'"


@contextlib.contextmanager
def extra_named():
    """Make a ModuleNotFoundError in the `with` block say which extra brings the missing package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise ModuleNotFoundError(missing_package(error.name), name=error.name) from error


@contextlib.contextmanager
def user_errors(
    command: str,
    kinds: tuple = MISTAKES,
    every_rank: bool = False,
    code: int = 2,
    resumes: bool = False,
):
    """Turn a user's mistake in the `with` block into one line and an exit code.

    If a collective fails because another process of the same launch has ended, this process says so in one line and
    ends with code 1.

    Args:
        command: name of the command, with which the line begins.
        kinds: exceptions that are users' mistakes.
        every_rank: print the line on every process that made the mistake; else on one process per machine.
        code: exit code of a mistake.
        resumes: whether the same command resumes where it ended, for the message about an ended process.
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
            text = missing_package(error.name)
        # One process per machine, not one in all: a folder may be missing on a single machine.
        if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
            rank = os.environ.get("RANK", "0")
            if rank != "0":
                text = f"(rank {rank}) {text}"
            print(f"{command}: error: {text}", file=sys.stderr)
        raise SystemExit(code) from None
    except RuntimeError as error:
        if not lost_a_process(error):
            raise
        again = "starts again"
        if resumes:
            again = "resumes the run"
        text = f"another process has ended (its own lines say why, if it was not killed); the same command {again}"
        sys.stdout.flush()
        os.write(2, f"{command}: error: (rank {os.environ.get('RANK', '0')}) {text}\n".encode())
        os._exit(1)  # skip all clean-up: it might wait for the ended process


def lost_a_process(error: BaseException | None) -> bool:
    """Return whether a collective raised this error because another process has ended."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "DistBackendError" or "gloo/transport" in str(error)
    )


def exit_code(command: str, work: Callable[[], None], kept: str = "") -> int:
    """Do the work of a command; return its exit code: 0, 2 after a user's mistake (one line), 130 if interrupted.

    `kept` names finished results, such as "shards", that stay after bad data, a full disk or an interruption; the
    message then says that the same command does the rest.
    """
    os.environ.setdefault(BUILD, "auto")
    goes_on = ""
    if kept:
        goes_on = f"; finished {kept} are kept, the same command goes on"
    full_disk = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    try:
        with user_errors(command, every_rank=True):
            try:
                work()
            except (OSError, BadData) as error:
                text = message_of(error)
                if isinstance(error, BadData) or error.errno in full_disk:
                    text += goes_on
                raise ValueError(text) from None
    except SystemExit as end:
        return end.code or 0
    except KeyboardInterrupt:
        print(f"{command}: interrupted{goes_on}", file=sys.stderr)
        return 130
    return 0
