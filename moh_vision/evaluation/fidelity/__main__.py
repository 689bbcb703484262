"""python -m moh_vision.evaluation.fidelity GENERATED REFERENCE

Also by `accelerate launch -m moh_vision.evaluation.fidelity ...`: the processes share the images.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Optional

import torch

from moh_vision.engine.commands import Parser, exit_code, reason_of, refuse_output
from moh_vision.engine.environment import versions
from moh_vision.engine.logging import write_json
from moh_vision.engine.run import finish, make_accelerator
from moh_vision.evaluation import fidelity
from moh_vision.evaluation.fidelity.extractors import make_extractor
from moh_vision.evaluation.fidelity.scoring import score, statistics_of
from moh_vision.evaluation.fidelity.table import table


def _parse(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = Parser("python -m moh_vision.evaluation.fidelity", fidelity.__doc__)
    add = parser.add_argument
    add("generated", metavar="GENERATED", help="folder of images, or .npz with arr_0 (uint8 NHWC)")
    add("reference", metavar="REFERENCE", nargs="?", help="the same, ADM's .npz of statistics, or saved statistics")
    add("--extractor", default="inception", help="inception, timm:NAME, timm:local-dir:FOLDER or a run (inception)")
    add("--inception-weights", metavar="FILE", help="torch-fidelity's .pth; without it, it is fetched once")
    add("--batch-size", type=int, default=64, help="images at a time (64)")
    add("--device", help="where the extractor runs (a GPU if there is one)")
    add("--allow-biased", action="store_true", help="also with no more images than features; labelled FID@N")
    add("--out", metavar="FILE", help="write the numbers as JSON; must not exist")
    add("--save-statistics", metavar="FILE", help="instead of REFERENCE: write those of GENERATED, to be one later")
    options = parser.parse(argv)
    if (options.reference is None) == (options.save_statistics is None):
        raise ValueError("give either REFERENCE, or --save-statistics FILE")
    for name in ("out", "allow_biased"):
        if options.save_statistics and getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --save-statistics, which scores nothing")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size {options.batch_size}: expected 1 or more")
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:  # torch's kinds for devices that it does not know or have
        raise ValueError(f"--device {options.device}: {reason_of(error)}") from None
    refuse_output("--out", options.out)
    refuse_output("--save-statistics", options.save_statistics)
    if options.save_statistics and not options.save_statistics.endswith(".safetensors"):
        raise ValueError(f"--save-statistics {options.save_statistics}: expected a path that ends in .safetensors")
    return options


def _work(options: argparse.Namespace, main_process: bool) -> None:
    network = make_extractor(options.extractor, options.inception_weights)
    if options.save_statistics:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        statistics = statistics_of(options.generated, network, options.batch_size, device, "images")
        if main_process:
            statistics.save(Path(options.save_statistics))
            print(f"statistics of {statistics.count} images, {network.name}: {options.save_statistics}")
        return
    names = ("batch_size", "device", "allow_biased")
    how = {name: getattr(options, name) for name in names}
    result = score(options.generated, options.reference, extractor=network, **how)
    if not main_process:
        return
    print(table(result, options.generated, options.reference))
    if options.out:
        sets = dict(generated=options.generated, reference=options.reference)
        write_json(Path(options.out), dict(result, **sets, versions=versions()))
        print(f"scores: {options.out}")


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, or 2 for a user's mistake."""

    def work() -> None:
        options = _parse(argv)
        accelerator = make_accelerator("no")  # one process, or those that accelerate started
        _work(options, accelerator.is_main_process)
        finish(accelerator)

    return exit_code("fidelity", work)


if __name__ == "__main__":
    raise SystemExit(main())
