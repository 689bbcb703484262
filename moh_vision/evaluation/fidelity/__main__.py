"""python -m moh_vision.evaluation.fidelity GENERATED REFERENCE"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import List

import torch

from moh_vision.evaluation import fidelity
from moh_vision.evaluation.fidelity.scoring import score, statistics_of
from moh_vision.evaluation.fidelity.table import table


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)


def _parse(argv: List[str]) -> argparse.Namespace:
    parser = _Parser("python -m moh_vision.evaluation.fidelity", description=fidelity.__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("generated", metavar="GENERATED", help="folder of images, or .npz with arr_0 (uint8 NHWC)")
    add("reference", metavar="REFERENCE", nargs="?", help="the same, ADM's .npz of statistics, or saved statistics")
    add("--extractor", default="inception", help="inception, or timm:NAME (inception)")
    add("--inception-weights", metavar="FILE", help="torch-fidelity's .pth; without it, it is fetched once")
    add("--batch-size", type=int, default=64, help="images at a time (64)")
    add("--device", help="where the extractor runs (a GPU if there is one)")
    add("--allow-biased", action="store_true", help="also with no more images than features; labelled FID@N")
    add("--out", metavar="FILE", help="write the numbers as JSON; must not exist")
    add("--save-statistics", metavar="FILE", help="instead of REFERENCE: write those of GENERATED, to be one later")
    options = parser.parse_args(argv)
    if (options.reference is None) == (options.save_statistics is None):
        raise ValueError("give either REFERENCE, or --save-statistics FILE")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size {options.batch_size}: expected 1 or more")
    for name, path in (("out", options.out), ("save-statistics", options.save_statistics)):
        if path and Path(path).exists():
            raise ValueError(f"--{name} {path} exists; give another path")
        if path and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"--{name} {path}: no such folder")
    if options.save_statistics and not options.save_statistics.endswith(".safetensors"):
        raise ValueError(f"--save-statistics {options.save_statistics}: expected a path that ends in .safetensors")
    return options


def _work(options: argparse.Namespace) -> None:
    if options.save_statistics:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        network = fidelity.make_extractor(options.extractor, options.inception_weights)
        statistics = statistics_of(options.generated, network, options.batch_size, device, "images")
        statistics.save(Path(options.save_statistics))
        print(f"statistics of {statistics.count} images, {network.name}: {options.save_statistics}")
        return
    names = ("extractor", "inception_weights", "batch_size", "device", "allow_biased")
    result = score(options.generated, options.reference, **{name: getattr(options, name) for name in names})
    print(table(result, options.generated, options.reference))
    if options.out:
        sets = dict(generated=options.generated, reference=options.reference)
        Path(options.out).write_text(json.dumps(dict(result, **sets), indent=1) + "\n")
        print(f"scores: {options.out}")


def main(argv: List[str]) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""
    try:
        _work(_parse(argv))
    except (ValueError, OSError) as error:
        print(f"fidelity: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
