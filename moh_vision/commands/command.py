"""What all commands share: arguments, the figure's file, one line for a mistake."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import List

from moh_vision.engine.commands import Parser, exit_code, say, user_errors


def run_command(name: str, command: ModuleType, argv: List[str]) -> int:
    """Run the module of a command; return its exit code.

    It has `options(add)`, which adds arguments, and `work(options)`, or `figure(options)`, which returns a
    figure, its numbers, and a text to print behind the files' names. If it has REST, the name of its first
    argument, `options.rest` has another parser's options. KEPT is what an interrupted command finds again. A module
    may have a `main` instead.
    """
    if hasattr(command, "main"):
        return command.main(argv)
    parser = Parser(f"python -m moh_vision {name}", command.__doc__)
    command.options(parser.add_argument)
    draws = hasattr(command, "figure")
    if draws:
        text = "the figure, .png or .svg; its numbers go to a .json beside it"
        parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=text)

    def work() -> None:
        with user_errors(name):  # once, however many ranks there are
            if hasattr(command, "REST"):
                options, rest = parser.parse_with_rest(argv, command.REST)
                options.rest = rest
            else:
                options = parser.parse(argv)
        if not draws:
            return command.work(options)
        from moh_vision.commands.figures import check_figure, write_figure  # matplotlib takes a second

        check_figure("--output", options.output)
        figure, numbers, text = command.figure(options)
        say(f"{write_figure(figure, options.output, numbers)}{text}")

    return exit_code(name, work, getattr(command, "KEPT", ""))
