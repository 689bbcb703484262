"""Top-1 of dense classifiers that are converted without training, by how their heads are spread over the layers.

    python benchmarks/converted_budgets.py RUN RUN ... --data.root SHARDS

RUN is a run with `--model.router dense`; several are seeds of one. Each is converted with its strongest heads shared, and searched,
as `python -m moh_vision search` does on 512 training images; then all validation images score the searched budget, the uniform
one and the papers' ramp, of equally many heads and with the same shared ones. Prints Markdown: mean, standard deviation of n - 1.
"""

import argparse
import statistics

import moh_vision
from moh_vision.commands.search import CONVERTED, compare, search_budget
from moh_vision.opening import open_run

IMAGES = 512  # of the search
SHARES = (0.75, 0.5)


def scores(run, rest):
    """(top-1 as trained, {share: {budget: (top-1, active heads per layer)}})"""
    opened, found = open_run(run, options=rest, split="val"), {}

    def top1(model):
        return opened.scores()["top1"]

    dense = top1(opened.model)
    searched, _ = opened.halves(IMAGES)
    calibrate = [opened.inputs(batch) for batch in searched]
    opened.model = moh_vision.convert(opened.model, CONVERTED, calibrate=calibrate)
    for share in SHARES:
        active = search_budget(opened.model, lambda model: opened.mean_loss(searched), share).active
        compared = compare(opened.model, active, top1)
        found[share] = {name: (budget["loss"], budget["active"]) for name, budget in compared.items()}
    return dense, found


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
