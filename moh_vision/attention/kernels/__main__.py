"""Compile the C++ operators of the attention core for this torch and this processor.

Where there is a GPU, Triton's kernels are compared with PyTorch first, which takes about a minute: a line for each says
whether it may run there. Put them into a report of what goes wrong on a GPU.
"""

import time

import torch

from moh_vision.attention.kernels.build import BUILDING, COMMAND, build, library_path, load
from moh_vision.common.cli import Parser
from moh_vision.common.errors import exit_code
from moh_vision.common.progress import say


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 2 for a mistake that the user can mend, 130 if interrupted."""

    def work() -> None:
        parser = Parser(COMMAND, __doc__)
        parser.add_argument(
            "--force", action="store_true", help="build again what is built already"
        )
        force = parser.parse(argv).force
        library = library_path()
        if torch.cuda.is_available():
            compare_on_gpu()
        if library.is_file() and not force:
            say(f"the C++ operators are built already: {library}")
        else:
            say(BUILDING)
            start = time.perf_counter()
            compiler = build()
            elapsed = time.perf_counter() - start
            say(f"built the C++ operators with {compiler} in {elapsed:.1f} s: {library}")
        if not load():
            raise ValueError(
                "the library cannot be loaded, see above; attention runs in plain PyTorch"
            )

    return exit_code("kernels", work)


def compare_on_gpu() -> None:
    """Print a line for each Triton kernel that says whether it computes the same as PyTorch."""
    try:
        from moh_vision.attention.kernels.gpu import numerics  # imports Triton
    except ImportError:
        say("the package triton is not installed: a GPU computes all heads, in plain PyTorch")
        return
    for line in numerics.lines():
        say(line)


if __name__ == "__main__":
    raise SystemExit(main())
