"""Speed and memory of `moh_vision.evaluation.fidelity` against torch-fidelity, on CIFAR-10.

    python benchmarks/fidelity.py --data SHARDS                    # about half an hour on 2 cores
    python benchmarks/fidelity.py --data SHARDS --parts memory

speed: both score the same two folders of PNG files with the same weights (random ones, in the layout of the published
file), for FID, inception score, KID, precision and recall; ours gives sFID on top. Each call in a process of its own, which
also gives its peak memory, in turn and in alternating order; both read the weights within the time measured.

memory: 50,000 training images against 10,000 test images with a cheap projection that has Inception's numbers of features,
2048, 2023 and 1008: everything but the network itself. Once with features (precision and recall), once against saved
statistics without features. Results go to benchmarks/results/fidelity.json.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from random_inception import write_random_inception
from timing import machine, write_report
from torch import nn

from moh_vision.data.splits import open_source
from moh_vision.evaluation.fidelity import Extracted, Extractor, score, statistics_of
from moh_vision.evaluation.fidelity.images import SourceImages

HERE = Path(__file__).parent
SETS = ("generated", "reference")


def write_folders(data, folder, count):
    """`count` images in all as PNG files: half of them of the training set, half of the test set."""
    for name, split in zip(SETS, ("train", "val")):
        source = open_source(data, split)
        (folder / name).mkdir()
        for i in range(count // 2):
            source.image(i).convert("RGB").save(folder / name / f"{i:05}.png")


def ours(folder, weights, batch_size):
    return score(
        folder / SETS[0], folder / SETS[1], inception_weights=weights, batch_size=batch_size, allow_biased=True
    )


def torch_fidelitys(folder, weights, batch_size):
    from torch_fidelity import calculate_metrics

    images = len(list((folder / SETS[0]).iterdir()))
    return calculate_metrics(
        input1=str(folder / SETS[0]), input2=str(folder / SETS[1]), cuda=torch.cuda.is_available(), batch_size=batch_size,
        fid=True, isc=True, kid=True, prc=True, feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights), samples_shuffle=False, isc_splits=1, save_cpu_ram=True,
        kid_subset_size=min(1000, images), verbose=False, cache=False,
    )  # fmt: skip


SCORERS = dict(ours=ours, torch_fidelity=torch_fidelitys)


class Projection(Extractor):
    """Inception's numbers of features for next to no time."""

    name = "random projection"
    weights_sha256 = "0" * 64

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3 * 32 * 32, 2048 + 2023 + 1008)

    def forward(self, images):
        return Extracted(*self.layer(images.flatten(1) / 255).relu().split((2048, 2023, 1008), 1))


def projected(data, saved, batch_size):
    """Scores of the training set against the test set, or against saved statistics without features."""
    train, reference = (SourceImages(open_source(data, split), split) for split in ("train", "val"))
    train.size = reference.size = 32
    if saved:
        reference = statistics_of(reference, Projection(), batch_size, "cpu", "test images")
        reference.features = None
    return score(train, reference, extractor=Projection(), batch_size=batch_size)


def measured(work):
    """(result, seconds, MiB at most of this process over what it held before, MiB of its largest child)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return dict(
        result={k: v for k, v in result.items() if isinstance(v, float)},
        seconds=round(seconds, 2),
        peak_mib=round(peak / 1024),
        peak_over_imports_mib=round((peak - before) / 1024),
        largest_child_mib=round(children / 1024),
    )


def in_own_process(*arguments):
    command = [sys.executable, __file__, *map(str, arguments)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def speed(args, folder):
    write_folders(args.data, folder, args.images)
    write_random_inception(folder / "random.pth")
    rounds = {name: [] for name in SCORERS}
    for number in range(args.rounds):
        for name in SCORERS if number % 2 == 0 else reversed(SCORERS):
            row = in_own_process("--worker", name, "--folder", folder, "--batch", args.batch)
            rounds[name].append(row)
            print(f"round {number}: {name:16}{row['seconds']:8.1f} s {row['peak_mib']:6} MiB", flush=True)
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(rounds["ours"], rounds["torch_fidelity"])]
    result = dict(images=args.images, rounds=args.rounds, time_ratio=statistics.median(ratios), time_ratios=ratios)
    for name, rows in rounds.items():
        seconds = statistics.median(row["seconds"] for row in rows)
        result[name] = dict(
            seconds=[row["seconds"] for row in rows],
            images_per_s=round(args.images / seconds, 2),
            **{k: max(row[k] for row in rows) for k in ("peak_mib", "peak_over_imports_mib", "largest_child_mib")},
            numbers=rows[-1]["result"],
        )
    print(f"time, ours over torch-fidelity: {result['time_ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return result


def memory(args):
    result = {}
    for name, saved in (("with features", ""), ("saved statistics", "yes")):
        row = in_own_process("--worker", "projected", "--data", args.data, "--batch", args.batch, "--saved", saved)
        result[name] = row
        print(f"50,000 images, {name:18}{row['seconds']:8.1f} s, {row['peak_mib']} MiB", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="webdataset shards of CIFAR-10")
    parser.add_argument("--parts", nargs="+", default=["speed", "memory"], choices=["speed", "memory"])
    parser.add_argument("--images", type=int, default=5000, help="in both sets together")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "fidelity.json")
    parser.add_argument("--worker", choices=[*SCORERS, "projected"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--saved", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "projected":
        print(json.dumps(measured(lambda: projected(args.data, args.saved, args.batch))))
        return
    if args.worker:
        print(json.dumps(measured(lambda: SCORERS[args.worker](args.folder, args.folder / "random.pth", args.batch))))
        return
    if not args.data:
        parser.error("--data SHARDS is needed")
    report = dict(machine=machine(), threads=torch.get_num_threads(), batch=args.batch, load_before=os.getloadavg())
    if args.output.exists():  # of the part that is not run now
        report = {**json.loads(args.output.read_text()), **report}
    if "speed" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            report["speed"] = speed(args, Path(folder))
    if "memory" in args.parts:
        report["memory"] = memory(args)
    write_report(args.output, report)


if __name__ == "__main__":
    main()
