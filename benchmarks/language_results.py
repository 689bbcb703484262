"""Tables of small language runs, one row a model, mean and spread over seeds, with the papers' figures beside.

    python benchmarks/language_results.py RUNS

RUNS is a folder with runs of train_text.py named TASK_MODEL_SEED: mt_base_0, mt_mae_7_0, clm_uni_mae_7_1, mlm_8K8E128D_0, ...
Runs that have not ended are left out, and named. docs/results/language.md says how they were made.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import yaml

# Peng 2020, tables 2 and 4 (models: section 4.1); Zhang 2022, tables 1 and 2: WMT14 EN-DE, WikiText-103.
PAPER = {
    ("mt", "base"): "27.6", ("mt", "uni_mae_7"): "27.7", ("mt", "nobcd"): "27.5", ("mt", "mae_7"): "28.4",
    ("mt", "moa"): "28.4 (8K8E128D)",
    ("clm", "base"): "19.03", ("clm", "uni_mae_7"): "19.26", ("clm", "nobcd"): "19.12", ("clm", "mae_7"): "18.71",
    ("mlm", "base"): "4.95", ("mlm", "8K8E128D"): "4.82", ("mlm", "8K16E256D"): "4.48",
}  # fmt: skip
# Peng 2020, table 5: one expert an encoder layer instead of the mixture, BLEU on WMT14's dev set.
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
        deviations = [r["bleu"]["random"]["bleu"]["std"] for r in runs if "random" in r["bleu"]]
        one += f", within a model +- {statistics.mean(deviations):.1f}" if deviations else ""
        entropy = spread([r.get("mean_gate_entropy", {}).get("encoder") for r in runs])
        values = [spread(score("soft"), 1), spread([r["test"]["perplexity"] for r in runs]), entropy, one]
        values += [PAPER.get((task, model), ""), PAPER_ENTROPY.get(model, ""), PAPER_DROP.get(model, "")]
        print(f"| {model} | " + " | ".join(values) + " |")


def perplexities(found, task):
    print("| | test perplexity | paper |")
    print("|---|---|---|")
    for (kind, model), seeds in found.items():
        if kind == task:
            values = spread([r.get("test", r["validation"])["perplexity"] for r in seeds.values()])
            print(f"| {model} | {values} | {PAPER.get((task, model), '')} |")


def looks(run, tokens_before=0):
    """([tokens seen], [validation perplexity])"""
    config = yaml.safe_load((run / "config.yaml").read_text())
    tokens = config["optim"]["batch_size"] * config["data"]["block"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"] + 1, line["validation"]["perplexity"]) for line in lines if "validation" in line]
    return [tokens_before + step * tokens for step, _ in found], [value for _, value in found]


def draw_tuning(folder, path):
    """Dense, dense with routed heads trained on, and MoH from scratch (Jin 2024, figure 2, has accuracy)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.4), layout="constrained")
    dense = looks(folder / "llama_dense_0")
    for name, label in (("dense", "dense"), ("moh_75", "MoH 75 % from scratch"), ("moh_50", "MoH 50 % from scratch")):
        axis.plot(*looks(folder / f"llama_{name}_0"), label=label, linewidth=1.6)
    for name, label in (
        ("continued_dense", "dense, trained on"),
        ("converted_75", "converted, 75 %"),
        ("converted_50", "converted, 50 %"),
    ):
        axis.plot(
            *looks(folder / f"llama_{name}_0", dense[0][-1]), label=label, linewidth=1.2, marker=".", markersize=4
        )
    axis.set(xlabel="tokens", ylabel="validation perplexity", yscale="log", title="WikiText-2", ylim=(80, 400))
    ticks = [80, 90, 100, 120, 150, 200, 300, 400]
    axis.set_yticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--tuning", type=Path, help="PNG of MoH's figure 2: perplexity of llama_* over tokens, seed 0")
    args = parser.parse_args()
    found = read_runs(args.runs)
    translation(found)
    for task in ("clm", "mlm"):
        print()
        perplexities(found, task)
    if args.tuning:
        draw_tuning(args.runs, args.tuning)


if __name__ == "__main__":
    main()
