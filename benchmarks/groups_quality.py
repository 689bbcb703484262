"""Quality of heads and MLP groups chosen by timestep, at equal sampling time: train, convert, score.

    python benchmarks/groups_quality.py --folder runs/groups_quality                     # digits
    python benchmarks/groups_quality.py --folder runs/groups_quality --cifar10 SHARDS    # digits, then CIFAR-10
    python benchmarks/groups_quality.py --table                                          # Markdown, from the results that are there

For each data set and seed three small DiTs:

    dense        trained for so many steps
    converted    the same, converted and fine-tuned for a tenth of these steps: half of the heads and half of the groups of every MLP
                 run, chosen by the timestep
    narrow       a dense DiT whose width makes its sampling time that of the converted one, trained for as many steps as both
                 of the others together

The width of the narrow model is found by timing: narrower dense models and the converted one (seed 0) denoise in turn.
Scored is the Frechet distance of samples to the test images in the features of a classifier, which is trained first (no FID), and the share of
samples that it recognises. Seed s draws the same noise for all three models.

Every command is printed before it runs; all are those that a user would type. What is finished is not done again: trainings resume,
scored runs (RUN/scores.json) are left as they are, and the width is kept in narrow.json. Grids of samples are RUN/grid.png. Results
go to benchmarks/results/groups_quality.json.
"""

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
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

SCRIPTS = Path(__file__).parents[1]
MODELS = ("dense", "converted", "narrow")
SHARE = 0.5  # of heads and of groups
PART = 10  # the fine-tuning has one step for so many of the dense model's
ROUNDS = (10, 30)
SECONDS = 30.0
NARROWEST = 0.4  # of the dense model's width


class Study(NamedTuple):
    """One data set.

    Attributes:
        config: a configuration of a small DiT, which gets a dense model.
        classifier: a configuration of the classifier that scores.
        root: of the data.
        steps: of the dense model.
        lr: of the fine-tuning.
        images: samples that are scored.
        batch: images of a batch of sampling, also in the timing.
        sampler: options of sample.py.
    """

    config: str
    classifier: str
    root: str
    steps: int
    lr: float
    images: int
    batch: int
    sampler: str


STUDIES = {
    "digits": Study(
        config="quickstart/dit",
        classifier="quickstart/cls",
        root="",
        steps=4000,
        lr=6e-4,
        images=500,
        batch=250,
        sampler="--sampler ddpm --steps 50 --cfg-scale 1.5",
    ),
    "cifar10": Study(
        config="dit/cifar10_small_cpu",
        classifier="cls/cifar10_vit_cpu",
        root="",
        steps=4000,
        lr=3e-4,
        images=2000,
        batch=100,
        sampler="--sampler ddim --steps 50 --cfg-scale 1.5",
    ),
}


def call(script, options, threads):
    """Print and run a script of the repository; end with its code if it fails."""
    words = [script, *map(str, options)]
    print(f"$ python {shlex.join(words)}", flush=True)
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    command = [sys.executable, str(SCRIPTS / script), *words[1:]]
    code = subprocess.call(command, env=environment)
    if code:
        print(f"groups_quality: that command failed with exit code {code}", file=sys.stderr)
        sys.exit(code)


def is_finished(run, steps):
    """Return whether a run has the weights of its last step."""
    weights = run / "model.safetensors"
    return weights.exists() and (run / f"checkpoints/step_{steps}").exists()


class Runs:
    """The runs of one data set in one folder: their commands, and what came out.

    Args:
        name: of the study.
        study: its data and sizes, root included.
        folder: of its runs.
        threads: of every process.
    """

    def __init__(self, name: str, study: Study, folder: Path, threads: int):
        self.name = name
        self.study = study
        self.folder = folder
        self.threads = threads

    def run_of(self, model, seed):
        return self.folder / f"{model}_{seed}"

    def steps_of(self, model):
        """Return the steps of a run."""
        steps = self.study.steps
        fine_tuning = max(1, steps // PART)
        return dict(dense=steps, converted=fine_tuning, narrow=steps + fine_tuning)[model]

    def classify(self, classifier):
        """Return the classifier: the caller's, or one that is trained now."""
        if classifier is not None:
            return classifier
        run = self.folder / "classifier"
        if not (run / "results.json").exists():
            self.train("train_cls.py", self.study.classifier, run, [])
        return run

    def train(self, script, config, run, options):
        data = ["--data.root", self.study.root]
        call(script, ["--config", config, *data, "--output", run, *options], self.threads)

    def train_model(self, model, seed, width=None):
        """Train one of MODELS; a training that was stopped resumes."""
        run = self.run_of(model, seed)
        steps = self.steps_of(model)
        if is_finished(run, steps):
            return
        options = ["--max-steps", steps, "--seed", seed]
        if steps <= 100:  # a trial
            options += ["--optim.warmup_steps", 1]
        if model == "converted":
            convert = "{router: moh, scope: sample}"
            options += [
                "--model.name",
                "pretrained",
                "--model.pretrained",
                self.run_of("dense", seed),
            ]
            options += ["--model.convert", convert, "--model.kwargs.route_by", "timestep"]
            options += ["--model.head_budget", SHARE, "--model.mlp_budget", SHARE]
            options += ["--optim.lr", self.study.lr, "--calibrate-images", 512]
        else:
            options += ["--model.name", "dit_small_patch2"]
        if width is not None:
            options += ["--model.embed_dim", width]
        self.train("train_dit.py", self.study.config, run, options)

    def score(self, model, seed, classifier):
        """Draw and score samples of a run; return its scores."""
        run = self.run_of(model, seed)
        scores = run / "scores.json"
        if not scores.exists():
            study = self.study
            options = ["--checkpoint", run, "--num-images", study.images, "--seed", seed]
            options += ["--batch-size", study.batch, *study.sampler.split()]
            options += ["--grid", run / "grid.png", "--overwrite", "true"]
            options += ["--score", study.root, "--extractor", classifier]
            call("sample.py", options, self.threads)
        return json.loads(scores.read_text())

    def denoising_steps(self, models):
        """Return {name: function that denoises a batch by one step}, without guidance, for the timing."""
        config = next(iter(models.values())).config
        size = (self.study.batch, config.in_channels, config.sample_size, config.sample_size)
        x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(self.study.batch) % config.num_classes
        timestep = torch.tensor([500])  # one for the batch, as in sampling
        steps = {}
        for name, model in models.items():
            model.eval()

            @torch.no_grad()
            def step(model=model):
                model(x, timestep, labels)

            steps[name] = step
        routed = models.get("converted")
        if routed is not None:
            moh_vision.measure(routed, x, timestep, labels)  # as sample.py does
        return steps

    def find_width(self):
        """Return the width of the narrow model: that of the dense one whose time is nearest to the converted model's."""
        file = self.folder / "narrow.json"
        if file.exists():
            return json.loads(file.read_text())["width"]
        dense = moh_vision.load_run(self.run_of("dense", 0))
        converted = moh_vision.load_run(self.run_of("converted", 0))
        models = {"converted": converted}
        whole = dense.config.hidden_size
        unit = math.lcm(4, dense.blocks[0].attn.num_heads)  # positions need multiples of 4
        for width in range(unit, whole, unit):
            if width >= NARROWEST * whole:
                models[width] = type(dense).from_config({**dense.config, "hidden_size": width})
        times = interleaved(self.denoising_steps(models), ROUNDS, SECONDS)
        rows = to_base(times, "converted")
        ratios = {width: row["ratio"] for width, row in rows.items() if width != "converted"}
        width = min(ratios, key=lambda candidate: abs(ratios[candidate] - 1))
        print(f"widths, time over the converted model: {ratios}; taken: {width}", flush=True)
        file.write_text(json.dumps(dict(width=width, ratios=ratios)))
        return width

    def times(self):
        """Return rows of `to_base` for the three models of seed 0, over the dense one."""
        models = {name: moh_vision.load_run(self.run_of(name, 0)) for name in MODELS}
        return to_base(interleaved(self.denoising_steps(models), ROUNDS, SECONDS))


def study_of(runs, seeds, classifier):
    """Train, time and score all runs of a data set; return its entry of the report."""
    classifier = runs.classify(classifier)
    for seed in range(seeds):
        runs.train_model("dense", seed)
        runs.train_model("converted", seed)
    width = runs.find_width()
    for seed in range(seeds):
        runs.train_model("narrow", seed, width)
    scores = {name: [] for name in MODELS}
    for name in MODELS:
        for seed in range(seeds):
            found = runs.score(name, seed, classifier)
            kept = {key: found[key] for key in ("frechet_distance", "recognised")}
            scores[name].append(dict(seed=seed, **kept))
    parameters = {}
    for name in MODELS:
        model = moh_vision.load_run(runs.run_of(name, 0))
        parameters[name] = sum(p.numel() for p in model.parameters())
    return dict(
        config=runs.study.config,
        steps={name: runs.steps_of(name) for name in MODELS},
        width=width,
        images=runs.study.images,
        batch=runs.study.batch,
        sampler=runs.study.sampler,
        parameters=parameters,
        times=runs.times(),
        scores=scores,
    )


def mean_and_spread(values, digits=2):
    """Write mean and standard deviation; "-" where a score is missing."""
    if None in values:
        return "-"
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text


def tables(report):
    """Write one table: a row for each data set and model."""
    columns = ["data, model", "steps", "parameters", "ms of a step", "over dense"]
    columns += ["Frechet distance", "recognised, %"]
    rows = []
    for data, entry in report["studies"].items():
        for name in MODELS:
            time = entry["times"][name]
            scores = entry["scores"][name]
            label = f"{data}, {name}"
            if name == "narrow":
                label += f" (width {entry['width']})"
            distances = [row["frechet_distance"] for row in scores]
            recognised = [100 * row["recognised"] for row in scores]
            rows.append(
                [
                    label,
                    str(entry["steps"][name]),
                    f"{entry['parameters'][name]:,}",
                    f"{time['milliseconds']:.1f}",
                    f"{time['ratio']:.2f}",
                    mean_and_spread(distances),
                    mean_and_spread(recognised, 1),
                ]
            )
    return f"{about_machine(report)}\n\n{markdown(columns, rows)}"


def main():
    parser = parser_of(__doc__, "groups_quality")
    parser.add_argument("--folder", type=Path, default=Path("runs/groups_quality"))
    parser.add_argument("--cifar10", help="shards of CIFAR-10; left out: digits alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of the dense models; default: 4000")
    parser.add_argument("--images", type=int, help="samples of each run; default: 500 and 2000")
    parser.add_argument(
        "--classifier", type=Path, help="a classifier of the data; default: trained"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(args.output.read_text())), end="")
        return

    torch.set_num_threads(args.threads)
    report = new_report(threads=args.threads, studies={})
    roots = {"digits": "digits"}
    if args.cifar10:
        roots["cifar10"] = args.cifar10
    for name, root in roots.items():
        study = STUDIES[name]._replace(root=root)
        if args.steps:
            study = study._replace(steps=args.steps)
        if args.images:
            study = study._replace(images=args.images)
        folder = args.folder / f"{name}_{study.steps}"
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(name, study, folder, args.threads)
        report["studies"][name] = study_of(runs, args.seeds, args.classifier)
        write_report(args.output, report)
    print(tables(report), end="")


if __name__ == "__main__":
    sys.exit(main())
