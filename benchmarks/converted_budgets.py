"""Top-1 of dense classifiers that are converted without training, by how their heads are spread over the layers.

    python benchmarks/converted_budgets.py RUN RUN ... --data.root SHARDS

RUN is a run with `--model.router dense`; several are seeds of one. Each is converted with its strongest heads shared, and searched,
as `moh_vision.commands.search` does on 512 training images; then all validation images score the searched budget, the uniform
one and the papers' ramp, of equally many heads and with the same shared ones. Prints Markdown: mean, standard deviation of n - 1.
"""

import argparse
import statistics

from moh_vision.classification.calibration import open_calibration

from moh_vision.classification.config import OpenedClsConfig
from moh_vision.classification.task import ClassificationTask
from moh_vision.classification.validate import open_model, validate
from moh_vision.commands.search import compare, search_budget
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.run import make_accelerator

IMAGES = 512  # of the search
SHARES = (0.75, 0.5)


def scores(run, rest):
    """(top-1 as trained, {share: {budget: (top-1, active heads per layer)}})"""
    argv = ["--checkpoint", run, *rest]
    config = parse_config(OpenedClsConfig, argv, "search")
    accelerator = make_accelerator(config.mixed_precision, config.tf32)
    dense, _, val, transform = open_model(config, accelerator, "val")

    def top1(model):
        return validate(ClassificationTask(model, 0.0), val, transform, config.data, accelerator)[0]["top1"]

    opened, found = open_calibration(argv, IMAGES), {}
    for share in SHARES:
        active = search_budget(opened.model, opened.loss_of, share).active
        compared = compare(opened.model, active, top1)
        found[share] = {name: (budget["loss"], budget["active"]) for name, budget in compared.items()}
    return top1(dense), found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    options, rest = parser.parse_known_args()
    dense, found = zip(*(scores(run, rest) for run in options.runs))
    print(f"Dense: {shown(dense)}\n")
    print("| active heads | budget | top-1, % | active heads per layer |\n|---|---|---:|---|")
    for share in SHARES:
        for name in found[0][share]:
            top1, active = zip(*(seed[share][name] for seed in found))
            layers = ", ".join(dict.fromkeys(" ".join(map(str, a)) for a in active))
            print(f"| {100 * share:g} % | {name} | {shown(top1)} | {layers} |")


def shown(values):
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
