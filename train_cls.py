"""Train a classifier.   accelerate launch train_cls.py --config configs/cls/NAME.yaml [--key value ...]

The same command run again resumes; `--validate-only --checkpoint RUN` validates. See `python train_cls.py --help`.
"""

import contextlib
import sys
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Tuple

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import moh_vision  # noqa: F401  registers the models
from moh_vision.analysis import HeadLoad, describe
from moh_vision.classification.config import ClsConfig
from moh_vision.classification.task import ClassificationTask
from moh_vision.classification.validate import draw_usage, validate, validate_only
from moh_vision.data.batches import BadSamples, LabelledImages, calibration_batches, training_batches
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.imagenet import BatchMixing, classification_transforms
from moh_vision.data.order import StepBatches
from moh_vision.data.splits import DataRecord, open_splits
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.checkpoint import load_training
from moh_vision.engine.command_line import changed_keys, parse_config
from moh_vision.engine.ema import make_ema
from moh_vision.engine.logging import open_log, write_json
from moh_vision.engine.saver import SaveError, Saver
from moh_vision.engine.script import finish, index_dir, make_accelerator, open_run, take_up, user_errors
from moh_vision.engine.seeds import derive_seed
from moh_vision.engine.signals import StopSignals
from moh_vision.engine.steps import Updater, average_over_step
from moh_vision.evaluation.accuracy import summary
from moh_vision.models.convert import share_strongest_heads
from moh_vision.models.mae import mae_routers, train_only
from moh_vision.models.weights import check_name, create, init_from, keep_shared_heads

NAME = "train_cls.py"


def train(argv, signals: StopSignals, held: contextlib.ExitStack) -> None:
    # ---------------------------------------------------------------- set-up
    with user_errors(NAME):
        config, flags = parse_config(ClsConfig, argv, NAME)
        o = config.optim
        accelerator = make_accelerator(config.mixed_precision, config.tf32, config.tracker)
    if flags.validate_only:
        with user_errors(NAME), user_errors(NAME, (UnreadableImage,), every_rank=True):
            validate_only(config, flags, accelerator)
        return finish(accelerator)
    with user_errors(NAME):
        check_name(config.model.name, "classifier")
        with accelerator.main_process_first():
            train, val = open_splits(config.data.root, index_dir(config.output))
        data = DataRecord(config.data.root, flags.allow_change, train=train, val=val)
        config.check_micro_batch(accelerator.num_processes)
        stop, cosine_steps, warmup_steps = config.steps(len(train))
        arguments = dict(config.model.arguments(), in_chans=train.channels, num_classes=len(train.classes))
        if config.data.img_size or train.img_size:
            arguments["img_size"] = config.data.img_size or train.img_size
        torch.manual_seed(config.seed)
        model = create(config.model.name, "classifier", **arguments)
        img_size = arguments.setdefault("img_size", model.pretrained_cfg["input_size"][-1])
        if flags.dry_run:
            print(describe(config.model.name, model, torch.zeros(1, train.channels, img_size, img_size)))
            return
        resumed = take_up(config.output, stop, flags.fresh, accelerator, held)
        if resumed:
            keep_shared_heads(model, resumed[1])
        elif config.init_from:
            config.check_calibration(init_from(model, config.init_from, accelerator.print))
        train_only(model, config.train_only)
        descent = BlockDescent(accelerator, model, mae_routers(model), config.compile, **asdict(config.block_descent))
        batches = StepBatches(
            train.shard_sizes, group=config.data.shuffle_shards, seed=config.seed, batch_size=o.batch_size,
            accumulation=o.accumulation, rank=accelerator.process_index, world=accelerator.num_processes,
            start=resumed[0] if resumed else 0, stop=stop, repeats=config.data.repeats,
        )  # fmt: skip
        to_tensor, val_to_tensor = classification_transforms(
            config.data, model.pretrained_cfg, img_size, train.channels
        )
        if config.calibrate_images and not resumed:
            share_strongest_heads(model, calibration_batches(train, val_to_tensor, config.calibrate_images))
        # Last, so that a mistake leaves nothing behind.
        changed = partial(changed_keys, allowed=flags.allow_change)
        run = open_run(config.output, config.tree(), changed, flags.fresh, accelerator, held, data)
    mixing = BatchMixing(config.seed, len(train.classes), **asdict(config.mix)) if config.mix.on else None
    unreadable = BadSamples(len(train), config.data.max_bad_fraction)

    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    task = ClassificationTask(model, config.balance_weight, config.label_smoothing, **config.moa_weights())
    if config.compile:
        task.compile()
    optimizer = create_optimizer_v2(
        model, "adamw", lr=o.lr, weight_decay=o.weight_decay, betas=o.betas, eps=o.eps, layer_decay=o.layer_decay
    )
    ema = make_ema(model, config.ema.decay, config.ema.warmup, accelerator.device)  # before the model may be sharded
    update = Updater(accelerator, o.clip_norm, signals, unreadable)
    task, optimizer = descent.prepare(task, optimizer, update)
    # timm's schedule is a function of the step alone, so there is nothing of it to save.
    scheduler, _ = create_scheduler_v2(
        optimizer, o.schedule, cosine_steps, warmup_epochs=warmup_steps, warmup_lr=o.warmup_lr, min_lr=o.min_lr,
        step_on_epochs=False, updates_per_epoch=1,
    )  # fmt: skip
    model = accelerator.unwrap_model(task).model
    start = batches.start
    if resumed:
        with user_errors(NAME):
            load_training(accelerator, resumed[1], model, ema, accelerator.print)
        accelerator.print(f"resuming {run} at step {start}")
    saver = Saver(accelerator, run, config.keep_checkpoints)
    log = open_log(run, start, stop, "classification", config.tracker, config.tree(), accelerator.is_main_process)
    metadata = dict(architecture=config.model.name, arguments=arguments, classes=train.classes, config=config.tree())
    descent.announce(log, start)

    def judge(step: int, task) -> Tuple[dict, HeadLoad]:
        """Validate the EMA weights where there are any, else the model."""
        judged = ClassificationTask(ema.module, 0.0) if ema else task
        with user_errors(NAME, (UnreadableImage,), every_rank=True):
            scores, load = validate(judged, val, val_to_tensor, config.data, accelerator, log.progress)
        values = {"validation": scores, "weights": "ema" if ema else "model"}
        log.event(step - 1, values, f"validation after {step} steps: {summary(scores)}" + (" (EMA)" if ema else ""))
        log.pause()
        return scores, load

    # ---------------------------------------------------------------- the loop
    train_set = LabelledImages(train, to_tensor, config.seed)
    stream = training_batches(train_set, batches, config.data.workers, unreadable, mixing)
    done = start
    signals.begin()
    for step in range(start, stop):
        scheduler.step_update(step)
        task.train()
        for phase in descent.phases(step * o.batch_size // len(train), islice(stream, o.accumulation)):
            losses = []
            for micro in range(o.accumulation):
                with user_errors(NAME, (UnreadableImage,), every_rank=True):
                    batch = {k: v.to(accelerator.device, non_blocking=True) for k, v in next(descent.batches).items()}
                if config.channels_last:
                    batch["images"] = batch["images"].contiguous(memory_format=torch.channels_last)
                # After the fetch, which draws numbers too: dropout depends on seed, step, rank and phase alone.
                torch.manual_seed(derive_seed(config.seed, step, micro, accelerator.process_index, *phase.salt))
                with contextlib.nullcontext() if micro + 1 == o.accumulation else accelerator.no_sync(descent.task):
                    losses.append(descent.task(**batch))
                    accelerator.backward(losses[-1]["loss"] / o.accumulation)
            with user_errors(NAME, (UnreadableImage,)), user_errors(NAME, (FloatingPointError,), code=1):
                norm, updated = descent.update(step, losses)
        if ema and updated:
            ema.update(model, step + 1)
        log.step(o.batch_size)
        if step % config.log_every == 0 or step + 1 == stop:
            values = average_over_step(accelerator, losses)
            lr = max(group["lr"] for group in optimizer.param_groups)
            counts = dict(skipped=update.skipped, failed_saves=saver.failed, unreadable=len(unreadable.seen))
            log.metrics(
                step,
                dict(values, lr=lr, grad_norm=round(norm, 4), **counts, **descent.values()),
                f"loss {values['loss']:.4f}, balance {100 * values['balance_share']:.1f} %, "
                f"acc {100 * values['batch_accuracy']:.0f} %",
            )
        done = step + 1
        if done % config.save_every == 0 or done == stop or update.stop:
            with user_errors(NAME, (SaveError,), code=1):
                saver.save(done, model, ema, metadata, last=done == stop or update.stop > 0)
            log.pause()
        if update.stop:
            break
        if config.eval_every and done % config.eval_every == 0 and done < stop:
            judge(done, task)

    # ---------------------------------------------------------------- the end
    signals.end()
    stopped = update.stop_after_all()
    if stopped:
        log.stopped(done, stopped)
    else:
        scores, load = judge(stop, task)
        if accelerator.is_main_process:
            results = dict(scores, step=stop, weights="ema" if ema else "model", **descent.about())
            write_json(run / "results.json", results)
            title = f"{config.model.name}: head usage by class, {config.data.root}, val split"
            draw_usage(load, model, val.classes, run / "head_usage.png", title, log.say)
    log.close()
    del task, optimizer, descent, stream, update, saver, scheduler
    finish(accelerator, stopped)


def main(argv) -> None:
    with StopSignals() as signals, contextlib.ExitStack() as held:
        train(argv, signals, held)


if __name__ == "__main__":
    main(sys.argv[1:])
