"""What all commands share: arguments, the file of a figure and its numbers, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import List

from moh_vision.engine.commands import Parser, exit_code, say


def run_command(name: str, command: ModuleType, argv: List[str]) -> int:
    """Run the module of a command; return its exit code.

    It has `options(add)`, which adds arguments, and `work(options)`; or instead of that `figure(options)`, which returns a
    figure, the numbers it shows, and what is printed behind the names of their files. With REST, the name of its first
    argument, it also takes options of another parser, as `options.rest`. Modules of other rooms have a `main`.
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

    return exit_code(name, work)
