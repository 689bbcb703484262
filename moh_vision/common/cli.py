"""The command line: a parser, and checks of the paths that options name. Needs no torch."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from moh_vision.common.errors import nearest
from moh_vision.common.imports import import_files
from moh_vision.common.progress import say

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz")


class ImportFile(argparse.Action):
    """The action of --imports: import the file at once, before later arguments are looked up in the package's tables."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        import_files([values])


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add the option --imports, which may be given several times."""
    parser.add_argument(
        "--imports",
        action=ImportFile,
        default=argparse.SUPPRESS,  # not among the options that a command is called with
        metavar="FILE",
        help="Python file of your own that adds routers, objectives, samplers or data sets, as the run imported it",
    )


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError for mistakes, and prints its description without rewrapping it."""

    def __init__(self, prog: str, description: str):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=form)

    def error(self, message: str):
        raise ValueError(message)

    def print_help(self, file=None) -> None:
        say(self.format_help().rstrip())

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """Parse `argv`, by default that of the process; raise ValueError, naming the nearest, for an unknown option."""
        options, unknown = self.parse_known_args(argv)
        if unknown:
            problem = f"unknown argument {unknown[0]}"
            near = nearest(unknown[0].split("=")[0], self._option_string_actions, 1)
            if near:
                problem += f", did you mean {near[0]}?"
            raise ValueError(problem)
        return options

    def parse_with_rest(self, argv: list[str], first: str) -> tuple[argparse.Namespace, list[str]]:
        """Parse the positional argument `first` and the options after it; also return the options that are unknown.

        The caller hands the unknown ones to another parser. Raise ValueError for options before `first`, and for
        --checkpoint.
        """
        if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
            raise ValueError(f"{first} comes before {argv[0]}")
        options, rest = self.parse_known_args(argv)
        for index, option in enumerate(rest):
            if option.partition("=")[0] == "--checkpoint":
                given = with_value(rest[index:])
                raise ValueError(f"{given} has no effect: {first} says what is opened")
        return options, rest


def with_value(options: Sequence[str]) -> str:
    """Return the first of some options with its values, such as "--checkpoint RUN" also for --checkpoint=RUN."""
    first, *rest = options
    name, equals, value = first.partition("=")
    if equals:
        return f"{name} {value}"
    values = takewhile(lambda text: not text.startswith("--"), rest)
    return " ".join([name, *values])


def refuse_output(option: str, path: str | None) -> None:
    """Raise ValueError if a file to be written exists already, or if its folder is missing or not writable."""
    if not path:
        return
    if os.path.exists(path):
        raise ValueError(f"{option} {path} exists; give another path")
    if not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise ValueError(f"{option} {path}: no such folder")
    refuse_unwritable(option, path)


def refuse_unwritable(option: str, path: Path | str) -> None:
    """Raise ValueError, with the system's reason, if the nearest existing folder of a path is not writable."""
    path = Path(path).absolute()
    folder = path
    try:
        # Find the nearest folder that exists; `path` itself may be a file.
        while not folder.exists() or (folder == path and folder.is_file()):
            folder = folder.parent
        # Try it: permissions do not tell whether root may write, whether the path is in /proc, or the disk is full.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {folder}: {error.strerror}") from None


def refuse_missing(option: str, path: str) -> None:
    """Raise FileNotFoundError for a missing path; the message suggests a folder beside it with a similar name."""
    if os.path.exists(path):
        return
    problem = f"{option} {path}: no such file or folder".strip()
    near = near_folder(path)
    if near:
        problem += f", did you mean {near}?"
    raise FileNotFoundError(problem)


def refuse_missing_source(option: str, source: str) -> None:
    """Call `refuse_missing` if `source` is written as a path; a name in timm or on the hub is not checked."""
    path = source.removeprefix("local-dir:")
    folder = os.path.dirname(path)
    written_as_path = (
        path != source
        or path.startswith((".", "/", "~"))
        or path.endswith(("/", *WEIGHT_SUFFIXES))
        or (folder and os.path.isdir(folder))  # a / alone is not enough: names on the hub have one
        or path.count("/") > 1
    )
    if written_as_path and ":" not in path:
        refuse_missing(option, path)


def near_folder(path: str) -> str | None:
    """Return the folder beside a missing path whose name is similar, or None."""
    folder, name = os.path.split(os.path.normpath(path))
    if not os.path.isdir(folder or "."):
        return None
    folders = [entry.name for entry in os.scandir(folder or ".") if entry.is_dir()]
    near = nearest(name, folders, 1)
    if not near:
        return None
    return os.path.join(folder, near[0])
