"""Train a translation, masked or causal language model: accelerate launch train_text.py --config configs/text/NAME.yaml.

Installed: accelerate launch -m moh_vision.language.train --config text/NAME. The same command run again resumes.
"""

import shutil
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import DistributedType, send_to_device

from moh_vision.engine.best import BEST, earlier_scores
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.errors import user_errors
from moh_vision.engine.optimizers import make_optimizer
from moh_vision.engine.ranks import say
from moh_vision.engine.run import Run
from moh_vision.engine.weights import whole_weights
from moh_vision.language.config import LanguageConfig
from moh_vision.language.task import LanguageTask
from moh_vision.models.describe import describe, full_name, in_short
from moh_vision.models.elastic import elastic_budget, with_elastic
from moh_vision.models.mae import mae_routers, train_only
from moh_vision.models.weights import taken_for

NAME = "train_text.py"
MOST_AVERAGED = 0.2  # share of a run that its averaged checkpoints may reach back, without a word

with user_errors(NAME):
    from moh_vision.language.data.batches import load_batches
    from moh_vision.language.data.inputs import INPUTS, tokenizer_of
    from moh_vision.language.data.tokens import cache_beside
    from moh_vision.language.evaluation.perplexity import summary
    from moh_vision.language.evaluation.scores import (
        evaluation_of,
        final_scores,
        final_weights,
        notes_on_scores,
    )
    from moh_vision.language.evaluation.translation import check_gate_modes
    from moh_vision.language.evaluation.words import bleu_tokenizer
    from moh_vision.language.models.weights import build_model, configs_of, init_text, task_for


def train(run: Run) -> None:
    config, accelerator = run.config, run.accelerator
    d, o = config.data, config.optim
    if config.average > 1 and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"average {config.average}: weights that are sharded (FSDP) are not averaged, set it to 1"
        )

    if task_for(config.model) == "mt":
        bleu_tokenizer(config.data.target, config.generate.tokenizer)  # may lack a package

    # ---------------------------------------------------------------- data; a resumed run has its tokenizer
    checkpoint = run.take_up(config.max_steps)
    tokenizer = tokenizer_of(config, config.output if checkpoint else None)
    with accelerator.main_process_first():
        text = INPUTS[task_for(config.model)](
            d, cache_beside(config.output), config.seed, tokenizer
        )

    notes = notes_on_scores(config, text)
    if config.max_steps and not checkpoint:  # an earlier run may go on
        say(text.scored_files())
    for note in () if checkpoint else notes:
        say(note)

    # ---------------------------------------------------------------- model
    torch.manual_seed(config.seed)
    model, arguments = build_model(config, text, bool(checkpoint))
    check_gate_modes(model, config.generate.gate_modes)
    if not (config.max_steps or config.init_from or config.model.pretrained):
        raise ValueError(
            "max_steps 0 trains nothing: init_from must say which weights are scored, or model.pretrained"
        )
    micro_batches = o.accumulation * accelerator.num_processes
    if checkpoint:
        text.check(Path(config.output), micro_batches)
    fingerprints = [vocabulary.fingerprint for vocabulary in text.vocabularies]
    if config.init_from and not checkpoint:
        with taken_for(config.model.name):
            fresh = init_text(model, config.init_from, fingerprints)
        if fresh:
            say(f"init_from: {len(fresh)} router tensors start fresh")
    train_only(model, config.train_only)
    elastic = elastic_budget(model, config)
    name = full_name(config.model.name, arguments)
    if config.dry_run:  # shows an elastic budget's largest share
        shown = describe(name, model, **text.example())
        run.description = with_elastic(shown, elastic, "\n")
    else:
        say(with_elastic(in_short(name, model), elastic, "; "))
    run.take_model(model, mae_routers(model), elastic)
    batches = text.batches(**run.portion())
    run.open()
    if config.dry_run:
        return
    if accelerator.is_main_process and not checkpoint:
        text.save(run.folder, micro_batches)
        for each in configs_of(model):  # with model.safetensors what from_pretrained reads
            each.save_pretrained(run.folder)

    # ---------------------------------------------------------------- task and optimiser
    task = LanguageTask(
        model, config.balance_weight, config.label_smoothing, **config.moa_weights()
    )
    undecayed = [
        name
        for name, _ in model.named_parameters()
        if ".router." in name or name.endswith("head_bias")
    ]
    optimizer = make_optimizer(model, o, undecayed)
    run.keep_best("loss", config.patience, write=config.patience > 0)
    metadata = dict(arguments=arguments, vocabularies=fingerprints)
    run.prepare(
        task,
        optimizer,
        metadata,
        title=config.model.name,
        unit="tokens",
        ends_with_validation=False,
    )
    evaluate = evaluation_of(text, run.task, accelerator, run.log)
    say_long_average(run)

    # ---------------------------------------------------------------- the loop
    stream = load_batches(text.train, batches, d.workers)
    if not config.max_steps:  # no step saves the weights that are scored
        run.save()
    for step in run.steps():
        with run.errors(every_rank=True, code=1):  # changed text, or invalid ids
            micro = islice(stream, o.accumulation)
            own = [send_to_device(batch, accelerator.device, non_blocking=True) for batch in micro]
        # Micro-batches differ in labels: divide by the step's mean number, so that the step's loss is the
        # mean over all its labels.
        labels = accelerator.reduce(
            sum((batch["labels"] != -100).sum() for batch in own).float(), "sum"
        )
        run.step(own, epoch=batches.epoch(step), count=int(labels), tokens=labels / micro_batches)
        if run.logs():
            v = dict(run.averages(), epoch=batches.epoch(step))
            run.metrics(v, f"loss {v['loss']:.4f}, nll {v['nll']:.4f}, lr {run.learning_rate:.2e}")
        # Before the save, so that a run that goes on from there knows of it.
        if config.eval_every and run.done % config.eval_every == 0:
            with run.errors(code=1):  # a loss that is not finite
                scores = evaluate(text.val, "validation")
            run.judge(scores, run.model)
            run.event(
                {"validation": scores}, f"validation after {run.done} steps: {summary(scores)}"
            )
        if config.keep_weights_every and run.done % config.keep_weights_every == 0:
            keep_weights(run)
        run.save()

    if not run.stopped:
        final_evaluation(run, text, evaluate)


def say_long_average(run: Run) -> None:
    """Say before step 1 if the checkpoints that are averaged reach far back, and what to set."""
    config = run.config
    if config.average == 1 or run.start == run.stop:
        return
    span = (config.average - 1) * config.save_every
    if span > MOST_AVERAGED * run.stop:
        most = max(1, int(MOST_AVERAGED * run.stop / (config.average - 1)))
        say(
            f"average {config.average}: its checkpoints, save_every {config.save_every} apart, reach {span} of the "
            f"{run.stop} steps back, to weights that had learned less; set save_every to at most {most}, or average 1"
        )


def keep_weights(run: Run) -> None:
    """Write OUTPUT/weights/step_N, a transformers model with tokenizer; every process calls it."""
    folder = run.folder / "weights" / f"step_{run.done}"
    main = run.accelerator.is_main_process
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (*run.folder.glob("*config.json"), *run.folder.glob("*tokenizer.json")):
            shutil.copyfile(file, folder / file.name)
    metadata = dict(run.metadata, step=run.done)
    export_weights(run.model, folder / "model.safetensors", metadata, write=main)
    run.log.pause()


def final_evaluation(run: Run, text, evaluate) -> None:
    """Score the configured final weights and write results.json; every process calls it."""
    if run.best.exhausted:
        looks = f"{run.best.waited} validations without a lower loss than {run.best.value:.4f}"
        run.log.say(f"stopped after {run.done} steps: {looks}")
    with run.errors():
        results = final_weights(run, partial(evaluate, text.val))
        with whole_weights(run.task):
            scores = final_scores(run, text, evaluate)
            if run.elastic:
                validate = partial(evaluate, text.val, "validation")
                scores["by_share"] = shares = run.elastic.by_share(
                    run.model, validate, scores["validation"]
                )
                run.log.say(
                    "\n".join(
                        f"with a share of {share}: {summary(shares[share])}" for share in shares
                    )
                )
    results.update(scores)
    for step, loss in earlier_scores(run.folder / "metrics.jsonl", "loss", run.done)[-1:]:
        if step == run.done and results["weights"] == BEST and run.config.average == 1:
            own = f"{scores['validation']['loss']:.4f} with {results['weights']}"
            run.log.say(
                f"validation loss: {own}, which the scores are of; {loss:.4f} with the last weights"
            )
    run.write_results(dict(results, **run.best.results()))
    run.log.say(
        f"{run.folder}: {run.done} steps done; weights in {run.folder / results['weights']}"
    )


def main(argv: list[str] | None = None) -> None:
    with Run(NAME, LanguageConfig, argv) as run:
        train(run)


if __name__ == "__main__":
    main()
