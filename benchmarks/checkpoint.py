"""What a checkpoint costs: a save of 500 MB of state against a bare copy of the same files with fsync.

    python benchmarks/checkpoint.py                          # about 3 minutes; 2 GB beside this file
    python benchmarks/checkpoint.py --folder /mnt/disk       # where runs are written: the disk is most of the time

The state is that of a ViT-S of 17 blocks in training: weights, their average, AdamW's two moments. Every round does each
of these once, in alternating order, after a sync that leaves the disk nothing else to do:

    copy         the files of a checkpoint, one after the other, each flushed to the disk
    copy all     these, model.safetensors and ema.safetensors for users, which are half as many bytes again
    checkpoint   the save until its folder has its name for good: written, summed, flushed, renamed
    save         all that training waits for: the checkpoint, the weights for users, and the deletion of an older one

Reported are medians and quartiles of seconds, and of two ratios, round by round: to the copy of the state, and of a save
to the copy of all that it writes. Results go to benchmarks/results/checkpoint.json.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from timing import machine, spread, write_report

import moh_vision  # noqa: F401  registers the models
from moh_vision.engine.checkpoint import save_training
from moh_vision.engine.ema import make_ema

HERE = Path(__file__).parent


def training_state(depth):
    """(accelerator, model, ema) of a training that has done a step."""
    accelerator = Accelerator(cpu=True)
    model = timm.create_model("moh_vit_small_patch16_224", depth=depth, head_budget="uniform:0.75", img_size=32)
    ema = make_ema(model, 0.99, False, "cpu")
    task, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    task(torch.randn(2, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    return accelerator, model, ema


def copy(paths, target):
    target.mkdir()
    for number, path in enumerate(paths):
        with open(path, "rb") as theirs, open(target / f"{number}", "wb") as ours:
            shutil.copyfileobj(theirs, ours, 2**20)
            ours.flush()
            os.fsync(ours.fileno())


def timed_rounds(state, folder, rounds):
    """{name: [seconds]}, after a round that does not count."""
    accelerator, model, ema = state
    run = folder / "run"
    times = {"copy": [], "copy all": [], "checkpoint": [], "save": []}

    def save(step):
        begin = time.perf_counter()
        named = []

        def at(point):
            if point.startswith("renamed ") and f"step_{step}" in point:
                named.append(time.perf_counter() - begin)

        problem = save_training(accelerator, run, step, model, ema, {}, 1, at)
        assert problem is None, problem
        times["save"].append(time.perf_counter() - begin)
        times["checkpoint"].append(named[0])

    def bare(step):
        (saved,) = (run / "checkpoints").iterdir()
        for name, paths in {
            "copy": [*saved.iterdir()],
            "copy all": [*saved.iterdir(), *run.glob("*.safetensors")],
        }.items():
            os.sync()
            begin = time.perf_counter()
            copy(paths, folder / "copy")
            times[name].append(time.perf_counter() - begin)
            shutil.rmtree(folder / "copy")

    save(0)
    for number in range(1, rounds + 2):
        for work in (bare, save) if number % 2 else (save, bare):
            os.sync()
            work(number)
    return {name: seconds[-rounds:] for name, seconds in times.items()}


def sha256_speed(megabytes=200):
    """MB/s of one core."""
    data = os.urandom(10**6)
    begin, digest = time.perf_counter(), hashlib.sha256()
    for _ in range(megabytes):
        digest.update(data)
    return round(megabytes / (time.perf_counter() - begin))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--depth", type=int, default=17, help="blocks of the model")
    parser.add_argument("--folder", type=Path, default=HERE, help="on the disk to measure")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "checkpoint.json")
    args = parser.parse_args()

    torch.manual_seed(0)
    report = dict(machine=machine(), load_before=os.getloadavg(), sha256_mb_per_s=sha256_speed(), rounds=args.rounds)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder))
    try:
        times = timed_rounds(training_state(args.depth), folder, args.rounds)
        run = folder / "run"
        (saved,) = (run / "checkpoints").iterdir()
        report["state_mb"] = round(sum(p.stat().st_size for p in saved.iterdir()) / 1e6)
        report["weights_for_users_mb"] = round(sum(p.stat().st_size for p in run.glob("*.safetensors")) / 1e6)
    finally:
        shutil.rmtree(folder)
    print(f"{report['state_mb']} MB of state; sha256 {report['sha256_mb_per_s']} MB/s on one core")
    print(f"{'':12}{'seconds':>8}{'time / copy':>24}{'time / copy all':>24}")
    for name, seconds in times.items():
        report[name] = dict(seconds=spread(seconds))
        line = f"{name:12}{report[name]['seconds']['median']:8.2f}"
        for base in ("copy", "copy all"):
            ratio = report[name][f"to {base}"] = spread([a / b for a, b in zip(seconds, times[base])])
            low, high = ratio["quartiles"]
            line += f"{ratio['median']:10.2f} ({low:.2f} to {high:.2f})"
        print(line)
    write_report(args.output, report)


if __name__ == "__main__":
    main()
