"""Loss curves of runs side by side, and how far apart they end.

    python benchmarks/compare_runs.py RUN [RUN ...] --key mse --last 10 --figure curves.png

The first run is the baseline. Runs with the same seed, batch and data see the same images, timesteps and noise at every
step, so that their losses can be compared step by step.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def curve(run, key):
    """[(step, value)] of metrics.jsonl."""
    file = Path(run) / "metrics.jsonl"
    if not file.exists():
        sys.exit(f"compare_runs.py: error: {file}: no such file")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    if not points:
        sys.exit(
            f"compare_runs.py: error: {file} has no {key!r}; it has {', '.join(lines[0]) if lines else 'no lines'}"
        )
    return points


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--key", default="mse", help="of metrics.jsonl")
    parser.add_argument("--last", type=int, default=10, help="logged steps at the end that are averaged")
    parser.add_argument("--figure", type=Path, help="PNG")
    args = parser.parse_args()
    curves = {run: curve(run, args.key) for run in args.runs}
    base = None
    print(f"{'run':50}{'steps':>8}{f'{args.key}, last {args.last}':>18}{'to the first':>14}")
    for run, points in curves.items():
        end = [value for _, value in points[-args.last :]]
        mean = sum(end) / len(end)
        base = mean if base is None else base
        print(f"{Path(run).name:50}{points[-1][0] + 1:8}{mean:18.4f}{100 * (mean / base - 1):+13.2f} %")
    if args.figure:
        figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
        for run, points in curves.items():
            axis.plot(*zip(*points), label=Path(run).name, lw=1.2)
        axis.set(xlabel="step", ylabel=args.key, yscale="log")
        axis.legend()
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.figure, dpi=110)
        print(args.figure)


if __name__ == "__main__":
    main()
