"""Final scores of a run on text: perplexities and BLEU."""

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from moh_vision.attention import RoutingStats, head_budget
from moh_vision.common.io import TensorFiles, by_age, write_whole
from moh_vision.engine.best import BEST, earlier_scores
from moh_vision.engine.checkpoint import export_weights
from moh_vision.engine.logging import write_json
from moh_vision.engine.ranks import by_all, from_first, total
from moh_vision.engine.step_folders import damage, refuse_other_views
from moh_vision.engine.training_loop import TrainingLoop
from moh_vision.engine.weights import load_whole, whole_weights
from moh_vision.language.config import GenerationConfig
from moh_vision.language.data.inputs import CausalInputs, TextInputs, TranslationInputs
from moh_vision.language.evaluation.gates import gate_text, read_gates
from moh_vision.language.evaluation.perplexity import exp, perplexity, routed_losses, summary
from moh_vision.language.evaluation.translation import (
    bleu,
    bleu_summary,
    gate_mode,
    tokenised_bleu,
    translate,
)
from moh_vision.language.evaluation.words import (
    bleu_tokenizer,
    join_pieces,
    notes_on_bleu,
    notes_on_perplexity,
    pieces_in,
)
from moh_vision.models.head_load import FILE, HeadLoad

AVERAGED = "averaged.safetensors"
FORMS = dict(bleu="sacreBLEU's default", tokenised_bleu="as the papers count")
LOOKED_AT = 1000  # lines that `notes_on_scores` reads before training
RANDOM_DRAWS = 5  # of random experts, as in Peng 2020, table 5


def evaluation_of(text: TextInputs, task: nn.Module, accelerator, log) -> Callable[..., dict]:
    """Return a function (data set, title, on_routing) -> loss and perplexity of the present weights over all processes.

    `on_routing`: see `routed_losses`.
    """

    def evaluate(
        dataset, title: str, on_routing: Callable[[list[RoutingStats]], None] | None = None
    ) -> dict:
        # Unwrapped, because DDP or FSDP would wait for processes that have fewer batches.
        losses = routed_losses(accelerator.unwrap_model(task).model, accelerator, on_routing)
        batches = text.eval_batches(dataset, accelerator.process_index, accelerator.num_processes)
        with whole_weights(task):
            scores = perplexity(losses, log.progress(batches, title), accelerator.device, total)
        log.pause()
        return scores

    return evaluate


def notes_on_scores(config, text: TextInputs) -> list[str]:
    """Return warnings about what the final scores count, from the first lines of the text to score.

    Raises:
        ValueError: BLEU of the target language needs a package that is missing.
    """
    lines = text.scored_lines(LOOKED_AT)
    name = f"{config.data.root}, {config.data.test or config.data.val}"
    if isinstance(text, TranslationInputs):
        asked = config.generate.tokenizer
        target = config.data.target
        tokenizer = bleu_tokenizer(target, asked)
        return notes_on_bleu(lines, asked or tokenizer, f"{name}.{target}")
    if isinstance(text, CausalInputs):
        return notes_on_perplexity(lines, name)
    return []


def final_weights(loop: TrainingLoop, validate: Callable[[str], dict]) -> dict:
    """Load the weights that are scored at the end; return their file's name and further entries of results.json.

    These are the last weights, or with `patience` the best ones. With `average` above 1 the mean of the last
    checkpoints is written, and of all these the weights with the lowest validation loss are loaded. `validate` takes a
    title. Collective: every process must call it.
    """
    config = loop.config
    if config.average > 1:
        return _average_or_better(loop, validate)
    if has_best(loop):
        load_best(loop)
        return dict(weights=BEST)
    return dict(weights="model.safetensors")


def has_best(loop: TrainingLoop) -> bool:
    """Return whether a run with `patience` has weights of its best validation; the main process looks."""
    return loop.config.patience > 0 and from_first((loop.folder / BEST).exists)


def load_best(loop: TrainingLoop) -> None:
    """Load the weights of the best validation; collective."""
    load_whole(loop.model, by_all(lambda: load_file(loop.folder / BEST)))


def _average_or_better(loop: TrainingLoop, validate: Callable[[str], dict]) -> dict:
    """Write the average of the last checkpoints; load the average, last or best weights, by their validation loss."""
    config = loop.config
    loop.accelerator.wait_for_everyone()
    averaged, steps = average_checkpoints(loop.folder, config.average, config.save_every)
    last = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    validations = earlier_scores(loop.folder / "metrics.jsonl", "loss", loop.done)[-1:]
    # Broadcast, so that either all processes validate or none.
    last_loss = from_first(lambda: dict(validations).get(loop.done))
    if last_loss is None:
        last_loss = validate("validation of the last weights")["loss"]
    load_whole(loop.model, averaged)
    if loop.accelerator.is_main_process:
        metadata = dict(loop.metadata, averaged_steps=steps)
        export_weights(loop.model, loop.folder / AVERAGED, metadata)
    averaged_loss = validate("validation of the average")["loss"]
    losses = {AVERAGED: averaged_loss, "model.safetensors": last_loss}
    of_steps = f"the average of steps {', '.join(map(str, reversed(steps)))}"
    compared = [f"{averaged_loss:.4f} with {of_steps}", f"{last_loss:.4f} with the last weights"]
    if has_best(loop):
        losses[BEST] = loop.best.value
        compared.append(f"{loop.best.value:.4f} with those of step {loop.best.step}")
    chosen = min(losses, key=losses.get)
    if chosen == BEST:
        load_best(loop)
    elif chosen != AVERAGED:
        load_whole(loop.model, last)
    loop.log.say(f"validation loss: {', '.join(compared)}; the scores are of {chosen}")
    return dict(
        weights=chosen, averaged_loss=averaged_loss, last_loss=last_loss, averaged_steps=steps
    )


def average_checkpoints(
    run: Path, count: int, every: int = 1
) -> tuple[dict[str, Tensor], list[int]]:
    """Average a run's newest `count` whole checkpoints (Vaswani 2017, section 6.1) in float64; return state and steps.

    All but the newest must be at multiples of `every` steps, so a run that was stopped between two saves gives the same
    weights as one that was not. Integer tensors, such as batch norm's counters, are those of the newest checkpoint.
    Collective: the main process chooses the checkpoints.
    """
    whole = from_first(lambda: newest_checkpoints(run, count, every))
    refuse_other_views(list(whole.values()))
    averages = {}
    newest, *older = (TensorFiles(folder / "model.safetensors") for folder in whole.values())
    for name in newest.shapes:  # one tensor at a time in memory
        mean = newest.read(name)
        if mean.is_floating_point():
            values = torch.stack([mean, *(file.read(name) for file in older)])
            mean = values.double().mean(0).to(mean.dtype)
        averages[name] = mean
    return averages, list(whole)


def newest_checkpoints(run: Path, count: int, every: int) -> dict[int, Path]:
    """Return {steps done: folder} of the checkpoints that `average_checkpoints` takes, the newest first."""
    whole: dict[int, Path] = {}
    for step, folder in by_age(run / "checkpoints"):
        regular = not whole or step % every == 0
        if regular and len(whole) < count and step not in whole and damage(folder, step) is None:
            whole[step] = folder
    if not whole:
        raise ValueError(f"{run / 'checkpoints'}: no whole checkpoint to average")
    return whole


def final_scores(loop: TrainingLoop, text: TextInputs, evaluate: Callable[..., dict]) -> dict:
    """Score the model's present weights, which must not be sharded. Collective: every process must call it.

    `evaluate` comes from `evaluation_of`.

    Returns dict(validation, test, gate_entropy per layer, mean_gate_entropy of encoder and decoder, and for translation
    the scores of `_translations`). Writes gates.md, gates.json, and head_load.json if tokens choose among heads.
    """
    config = loop.config
    texts = text.texts()
    load = HeadLoad(head_budget(loop.model)["layers"], {"text": [name for name, _ in texts]})
    counts = load.choosing()

    def count_in(group: int) -> Callable[[list[RoutingStats]], None]:
        """Return a function that adds statistics to the head load of a text."""
        return lambda stats: load.add(stats, group)

    results = {}
    for title, dataset in dict(validation=text.val, test=text.test).items():
        if dataset is None:
            continue
        on_routing = None
        if counts and dataset is text.val:  # group 0, because it is the first of `texts`
            on_routing = count_in(0)
        scores = evaluate(dataset, title, on_routing)
        results[title] = scores
        if isinstance(text, CausalInputs):  # comparable between vocabularies
            nats = scores["loss"] * scores["tokens"]
            scores["word_perplexity"] = exp(nats / dataset.tokens.words)
        loop.log.say(f"{title}: {summary(scores)}")
    if counts:
        for group, (name, dataset) in enumerate(texts[1:], 1):
            evaluate(dataset, f"head load, {name}", count_in(group))
        load.reduce(total)
        load.of = dict(model=config.model.name, data=config.data.root, split=config.data.val)
        if loop.accelerator.is_main_process:
            load.save(loop.folder / FILE)
    results.update(_gate_scores(loop, text))
    if isinstance(text, TranslationInputs):
        results.update(_translations(loop, text))
    return results


def _gate_scores(loop: TrainingLoop, text: TextInputs) -> dict:
    """Write gates.json and gates.md; return the entropies of the gates, {} for a model without gates."""
    split = loop.config.data.val
    batches = text.eval_batches(
        text.val, loop.accelerator.process_index, loop.accelerator.num_processes
    )
    gates = read_gates(loop.model, batches, text.vocabularies, loop.accelerator)
    if not gates["layers"]:
        return {}
    if loop.accelerator.is_main_process:
        write_json(loop.folder / "gates.json", dict(split=split, **gates))
        page = gate_text(gates, f"# What the gates do with {split}")
        write_whole(loop.folder / "gates.md", page)
    by_layer = {layer["name"]: round(layer["entropy"], 4) for layer in gates["layers"]}
    by_stack = {stack: round(mean, 4) for stack, mean in gates["mean_entropy"].items()}
    for stack, mean in by_stack.items():
        loop.log.say(f"mean entropy of the gates of the {stack}: {mean:.3f} nats")
    return dict(gate_entropy=by_layer, mean_gate_entropy=by_stack)


def _translations(loop: TrainingLoop, text: TranslationInputs) -> dict:
    """Translate the test split, or else the val split, in each gate mode; return BLEU and what it was computed on.

    "random" gets the mean over several draws. Writes OUTPUT/translations.txt, a line per scored pair, and for another
    mode than "soft" OUTPUT/translations.MODE.txt.
    """
    config = loop.config
    pairs = text.test
    split = config.data.test
    if pairs is None:
        pairs = text.val
        split = config.data.val
    references = text.references(split, pairs)
    piece_sign = pieces_in(references)
    references = [join_pieces(line, piece_sign) for line in references]
    vocabulary = text.vocabularies[1]
    options = config.generate
    tokenizer = bleu_tokenizer(config.data.target, options.tokenizer)
    lowercase = vocabulary.lowercase  # not part of sacrebleu's signature
    scores: dict[str, dict] = {}
    for mode in options.gate_modes:
        title = split
        file = "translations.txt"
        if mode != "soft":
            title = f"{split}, gates of the encoder {mode}"
            file = f"translations.{mode}.txt"
        count = RANDOM_DRAWS if mode == "random" else 1
        draws = []
        for draw in range(count):
            message = f"{title}: translating {len(references)} sentences"
            if mode == "random":
                message += f", draw {draw + 1} of {count}"
            loop.log.say(message)
            with gate_mode(loop.model, mode):
                lines = translate(
                    loop.model,
                    pairs,
                    vocabulary,
                    options,
                    loop.accelerator,
                    loop.log.progress,
                    draw,
                )
            lines = [join_pieces(line, piece_sign) for line in lines]
            draws.append(_both_forms(lines, references, tokenizer, options))
            if loop.accelerator.is_main_process and draw == 0:
                write_whole(loop.folder / file, "".join(line + "\n" for line in lines))
        scores[mode] = draws[0]
        if mode == "random":
            scores[mode] = {form: over_draws(draws, form) for form in draws[0]}
        for form, found in scores[mode].items():
            case = ", lower-cased data" if lowercase else ""
            line = f"{title}, {FORMS[form]}{case}: {bleu_summary(found)}"
            if mode == "random":
                line += f", mean of {count} draws, std {found['std']:.2f}"
            loop.log.say(line)
    return dict(
        bleu=scores,
        bleu_split=split,
        bleu_pairs=len(references),
        bleu_lowercase=lowercase,
        bleu_joined=piece_sign,
        left_out=pairs.left_out,
    )


def _both_forms(
    lines: list[str], references: list[str], tokenizer: str, options: GenerationConfig
) -> dict[str, dict]:
    """Return BLEU of translations in the forms of `FORMS`; `tokenizer` is sacrebleu's for the language."""
    default = bleu(lines, references, tokenizer)
    papers = tokenised_bleu(
        lines, references, options.tokenizer or tokenizer, options.compound_split
    )
    return dict(bleu=default, tokenised_bleu=papers)


def over_draws(draws: list[dict], form: str) -> dict:
    """Merge one form of BLEU over draws: return the first draw's entry with the mean, deviation and all values."""
    values = [draw[form]["bleu"] for draw in draws]
    return dict(
        draws[0][form], bleu=statistics.mean(values), std=statistics.stdev(values), draws=values
    )
