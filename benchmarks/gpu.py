"""Numerics, time and memory of routed attention on a GPU, against dense attention and the released MoH operations.

    python benchmarks/gpu.py                          # one card, less than 8 minutes
    python benchmarks/gpu.py --add                    # go on where the time did not suffice
    python benchmarks/gpu.py --parts profile          # two minutes: where a whole step spends its time
    python benchmarks/gpu.py --parts numerics layer   # parts whose names begin so
    python benchmarks/gpu.py --parts peaks 'numerics groups' 'layer dit_xlarge_mlp' 'sampling dit_xlarge' 'step dit_xlarge eager'
                                                      # groups of the MLP
    python benchmarks/gpu.py --device cpu --quick     # tiny shapes: checks that the benchmark itself runs
    python benchmarks/gpu.py --table                  # the goals and what was reached, as Markdown

First comes a profile of whole training steps (gpu_profile.py): how long the device is busy, what a launch takes, waits of the
host. Numerics (gpu_numerics.py) follow, with fresh random weights and inputs. Every executor runs every case in every dtype;
output and gradients are compared with the executor `reference` in float64, and computed twice, whose bits are compared. Below
float64 all executors get the routing that float64 gave, and the router is checked by itself. An executor that is off by more
than DTYPES allows is not timed in that dtype, and the run ends with exit code 1. Memory that is free is NaN before every check.

Then follow times (gpu_times.py), the most wanted first:

    dense       fused qkv product, scaled_dot_product_attention (torch's choice, and each backend), output product
    released    the published MoH operations: all heads, gates by softmax, top-k and a mask, then an einsum
    masked, packed
                our executors, with the share of heads that runs and what chooses them: every token, a sample, a timestep;
                of an MLP, and "with groups" of a model's MLPs too, the share of groups

    eager       as called from Python, including the time to launch kernels
    graph       replays of a CUDA graph: the time of the device alone; code that waits for the device has none
    compiled    torch.compile

Each round runs all contestants once, in another random order, so that drift hits all alike. The table gives medians, and the
median and quartiles of the ratios to the fastest dense contestant, round by round. Peak memory is what a call takes beside
its inputs. The share of the roofline is the least time over the time taken: the least time is that of the multiplications of
the heads that run, or of moving inputs, outputs and weights once, at the rates that matrix products and copies reach in the
same run. A failure is recorded and the run goes on, in a new process if the device answers no more; parts that the time does
not suffice for are listed under "skipped". A goal is met if the lower quartile reaches it: smaller differences are noise. Results
go to benchmarks/results/gpu.json.
"""

import importlib.util
import json
import os
import sys
import time
from typing import NamedTuple

import torch
from gpu_numerics import CASES, DTYPES, QUICK_CASES, numerics, races, summary, wrong
from gpu_profile import profile
from gpu_run import Run
from gpu_times import (
    MLP_SHAPES,
    MODELS,
    QUICK_MLP_SHAPES,
    QUICK_SHAPES,
    SAMPLERS,
    SHAPES,
    SHARES,
    layers,
    peaks,
    prompt,
    sampling,
    training,
)
from timing import cell, markdown, parser_of

from moh_vision.attention import kernels

CONTESTANTS = ("released", "masked", "packed", "auto")
AUTO = 1.02  # largest time of `auto` over that of `masked`, wherever it was measured


class Goal(NamedTuple):
    """Largest time of an executor over that of dense attention on the fastest backend of the card.

    On one H100 or H200 in bfloat16; `auto` takes `packed` where it was measured to pay.
    """

    part: str  # "layer", "prefill", "sampling" (a step of it) or "step" (of training)
    shape: str
    # "token", "sample", or "one": one choice for all samples. A DiT's is "timestep" where all are at one. "... with groups":
    # the groups of the MLP are chosen too.
    scope: str
    mode: str  # "forward" or "train" (forward and backward; a step: the whole training step)
    share: float  # of the heads that run, and of the groups
    executor: str
    limit: float


def goals():
    """Yield all goals: those of a layer, then the prompt and whole steps."""
    layers = {  # shape, scope, share: forward, train
        ("vit_base", "token", 0.5): (1.08, 0.80),
        ("vit_base", "token", 0.75): (None, 0.86),
        ("dit_xlarge", "token", 0.5): (1.15, 0.92),
        ("n1024", "token", 0.5): (1.02, 0.82),
        ("n4096", "token", 0.5): (0.74, 0.80),
        ("n4096", "token", 0.75): (0.95, 1.05),
        ("n16384", "token", 0.5): (0.60, 0.79),
        ("dit_xlarge", "sample", 0.5): (0.85, 0.75),
        ("vit_base", "sample", 0.5): (0.95, 0.75),
        ("n1024", "sample", 0.5): (0.80, 0.72),
        ("dit_xlarge", "one", 0.5): (0.62, None),
    }
    for (shape, scope, share), limits in layers.items():
        for mode, limit in zip(("forward", "train"), limits):
            if limit is not None:
                yield Goal("layer", shape, scope, mode, share, "packed", limit)
    yield Goal("layer", "vit_base", "token", "forward", 0.5, "masked", 1.2)
    yield Goal("layer", "vit_base", "token", "train", 0.5, "masked", 1.0)
    yield Goal("prefill", "llama_8b", "token", "forward", 0.5, "packed", 0.7)
    for family in ("vit_base", "dit_xlarge"):
        yield Goal("step", family, "token", "train", 0.75, "packed", 1.02)
        yield Goal("step", family, "sample", "train", 0.5, "packed", 0.9)
    yield Goal("sampling", "dit_xlarge", "timestep with groups", "forward", 0.5, "packed", 0.62)
    yield Goal("step", "dit_xlarge", "sample with groups", "train", 0.5, "packed", 0.8)


def reached(goal, tables):
    """Return the rows in which a goal was measured, by contestant, and the dense row that they are held to; or None.

    The rows are those of the first form that was measured; a graph's replay is the time of the device alone. Whole
    steps are eager, as most users run them.
    """
    forms = ("graph", "eager")
    if goal.part == "step":
        forms = ("eager",)
    for form in forms:
        about = dict(part=goal.part, shape=goal.shape, mode=goal.mode, form=form, dtype="bfloat16")
        for table in tables:
            rows = {}
            for name in CONTESTANTS:
                rows[name] = table["rows"].get(f"{name} {goal.share} {goal.scope}", {})
            timed = "ratio" in rows[goal.executor] and table["base"].startswith("dense")
            if timed and all(table[key] == value for key, value in about.items()):
                return rows, table["rows"][table["base"]]
    return None


def auto_over_masked(tables):
    """Yield (ratio of medians, where) of every layer in which both were timed."""
    for table in tables:
        for name, row in table["rows"].items():
            masked = table["rows"].get(name.replace("auto", "masked", 1), {})
            if name.startswith("auto") and "milliseconds" in row and "milliseconds" in masked:
                heads = name.removeprefix("auto ")
                where = f"{table['shape']} {table['mode']} {table['form']} {heads}"
                yield row["milliseconds"] / masked["milliseconds"], where


def goal_table(report):
    """Write in Markdown the goals of which there is a measurement on a card, and how many have none."""
    tables = []
    if "card" in report and not report["quick"]:
        tables = report["tables"]
    every = {goal: reached(goal, tables) for goal in goals()}
    lines = []
    for goal, found in every.items():
        if found:
            rows, dense = found
            ratios = [""] * len(CONTESTANTS)
            for number, name in enumerate(CONTESTANTS):
                if "ratio" in rows[name]:
                    ratios[number] = cell(rows[name]["ratio"], rows[name]["quartiles"])
            verdict = met_or_missed(rows[goal.executor]["quartiles"][0], goal.limit)
            milliseconds = f"{dense['milliseconds']:.3f}"
            lines.append([*map(str, goal[:-1]), milliseconds, *ratios, str(goal.limit), verdict])
    text = f"{len(every) - len(lines)} of {len(every)} goals are not measured.\n"
    worst = max(auto_over_masked(tables), default=None)
    if worst is not None:
        ratio, where = worst
        verdict = met_or_missed(ratio, AUTO)
        text += f"auto over masked: at most {ratio:.2f} ({where}); goal {AUTO}: {verdict}.\n"
    if not lines:
        return text
    head = [*Goal._fields[:-1], "dense, ms", *CONTESTANTS, "goal", ""]
    return f"{markdown(head, lines)}\n{text}"


def met_or_missed(ratio, limit):
    return "met" if ratio <= limit else "missed"


def plan(run):  # noqa: C901
    """Return [(name, function, arguments, whether torch.compile takes much of its time)], the most wanted first."""
    shapes = SHAPES
    mlp_shapes = MLP_SHAPES
    cases = CASES
    shares = SHARES
    if run.quick:
        shapes = QUICK_SHAPES
        mlp_shapes = QUICK_MLP_SHAPES
        cases = QUICK_CASES
        shares = SHARES[:1]
    # The forms that a table is measured in: the most wanted one, and those that are left for later.
    best_form = "eager"
    later_forms = ()
    if run.cuda:
        best_form = "graph"
        later_forms = ("eager",)
    every_shape = {**shapes, **mlp_shapes}
    first_case = next(iter(cases))
    families = dict.fromkeys(family for family, _ in MODELS)
    parts = {}

    def add(name, function, *arguments, compiles=False):
        if name not in parts:  # a part that is wanted twice runs once, at its first place
            parts[name] = (name, function, arguments, compiles)

    def numerics_of(dtype, names, share=0.5):
        for name in names:
            add(f"numerics {name} {dtype} {share}", numerics, name, cases[name], dtype, share)

    def layers_of(names, scope, form, dtype="bfloat16", compiles=False):
        for name in names:
            shape = every_shape[name]._replace(scope=scope)
            for mode in ("forward", "train"):
                about = (name, shape, shares, dtype, mode, form)
                part = f"layer {name} {scope} {dtype} {mode} {form}"
                add(part, layers, *about, compiles=compiles)

    add("profile eager", profile, "eager")
    add("peaks", peaks)
    numerics_of("bfloat16", cases)
    for dtype in ("float32", "tf32"):
        numerics_of(dtype, [first_case])
    layers_of(shapes, "token", best_form)
    add(f"prefill {best_form}", prompt, best_form)
    layers_of(shapes, "sample", best_form)
    layers_of(["dit_xlarge"], "one", best_form)
    for scope in ("sample", "one"):
        layers_of(mlp_shapes, scope, best_form)
    for name, shape in every_shape.items():
        add(f"races {name}", races, name, shape, "bfloat16", 0.5)
    for family in families:
        add(f"step {family} compiled", training, family, "compiled", compiles=True)
    for dtype in DTYPES:
        numerics_of(dtype, cases)
        numerics_of(dtype, [first_case], 0.75)
        if not run.quick:
            numerics_of(dtype, [first_case], 1.0)
    for family in SAMPLERS:
        for form in (best_form, *later_forms):
            add(f"sampling {family} {form}", sampling, family, form)
    for family in families:
        add(f"step {family} eager", training, family, "eager")
    first_shapes = list(shapes)[:2]
    layers_of(first_shapes, "token", "compiled", compiles=True)
    for form in later_forms:
        layers_of(first_shapes, "token", form)
        layers_of(first_shapes, "sample", form)
    layers_of(first_shapes, "token", best_form, dtype="tf32")
    add("profile blocks", profile, "blocks", compiles=True)
    return list(parts.values())


def missing(name):
    """Say why a part has nothing to measure here; None if it has."""
    if name.startswith(("step dit", "sampling")) and importlib.util.find_spec("diffusers") is None:
        return "diffusers is not installed"
    return None


def carry_out(run, prefixes):
    """Run the parts that are not done, as long as the device answers."""
    for name, function, arguments, compiles in plan(run):
        if not name.startswith(tuple(prefixes)) or name in run.report["seconds"]:
            continue
        why = missing(name)
        if why is not None:
            run.report["skipped"].append(f"{name}: {why}")
            continue
        torch.manual_seed(run.report["seed"])
        run.part(name, function, *arguments, compiles=compiles)
        if run.lost:
            return


def parse_options():
    """Return the parser, for errors that show later, and the options."""
    parser = parser_of(__doc__, "gpu")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cuda (the default) or cpu"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one share, two rounds")
    parser.add_argument(
        "--parts", nargs="+", default=[""], help="beginnings of names of parts; default: all"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=7.3,
        help="for everything; the rest is skipped (default 7.3)",
    )
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=200.0,
        help="for all of torch.compile (default 200)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="of weights and inputs; default: a new one",
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what is in --output and measure what it lacks"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="as --add, in the same time: after the device was lost",
    )
    args = parser.parse_args()
    if args.device == "cpu" and args.output == parser.get_default("output"):
        args.output = args.output.with_stem("gpu_on_cpu")
    return parser, args


def main():
    parser, args = parse_options()
    out = args.output
    if args.table:
        report = {}
        if out.is_file():
            report = json.loads(out.read_text())
        print(goal_table(report), end="")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; allowed here: cpu"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    empty = dict(profile={}, numerics=[], routers=[], races=[], peaks={}, tables=[])
    run = Run(
        args.device, out, args.minutes, args.compile_seconds, args.quick, seed=args.seed, **empty
    )
    if args.resume:
        run.resume()
    elif args.add:
        try:
            run.add()
        except (OSError, ValueError) as error:
            parser.error(f"--add: {error}")
    run.report.update(operators=kernels.about(args.device))
    about = {**run.report["machine"], **run.report.get("card", {})}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(run.report["operators"], flush=True)
    carry_out(run, args.parts)
    if run.lost:
        print("the device answers no more: going on in a new process", flush=True)
        options = [arg for arg in sys.argv[1:] if arg != "--resume"]
        os.execv(sys.executable, [sys.executable, __file__, *options, "--resume"])
    print(*summary(run.report), sep="\n")
    print("\nskipped:", "; ".join(run.report["skipped"]) or "nothing")
    print(goal_table(run.report))
    print(out)
    lines = wrong(run.report)
    for line in lines[:1]:
        print(f"gpu: error: {line}", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
