"""Validation perplexity of small LLaMA-style runs over tokens: dense, dense with routed heads trained on, and MoH from scratch.

    python benchmarks/language_results.py RUNS --tuning wikitext2_llama.png

RUNS is a folder with runs of train_text.py named llama_dense_0, llama_moh_75_0, llama_moh_50_0, llama_continued_dense_0, llama_converted_75_0 and
llama_converted_50_0. docs/results/language.md says how they were made. What is trained on begins where the dense run ended, so this is no figure of
one command of `python -m moh_vision`.
"""

import argparse
import json
from pathlib import Path

import yaml


def looks(run, tokens_before=0):
    """([tokens seen], [validation perplexity])"""
    config = yaml.safe_load((run / "config.yaml").read_text())
    tokens = config["optim"]["batch_size"] * config["data"]["block"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["validation"]["perplexity"]) for line in lines if "validation" in line]
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
    parser.add_argument(
        "--tuning", type=Path, required=True, help="PNG of MoH's figure 2: perplexity of llama_* over tokens, seed 0"
    )
    args = parser.parse_args()
    draw_tuning(args.runs, args.tuning)


if __name__ == "__main__":
    main()
