"""python -m moh_vision.evaluation.fidelity GENERATED REFERENCE

Also by `accelerate launch -m moh_vision.evaluation.fidelity ...`: the processes share the images.
"""

import argparse
from pathlib import Path

from moh_vision.common.cli import Parser, add_imports, refuse_output
from moh_vision.common.errors import exit_code
from moh_vision.common.progress import say
from moh_vision.data.batches import check_images_fit
from moh_vision.data.decode import Decoding, add_decoding
from moh_vision.data.sources import first_size
from moh_vision.engine.accelerator import finish, make_accelerator
from moh_vision.engine.logging import versions, write_json
from moh_vision.evaluation import fidelity
from moh_vision.evaluation.fidelity.extractors import make_extractor
from moh_vision.evaluation.fidelity.images import SourceImages, open_images, open_set
from moh_vision.evaluation.fidelity.reference import Reference, statistics_of
from moh_vision.evaluation.fidelity.scoring import score, table

SPLITS = dict(generated="train", reference="val")  # of data sets


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m moh_vision.evaluation.fidelity", fidelity.__doc__)
    add_imports(parser)
    add = parser.add_argument
    held = "folder of images, .npz with arr_0 (uint8 NHWC), or a data set as data.root"
    add("generated", metavar="GENERATED", help=held)
    add(
        "reference",
        metavar="REFERENCE",
        nargs="?",
        help="the same, ADM's .npz of statistics, or saved statistics",
    )
    for name, split in SPLITS.items():
        add(
            f"--{name}-split",
            choices=("train", "val"),
            help=f"of {name.upper()}, if it is a data set ({split})",
        )
    size = "a data set is center-cropped to it (to the size of the other images)"
    add("--size", type=int, metavar="PIXELS", help=size)
    add(
        "--extractor",
        default="inception",
        help="inception, timm:NAME, timm:local-dir:FOLDER or a run (inception)",
    )
    add(
        "--inception-weights",
        metavar="FILE",
        help="torch-fidelity's .pth; without it, it is fetched once",
    )
    add_decoding(add)
    add("--batch-size", type=int, default=64, help="images at a time (64)")
    add(
        "--allow-biased",
        action="store_true",
        help="also with no more images than features; labelled FID@N",
    )
    add("--out", metavar="FILE", help="write the numbers as JSON; must not exist")
    add(
        "--save-statistics",
        metavar="FILE",
        help="instead of REFERENCE: write those of GENERATED, to be one later",
    )
    options = parser.parse(argv)
    if (options.reference is None) == (options.save_statistics is None):
        raise ValueError("give either REFERENCE, or --save-statistics FILE")
    options.decoding = Decoding.of(options, "--")
    for name in ("out", "allow_biased", "reference_split"):
        value = getattr(options, name)
        if options.save_statistics and value:
            option = f"--{name.replace('_', '-')}"
            if value is not True:
                option += f" {value}"
            saved = f"--save-statistics {options.save_statistics}"
            raise ValueError(f"{option} has no effect with {saved}, which scores nothing")
    for name in ("batch_size", "size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    check_images_fit("--size", options.size, 3, options.batch_size)
    refuse_output("--out", options.out)
    refuse_output("--save-statistics", options.save_statistics)
    if options.save_statistics and not options.save_statistics.endswith(".npz"):
        raise ValueError(
            f"--save-statistics {options.save_statistics}: expected a path that ends in .npz"
        )
    return options


def _open_sets(options: argparse.Namespace) -> list:
    """Open GENERATED and, if given, REFERENCE; data sets get a size."""
    opened = []
    for name, default_split in SPLITS.items():
        path = getattr(options, name)
        if path is not None:
            split = getattr(options, f"{name}_split")
            opened.append(open_set(name.upper(), path, split, default_split, options.decoding))
    data_sets = [one for one in opened if isinstance(one, SourceImages)]
    if options.size and not data_sets:
        raise ValueError(f"--size {options.size} has no effect: there is no data set")
    generated = open_images(opened[0], "generated", options.decoding)
    references = [Reference(source, options.decoding) for source in opened[1:]]
    squares = []  # sides of the images of those other sets that are square
    for images in (generated, *(reference.images for reference in references)):
        if images is None or images in data_sets:
            continue
        width, height = images.size
        if width == height:
            squares.append(width)
    for data_set in data_sets:
        if options.size:
            data_set.size = options.size
        elif squares:
            data_set.size = squares[0]
        if data_set.size is None:
            hint = first_size(data_set.source)
            raise ValueError(
                f"{data_set.name}: --size PIXELS is needed, images are cropped to it{hint}"
            )
    return [generated, *references]


def _work(options: argparse.Namespace) -> None:
    accelerator = make_accelerator("no")  # one process, or those that accelerate started
    with accelerator.main_process_first():
        generated, *reference = _open_sets(options)
    network = make_extractor(options.extractor, options.inception_weights)
    if options.save_statistics:
        statistics = statistics_of(
            generated, network, options.batch_size, accelerator.device, title="images"
        )
        if accelerator.is_main_process:
            statistics.save(Path(options.save_statistics))
            for remark in generated.remarks:
                say(f"note: {remark}")
            say(
                f"statistics of {statistics.count} images, {network.name}: {options.save_statistics}"
            )
        finish(accelerator)
        return
    result = score(
        generated,
        *reference,
        extractor=network,
        batch_size=options.batch_size,
        device=accelerator.device,
        allow_biased=options.allow_biased,
    )
    if accelerator.is_main_process:
        source = reference[0].source
        names = dict(generated=generated.name, reference=getattr(source, "name", source))
        if options.out:
            write_json(Path(options.out), dict(result, **names, versions=versions()))
        say(table(result, **names))
        if options.out:
            say(f"scores: {options.out}")
    finish(accelerator)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 for a user's mistake."""
    return exit_code("fidelity", lambda: _work(_parse(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
