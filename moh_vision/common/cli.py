"""The command line: a parser, and refusals of paths that options name. Needs no torch."""

import argparse
import os
import tempfile
from pathlib import Path

from moh_vision.common.errors import nearest
from moh_vision.common.progress import say

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz")  # of files of weights


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
            problem = f"unknown argument {unknown[0]}"
            near = nearest(unknown[0].split("=")[0], self._option_string_actions, 1)
            if near:
                problem += f", did you mean {near[0]}?"
            raise ValueError(problem)
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
    if not path:
        return
    if os.path.exists(path):
        raise ValueError(f"{option} {path} exists; give another path")
    if not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise ValueError(f"{option} {path}: no such folder")
    refuse_unwritable(option, path)


def refuse_unwritable(option: str, path: Path | str) -> None:
    """Raise ValueError, with the system's reason, if a path or the first folder above it is not writable."""
    path = Path(path).absolute()
    folder = path
    try:
        while not folder.exists() or folder == path and folder.is_file():
            folder = folder.parent
        # Write a file: permissions alone say nothing of root, /proc and full disks.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {folder}: {error.strerror}") from None


def refuse_missing(option: str, path: str) -> None:
    """Raise FileNotFoundError for a missing path, naming a folder beside it with nearly the same name."""
    if os.path.exists(path):
        return
    problem = f"{option} {path}: no such file or folder"
    near = near_folder(path)
    if near:
        problem += f", did you mean {near}?"
    raise FileNotFoundError(problem)


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
    folders = [entry.name for entry in os.scandir(folder or ".") if entry.is_dir()]
    near = nearest(name, folders, 1)
    if not near:
        return None
    return os.path.join(folder, near[0])
