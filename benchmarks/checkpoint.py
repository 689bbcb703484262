"""What a checkpoint costs: a save of 500 MB of state against a bare copy of the same files with fsync.

    python benchmarks/checkpoint.py                          # about 3 minutes; 2 GB beside this file
    python benchmarks/checkpoint.py --folder /mnt/disk       # where runs are written: the disk is most of the time

The state is that of a ViT-S of 17 blocks in training: weights, their average, AdamW's two moments. Every round does each
of these once, in a random order, after a sync that leaves the disk nothing else to do:

    copy      the files of a checkpoint, one after the other, each flushed to the disk
    waiting   a save with save_in_background false: copied to main memory, written, summed, flushed, renamed
    stall     of a save in the background: how long training stands still
    written   until that checkpoint has its name, where training does nothing in the meantime

Reported are medians and quartiles of seconds, and of the ratio to the copy, round by round. Results go to
benchmarks/results/checkpoint.json.
"""

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import timm
import torch
from accelerate import Accelerator
from timing import (
    about_machine,
    cell,
    interleaved,
    markdown,
    new_report,
    parser_of,
    spread,
    wall,
    write_report,
)

from moh_vision.classification.task import ClassificationTask
from moh_vision.engine.checkpoint import TrainingState
from moh_vision.engine.config import EmaConfig
from moh_vision.engine.saver import Saver
from moh_vision.engine.weights import make_ema

HERE = Path(__file__).parent
NAMES = ("copy", "waiting", "stall", "written")


def training_state(depth):
    """Return (accelerator, `TrainingState`) of a training that has done a step."""
    accelerator = Accelerator(cpu=True)
    model = timm.create_model(
        "moh_vit_small_patch16_224", depth=depth, head_budget="uniform:0.75", img_size=32
    )
    ema = make_ema(model, EmaConfig(decay=0.99), "cpu")
    task = ClassificationTask(model, 0.01)
    task, optimizer = accelerator.prepare(task, torch.optim.AdamW(task.parameters()))
    task(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))["loss"].backward()
    optimizer.step()
    return accelerator, TrainingState(task, [optimizer], ema)


def copy(paths, target):
    """Copy files into a new folder, each flushed to the disk."""
    target.mkdir()
    for number, path in enumerate(paths):
        with open(path, "rb") as source, open(target / f"{number}", "wb") as copied:
            shutil.copyfileobj(source, copied, 2**20)
            copied.flush()
            os.fsync(copied.fileno())


def timed_rounds(accelerator, state, folder, rounds):
    """Return {name: seconds [rounds]}, after a round that does not count."""
    run = folder / "run"
    waiting = Saver(accelerator, run, state, keep=1, background=False)
    background = Saver(accelerator, run, state, keep=1, background=True)
    stalls = []
    numbers = itertools.count(1)  # of steps

    def copy_checkpoint():
        checkpoint = next((run / "checkpoints").iterdir())
        copy([*checkpoint.iterdir()], folder / "copy")

    def save_waiting():
        waiting.save(next(numbers), {})

    def save_in_background():
        stalls.append(wall(lambda: background.save(next(numbers), {})))
        background.finish(last=True)

    def remove_copy(_):
        shutil.rmtree(folder / "copy", ignore_errors=True)

    def after_sync(step):
        os.sync()
        return wall(step)

    waiting.save(0, {}, last=True)
    steps = dict(copy=copy_checkpoint, waiting=save_waiting, written=save_in_background)
    times = interleaved(steps, rounds, warm_up=1, before=remove_copy, clock=after_sync)
    return {**times, "stall": torch.tensor(stalls[-rounds:], dtype=torch.float64)}


def table(report):
    """Make the table of docs/results/speed.md."""
    rows = []
    for name in NAMES:
        row = [name]
        for found in (report[name]["seconds"], report[name]["to copy"]):
            row.append(cell(found["median"], found["quartiles"]))
        rows.append(row)
    about = f"{about_machine(report)} {report['state_mb']} MB of state, {report['rounds']} rounds; medians [quartiles].\n"
    return about + "\n" + markdown(["", "seconds", "of a copy"], rows)


def main():
    parser = parser_of(__doc__, "checkpoint")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--depth", type=int, default=17, help="blocks of the model")
    parser.add_argument("--folder", type=Path, default=HERE, help="on the disk to measure")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.output.read_text())), end="")
        return

    torch.manual_seed(0)
    report = new_report(rounds=args.rounds)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder))
    try:
        times = timed_rounds(*training_state(args.depth), folder, args.rounds)
        (saved,) = (folder / "run" / "checkpoints").iterdir()
        report["state_mb"] = round(sum(p.stat().st_size for p in saved.iterdir()) / 1e6)
    finally:
        shutil.rmtree(folder)
    for name, seconds in times.items():
        report[name] = {"seconds": spread(seconds), "to copy": spread(seconds / times["copy"])}
    print(table(report))
    write_report(args.output, report)


if __name__ == "__main__":
    main()
