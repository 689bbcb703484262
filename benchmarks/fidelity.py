"""Speed and memory of `moh_vision.evaluation.fidelity` against torch-fidelity, on CIFAR-10.

    python benchmarks/fidelity.py --data SHARDS                    # about half an hour on 2 cores

Both score the same two folders of PNG files with the same weights (random ones, in the layout of the published
file), for FID, inception score, KID, precision and recall; ours gives sFID on top. Each call in a process of its own, which
also gives its peak memory, in turn and in alternating order; both read the weights within the time measured.
Results go to benchmarks/results/fidelity.json.
"""

import json
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from random_inception import write_random_inception
from timing import new_report, parser_of, write_report

from moh_vision.data.splits import open_source
from moh_vision.evaluation.fidelity import score

SETS = ("generated", "reference")


def write_folders(data, folder, count):
    """Write `count` images in all as PNG files: half of them of the training set, half of the test set."""
    for name, split in zip(SETS, ("train", "val")):
        source = open_source(data, split)
        (folder / name).mkdir()
        for number in range(count // 2):
            source.image(number).convert("RGB").save(folder / name / f"{number:05}.png")


def ours(folder, weights, batch_size):
    return score(
        folder / SETS[0],
        folder / SETS[1],
        inception_weights=weights,
        batch_size=batch_size,
        allow_biased=True,
    )


def torch_fidelitys(folder, weights, batch_size):
    from torch_fidelity import calculate_metrics

    images = len(list((folder / SETS[0]).iterdir()))
    return calculate_metrics(
        input1=str(folder / SETS[0]),
        input2=str(folder / SETS[1]),
        cuda=torch.cuda.is_available(),
        batch_size=batch_size,
        fid=True,
        isc=True,
        kid=True,
        prc=True,
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights),
        samples_shuffle=False,
        isc_splits=1,
        save_cpu_ram=True,
        kid_subset_size=min(1000, images),
        verbose=False,
        cache=False,
    )


SCORERS = dict(ours=ours, torch_fidelity=torch_fidelitys)


def measured(name, folder, batch_size):
    """Return scores, seconds, and the largest MiB of this process in all and beyond what it held before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    result = SCORERS[name](folder, folder / "random.pth", batch_size)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return dict(
        numbers={key: value for key, value in result.items() if isinstance(value, float)},
        seconds=round(seconds, 2),
        peak_mib=round(peak / 1024),
        peak_over_imports_mib=round((peak - before) / 1024),
    )


def speed(args, folder):
    """Score the same images by both in turn, and return times and peaks."""
    write_folders(args.data, folder, args.images)
    write_random_inception(folder / "random.pth")
    rounds = {name: [] for name in SCORERS}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for number in range(args.rounds):
            order = list(SCORERS)
            if number % 2 == 1:
                order.reverse()
            for name in order:
                row = processes.submit(measured, name, folder, args.batch).result()
                rounds[name].append(row)
                print(
                    f"round {number}: {name:16}{row['seconds']:8.1f} s {row['peak_mib']:6} MiB",
                    flush=True,
                )
    ratios = []
    for our_row, their_row in zip(rounds["ours"], rounds["torch_fidelity"]):
        ratios.append(our_row["seconds"] / their_row["seconds"])
    result = dict(
        images=args.images,
        rounds=args.rounds,
        time_ratio=statistics.median(ratios),
        time_ratios=ratios,
    )
    for name, rows in rounds.items():
        seconds = [row["seconds"] for row in rows]
        peaks = {
            key: max(row[key] for row in rows) for key in ("peak_mib", "peak_over_imports_mib")
        }
        images_per_s = round(args.images / statistics.median(seconds), 2)
        result[name] = dict(
            seconds=seconds, images_per_s=images_per_s, **peaks, numbers=rows[-1]["numbers"]
        )
    return result


def line(speed):
    low = min(speed["time_ratios"])
    high = max(speed["time_ratios"])
    return f"time, ours over torch-fidelity: {speed['time_ratio']:.3f} ({low:.3f} to {high:.3f})"


def main():
    parser = parser_of(__doc__, "fidelity")
    parser.add_argument("--data", help="webdataset shards of CIFAR-10")
    parser.add_argument("--images", type=int, default=5000, help="in both sets together")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    if args.table:
        print(line(json.loads(args.output.read_text())["speed"]))
        return
    if not args.data:
        parser.error("--data SHARDS is needed")
    report = new_report(threads=torch.get_num_threads(), batch=args.batch)
    with tempfile.TemporaryDirectory() as folder:
        report["speed"] = speed(args, Path(folder))
    print(line(report["speed"]))
    write_report(args.output, report)


if __name__ == "__main__":
    main()
