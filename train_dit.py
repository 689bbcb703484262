"""Train a diffusion transformer.   accelerate launch train_dit.py --config configs/dit/NAME.yaml [--key value ...]

The same command run again resumes. See `python train_dit.py --help` for every key.
"""

import contextlib
import sys
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from timm.optim import create_optimizer_v2

import moh_vision  # noqa: F401  registers the models
from moh_vision.analysis import describe
from moh_vision.data.batches import BadSamples, training_batches
from moh_vision.data.decode import UnreadableImage
from moh_vision.data.order import StepBatches
from moh_vision.data.splits import DataRecord
from moh_vision.diffusion import HybridLoss
from moh_vision.diffusion.config import DitConfig
from moh_vision.diffusion.inputs import open_inputs
from moh_vision.diffusion.objectives import NUM_TIMESTEPS
from moh_vision.diffusion.previews import Samples
from moh_vision.diffusion.scores import make_judge
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.checkpoint import load_training
from moh_vision.engine.command_line import changed_keys, parse_config
from moh_vision.engine.ema import make_ema
from moh_vision.engine.logging import open_log
from moh_vision.engine.saver import SaveError, Saver
from moh_vision.engine.script import finish, index_dir, make_accelerator, open_run, take_up, user_errors
from moh_vision.engine.seeds import derive_seed
from moh_vision.engine.signals import StopSignals
from moh_vision.engine.steps import Updater, average_over_step, learning_rate, set_learning_rate
from moh_vision.models.mae import mae_routers, train_only
from moh_vision.models.weights import check_name, create, init_from, keep_shared_heads


def train(argv, signals: StopSignals, held: contextlib.ExitStack) -> None:
    # ---------------------------------------------------------------- set-up
    with user_errors("train_dit.py"):
        config, flags = parse_config(DitConfig, argv, "train_dit.py")
        check_name(config.model.name, "diffusion")
        accelerator = make_accelerator(config.mixed_precision, config.tf32, config.tracker)
        with accelerator.main_process_first():
            d = config.data
            index, device = index_dir(config.output), accelerator.device
            inputs = open_inputs(d.root, config.vae, d.img_size, d.augment, index, device)
        train, img_size, channels = inputs.source, inputs.img_size, inputs.channels  # of pixels or latents
        arguments = dict(
            config.model.arguments(),
            img_size=img_size,
            in_chans=channels,
            num_classes=len(train.classes),
            learn_sigma=config.learn_sigma,
        )
        torch.manual_seed(config.seed)
        model = create(config.model.name, "diffusion", **arguments)
        if flags.dry_run:
            zeros = torch.zeros(1, dtype=torch.long)
            print(describe(config.model.name, model, torch.zeros(1, channels, img_size, img_size), zeros, zeros))
            return
        resumed = take_up(config.output, config.max_steps, flags.fresh, accelerator, held)
        if resumed:
            keep_shared_heads(model, resumed[1])
        elif config.init_from:
            init_from(model, config.init_from, accelerator.print)
        train_only(model, config.train_only)
        descent = BlockDescent(accelerator, model, mae_routers(model), config.compile, **asdict(config.block_descent))
        draws = config.preview.every or config.score.every
        if draws and not config.ema.decay and accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("preview.every and score.every with FSDP need ema.decay, whose weights are whole")
        decode = inputs.decoder(accelerator.device) if draws else None
        previews, scored = (
            Samples(c, len(train.classes), config.learn_sigma, clip=inputs.space is None, decode=decode)
            for c in (config.preview, config.score)
        )
        with accelerator.main_process_first():
            judge = make_judge(**config.score.scoring(d.root), index_dir=index) if config.score.every else None
        batches = StepBatches(
            train.shard_sizes, group=config.data.shuffle_shards, seed=config.seed, batch_size=config.optim.batch_size,
            accumulation=config.optim.accumulation, rank=accelerator.process_index, world=accelerator.num_processes,
            start=resumed[0] if resumed else 0, stop=config.max_steps,
        )  # fmt: skip
        # Last, so that a mistake leaves nothing behind.
        changed = partial(changed_keys, allowed=flags.allow_change)
        data = DataRecord(d.root, flags.allow_change, train=train)
        run = open_run(config.output, config.tree(), changed, flags.fresh, accelerator, held, data)
    train_set = inputs.dataset(config.seed, NUM_TIMESTEPS, config.label_drop)

    task = DiffusionTask(model, config.balance_weight, HybridLoss(), **config.moa_weights())
    if config.compile:
        task.compile()
    o = config.optim
    optimizer = create_optimizer_v2(model, "adamw", lr=o.lr, weight_decay=o.weight_decay, betas=o.betas)
    ema = make_ema(model, config.ema.decay, config.ema.warmup, accelerator.device)  # before the model may be sharded
    unreadable = BadSamples(len(train), config.data.max_bad_fraction)
    update = Updater(accelerator, o.clip_norm, signals, unreadable)
    task, optimizer = descent.prepare(task, optimizer, update)
    model = accelerator.unwrap_model(task).model
    start = batches.start
    if resumed:
        with user_errors("train_dit.py"):
            load_training(accelerator, resumed[1], model, ema, accelerator.print)
        accelerator.print(f"resuming {run} at step {start}")
    saver = Saver(accelerator, run, config.keep_checkpoints)
    log = open_log(
        run, start, config.max_steps, "diffusion", config.tracker, config.tree(), accelerator.is_main_process
    )
    metadata = dict(architecture=config.model.name, arguments=arguments, classes=train.classes, config=config.tree())
    metadata["vae"] = inputs.about_vae()
    descent.announce(log, start)

    def ready(batch: dict) -> dict:
        batch = {k: v.to(accelerator.device, non_blocking=True) for k, v in batch.items()}
        return inputs.encode(batch, accelerator.autocast())

    # ---------------------------------------------------------------- the loop
    stream = map(ready, training_batches(train_set, batches, config.data.workers, unreadable))
    task.train()
    done = start
    signals.begin()
    for step in range(start, config.max_steps):
        lr = learning_rate(step, o.lr, o.schedule, o.warmup_steps, config.max_steps, o.min_lr)
        set_learning_rate(optimizer, lr)
        for phase in descent.phases(step * o.batch_size // len(train), islice(stream, o.accumulation)):
            losses = []
            for micro in range(o.accumulation):
                with user_errors("train_dit.py", (UnreadableImage,), every_rank=True):
                    batch = next(descent.batches)
                # After the fetch, which draws numbers too: dropout depends on seed, step, rank and phase alone.
                torch.manual_seed(derive_seed(config.seed, step, micro, accelerator.process_index, *phase.salt))
                with contextlib.nullcontext() if micro + 1 == o.accumulation else accelerator.no_sync(descent.task):
                    losses.append(descent.task(**batch))
                    accelerator.backward(losses[-1]["loss"] / o.accumulation)
            with (
                user_errors("train_dit.py", (UnreadableImage,)),
                user_errors("train_dit.py", (FloatingPointError,), code=1),
            ):
                norm, updated = descent.update(step, losses)
        if ema and updated:
            ema.update(model, step + 1)
        log.step(o.batch_size)

        if step % config.log_every == 0 or step + 1 == config.max_steps:
            values = average_over_step(accelerator, losses)
            counts = dict(
                skipped=update.skipped,
                failed_saves=saver.failed,
                failed_previews=previews.failed,
                failed_scores=scored.failed,
                unreadable=len(unreadable.seen),
            )
            log.metrics(
                step,
                dict(values, lr=lr, grad_norm=round(norm, 4), **counts, **descent.values()),
                f"loss {values['loss']:.4f}, mse {values['mse']:.4f}, balance {100 * values['balance_share']:.1f} %",
            )
        done = step + 1
        if done % config.save_every == 0 or done == config.max_steps or update.stop:
            with user_errors("train_dit.py", (SaveError,), code=1):
                saver.save(done, model, ema, metadata, last=done == config.max_steps or update.stop > 0)
            log.pause()
        if update.stop:
            break
        if previews.due(done, config.max_steps):
            previews.draw(ema.module if ema else model, run / "previews" / f"step_{done}.png", log, step)
            log.pause()
        if scored.due(done, config.max_steps):
            scores, text = scored.score(ema.module if ema else model, judge, run, done, accelerator)
            log.event(step, {"scores": scores}, f"scores after {done} steps:\n{text}")
            log.pause()

    # ---------------------------------------------------------------- the end
    signals.end()
    stopped = update.stop_after_all()
    if stopped:
        log.stopped(done, stopped)
    log.close()
    if not stopped:
        best = Path(run, "ema.safetensors" if ema else "model.safetensors")
        accelerator.print(f"{run}: {config.max_steps} steps done; weights in {best}")
    del task, optimizer, descent, stream, update, saver
    finish(accelerator, stopped)


def main(argv) -> None:
    with StopSignals() as signals, contextlib.ExitStack() as held:
        train(argv, signals, held)


if __name__ == "__main__":
    main(sys.argv[1:])
