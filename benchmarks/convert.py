"""A trained dense ViT turned into MoH: accuracy before and after a short fine-tune, on real images.

    python train_cls.py --config configs/cls/cifar10_small_cpu.yaml --model.router dense \\
        --max-steps 1500 --data.root SHARDS --output runs/cls/cifar10_dense
    python benchmarks/convert.py --dense runs/cls/cifar10_dense --data SHARDS

For every router and share: the dense model is converted at once, with and without calibration, judged, fine-tuned for 5 %
of the dense run's steps, judged again. The dense model fine-tuned alike is the control: what the extra steps bring by
themselves. Results go to benchmarks/results/convert.json.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch

import moh_vision
from moh_vision.classification.task import ClassificationTask
from moh_vision.data.batches import (
    LabelledImages,
    evaluation_batches,
    evenly_spread,
    image_transform,
    training_batches,
)
from moh_vision.data.order import StepBatches, rank_slice
from moh_vision.data.splits import open_source
from moh_vision.engine.step import learning_rate, set_learning_rate
from moh_vision.evaluation.accuracy import evaluate
from moh_vision.models.weights import from_run

HERE = Path(__file__).parent
BATCH, LR, BALANCE = 128, 3e-4, 0.01


def accuracy(model, data):
    slices = rank_slice(len(data.source), 0, 1, 256)
    batches = evaluation_batches(data, slices, 1)
    return evaluate(lambda images, labels: model.eval()(images), batches, "cpu", lambda t: t)["top1"]


def fine_tune(model, data, steps, seed):
    order = StepBatches(
        data.source.shard_sizes,
        group=8,
        seed=seed,
        batch_size=BATCH,
        accumulation=1,
        rank=0,
        world=1,
        start=0,
        stop=steps,
    )
    task = ClassificationTask(model, BALANCE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    for step, batch in enumerate(training_batches(data, order, 1)):
        set_learning_rate(optimizer, learning_rate(step, LR, "cosine", max(steps // 10, 1), steps, 0.0))
        loss = task(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True, help="folder of a dense run of train_cls.py")
    parser.add_argument("--data", required=True, help="folder of shards, the same as the run's")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.75, 0.5])
    parser.add_argument("--routers", nargs="+", default=["moh", "query_norm"])
    parser.add_argument("--steps", type=int, help="of fine-tuning; default: 5 %% of the dense run's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "convert.json")
    args = parser.parse_args()

    train, val = open_source(args.data, "train"), open_source(args.data, "val")
    dense, about = from_run(args.dense, "classifier")
    cfg, size = dense.pretrained_cfg, about["arguments"]["img_size"]
    transform = {
        augment: image_transform(augment, size, train.channels, mean=cfg["mean"], std=cfg["std"])
        for augment in ("none", "crop_flip")
    }
    train_data = LabelledImages(train, transform["crop_flip"], args.seed)
    val_data = LabelledImages(val, transform["none"], args.seed)
    steps = args.steps or max(about["step"] // 20, 1)
    some = evaluation_batches(LabelledImages(train, transform["none"], args.seed), evenly_spread(len(train), 512), 0)
    calibration = [batch["images"] for batch in some]

    rows = []

    def report(what, before, after, share):
        rows.append(dict(model=what, share=share, before=round(before, 2), after=round(after, 2)))
        print(f"{what:44} {share:5.2f} {before:8.2f} {after:8.2f}", flush=True)

    print(f"{len(val):,} test images, {steps} steps of fine-tuning after {about['step']}")
    print(f"{'':44} share   before    after   top-1 in %")
    before = accuracy(dense, val_data)
    fine_tune(dense, train_data, steps, args.seed)
    report("dense (fine-tuned alike)", before, accuracy(dense, val_data), 1.0)
    for share in args.shares:
        for router in args.routers:
            for calibrate in (None, calibration):
                copy = from_run(args.dense, "classifier")[0]
                model = moh_vision.convert(copy, f"ramp:{share}", router, calibrate=calibrate)
                before = accuracy(model, val_data)
                fine_tune(model, train_data, steps, args.seed)
                name = f"{router}, {'strongest' if calibrate else 'first'} heads shared"
                report(name, before, accuracy(model, val_data), moh_vision.head_budget(model)["share"])
    result = dict(
        date=date.today().isoformat(), data=train.name, test_images=len(val), dense=about["arguments"],
        dense_steps=about["step"], steps=steps, batch=BATCH, lr=LR, rows=rows,
    )  # fmt: skip
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
