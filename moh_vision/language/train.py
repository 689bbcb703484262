"""Train a translation, masked or causal language model: accelerate launch train_text.py --config configs/text/NAME.yaml.

Where only the package is installed: accelerate launch -m moh_vision.language.train --config text/NAME.
The same command resumes the run; --help prints every key.
"""

import shutil
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import DistributedType, send_to_device

from moh_vision.common.errors import extra_named, user_errors
from moh_vision.common.wings import TEXT
from moh_vision.engine.best import BEST, Best, earlier_scores
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.estimate import Fetched, estimate_cost
from moh_vision.engine.loop_start import start_loop
from moh_vision.engine.optimizers import make_optimizer
from moh_vision.engine.ranks import by_main, say
from moh_vision.engine.run_setup import RunSetup, Span, set_up_run
from moh_vision.engine.training_loop import TrainingLoop
from moh_vision.engine.weights import whole_weights
from moh_vision.language.config import LanguageConfig
from moh_vision.language.task import LanguageTask
from moh_vision.models.counts import without_memory
from moh_vision.models.describe import full_name
from moh_vision.models.elastic import elastic_budget, mean_macs
from moh_vision.models.fine_tuning import train_only
from moh_vision.models.fitting import advise_on_model_name
from moh_vision.models.set_up import introduce
from moh_vision.models.weights import find_weights

MOST_AVERAGED = 0.2  # share of a run that averaged checkpoints may span without a warning

# Without the packages of the extra "text", a command prints one line that says what to install, and an import raises
# ImportError.
with user_errors(TEXT.script) if __name__ == "__main__" else extra_named():
    from moh_vision.language.data.batches import load_batches
    from moh_vision.language.data.inputs import INPUTS, tokenizer_of
    from moh_vision.language.data.tokens import cache_beside
    from moh_vision.language.data.vocabulary import copy_tokenizers
    from moh_vision.language.evaluation.perplexity import summary
    from moh_vision.language.evaluation.scores import (
        evaluation_of,
        final_scores,
        final_weights,
        notes_on_scores,
    )
    from moh_vision.language.evaluation.translation import check_gate_modes
    from moh_vision.language.evaluation.words import bleu_tokenizer
    from moh_vision.language.models.base import labelled
    from moh_vision.language.models.weights import (
        build_model,
        configs_of,
        start_text,
        task_for,
    )


def train(setup: RunSetup) -> None:  # noqa: C901, PLR0915
    config = setup.config
    accelerator = setup.accelerator
    if config.average > 1 and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"average {config.average}: weights that are sharded (FSDP) are not averaged, set it to 1"
        )

    if task_for(config.model) == "mt":
        # Raises at once if the tokenizer needs a package that is missing.
        bleu_tokenizer(config.data.target, config.generate.tokenizer)

    # ---------------------------------------------------------------- steps to do, text
    span = setup.lock_and_find_steps(config.max_steps)
    checkpoint = span.checkpoint
    resumed_run = (
        config.output if checkpoint else None
    )  # a resumed run takes the tokenizer of its folder
    tokenizer = tokenizer_of(config, resumed_run)
    inputs_class = INPUTS[task_for(config.model)]
    with accelerator.main_process_first():
        cache = cache_beside(config.output)
        text = inputs_class(config.data, cache, config.seed, tokenizer)

    notes = notes_on_scores(config, text)
    if not checkpoint:  # say this once, when the run begins
        if config.max_steps:
            say(text.scored_files())  # raises if a scored file is also trained on
        for note in notes:
            say(note)

    # ---------------------------------------------------------------- model
    torch.manual_seed(config.seed)
    model, arguments = build_model(config, text, resumed=bool(checkpoint))
    check_gate_modes(model, config.generate.gate_modes)
    if not (config.max_steps or config.init_from or config.model.pretrained):
        raise ValueError(
            "max_steps 0 trains nothing: init_from must say which weights are scored, or model.pretrained"
        )
    micro_batches = config.optim.accumulation * accelerator.num_processes
    if checkpoint:
        by_main(lambda: text.check(Path(config.output), micro_batches), accelerator)
    fingerprints = [vocabulary.fingerprint for vocabulary in text.vocabularies]
    if config.init_from and not checkpoint:
        with advise_on_model_name(config.model.name):
            found = find_weights(config.init_from, wing=TEXT.name, key="init_from")
            lines = start_text(model, found, fingerprints)
        for line in lines:
            say(f"init_from: {line}")
    train_only(model, config.train_only)
    elastic = elastic_budget(model, config)
    name = full_name(config.model.name, arguments)
    description = introduce(name, model, elastic, config, say, **text.example())
    descent = BlockDescent(accelerator, model, config.compile, config.block_descent)
    sampler = text.sampler(**setup.sampler_arguments(span))

    # ---------------------------------------------------------------- open the folder, which is first written here
    folder = setup.open_folder(span, description=description)
    if config.dry_run:  # nothing was written
        return
    if accelerator.is_main_process and not (checkpoint or config.estimate):
        longest = getattr(model.config, "max_position_embeddings", None)
        text.save(folder.path, micro_batches, longest)
        for model_config in configs_of(model):  # from_pretrained reads them with model.safetensors
            model_config.save_pretrained(folder.path)

    # ---------------------------------------------------------------- task and optimiser
    task = LanguageTask(
        model, config.balance_weight, config.label_smoothing, **config.moa_weights()
    )
    undecayed = [
        name
        for name, _ in model.named_parameters()
        if ".router." in name or name.endswith("head_bias")
    ]
    optimizer = make_optimizer(model, config.optim, undecayed)
    metadata = dict(arguments=arguments, vocabularies=fingerprints)
    shadow = None
    if config.estimate:
        shadow = without_memory(model)  # copied before accelerate may shard the model
    with start_loop(
        setup,
        span,
        folder,
        descent,
        task,
        optimizer,
        metadata,
        title=config.model.name,
        elastic=elastic,
        best=Best("loss", config.patience, write=config.patience > 0),
        unit="tokens",
        ends_with_validation=False,
    ) as loop:
        # ------------------------------------------------------------ the loop
        say_long_average(config, span)
        evaluate = evaluation_of(text, loop.task, accelerator, loop.log)
        batches = load_batches(text.train, sampler, config.data.workers)
        if not config.max_steps:  # no step saves the weights that are scored
            loop.save()

        def fetch() -> Fetched:
            with setup.errors(every_rank=True, code=1):  # text that has changed, or invalid ids
                # Labels are found before the batch is on the device: looking there would wait for the device.
                step_batches = [
                    dict(batch, where=labelled(batch["labels"]))
                    for batch in islice(batches, config.optim.accumulation)
                ]
            # Micro-batches have different numbers of labels. Each sum of losses is divided by the mean number, so
            # that the loss of the step is the mean over all labels of the step.
            labels = sum(len(batch["where"]) for batch in step_batches)
            if accelerator.num_processes > 1:
                here = torch.full((), float(labels), device=accelerator.device)
                labels = int(accelerator.reduce(here, "sum"))
            tokens = torch.full((), labels / micro_batches, device=accelerator.device)
            on_device = send_to_device(step_batches, accelerator.device, non_blocking=True)
            return Fetched(on_device, labels, dict(tokens=tokens))

        if config.estimate:

            def macs_of(batch: dict) -> int:
                not_inputs = ("labels", "where")
                one = {name: value[:1] for name, value in batch.items() if name not in not_inputs}
                return len(batch["labels"]) * mean_macs(shadow, elastic, **one)

            estimate_cost(loop, sampler, fetch, macs_of)
            return
        for step in loop.steps():
            epoch = sampler.epoch(step)
            fetched = fetch()
            loop.step(fetched.micro_batches, epoch=epoch, count=fetched.count, **fetched.more)
            if loop.step_is_logged():
                values = dict(loop.averages(), epoch=epoch)
                rate = f"lr {loop.learning_rate:.2e}"
                loop.metrics(values, f"loss {values['loss']:.4f}, nll {values['nll']:.4f}, {rate}")
            # Validate before saving, so that the checkpoint of this step has the score.
            if config.eval_every and loop.done % config.eval_every == 0:
                with setup.errors(code=1):  # the loss may be infinite or NaN
                    scores = evaluate(text.val, "validation")
                loop.judge(scores, loop.model)
                loop.event(
                    {"validation": scores}, f"validation after {loop.done} steps: {summary(scores)}"
                )
            if config.keep_weights_every and loop.done % config.keep_weights_every == 0:
                keep_weights(loop)
            loop.save()
        if not loop.stopped:
            final_evaluation(loop, text, evaluate)


def say_long_average(config: LanguageConfig, span: Span) -> None:
    """Warn before the first step if the averaged checkpoints span a large part of the run, and say what to set."""
    if config.average == 1 or span.start == span.stop:
        return
    reach = (config.average - 1) * config.save_every
    if reach > MOST_AVERAGED * span.stop:
        most = max(1, int(MOST_AVERAGED * span.stop / (config.average - 1)))
        say(
            f"average {config.average}: its checkpoints, save_every {config.save_every} apart, reach {reach} of the "
            f"{span.stop} steps back, to weights that had learned less; set save_every to at most {most}, or average 1"
        )


def keep_weights(loop: TrainingLoop) -> None:
    """Write OUTPUT/weights/step_N, a transformers model with its tokenizers. Collective: every process must call it."""
    folder = loop.folder / "weights" / f"step_{loop.done}"
    main = loop.accelerator.is_main_process
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizers(loop.folder, folder)
        for file in loop.folder.glob("*config.json"):
            shutil.copyfile(file, folder / file.name)
    metadata = dict(loop.metadata, step=loop.done)
    export_weights(loop.model, folder / "model.safetensors", metadata, write=main)
    loop.log.pause()


def final_evaluation(loop: TrainingLoop, text, evaluate) -> None:
    """Score the configured final weights and write results.json. Collective: every process must call it."""
    if loop.best.exhausted:
        reason = f"{loop.best.waited} validations without a lower loss than {loop.best.value:.4f}"
        loop.log.say(f"stopped after {loop.done} steps: {reason}")
    with loop.setup.errors():
        results = final_weights(loop, partial(evaluate, text.val))
        with whole_weights(loop.task):
            scores = final_scores(loop, text, evaluate)
            if loop.elastic:
                validate = partial(evaluate, text.val, "validation")
                shares = loop.elastic.by_share(loop.model, validate, scores["validation"])
                lines = [f"with a share of {share}: {summary(shares[share])}" for share in shares]
                loop.log.say("\n".join(lines))
                scores["by_share"] = shares
    results.update(scores)
    validations = earlier_scores(loop.folder / "metrics.jsonl", "loss", loop.done)
    scores_best = results["weights"] == BEST and loop.config.average == 1
    if validations and scores_best:
        step, loss = validations[-1]
        if step == loop.done:  # the last weights were validated too
            scored = f"{scores['validation']['loss']:.4f} with {results['weights']}"
            loop.log.say(
                f"validation loss: {scored}, which the scores are of; {loss:.4f} with the last weights"
            )
    loop.write_results(dict(results, **loop.best.results()))
    loop.log.say(
        f"{loop.folder}: {loop.done} steps done; weights in {loop.folder / results['weights']}"
    )


def main(argv: list[str] | None = None) -> None:
    with set_up_run(TEXT.script, LanguageConfig, argv) as setup:
        train(setup)


if __name__ == "__main__":
    main()
