"""Build the model of a run on text: a preset, or a converted pre-trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

from torch import nn

from moh_vision.language.data.inputs import CausalInputs, TextInputs
from moh_vision.language.data.vocabulary import TOKENIZER, NumberedVocabulary, Vocabulary
from moh_vision.language.models.create import create_text_model, task_of
from moh_vision.language.models.weights import model_as_saved, pretrained_model


def task_for(model) -> str:
    """The task of a `TextModelConfig`: "mt", "mlm" or "clm"."""
    return "clm" if model.pretrained else task_of(model.name)


def build_model(config, text: TextInputs, resumed: bool) -> Tuple[nn.Module, dict]:
    """Return the model, and its arguments for exported weights. A resumed pre-trained model is built from
    config.output without weights, because a checkpoint follows.
    """
    m = config.model
    if m.pretrained:
        if not resumed:
            check_same_tokens(text.vocabularies[0], config)
        size = text.model_arguments()["vocab_size"]
        if resumed:
            model = model_as_saved(config.output)
        else:
            model = pretrained_model(m.pretrained, m.arguments(), size)
        arguments = dict(pretrained=m.pretrained, convert=m.arguments(), vocab_size=size)
    else:
        arguments = config.model_arguments(text.model_arguments())
        model = create_text_model(m.name, **arguments)
    config.check_model(model.config)
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(text, CausalInputs):
        if positions is not None and config.data.block > positions:
            raise ValueError(f"data.block {config.data.block}: the model has {positions} positions")
        for name, number in text.special_tokens().items():
            for about in (model.config, getattr(model, "generation_config", None)):
                if about is not None:
                    setattr(about, name, number)
    if config.checkpointing:
        # Not reentrant: reentrant checkpointing loses routing statistics.
        older = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", older)
        enable(dict(use_reentrant=False))
    return model, arguments


def check_same_tokens(vocabulary, config) -> None:
    """Raise ValueError if the vocabulary numbers a token otherwise than a tokenizer in model.pretrained:
    the model would read other words than it learnt."""
    file = Path(config.model.pretrained, TOKENIZER)
    if isinstance(vocabulary, NumberedVocabulary) or not file.is_file():
        return
    learnt = Vocabulary.load(file, foreign=True)
    for number in range(min(len(vocabulary), len(learnt))):
        if vocabulary.token(number) != learnt.token(number):
            raise ValueError(
                f"data.tokenizer {config.data.tokenizer}: token {number} is {vocabulary.token(number)!r}, "
                f"in {file} {learnt.token(number)!r}; expected that one, or one that adds tokens behind it"
            )


def save_configs(model: nn.Module, run: Path) -> None:
    """config.json, and generation_config.json where the model has one, beside the weights."""
    model.config.save_pretrained(run)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(run)
