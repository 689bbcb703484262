"""python -m moh_vision shards"""

from __future__ import annotations

import warnings
from typing import List, Optional

from moh_vision.data import shards
from moh_vision.engine.commands import Parser, exit_code, say


def _parse(argv: Optional[List[str]]) -> dict:
    parser = Parser("python -m moh_vision shards", shards.__doc__)
    add = parser.add_argument
    add("--in", dest="source", required=True, metavar="IMAGEFOLDER", help="ROOT/{train,val}/CLASS/* or ROOT/CLASS/*")
    add("--out", required=True, metavar="DIR", help="a new folder, or that of the same command")
    add("--split", metavar="NAME", help="the folders in IMAGEFOLDER are classes, and this is their split (train)")
    add("--val-fraction", type=float, metavar="F", help="of a folder of classes, this share of every class becomes val")
    add("--size", type=int, help="pixels of the shorter side; without it the bytes are stored unchanged")
    add("--quality", type=int, help="of the JPEG that --size stores, 1 to 100 (95)")
    add("--samples-per-shard", type=int, default=1000, help="at most (1000)")
    add("--seed", type=int, default=0, help="of the shuffle (0)")
    add("--workers", type=int, help="shards written at a time (the processors there are)")
    add("--max-bad-fraction", type=float, default=0.0, help="share of images that may be bad and left out (0)")
    options = parser.parse(argv)
    if options.quality is not None and options.size is None:
        raise ValueError(f"--quality {options.quality} is of the JPEG that --size stores; give --size too")
    options.quality = 95 if options.quality is None else options.quality
    return vars(options)


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""

    def work() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # of oddities in files that decode all the same
            shards.convert(**_parse(argv), say=say)

    return exit_code("shards", work, kept="shards")


if __name__ == "__main__":
    raise SystemExit(main())
