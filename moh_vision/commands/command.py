"""What all commands share: arguments, the figure's file, one line for a mistake."""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from moh_vision.common.cli import Parser, refuse_output
from moh_vision.common.errors import exit_code, user_errors
from moh_vision.common.progress import say


class Drawn(NamedTuple):
    """A figure of a command."""

    figure: Any  # of matplotlib
    numbers: dict[str, Any]  # for the JSON beside it
    text: str = ""  # printed behind the names of both files
    alone: bool = False  # print the text without these names


def run_command(name: str, command: ModuleType, argv: list[str]) -> int:
    """Run the module of a command; return its exit code.

    It has `options(add)`, which adds arguments, and `work(options)`, or `figure(options)`, which returns `Drawn`. An
    `options.output` is a new file or folder with one of ENDINGS, if it has these. If it has REST, the name of its
    first argument, `options.rest` has another parser's options. KEPT is what an interrupted command finds again. A
    module may have a `main` instead.
    """
    if hasattr(command, "main"):
        return command.main(argv)
    parser = Parser(f"python -m moh_vision {name}", command.__doc__)
    command.options(parser.add_argument)
    draws = hasattr(command, "figure")
    endings = getattr(command, "ENDINGS", ())
    if draws:
        endings = (".png", ".svg")
        text = "the figure, .png or .svg; its numbers go to a .json beside it"
        parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=text)

    def work() -> None:
        with user_errors(name):  # once, however many ranks there are
            if hasattr(command, "REST"):
                options, rest = parser.parse_with_rest(argv, command.REST)
                options.rest = rest
            else:
                options = parser.parse(argv)
        output = str(getattr(options, "output", None) or "")
        refuse_output("--output", output)
        if output and endings and not output.endswith(endings):
            raise ValueError(
                f"--output {output}: expected a name that ends in {' or '.join(endings)}"
            )
        if not draws:
            command.work(options)
            return
        # Imported here because matplotlib takes a second.
        from moh_vision.commands.figures import numbers_path, write_figure

        refuse_output("--output", str(numbers_path(options.output)))
        drawn = command.figure(options)
        files = write_figure(drawn.figure, options.output, drawn.numbers)
        if drawn.alone:
            say(drawn.text)
        else:
            say(f"{files}{drawn.text}")

    return exit_code(name, work, getattr(command, "KEPT", ""))
