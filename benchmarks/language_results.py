"""Tables of small language runs, one row a model, mean and spread over seeds, with the papers' figures beside.

    python benchmarks/language_results.py RUNS [--curves curves.png]

RUNS is a folder with runs of train_text.py named TASK_MODEL_SEED: mt_base_0, mt_mae_7_0, clm_uni_mae_7_1, mlm_8K8E128D_0, ...
Runs that have not ended are left out, and named. docs/results/language.md says how they were made.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

# Peng 2020, tables 1 and 4 (UNI-MAE-7, NoBCD: section 4.2); Zhang 2022, tables 1 and 2: WMT14 EN-DE, WikiText-103.
PAPER = {
    ("mt", "base"): "27.6", ("mt", "uni_mae_7"): "27.7", ("mt", "nobcd"): "27.5", ("mt", "mae_7"): "28.4",
    ("mt", "moa"): "28.4 (8K8E128D)",
    ("clm", "base"): "19.03", ("clm", "uni_mae_7"): "19.26", ("clm", "nobcd"): "19.12", ("clm", "mae_7"): "18.71",
    ("mlm", "base"): "4.95", ("mlm", "8K8E128D"): "4.82", ("mlm", "8K16E256D"): "4.48",
}  # fmt: skip
# Peng 2020, table 5: one expert a layer instead of the mixture, BLEU on WMT14's dev set.
PAPER_DROP = {"uni_mae_7": "26.6 to 25.8 (random)", "nobcd": "26.7 to 26.0", "mae_7": "27.1 to 26.8"}
PAPER_ENTROPY = {"nobcd": "2.02", "mae_7": "1.91"}  # mean over the encoder's layers


def read_runs(folder):
    """{(task, model): {seed: results}}"""
    found = defaultdict(dict)
    for run in sorted(p for p in Path(folder).iterdir() if p.is_dir() and p.name[0] != "."):
        task, _, rest = run.name.partition("_")
        model, _, seed = rest.rpartition("_")
        if not (run / "results.json").is_file():
            print(f"{run.name}: not ended, left out", file=sys.stderr)
            continue
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        results = json.loads((run / "results.json").read_text())
        results["speed"] = statistics.median(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
        found[task, model][int(seed)] = results
    return found


def spread(values, digits=2):
    """Mean, and each value behind it where there are several."""
    values = [v for v in values if v is not None]
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({', '.join(f'{v:.{digits}f}' for v in values)})"


def translation(found):
    print(
        "| | BLEU | test perplexity | mean gate entropy of the encoder | one expert a layer, BLEU | paper: BLEU | entropy | one expert |"
    )
    print("|---|---|---|---|---|---|---|---|")  # fmt: skip
    for (task, model), seeds in found.items():
        if task != "mt":
            continue
        runs = list(seeds.values())

        def score(mode, runs=runs):
            return [r["bleu"][mode]["bleu"]["bleu"] if mode in r["bleu"] else None for r in runs]

        one = "; ".join(f"{mode} {spread(score(mode), 1)}" for mode in ("argmax", "random") if any(score(mode)))
        gates = [[e for name, e in r.get("gate_entropy", {}).items() if name.startswith("encoder")] for r in runs]
        entropy = spread([statistics.mean(g) if g else None for g in gates])
        values = [spread(score("soft"), 1), spread([r["test"]["perplexity"] for r in runs]), entropy, one]
        values += [PAPER.get((task, model), ""), PAPER_ENTROPY.get(model, ""), PAPER_DROP.get(model, "")]
        print(f"| {model} | " + " | ".join(values) + " |")


def perplexities(found, task):
    print("| | test perplexity | paper |")
    print("|---|---|---|")
    for (kind, model), seeds in found.items():
        if kind == task:
            values = spread([r["validation"]["perplexity"] for r in seeds.values()])
            print(f"| {model} | {values} | {PAPER.get((task, model), '')} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--curves", type=Path, help="PNG of MAE's figure 3: losses of base, nobcd and mae_7, seed 0")
    args = parser.parse_args()
    found = read_runs(args.runs)
    translation(found)
    for task in ("clm", "mlm"):
        print()
        perplexities(found, task)
    if args.curves:
        from moh_vision.analysis.gate_figures import draw_learning_curves

        runs = {name: args.runs / f"mt_{name}_0" / "metrics.jsonl" for name in ("base", "nobcd", "mae_7")}
        draw_learning_curves(runs, args.curves, "Multi30k DE-EN", train="nll", first_step=150, window=15)


if __name__ == "__main__":
    main()
