"""python -m moh_vision latents"""

from __future__ import annotations

import contextlib
import datetime
import os
import warnings
from typing import Iterator, List, Optional

from accelerate import PartialState

from moh_vision.data.shards.worker import watch_parent
from moh_vision.diffusion import latents
from moh_vision.diffusion.latents.cache import DTYPES
from moh_vision.diffusion.latents.conversion import write_latents
from moh_vision.diffusion.latents.vae import DEFAULT_VAE
from moh_vision.engine.commands import Parser, exit_code, say
from moh_vision.engine.ranks import MistakeElsewhere, from_first


def _parse(argv: Optional[List[str]]) -> dict:
    parser = Parser("python -m moh_vision latents", latents.__doc__)
    add = parser.add_argument
    add("--vae", default=DEFAULT_VAE, metavar="NAME|FOLDER", help=f"on the hub, or a local folder ({DEFAULT_VAE})")
    add("--data", dest="root", required=True, metavar="ROOT", help="what data.root of a training run takes")
    add("--out", required=True, metavar="DIR", help="a new folder, or that of the same command")
    add("--split", choices=("train", "val"), default="train", help="(train)")
    add("--size", type=int, default=256, help="pixels of the center-cropped images (256)")
    add("--dtype", choices=DTYPES, default="float16", help="of the moments on disk (float16)")
    add("--batch-size", type=int, default=32, help="images at a time (32)")
    add("--samples-per-shard", type=int, default=1000, help="at most (1000)")
    add("--seed", type=int, default=0, help="of the shuffle (0)")
    add("--workers", type=int, default=2, help="processes of each rank that read images (2)")
    add("--max-bad-fraction", type=float, default=0.0, help="share of images that may be unreadable and left out (0)")
    return vars(parser.parse(argv))


@contextlib.contextmanager
def launched_ranks() -> Iterator[None]:
    """Connect the ranks that the environment names, if there are several (accelerate's PartialState)."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        # An orphan would write on beside the run that is started next.
        watch_parent(os.getppid())
        # A rank waits until the slowest has written its last shard.
        PartialState(cpu=True, backend="gloo", timeout=datetime.timedelta(days=7))
    try:
        yield
    finally:
        if several:
            PartialState().destroy_process_group()


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command; return the exit code: 0, 2 for a user's mistake, 130 when interrupted."""

    def work() -> None:
        with warnings.catch_warnings(), launched_ranks():
            warnings.filterwarnings("ignore", module="PIL")  # of odd files that decode all the same
            write_latents(**from_first(lambda: _parse(argv)), say=say)

    try:
        return exit_code("latents", work, kept="shards")
    except MistakeElsewhere:
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
