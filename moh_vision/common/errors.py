"""What commands say of mistakes: one line, the nearest allowed name, an exit code. Needs no torch."""

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
MISTAKES = (ValueError, OSError)  # during set-up an OSError is of a path that the user named
BUILD = "MOH_VISION_BUILD"  # "auto": the first model on a CPU builds the operators; "later": a set-up goes on
LIKE = 0.6  # from this likeness on a name may be meant, where 1 is the same one


class BadData(ValueError):
    """Unusable data that a command finds while at work; the message names it."""


def nearest(name: str, allowed: Iterable[str], most: int = 3) -> list[str]:
    """Return allowed names that a mistyped one may mean, the likeliest first."""
    allowed = list(allowed)
    if name in allowed:
        return [name]
    # Similarity prefers 'optim.betas' for 'optim.ets'; one edit gives 'optim.eps'.
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
    """Return the first `most` names, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most} more"
    return shown


def closest(name: str, allowed: Iterable[str]) -> str:
    """Return "did you mean ...?", or all that is allowed where nothing is near."""
    allowed = list(allowed)
    near = nearest(name, allowed)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"only {', '.join(allowed)}"


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
    a = a[start:]
    b = b[start:]
    end = len(os.path.commonprefix([a[::-1], b[::-1]]))
    a = a[: len(a) - end]
    b = b[: len(b) - end]
    swapped = len(a) == 2 and a == b[::-1]
    return swapped or len(a) <= 1 and len(b) <= 1


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


def missing_package(name: str) -> str:
    """Return which extra brings a package of EXTRAS that is not installed."""
    return f"the package {name} is missing: pip install 'moh_vision[{EXTRAS[name]}]'"


@contextlib.contextmanager
def extra_named():
    """Name the extra that brings a missing package in the ModuleNotFoundError of imports."""
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
    """Turn a user's mistake into one line and an exit code.

    Where another process of the same launch has ended, this one says so in one line and ends with code 1.

    Args:
        command: name of the command, with which the line begins.
        kinds: exceptions that are a user's mistakes.
        every_rank: print the line on every process with the mistake; else once a machine.
        code: exit code of a mistake.
        resumes: the same command goes on where it was.
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
        # Once on every machine: a folder may be missing on one of them.
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
        os._exit(1)  # to clean up might wait for the process that is no more


def lost_a_process(error: BaseException | None) -> bool:
    """Return whether an error is that of a collective whose other processes are no more."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "DistBackendError" or "gloo/transport" in str(error)
    )


def exit_code(command: str, work: Callable[[], None], kept: str = "") -> int:
    """Do the work of a command; return 0, 2 for a user's mistake (one line), 130 when interrupted.

    `kept` names what stays after an error at work, such as "shards"; the same command then goes on with the rest.
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
