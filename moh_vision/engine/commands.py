"""What the commands `python -m moh_vision.data.*` share: one line for every mistake, and the exit codes."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import Callable, List


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

    def parse(self, argv: List[str]) -> argparse.Namespace:
        """The options.

        Raises:
            ValueError: one line; an unknown option is named with the nearest known one.
        """
        options, unknown = self.parse_known_args(argv)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
            raise ValueError(f"unknown argument {unknown[0]}{f', did you mean {close[0]}?' if close else ''}")
        return options


def exit_code(command: str, work: Callable[[], None]) -> int:
    """Do `work`; returns 0, 2 for a user's mistake (printed as one line), 130 when interrupted."""
    try:
        work()
    except (ValueError, OSError) as error:
        named = getattr(error, "filename", None) is not None
        text = f"{os.fsdecode(error.filename)}: {error.strerror}" if named else str(error)
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f"(rank {rank}) "
        print(f"{command}: error: {where}{' '.join(text.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: interrupted; finished shards are kept, the same command goes on", file=sys.stderr)
        return 130
    return 0
