"""From a task's name to its inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Optional

from moh_vision.engine.io import run_of
from moh_vision.language.data.causal_inputs import CausalInputs
from moh_vision.language.data.inputs import TOKENIZER, MaskedInputs, TextInputs, TranslationInputs

INPUTS = {"mt": TranslationInputs, "mlm": MaskedInputs, "clm": CausalInputs}


def open_text(
    kind: str, data, cache_dir: str, seed: int, tokenizer: Optional[str] = None, say: Callable[[str], None] = print
) -> TextInputs:
    """The inputs of a task: "mt", "mlm" or "clm"; see `TextInputs`."""
    return INPUTS[kind](data, cache_dir, seed, tokenizer, say)


def tokenizer_of(config, resumed: bool) -> Optional[str]:
    """Where a run's vocabulary is: in its own folder if it goes on, as data.tokenizer says, or with the weights that it starts
    from (init_from, or the folder of model.pretrained).

    Args:
        config: a `LanguageConfig`.
        resumed: whether there is a run to go on with.

    Raises:
        ValueError: if nothing says what the tokens of model.pretrained are: a new vocabulary would number others.
    """
    d = config.data
    if resumed and (d.tokenizer or not d.vocab_size or Path(config.output, TOKENIZER).is_file()):
        return config.output
    if not d.tokenizer and config.init_from and (run_of(config.init_from) / TOKENIZER).is_file():
        return str(run_of(config.init_from))
    pretrained = config.model.pretrained
    if pretrained and not d.tokenizer:
        if Path(pretrained, TOKENIZER).is_file():
            return pretrained
        if not d.vocab_size:
            raise ValueError(
                f"model.pretrained {pretrained}: no folder with {TOKENIZER}, so data.tokenizer must say what its tokens are "
                "(or, for text that comes as ids, data.vocab_size how many there are)"
            )
    return d.tokenizer
