"""Top-1 over the time of an image: a dense ViT, its conversions to fewer heads and MLP groups, and dense ViTs of fewer layers.

    python benchmarks/vit_quality.py --root SHARDS --seeds 0 1 2       # CIFAR-10 as webdataset shards
    python benchmarks/vit_quality.py --table                           # Markdown, from the results that are there

For each seed the dense ViT of configs/cls/cifar10_vit_cpu.yaml is trained, converted and fine-tuned for a tenth of its steps; heads and
groups are chosen for an image (scope sample). Each conversion is fine-tuned alone, with the dense model as teacher, and so that the
strongest heads and groups run for all images ("fixed"). The opponent is dense, with as many layers as come nearest to the time of half
of the heads and groups. It is trained from the start, with and without the dense model as teacher, for the compute of the dense
training and of a fine-tuning with the teacher, and so for more steps. What the opponent's teacher was trained for comes on top.

Each command is printed before it runs; all are those that a user would type. What is finished is not done again: trainings resume, and
what the report holds is not measured again, also if --folder is another one. Two runs go on at a time (--jobs), each on one thread;
times are measured first, before anything else runs.
Results: benchmarks/results/vit_quality.json.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import timm
import torch
import yaml
from conversion_quality import (
    DENSE,
    PART,
    ROUNDS,
    SCRIPTS,
    SECONDS,
    TEACHER,
    UNBALANCED,
    call,
    conversion_of,
)
from timing import (
    about_machine,
    interleaved,
    markdown,
    new_report,
    parser_of,
    to_base,
    write_report,
)

import moh_vision
from moh_vision.commands.sampling_curve import with_spread
from moh_vision.models.counts import count_macs

CONFIG = "cls/cifar10_vit_cpu"
STEPS = 1953  # five epochs of 50,000 images in batches of 128
TUNED = round(STEPS / PART)
LR = 6e-4  # of the fine-tunings
BATCH = 128  # of the timing


class Conversion(NamedTuple):
    """The shares of the heads and of the MLP groups that run; None: all groups run."""

    heads: float
    groups: float | None


HALF = "half of heads and groups"
CONVERSIONS = {
    "3/4 of heads": Conversion(0.75, None),
    "half of heads": Conversion(0.5, None),
    "3/4 of heads and groups": Conversion(0.75, 0.75),
    HALF: Conversion(0.5, 0.5),
}
FEWER = "fewer layers"
TAUGHT = ", teacher"
FIXED = ", fixed"  # behind TAUGHT
MODELS = ["dense"]
MODELS += [name + suffix for name in CONVERSIONS for suffix in ("", TAUGHT, TAUGHT + FIXED)]
MODELS += [FEWER, FEWER + TAUGHT]


def architecture_of(model):
    """Return a model's name without how it was trained."""
    return model.removesuffix(FIXED).removesuffix(TAUGHT)


class Study:
    """The runs in one folder: their commands, and what came out.

    Args:
        root: of the data.
        folder: of the runs.
        report: gets what is measured.
    """

    def __init__(self, root: str, folder: Path, report: dict):
        self.root = root
        self.folder = folder
        self.report = report

    def run_of(self, model, seed):
        words = model.replace("/", "_of_").replace(",", "").replace(" ", "_")
        return self.folder / f"{words}_{seed}"

    def time(self):
        """Time and count a batch of the dense model, its conversions and dense models of fewer layers; choose the opponent."""
        if self.report["times"]:
            return
        config = yaml.safe_load((SCRIPTS / f"configs/{CONFIG}.yaml").read_text())["model"]
        sizes = {key: config[key] for key in ("embed_dim", "num_heads", "patch_size", "depth")}

        def dense(**changed):
            options = dict(router="dense", img_size=32, num_classes=10, **config["kwargs"])
            return timm.create_model(config["name"], **{**sizes, **options, **changed}).eval()

        torch.set_num_threads(1)  # as the trainings
        images = torch.randn(BATCH, 3, 32, 32)
        models = {"dense": dense()}
        for name, shares in CONVERSIONS.items():
            model = moh_vision.convert(
                dense(), head_budget=shares.heads, mlp_budget=shares.groups, scope="sample"
            )
            moh_vision.measure(model, images)  # as a run does
            models[name] = model
        layers = {f"{depth} layers": depth for depth in range(1, sizes["depth"])}
        models |= {name: dense(depth=depth) for name, depth in layers.items()}
        steps = {}
        for name, model in models.items():

            @torch.no_grad()
            def step(model=model):
                model(images)

            steps[name] = step
        rows = to_base(interleaved(steps, ROUNDS, SECONDS))
        for name, model in models.items():
            rows[name]["macs"] = count_macs(model, images[:1]).ideal
        half = rows[HALF]["ratio"]
        nearest = min(layers, key=lambda name: abs(rows[name]["ratio"] - half))
        self.report["fewer_layers"] = layers[nearest]
        rows[FEWER] = rows[nearest]
        self.report["times"] = rows

    def steps_of(self, model):
        """Return the training steps of a run."""
        if model == "dense":
            return STEPS
        architecture = architecture_of(model)
        if architecture in CONVERSIONS:
            return TUNED
        times = self.report["times"]
        step = times[architecture]["ratio"]
        if TAUGHT in model:
            step += TEACHER  # a pass of the dense model
        compute = STEPS + TUNED * (times[HALF]["ratio"] + TEACHER)  # in steps of the dense model
        return round(compute / step)

    def options_of(self, model, seed):
        """Return what a run's options add to the configuration's."""
        dense = self.run_of("dense", seed)
        architecture = architecture_of(model)
        if architecture in CONVERSIONS:
            shares = CONVERSIONS[architecture]
            options = conversion_of(dense)
            shape = "uniform:{}"
            if model.endswith(FIXED):
                # All but one are shared, and without the balance loss nothing trains the router of a single one.
                shape = "uniform:{}:0.9"
                options += UNBALANCED
            options += ["--model.head_budget", shape.format(shares.heads)]
            if shares.groups is not None:
                options += ["--model.mlp_budget", shape.format(shares.groups)]
            options += ["--optim.lr", LR, "--optim.warmup_epochs", 0.05, "--calibrate-images", 512]
        else:
            options = DENSE.split()
        if architecture == FEWER:
            options += ["--model.depth", self.report["fewer_layers"]]
        if TAUGHT in model:
            options += ["--distill.teacher", dense]
        return options

    def train(self, model, seed):
        """Train a model; keep its top-1 of the test images in the report."""
        scores = self.report["top1"].setdefault(model, {})
        run = self.run_of(model, seed)
        # Fine-tunings read the dense run, which may be scored and gone.
        if str(seed) in scores and (model != "dense" or run.exists()):
            return
        if not (run / "results.json").exists():
            options = ["--config", CONFIG, "--data.root", self.root, "--output", run]
            # Without epochs the learning rate falls to 0 at the last step.
            options += [
                "--seed",
                seed,
                "--optim.epochs",
                "null",
                "--max-steps",
                self.steps_of(model),
            ]
            call(SCRIPTS / "train_cls.py", [*options, *self.options_of(model, seed)])
        scores[str(seed)] = json.loads((run / "results.json").read_text())["top1"]

    def train_all(self, models, seeds, jobs):
        """Train what the report lacks: the dense models first."""
        lacking = {
            seed
            for seed in seeds
            if any(str(seed) not in self.report["top1"].get(model, {}) for model in models)
        }
        for names in (["dense"], [model for model in models if model != "dense"]):
            pairs = [(model, seed) for seed in sorted(lacking) for model in names]
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(lambda pair: self.train(*pair), pairs))


def table(report):
    """Write a row a model: layers, steps, time, top-1."""
    study = Study("", Path(), report)
    rows = []
    for model in MODELS:
        by_seed = report["top1"].get(model)
        if not by_seed:
            continue
        architecture = architecture_of(model)
        label = model
        if architecture == FEWER:
            label += f" ({report['fewer_layers']})"
        time = report["times"][architecture]
        row = [label, str(len(by_seed)), str(study.steps_of(model)), f"{time['macs'] / 1e6:.1f}"]
        row.append(f"{time['ratio']:.2f}")
        rows.append([*row, with_spread(list(by_seed.values()), 2)])
    columns = ["ViT, CIFAR-10", "seeds", "training steps", "MACs, M", "time over dense", "top-1, %"]
    return f"{about_machine(report)}\n\n{markdown(columns, rows)}"


def main():
    parser = parser_of(__doc__, "vit_quality")
    parser.add_argument("--root", help="of the data")
    parser.add_argument("--folder", type=Path, default=Path("runs/vit_quality"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default: 2")
    args = parser.parse_args()
    report = new_report(times={}, fewer_layers=None, top1={})
    if args.output.exists():
        report |= json.loads(args.output.read_text())
    if not args.table:
        if args.root is None:
            parser.error("--root or --table is needed")
        study = Study(args.root, args.folder, report)
        args.folder.mkdir(parents=True, exist_ok=True)
        try:
            study.time()
            study.train_all(args.models, args.seeds, args.jobs)
        finally:
            write_report(args.output, report)
    print(table(report), end="")


if __name__ == "__main__":
    sys.exit(main())
