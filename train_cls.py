"""Train a classifier.   accelerate launch train_cls.py --config configs/cls/NAME.yaml [--key value ...]

The same command run again resumes. See `python train_cls.py --help` for every key.
"""

import contextlib
import json
import sys
from functools import partial
from pathlib import Path

import torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

import moh_vision  # noqa: F401  registers the models
from moh_vision.analysis import HeadLoad, describe
from moh_vision.analysis.figures import draw_head_usage
from moh_vision.attention import head_budget
from moh_vision.command_line import changed_keys, parse_config
from moh_vision.config import ClsConfig
from moh_vision.data.batches import LabelledImages, evaluation_batches, image_transform, training_batches
from moh_vision.data.order import StepBatches, derive_seed, rank_slice
from moh_vision.data.sources import open_source
from moh_vision.engine.checkpoint import load_training, resume_point, save_training
from moh_vision.engine.logging import RunLog
from moh_vision.engine.script import finish, index_dir, make_accelerator, open_run, user_errors
from moh_vision.engine.steps import Updater, average_over_step, learning_rate, set_learning_rate
from moh_vision.evaluation.accuracy import evaluate
from moh_vision.models.weights import create, init_from
from moh_vision.tasks import ClassificationTask


def main(argv) -> None:
    # ---------------------------------------------------------------- set-up
    with user_errors("train_cls.py"):
        config, flags = parse_config(ClsConfig, argv, "train_cls.py")
        accelerator = make_accelerator(config.mixed_precision)
        with accelerator.main_process_first():
            train, val = (open_source(config.data.root, split, index_dir(config.output)) for split in ("train", "val"))
        if len(val.classes) != len(train.classes):
            raise ValueError(
                f"data.root {config.data.root}: {len(train.classes)} classes in train, {len(val.classes)} in val"
            )
        arguments = dict(config.model.arguments(), in_chans=train.channels, num_classes=len(train.classes))
        if config.data.img_size or train.img_size:
            arguments["img_size"] = config.data.img_size or train.img_size
        torch.manual_seed(config.seed)
        model = create(config.model.name, "classifier", **arguments)
        img_size = arguments.setdefault("img_size", model.pretrained_cfg["input_size"][-1])
        if flags.dry_run:
            print(describe(config.model.name, model, torch.zeros(1, train.channels, img_size, img_size)))
            return
        resumed = resume_point(Path(config.output), config.max_steps, flags.fresh, accelerator.print)
        if config.init_from and not resumed:
            init_from(model, config.init_from, accelerator.print)
        normal = dict(
            mean=model.pretrained_cfg["mean"][: train.channels], std=model.pretrained_cfg["std"][: train.channels]
        )
        batches = StepBatches(
            train.shard_sizes, group=config.data.shuffle_shards, seed=config.seed, batch_size=config.optim.batch_size,
            accumulation=config.optim.accumulation, rank=accelerator.process_index, world=accelerator.num_processes,
            start=resumed[0] if resumed else 0, stop=config.max_steps,
        )  # fmt: skip
        # Last, so that a mistake leaves nothing behind.
        changed = partial(changed_keys, allowed=flags.allow_change)
        run = open_run(config.output, config.tree(), changed, flags.fresh, accelerator)
    train_set = LabelledImages(
        train, image_transform(config.data.augment, img_size, train.channels, **normal), config.seed
    )
    val_set = LabelledImages(val, image_transform("none", img_size, train.channels, **normal), config.seed)
    val_slices = rank_slice(len(val), accelerator.process_index, accelerator.num_processes, 256)

    task = ClassificationTask(model, config.balance_weight, config.label_smoothing)
    o = config.optim
    optimizer = create_optimizer_v2(model, "adamw", lr=o.lr, weight_decay=o.weight_decay, betas=o.betas)
    task, optimizer = accelerator.prepare(task, optimizer)
    model = accelerator.unwrap_model(task).model
    ema = ModelEmaV3(model, decay=config.ema.decay, use_warmup=config.ema.warmup) if config.ema.decay else None
    start = batches.start
    if resumed:
        load_training(accelerator, resumed[1], model, ema, accelerator.print)
        accelerator.print(f"resuming {run} at step {start}")
    update = Updater(accelerator, o.clip_norm)
    log = RunLog(run / "metrics.jsonl", start, config.max_steps, accelerator.is_main_process, "classification")
    metadata = dict(architecture=config.model.name, arguments=arguments, classes=train.classes, config=config.tree())

    def validate(step: int) -> dict:
        """Accuracy of the EMA weights where there are any, else of the model; heads used per layer and class."""
        judged = ema.module if ema else model
        judged.eval()
        budget = head_budget(judged)["layers"]
        load = HeadLoad([layer["heads"] for layer in budget], len(val.classes))

        def predict(images, labels):
            logits, stats = judged.forward_routed(images)
            load.add(stats, labels)
            return logits

        def total(tensor):
            if accelerator.num_processes == 1:
                return tensor
            return accelerator.reduce(tensor.to(accelerator.device), "sum").cpu()

        val_batches = log.progress(evaluation_batches(val_set, val_slices, config.data.workers), "validation")
        scores = evaluate(predict, val_batches, accelerator.device, total)
        load.reduce(total)
        if accelerator.is_main_process and step >= config.max_steps:
            title = f"{config.model.name}: head usage by class, {config.data.root}, test split"
            draw_head_usage(
                load.share(), [layer["shared"] for layer in budget], val.classes, str(run / "head_usage.png"), title
            )
        shown = f"validation after {step} steps: top-1 {scores['top1']:.2f} %, top-5 {scores['top5']:.2f} %, loss {scores['loss']:.4f}"
        log.event(
            step - 1, {"validation": scores, "weights": "ema" if ema else "model"}, shown + (" (EMA)" if ema else "")
        )
        log.pause()
        return scores

    # ---------------------------------------------------------------- the loop
    stream = training_batches(train_set, batches, config.data.workers)
    for step in range(start, config.max_steps):
        lr = learning_rate(step, o.lr, o.schedule, o.warmup_steps, config.max_steps, o.min_lr)
        set_learning_rate(optimizer, lr)
        losses = []
        task.train()
        for micro in range(o.accumulation):
            batch = {k: v.to(accelerator.device, non_blocking=True) for k, v in next(stream).items()}
            # After the fetch, which draws numbers too: dropout depends on seed, step and rank alone.
            torch.manual_seed(derive_seed(config.seed, step, micro, accelerator.process_index))
            last = micro == o.accumulation - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(task):
                losses.append(task(**batch))
                accelerator.backward(losses[-1]["loss"] / o.accumulation)
        norm, updated = update(task, optimizer, step)
        if ema and updated:
            ema.update(model, step + 1)
        log.step(o.batch_size)

        if step % config.log_every == 0 or step + 1 == config.max_steps:
            values = average_over_step(accelerator, losses)
            log.metrics(
                step,
                dict(values, lr=lr, grad_norm=round(norm, 4), skipped=update.skipped),
                f"loss {values['loss']:.4f}, balance {100 * values['balance_share']:.1f} %, "
                f"acc {100 * values['batch_accuracy']:.0f} %",
            )
        done = step + 1
        if done % config.save_every == 0 or done == config.max_steps:
            save_training(accelerator, run, done, model, ema, metadata, config.keep_checkpoints)
            log.pause()
        if config.eval_every and done % config.eval_every == 0 and done < config.max_steps:
            validate(done)

    # ---------------------------------------------------------------- the end
    scores = validate(config.max_steps)
    if accelerator.is_main_process:
        results = dict(scores, step=config.max_steps, weights="ema" if ema else "model")
        (run / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    log.close()
    del task, optimizer, stream, update
    finish(accelerator)


if __name__ == "__main__":
    main(sys.argv[1:])
