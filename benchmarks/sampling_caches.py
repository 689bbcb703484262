"""Heads and MLP groups by timestep, a cache of diffusers, and both together: quality over the time of sampling.

    python benchmarks/sampling_caches.py --study digits --seeds 0 1 2
    python benchmarks/sampling_caches.py --study cifar10 --root SHARDS --seeds 0 1 2
    python benchmarks/sampling_caches.py --time --study digits         # on a machine with nothing else to do
    python benchmarks/sampling_caches.py --table                       # Markdown, from the results that are there

Reads the runs "dense" and "plain" of conversion_quality.py, from the same --folder: a dense DiT and its conversion to half of the
heads and half of the MLP groups by timestep. Each draws by fewer and fewer steps, without a cache and with the caches of CACHES.
TaylorSeer computes the blocks in the first three steps and then in every second, third or fifth one, and extrapolates between them.
FirstBlockCache skips all blocks but the first where that one changed its tokens little; it does not fit JiT.

Scored are the Frechet distance of the samples to the test images in the features of the study's classifier (no FID), and the
share that it recognises. Seed s draws the same noise everywhere. Times are of drawing one batch of images, interleaved. What the
report holds is not scored again: the runs and the classifier must be those of its scores.
Results: benchmarks/results/sampling_caches.json.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from conversion_quality import STUDIES, refuse_scores_of_another
from timing import (
    about_machine,
    interleaved,
    markdown,
    new_report,
    parser_of,
    to_base,
    write_report,
)

from moh_vision.attention import model_budgets
from moh_vision.commands.budget_curve import measured_calls
from moh_vision.commands.sampling_curve import with_spread
from moh_vision.diffusion.image_parts import ImageParts
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights

MODELS = {
    "dense": "dense",
    "half of heads and groups": "plain",
}  # name: run of conversion_quality.py
CACHES = {  # name: --cache of sample.py
    "none": "none",
    "TaylorSeer, every 2nd step": "taylorseer:2",
    "TaylorSeer, every 3rd step": "taylorseer:3",
    "TaylorSeer, every 5th step": "taylorseer:5",
    "FirstBlockCache, 0.1": "first_block:0.1",
    "FirstBlockCache, 0.2": "first_block:0.2",
}
ROUNDS = (5, 20)
SECONDS = 120.0


class Draws(NamedTuple):
    """How a study draws.

    Attributes:
        sampler: options of sample.py; equal steps, as TaylorSeer needs.
        steps: numbers of steps; caches are tried at the first one.
        caches: names of CACHES that fit the model.
    """

    sampler: str
    steps: tuple[int, ...]
    caches: tuple[str, ...]


DRAWS = {
    "digits": Draws("--sampler ddim --cfg-scale 1.5", (48, 24, 16, 8), tuple(CACHES)[1:]),
    # JiT adds class tokens behind the first block.
    "cifar10": Draws("--sampler euler --cfg-scale 1.5", (32, 16, 8), tuple(CACHES)[1:4]),
}


class Variant(NamedTuple):
    """One way to draw.

    Attributes:
        model: a name of MODELS.
        steps: of the sampler.
        cache: a name of CACHES.
    """

    model: str
    steps: int
    cache: str

    @property
    def key(self):
        return f"{self.model}, {self.steps} steps, {self.cache}"


def variants_of(study):
    """Return all ways in which a study draws."""
    draws = DRAWS[study]
    found = []
    for model in MODELS:
        found += [Variant(model, steps, "none") for steps in draws.steps]
        found += [Variant(model, draws.steps[0], cache) for cache in draws.caches]
    return found


def open_drawings(study, root, folder, seed):
    """Open the runs of a seed; return {variant: its opened run}. Variants of one run share the model."""
    sizes = STUDIES[study]
    draws = DRAWS[study]
    drawings = {}
    for model, run in MODELS.items():
        found = find_weights(
            str(folder / study / f"{run}_{seed}"), wing="diffusion", key="--folder"
        )
        options = [*draws.sampler.split(), "--seed", str(seed), "--score", root]
        options += ["--num-images", str(sizes.images), "--batch-size", str(sizes.batch)]
        options += ["--extractor", str(folder / study / "classifier")]
        first = None
        for variant in variants_of(study):
            if variant.model != model:
                continue
            asked = [*options, "--steps", str(variant.steps), "--cache", CACHES[variant.cache]]
            if first is None:
                first = open_weights(found, asked, scores=True, command="sampling_caches")
                one = first
            else:
                one = first.drawn_with(asked, "sampling_caches")
            one.open_drawing()
            drawings[variant] = one
    return drawings


@contextlib.contextmanager
def measured(drawings):
    """Measure for all models where skipping heads saves time, as sample.py does."""
    opened = list(drawings.values())
    passes = [one.make_forward() for one in opened]
    budgets = [{1.0: model_budgets(one.model)} for one in opened]
    with measured_calls(opened, passes, budgets):
        yield


def score(study, root, folder, seed, entry):
    """Score what the report lacks of a seed."""
    lacking = [
        variant
        for variant in variants_of(study)
        if str(seed) not in entry["scores"].get(variant.key, {})
    ]
    if not lacking:
        return
    drawings = open_drawings(study, root, folder, seed)
    with measured(drawings):
        for variant in lacking:
            scores = drawings[variant].scores()
            kept = {name: scores[name] for name in ("frechet_distance", "recognised")}
            entry["scores"].setdefault(variant.key, {})[str(seed)] = kept
            print(f"seed {seed}, {variant.key}: {kept}", flush=True)


def measure_times(study, root, folder, seed, entry):
    """Time a batch of every variant, interleaved; ratios are to the dense model with most steps."""
    drawings = open_drawings(study, root, folder, seed)
    batch = STUDIES[study].batch

    def draw_of(variant):
        one = drawings[variant]

        def draw():
            with tempfile.TemporaryDirectory() as hidden:
                one.drawing.draw(ImageParts(Path(hidden), batch, batch, {}))

        return draw

    with measured(drawings):
        steps = {variant.key: draw_of(variant) for variant in drawings}
        entry["times"] = to_base(interleaved(steps, ROUNDS, SECONDS, warm_up=1))


def tables(report):
    """Write a table of every study, a row a variant."""
    written = [about_machine(report)]
    for study, entry in report["studies"].items():
        columns = [study, "steps", "cache", "seeds", "time", "distance", "recognised, %"]
        rows = []
        for variant in variants_of(study):
            by_seed = entry["scores"].get(variant.key)
            if not by_seed:
                continue
            time = entry["times"].get(variant.key)
            row = [variant.model, str(variant.steps), variant.cache, str(len(by_seed))]
            row.append(f"{time['ratio']:.2f}" if time else "-")
            for name, digits in (("frechet_distance", 2), ("recognised", 1)):
                row.append(with_spread([scores[name] for scores in by_seed.values()], digits))
            rows.append(row)
        written.append(markdown(columns, rows))
    return "\n\n".join(written)


def main():
    parser = parser_of(__doc__, "sampling_caches")
    parser.add_argument("--study", choices=DRAWS)
    parser.add_argument("--root", default="digits", help="data of the study; default: digits")
    parser.add_argument("--folder", type=Path, default=Path("runs/conversion_quality"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--time", action="store_true", help="time the first seed; score nothing")
    args = parser.parse_args()
    report = new_report(studies={})
    if args.output.exists():
        report["studies"] = json.loads(args.output.read_text())["studies"]
    if args.study is None or args.table:
        if not args.table:
            parser.error("--study or --table is needed")
        print(tables(json.loads(args.output.read_text())), end="")
        return
    entry = report["studies"].setdefault(args.study, dict(scores={}, times={}))
    try:
        if args.time:
            measure_times(args.study, args.root, args.folder, args.seeds[0], entry)
        else:
            refuse_scores_of_another(args.folder / args.study / "classifier", entry)
            for seed in args.seeds:
                score(args.study, args.root, args.folder, seed, entry)
    finally:
        write_report(args.output, report)
    print(tables(report), end="")


if __name__ == "__main__":
    sys.exit(main())
