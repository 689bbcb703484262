"""Parameters and MACs of a text preset, for the papers' inputs."""

from __future__ import annotations

from typing import Optional

import torch

from moh_vision.commands.macs import Count
from moh_vision.language.models.create import create_text_model
from moh_vision.models.counts import count_macs, count_parameters

TOKENS = {"mt": 10, "mlm": 128, "clm": 512}  # of each text
# Zhang's parameters are those of a dictionary of about 37,000 words, its MACs of 32,000 to choose from.
MACS_WORDS = {"mt": 32_000}


def count_preset(preset: str, tokens: Optional[int] = None, vocab: Optional[int] = None) -> Count:
    """See `moh_vision.commands.macs.count`."""
    kind = preset.partition("_")[0]
    model = _on_meta(preset, vocab)
    words = vocab or MACS_WORDS.get(kind) or model.config.vocab_size
    smaller = model if words == model.config.vocab_size else _on_meta(preset, words)
    length = tokens or TOKENS[kind]
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    named = dict(decoder_input_ids=ids) if kind == "mt" else {}
    about = f"{length} source and {length} target tokens" if kind == "mt" else f"{length} tokens"
    return Count(
        f"{preset}, {about}, batch 1",
        count_parameters(model),
        f", {model.config.vocab_size:,} words",
        count_macs(smaller, ids, **named),
        f", {words:,} words",
    )


def _on_meta(preset: str, words: Optional[int]):
    overrides = {} if words is None else dict(vocab_size=words)
    with torch.device("meta"):
        return create_text_model(preset, **overrides)
