"""Quality over sampling time: a dense DiT, its conversions to half of the heads and MLP groups, and dense opponents.

    python benchmarks/conversion_quality.py --study digits --seeds 0 1 2
    python benchmarks/conversion_quality.py --study cifar10 --root SHARDS --seeds 0 --models dense teacher shallow
    python benchmarks/conversion_quality.py --table                    # Markdown, from the results that are there
    python benchmarks/conversion_quality.py --picture quality.png      # quality over time, one panel a study

For each seed a dense DiT is trained, converted and fine-tuned: half of the heads and half of the groups of every MLP run, chosen by
the timestep (RECIPES says how the fine-tunings differ). Its opponents are dense:

    shallow     fewer layers, as many as come nearest to the converted model's time
    narrow      as many layers, of the width that comes nearest to its time
    one block   one layer
    dense       the dense model itself, by fewer steps of the sampler

The opponents have the compute of the dense training and of a fine-tuning for a tenth of its steps, the teacher's passes included, and
so more steps than both, because their steps take less time. Every model is scored at several numbers of sampling steps:
by the Frechet distance of its samples to the test images in the features of a classifier, which is trained first (no FID), and by the
share of samples that it recognises. Seed s draws the same noise for all models.

Each command is printed before it runs; all are those that a user would type. What is finished is not done again: trainings resume,
and what the report holds is not measured again, also if --folder is another one, as long as its classifier is the same. Two runs
go on at a time (--jobs), each on one thread; times are measured at the end, when nothing else runs.
Results: benchmarks/results/conversion_quality.json.
"""

import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from timing import (
    about_machine,
    interleaved,
    machine,
    markdown,
    new_report,
    parser_of,
    to_base,
    write_report,
)

import moh_vision
from moh_vision.attention import attention_layers
from moh_vision.commands.sampling_curve import with_spread

SCRIPTS = Path(__file__).parents[1]
SHARE = 0.5  # of heads and of groups
PART = 10  # a fine-tuning has one step for so many of the dense model's, if its recipe says nothing else
TEACHER = 1 / 3  # a forward pass of the teacher, in training steps
ROUNDS = (10, 30)
SECONDS = 30.0
OPPONENTS = ("shallow", "narrow", "one block")


class Recipe(NamedTuple):
    """A fine-tuning of the converted model.

    Attributes:
        part: it has one step for so many of the dense model's.
        options: of train_dit.py.
        searched: take the budgets of heads and groups that the command search finds in the plain conversion.
    """

    part: float = PART
    options: tuple[str, ...] = ()
    searched: bool = False


TAUGHT = ("--distill.teacher", "source")
# The balance loss spreads tokens over all heads, the weak ones too.
UNBALANCED = ("--balance_weight", "0")
# All but one part of each layer are shared, and without the balance loss nothing trains the router of a single one: the strongest
# parts run, always.
FIXED = (
    *UNBALANCED,
    "--model.head_budget",
    "uniform:0.5:0.9",
    "--model.mlp_budget",
    "uniform:0.5:0.9",
)
RECIPES = {
    "plain": Recipe(),
    "teacher": Recipe(options=TAUGHT),
    "teacher, no balance": Recipe(options=(*TAUGHT, *UNBALANCED)),
    "teacher, fixed": Recipe(options=(*TAUGHT, *FIXED)),
    "searched": Recipe(searched=True),
    "searched, teacher": Recipe(options=TAUGHT, searched=True),
    "5 % of the steps": Recipe(part=20, options=TAUGHT),
    "20 % of the steps": Recipe(part=5, options=TAUGHT),
    "50 % of the steps": Recipe(part=2, options=TAUGHT),
}
MODELS = ("dense", *RECIPES, *OPPONENTS)


class Study(NamedTuple):
    """One data set.

    Attributes:
        options: of train_dit.py for the dense model, its configuration included.
        classifier: options of train_cls.py for the classifier that scores.
        steps: of the dense model.
        lr: of the fine-tunings.
        images: samples that are scored.
        batch: images of a batch of sampling, also in the timing.
        sampler: options of sample.py.
        sampling_steps: numbers of steps.
        passes: of the network, at so many sampling steps.
    """

    options: str
    classifier: str
    steps: int
    lr: float
    images: int
    batch: int
    sampler: str
    sampling_steps: tuple[int, ...]
    passes: tuple[int, ...]


# The training of a dense classifier ends with the same bits on one kind of machine, and its scores add up over sessions; that of an
# MoH model depends on what was measured to be fast.
DENSE = " --model.router dense --model.head_budget null"
STUDIES = {
    "digits": Study(
        options="--config quickstart/dit --model.name dit_small_patch2",
        classifier="--config quickstart/cls" + DENSE,
        steps=1500,
        lr=6e-4,
        images=500,
        batch=250,
        sampler="--sampler dpm-solver++ --cfg-scale 1.5",
        sampling_steps=(5, 10, 20, 40),
        passes=(5, 10, 20, 40),
    ),
    # The network of dit/own_pictures, smaller, and without SwiGLU, which has no groups.
    "cifar10": Study(
        options="--config dit/own_pictures --model.name dit_small_patch2 --model.depth 4 --model.embed_dim 96 "
        "--model.num_heads 6 --model.kwargs.swiglu_mlp false --preview.every 0 --optim.warmup_steps 100",
        classifier="--config cls/cifar10_vit_cpu" + DENSE,
        steps=3000,
        lr=3e-4,
        images=1000,
        batch=100,
        sampler="--sampler heun --cfg-scale 1.5",
        sampling_steps=(4, 8, 16),
        passes=(7, 15, 31),
    ),
}


def call(script, options):
    """Print and run a script of the repository or a command of the package on one thread; end with its code if it fails."""
    words = [str(script), *map(str, options)]
    print(f"$ python {shlex.join(words)}", flush=True)
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(SCRIPTS))
    result = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True
    )
    if result.returncode:
        print(result.stdout[-2000:], result.stderr[-2000:], file=sys.stderr)
        raise SystemExit(f"that command failed with exit code {result.returncode}")


def conversion_of(source):
    """Return the options that start a run from the conversion of a dense run, whose choice is one of a sequence."""
    options = ["--model.name", "pretrained", "--model.pretrained", source]
    for name in ("embed_dim", "depth", "num_heads", "patch_size", "kwargs"):
        options += [f"--model.{name}", "null"]  # the source says them
    return [*options, "--model.convert", "{router: moh, scope: sample}"]


def sha256_of(classifier):
    """Return the SHA-256 of a classifier's weights: distances in the features of two trainings cannot be compared."""
    return hashlib.sha256((classifier / "model.safetensors").read_bytes()).hexdigest()


def refuse_scores_of_another(classifier, entry):
    """Note in a study's entry which classifier scores; end if the scores that it has are of another one."""
    sha256 = sha256_of(classifier)
    if entry["scores"] and entry.get("classifier") != sha256:
        raise SystemExit(
            f"the report's scores are of a classifier with SHA-256 {entry.get('classifier')}, not of {classifier} with {sha256}: "
            '--output another file, or empty "scores" of the study in this one'
        )
    entry["classifier"] = sha256


def refuse_other_sizes(study, entry):
    """Note in a study's entry its steps and images; end if what it holds is of other numbers of them."""
    sizes = dict(steps=study.steps, images=study.images)
    if (entry["scores"] or "opponents" in entry) and entry["sizes"] != sizes:
        raise SystemExit(
            f"the report's scores and opponents are of {entry['sizes']}, not of {sizes}: --output another file"
        )
    entry["sizes"] = sizes


class Runs:
    """The runs of a study in one folder: their commands, and what came out.

    Args:
        study: its data and sizes.
        root: of the data.
        folder: of its runs.
        entry: of the study in the report, which gets what is measured.
    """

    def __init__(self, study: Study, root: str, folder: Path, entry: dict):
        self.study = study
        self.root = root
        self.folder = folder
        self.entry = entry

    def run_of(self, model, seed):
        return (
            self.folder
            / f"{model.replace(' ', '_').replace(',', '').replace('%', 'percent')}_{seed}"
        )

    def steps_of(self, model):
        """Return the steps of a run."""
        if model in OPPONENTS:
            return self.entry["opponents"][model]["steps"]
        steps = self.study.steps
        if model in RECIPES:
            steps = max(1, round(steps / RECIPES[model].part))
        return steps

    def classifier(self):
        """Return the classifier that scores; train it if it is not there."""
        run = self.folder / "classifier"
        if not (run / "results.json").exists():
            options = self.study.classifier.split()
            call(SCRIPTS / "train_cls.py", [*options, "--data.root", self.root, "--output", run])
        return run

    def options_of(self, model, seed):
        """Return what a run's options add to the study's."""
        if model in OPPONENTS:
            return self.entry["opponents"][model]["options"].split()
        if model == "dense":
            return []
        recipe = RECIPES[model]
        options = conversion_of(self.run_of("dense", seed))
        options += ["--model.kwargs", "{route_by: timestep}"]
        if recipe.searched:
            for key, name in (("head_budget", "share"), ("mlp_budget", "mlp-share")):
                options += [f"--model.{key}", self.searched(name, seed)]
        else:
            options += ["--model.head_budget", SHARE, "--model.mlp_budget", SHARE]
        return [*options, "--optim.lr", self.study.lr, "--calibrate-images", 512, *recipe.options]

    def searched(self, share, seed):
        """Return the budget that the command search finds in the plain conversion."""
        plain = self.run_of("plain", seed)
        file = plain / f"{share}.yaml"
        if not file.exists():
            options = ["search", plain, f"--{share}", SHARE, "--output", file]
            call("-m", ["moh_vision", *options])
        return file.read_text()

    def train(self, model, seed):
        """Train a model; a training that was stopped resumes."""
        run = self.run_of(model, seed)
        steps = self.steps_of(model)
        if (run / "model.safetensors").exists() and (run / f"checkpoints/step_{steps}").exists():
            return
        data = ["--data.root", self.root]
        options = [*self.study.options.split(), *data, "--output", run, "--seed", seed]
        options += ["--max-steps", steps, *self.options_of(model, seed)]
        if steps <= 100:  # a trial
            options += ["--optim.warmup_steps", 1]
        call(SCRIPTS / "train_dit.py", options)

    def score(self, model, seed):
        """Score a run at every number of sampling steps; keep the scores in the report."""
        study = self.study
        run = self.run_of(model, seed)
        figure = run / f"curve_{sha256_of(self.classifier())[:8]}.png"
        if not figure.exists():
            options = ["sampling-curve", run, "--over", "steps", *study.sampling_steps]
            options += ["--output", figure, "--noises", 1, "--seed", seed]
            options += ["--num-images", study.images, "--batch-size", study.batch]
            options += [*study.sampler.split(), "--score", self.root]
            call("-m", ["moh_vision", *options, "--extractor", self.classifier()])
        [line] = json.loads(figure.with_suffix(".json").read_text())["lines"]
        scores = {
            name: [values[0] for values in line["scores"][name]]
            for name in ("frechet_distance", "recognised")
        }
        last = (run / "metrics.jsonl").read_text().splitlines()[-1]
        scores["mse"] = json.loads(last).get("mse")
        self.entry["scores"].setdefault(model, {})[str(seed)] = scores

    def lacks(self, model, seed):
        """Say whether the report has no scores of a run."""
        return str(seed) not in self.entry["scores"].get(model, {})

    def train_and_score(self, model, seed):
        """Train and score a model, unless the report has its scores already."""
        if self.lacks(model, seed):
            self.train(model, seed)
            self.score(model, seed)

    def guided_steps(self, models):
        """Return {name: function that denoises a batch by one guided step}, for the timing."""
        config = next(iter(models.values())).config
        batch = 2 * self.study.batch  # with and without the class
        x = torch.randn(batch, config.in_channels, config.sample_size, config.sample_size)
        labels = torch.arange(batch) % config.num_classes
        timestep = torch.tensor([500])  # one for the batch, as in sampling
        steps = {}
        for name, model in models.items():
            model.eval()

            @torch.no_grad()
            def step(model=model):
                model(x, timestep, labels)

            steps[name] = step
            if attention_layers(model)[0].scope == "sample":
                moh_vision.measure(model, x, timestep, labels)  # as sample.py does
        return steps

    def size_opponents(self):
        """Choose the dense opponents by timing: the depth and the width whose time is nearest to the converted model's."""
        if self.entry.get("opponents", {}).keys() >= set(OPPONENTS):
            return
        # One step of training is enough: the shares are fixed, and with them the time.
        trial = Runs(self.study._replace(steps=1), self.root, self.folder / "trial", self.entry)
        for name in ("dense", "plain"):
            trial.train(name, 0)
        dense = moh_vision.load_run(trial.run_of("dense", 0))
        models = {"dense": dense, "converted": moh_vision.load_run(trial.run_of("plain", 0))}
        made = {}

        def try_size(name, size, option, **changed):
            made[f"{name} {size}"] = option
            models[f"{name} {size}"] = type(dense).from_config({**dense.config, **changed})

        depth = len(dense.blocks)
        for layers in range(1, depth):
            option = f"--model.depth {layers}"
            changed = dict(num_layers=layers)
            if dense.config.class_tokens:  # they come after as large a part of the blocks
                start = dense.config.class_tokens_start * layers // depth
                option += f" --model.kwargs.class_tokens_start {start}"
                changed["class_tokens_start"] = start
            try_size("shallow", layers, option, **changed)
        heads = dense.blocks[0].attn.num_heads
        # Positions need multiples of 4, rotary ones in each head.
        unit = 4 * heads if dense.config.use_rot_pos_emb else math.lcm(4, heads)
        width = dense.config.hidden_size
        for narrower in range(unit, width, unit):
            if narrower >= 0.4 * width:
                option = f"--model.embed_dim {narrower}"
                try_size("narrow", narrower, option, hidden_size=narrower)
        rows = to_base(interleaved(self.guided_steps(models), ROUNDS, SECONDS))
        converted = rows["converted"]["ratio"]
        longest = max(
            self.study.steps / recipe.part for recipe in RECIPES.values() if recipe.part >= PART
        )
        compute = self.study.steps + longest * (converted + TEACHER)  # in steps of the dense model
        opponents = {}
        for name in OPPONENTS:
            sizes = [size for size in made if size.startswith(name)]
            if name == "one block":
                sizes = ["shallow 1"]
            nearest = min(sizes, key=lambda size: abs(rows[size]["ratio"] - converted))
            steps = round(compute / rows[nearest]["ratio"])
            opponents[name] = dict(options=made[nearest], steps=steps, ratio=rows[nearest]["ratio"])
        self.entry["opponents"] = opponents
        print(f"converted: {converted} of the time; opponents: {opponents}", flush=True)

    def time(self, seed):
        """Time a guided step of the models that a seed has, interleaved, over that of the dense one."""
        models = {}
        for name in MODELS:
            run = self.run_of(name, seed)
            if time_key(name) == name and (run / "model.safetensors").exists():
                models[name] = moh_vision.load_run(run)
        self.entry["times"] |= to_base(interleaved(self.guided_steps(models), ROUNDS, SECONDS))
        self.entry["machine"] = machine()


def study_of(runs, models, seeds, jobs):
    """Train, score and time what the report lacks."""
    if any(name in OPPONENTS for name in models):
        runs.size_opponents()  # first of all: nothing else runs yet
    refuse_scores_of_another(runs.classifier(), runs.entry)

    def at_once(function, names, seeds=seeds):
        pairs = [(name, seed) for seed in seeds for name in names]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda pair: function(*pair), pairs))

    recipes = [name for name in models if name in RECIPES]
    # Fine-tunings read the dense run, searched ones the plain conversion's too, which may be scored and gone.
    tuned = {seed for seed in seeds if any(runs.lacks(name, seed) for name in recipes)}
    searched = [name for name in recipes if RECIPES[name].searched]
    of_plain = {seed for seed in seeds if any(runs.lacks(name, seed) for name in searched)}
    # Times are those of the first seed.
    at_once(runs.train, ["dense"], {*tuned, seeds[0]})
    at_once(runs.train, ["plain"], {*of_plain, seeds[0]})
    at_once(runs.train_and_score, models)
    runs.time(seeds[0])


def time_key(model):
    """Return the model that is timed for a model: conversions at one budget are one architecture."""
    if model in RECIPES and not RECIPES[model].searched:
        return "plain"
    return model


def time_of(model, entry):
    """Return the times of a model's step, or None."""
    return entry["times"].get(time_key(model))


def compute_of(model, entry):
    """Return the compute of all training of a model, in training steps of the dense one; None: a time is missing."""
    steps = entry["steps"][model]
    time = time_of(model, entry)
    if time is None:
        return None
    compute = steps * time["ratio"]
    if model in RECIPES:
        compute += entry["steps"]["dense"]
        if "--distill.teacher" in RECIPES[model].options:
            compute += steps * TEACHER
    return round(compute)


def scored(report):
    """Return the entries of the studies that have scores; others may have their opponents' sizes alone."""
    return {name: entry for name, entry in report["studies"].items() if entry["scores"]}


def tables(report):
    """Write a table of every study: a row a model, a column of distances a number of sampling steps."""
    written = []
    for name, entry in scored(report).items():
        study = STUDIES[name]
        columns = [name, "seeds", "training steps", "compute, dense steps", "step over dense"]
        columns += [f"{steps} steps" for steps in study.sampling_steps]
        columns.append("recognised, %")
        rows = []
        for model in MODELS:
            by_seed = entry["scores"].get(model)
            if not by_seed:
                continue
            distances = zip(*(scores["frechet_distance"] for scores in by_seed.values()))
            recognised = [scores["recognised"][-1] for scores in by_seed.values()]
            time = time_of(model, entry)
            label = model
            if model in OPPONENTS:
                label += f" ({entry['opponents'][model]['options'].replace('--model.', '')})"
            steps = entry["steps"][model]
            row = [label, str(len(by_seed)), str(steps), str(compute_of(model, entry) or "-")]
            row.append(f"{time['ratio']:.2f}" if time else "-")
            row += [with_spread(values) for values in distances]
            rows.append([*row, with_spread(recognised, 1)])
        written += [about_machine(entry), markdown(columns, rows)]
    return "\n\n".join(written)


def picture(report, path):
    """Draw the distance over the sampling time of an image, one panel a study."""
    from moh_vision.commands.figures import Line, add_legend, plot_lines, plt

    studies = scored(report)
    figure, panels = plt.subplots(
        1, len(studies), figsize=(5.6 * len(studies), 4.2), layout="constrained", squeeze=False
    )
    for axes, (name, entry) in zip(panels[0], studies.items()):
        study = STUDIES[name]
        lines = []
        for model in MODELS:
            by_seed = entry["scores"].get(model)
            time = time_of(model, entry)
            if not by_seed or not time:
                continue
            milliseconds = [passes * time["milliseconds"] / study.batch for passes in study.passes]
            distances = zip(*(scores["frechet_distance"] for scores in by_seed.values()))
            seeds = "1 seed" if len(by_seed) == 1 else f"{len(by_seed)} seeds"
            by_time = dict(zip(milliseconds, map(list, distances)))
            lines.append(Line(f"{model}, {seeds}", by_time))
        plot_lines(axes, lines)
        axes.set_xlabel("ms an image")
        axes.set_ylabel("Frechet distance")
        axes.set_title(name)
        add_legend(figure, axes)
    figure.savefig(path, dpi=130)


def main():
    parser = parser_of(__doc__, "conversion_quality")
    parser.add_argument("--study", choices=STUDIES)
    parser.add_argument("--root", default="digits", help="data of the study; default: digits")
    parser.add_argument("--folder", type=Path, default=Path("runs/conversion_quality"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of the dense models; default: the study's")
    parser.add_argument("--images", type=int, help="samples of each run; default: the study's")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default: 2")
    parser.add_argument("--picture", type=Path, help="only draw what is in --output")
    args = parser.parse_args()
    report = new_report(studies={})
    if args.output.exists():
        report["studies"] = json.loads(args.output.read_text())["studies"]
    if args.table:
        print(tables(json.loads(args.output.read_text())), end="")
    elif args.picture:
        picture(report, args.picture)
    elif args.study is None:
        parser.error("--study, --table or --picture is needed")
    else:
        study = STUDIES[args.study]
        study = study._replace(steps=args.steps or study.steps, images=args.images or study.images)
        entry = report["studies"].setdefault(args.study, dict(scores={}, times={}))
        runs = Runs(study, args.root, args.folder / args.study, entry)
        runs.folder.mkdir(parents=True, exist_ok=True)
        refuse_other_sizes(study, entry)
        try:
            study_of(runs, args.models, args.seeds, args.jobs)
        finally:
            entry["steps"] = {name: runs.steps_of(name) for name in entry["scores"]}
            write_report(args.output, report)
        print(tables(report), end="")


if __name__ == "__main__":
    sys.exit(main())
