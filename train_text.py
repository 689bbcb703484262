"""Train a translation, masked or causal language model.

    accelerate launch train_text.py --config configs/text/NAME.yaml [--key value ...]

The same command run again resumes. See `python train_text.py --help` for every key.
"""

import contextlib
import sys
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from timm.optim import param_groups_weight_decay

from moh_vision.analysis import describe
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.checkpoint import export_weights, load_training
from moh_vision.engine.command_line import changed_keys, parse_config
from moh_vision.engine.early_stop import Patience, earlier_losses
from moh_vision.engine.logging import open_log, write_json
from moh_vision.engine.saver import SaveError, Saver
from moh_vision.engine.script import finish, index_dir, make_accelerator, open_run, take_up, user_errors
from moh_vision.engine.seeds import derive_seed
from moh_vision.engine.sharding import whole_weights
from moh_vision.engine.signals import StopSignals
from moh_vision.engine.steps import Updater, average_over_step, learning_rate, set_learning_rate
from moh_vision.language.config import LanguageConfig
from moh_vision.language.task import LanguageTask
from moh_vision.models.mae import mae_routers, train_only

NAME = "train_text.py"

try:
    from moh_vision.language.data.open import open_text, tokenizer_of
    from moh_vision.language.evaluation.perplexity import summary
    from moh_vision.language.evaluation.scores import BEST, final_scores, final_weights, make_judge
    from moh_vision.language.evaluation.translation import check_gate_modes
    from moh_vision.language.models.build import build_model, save_configs, task_for
    from moh_vision.language.models.weights import init_text
except ModuleNotFoundError as error:
    print(f"{NAME}: error: text needs the package {error.name}: pip install 'moh_vision[text]'", file=sys.stderr)
    raise SystemExit(2) from None


def train(argv, signals: StopSignals, held: contextlib.ExitStack) -> None:
    # ---------------------------------------------------------------- set-up
    with user_errors(NAME):
        config, flags = parse_config(LanguageConfig, argv, NAME)
        o, d = config.optim, config.data
        accelerator = make_accelerator(config.mixed_precision, config.tf32, config.tracker)
        if config.average > 1 and accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError(f"average {config.average}: weights that are sharded (FSDP) are not averaged, set it to 1")
        resumed = take_up(config.output, config.max_steps, flags.fresh, accelerator, held, lock=not flags.dry_run)
        cache, tokenizer = str(Path(index_dir(config.output), "text")), tokenizer_of(config, bool(resumed))
        with accelerator.main_process_first():
            text = open_text(task_for(config.model), d, cache, config.seed, tokenizer, accelerator.print)
        torch.manual_seed(config.seed)
        model, arguments = build_model(config, text, bool(resumed), accelerator.print)
        check_gate_modes(model, config.generate.gate_modes)
        if flags.dry_run:
            print(describe(config.model.name, model, **text.example()))
            return
        micro_batches = o.accumulation * accelerator.num_processes
        if resumed:
            text.check(Path(config.output), micro_batches)
        fingerprints = [vocabulary.fingerprint for vocabulary in text.vocabularies]
        if config.init_from and not resumed:
            init_text(model, config.init_from, fingerprints, accelerator.print)
        train_only(model, config.train_only)
        descent = BlockDescent(accelerator, model, mae_routers(model), config.compile, **asdict(config.block_descent))
        start = resumed[0] if resumed else 0
        batches = text.batches(
            batch_size=o.batch_size, accumulation=o.accumulation, rank=accelerator.process_index,
            world=accelerator.num_processes, start=start, stop=config.max_steps,
        )  # fmt: skip
        # Last, so that a mistake leaves nothing behind.
        changed = partial(changed_keys, allowed=flags.allow_change)
        run = open_run(config.output, config.tree(), changed, flags.fresh, accelerator, held)
    if accelerator.is_main_process and not resumed:
        text.save(run, micro_batches)
        save_configs(model, run)  # with model.safetensors what from_pretrained reads

    task = LanguageTask(model, config.balance_weight, config.label_smoothing, **config.moa_weights())
    if config.compile:
        task.compile()
    undecayed = [name for name, _ in model.named_parameters() if ".router." in name or name.endswith("head_bias")]
    groups = param_groups_weight_decay(model, o.weight_decay, no_weight_decay_list=undecayed)
    if o.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, nesterov=True)
    model.to(accelerator.device)
    update = Updater(accelerator, o.clip_norm, signals)
    task, optimizer = descent.prepare(task, optimizer, update)
    model = accelerator.unwrap_model(task).model
    if resumed:
        with user_errors(NAME):
            load_training(accelerator, resumed[1], model, None, accelerator.print)
        accelerator.print(f"resuming {run} at step {start}")
    saver = Saver(accelerator, run, config.keep_checkpoints)
    patience = Patience(config.patience, earlier_losses(run / "metrics.jsonl", start))
    accelerator.wait_for_everyone()  # all have read what the log of the main process goes on with
    log = open_log(
        run, start, config.max_steps, config.model.name, config.tracker, config.tree(), accelerator.is_main_process,
        unit="tokens", ends_with_validation=False,
    )  # fmt: skip
    metadata = dict(
        architecture=config.model.name, arguments=arguments, vocabularies=fingerprints, config=config.tree()
    )
    descent.announce(log, start)
    judge = make_judge(text, task, accelerator, log)

    # ---------------------------------------------------------------- the loop
    stream = text.stream(batches)
    done, enough = start, patience.exhausted
    signals.begin()
    for step in range(start, start if enough else config.max_steps):
        lr = learning_rate(step, o.lr, o.schedule, o.warmup_steps, config.max_steps, o.min_lr, o.warmup_lr)
        set_learning_rate(optimizer, lr)
        task.train()
        with user_errors(NAME, every_rank=True, code=1):  # text that has changed, or ids that are none
            own = [
                {k: v.to(accelerator.device, non_blocking=True) for k, v in batch.items()}
                for batch in islice(stream, o.accumulation)
            ]
        # Every micro-batch has its own number of labels: each is divided by that of a mean one of the step, so that the
        # step's loss is the mean over all its labels.
        labels = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in own).float(), "sum")
        share = labels / micro_batches
        for phase in descent.phases(batches.epoch(step), own):
            losses = []
            for micro, batch in enumerate(descent.batches):
                torch.manual_seed(derive_seed(config.seed, step, micro, accelerator.process_index, *phase.salt))
                with contextlib.nullcontext() if micro + 1 == o.accumulation else accelerator.no_sync(descent.task):
                    losses.append(descent.task(**batch, tokens=share))
                    accelerator.backward(losses[-1]["loss"] / o.accumulation)
            with user_errors(NAME, (FloatingPointError,), code=1):
                norm, _ = descent.update(step, losses)
        log.step(int(labels))

        done = step + 1
        if step % config.log_every == 0 or done == config.max_steps:
            values = average_over_step(accelerator, losses)
            values.update(lr=lr, grad_norm=round(norm, 4), epoch=batches.epoch(step), **descent.values())
            counts = dict(skipped=update.skipped, failed_saves=saver.failed)
            log.metrics(
                step, dict(values, **counts), f"loss {values['loss']:.4f}, nll {values['nll']:.4f}, lr {lr:.2e}"
            )
        # Before the save, so that a run that goes on from there knows of it.
        if config.eval_every and done % config.eval_every == 0:
            with user_errors(NAME, code=1):  # a loss that is not finite
                scores = judge(text.val, "validation")
            log.event(step, {"validation": scores}, f"validation after {done} steps: {summary(scores)}")
            if patience(done, scores["loss"]) and config.patience:
                export_weights(model, run / BEST, dict(metadata, step=done), write=accelerator.is_main_process)
            enough = patience.exhausted
        if done % config.save_every == 0 or done == config.max_steps or update.stop or enough:
            with user_errors(NAME, (SaveError,), code=1):
                saver.save(done, model, None, metadata, last=done == config.max_steps or update.stop > 0 or enough)
            log.pause()
        if update.stop or enough:
            break

    # ---------------------------------------------------------------- the end
    signals.end()
    stopped = update.stop_after_all()
    if stopped:
        log.stopped(done, stopped)
    else:
        if enough:
            log.say(
                f"stopped after {done} steps: {patience.waited} validations without a lower loss than {patience.best:.4f}"
            )
        with user_errors(NAME):
            results = final_weights(config, model, run, accelerator, log, metadata)
            with whole_weights(task):
                results.update(final_scores(config, text, model, run, judge, accelerator, log))
        if accelerator.is_main_process:
            results = dict(results, step=done, **patience.about(), **descent.about())
            write_json(run / "results.json", results)
    log.close()
    if not stopped:
        accelerator.print(f"{run}: {done} steps done; weights in {run / results['weights']}")
    del task, optimizer, descent, stream, update, saver
    finish(accelerator, stopped)


def main(argv) -> None:
    with StopSignals() as signals, contextlib.ExitStack() as held:
        train(argv, signals, held)


if __name__ == "__main__":
    main(sys.argv[1:])
