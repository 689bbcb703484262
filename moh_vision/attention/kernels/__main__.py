"""Compile the C++ operators of the attention core for this torch and this processor."""

import time

from moh_vision.attention.kernels.build import BUILDING, COMMAND, build, library_path, load
from moh_vision.engine.commands import Parser, exit_code, say


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 for what the user can mend, 130 when interrupted."""

    def work() -> None:
        parser = Parser(COMMAND, __doc__)
        parser.add_argument(
            "--force", action="store_true", help="build again what is built already"
        )
        force, place = parser.parse(argv).force, library_path()
        if place.is_file() and not force:
            say(f"the C++ operators are built already: {place}")
        else:
            say(BUILDING)
            start = time.perf_counter()
            compiler = build()
            say(
                f"built the C++ operators with {compiler} in {time.perf_counter() - start:.1f} s: {place}"
            )
        if not load():
            raise ValueError(
                "the library cannot be loaded, see above; attention runs in plain PyTorch"
            )

    return exit_code("kernels", work)


if __name__ == "__main__":
    raise SystemExit(main())
