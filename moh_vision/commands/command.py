"""Run a command: parse its arguments, write its figure, and turn a user's mistake into one line."""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from moh_vision.common.cli import Parser, add_imports, refuse_output
from moh_vision.common.errors import exit_code, user_errors
from moh_vision.common.progress import say


class Drawn(NamedTuple):
    """What the `figure` function of a command returns."""

    figure: Any  # a figure of matplotlib
    numbers: dict[str, Any]  # written to the JSON beside the figure
    text: str = ""  # printed after the names of both files
    alone: bool = False  # print `text` alone, without the names of the files


def run_command(name: str, command: ModuleType, argv: list[str]) -> int:
    """Run the module of a command; return its exit code.

    The module has `options(add)`, which adds arguments to the parser, and either `work(options)` or `figure(options)`.
    The latter returns `Drawn`, and the figure is written to --output. A module that parses its own arguments has
    `main(argv)` instead, and nothing else here applies. If the command has an option --output, its path must not exist
    yet. The module may define:

        ENDINGS  the endings that the path of --output may have
        REST     the name of the first argument; options that the parser does not know are in `options.rest`
        KEPT     what an interrupted command leaves behind and does not make again, such as "shards"
    """
    if hasattr(command, "main"):
        return command.main(argv)
    parser = Parser(f"python -m moh_vision {name}", command.__doc__)
    command.options(parser.add_argument)
    add_imports(parser)
    draws = hasattr(command, "figure")
    endings = getattr(command, "ENDINGS", ())
    if draws:
        endings = (".png", ".svg")
        text = "the figure, .png or .svg; its numbers go to a .json beside it"
        parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=text)

    def work() -> None:
        with user_errors(name):  # a mistake in the options is printed once, not by every rank
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
