"""Translations of a test set by beam search, over processes, and their BLEU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn

from moh_vision.engine.seeds import derive_seed
from moh_vision.language.data.translation import ParallelTokens
from moh_vision.language.data.vocabulary import Vocabulary
from moh_vision.language.evaluation.bleu import bleu, tokenised_bleu
from moh_vision.models.mae import mae_routers


@torch.no_grad()
def translate(
    model,
    pairs: ParallelTokens,
    vocabulary: Vocabulary,
    options,
    accelerator,
    progress: Callable[[Iterable, str], Iterable] = lambda batches, title: batches,
    draw: int = 0,
) -> list[str]:
    """Translate the source of every pair; all processes return the same list.

    `draw` seeds experts that are drawn at random. The model is left in eval mode.
    """
    model.eval()
    order = np.argsort(pairs.lengths[:, 0], kind="stable")
    groups = [order[i : i + options.batch_size].tolist() for i in range(0, len(order), options.batch_size)]
    own = groups[accelerator.process_index :: accelerator.num_processes]
    found = []
    for group in progress(own, "translating"):
        torch.manual_seed(derive_seed(draw, group[0]))
        batch = pairs.collate([pairs[number] for number in group])
        source = {name: batch[name].to(accelerator.device) for name in ("input_ids", "attention_mask")}
        with accelerator.autocast():
            ids = model.generate(
                **source,
                num_beams=options.beam,
                do_sample=False,
                length_penalty=options.length_penalty,
                max_new_tokens=source["input_ids"].shape[1] + options.max_length,
                synced_gpus=False,  # weights are whole, batch counts differ
            )
        found += [(number, vocabulary.decode(row)) for number, row in zip(group, ids.tolist())]
    return [text for _, text in sorted(gather_object(found))]


def score_translations(hypotheses: list[str], references: list[str], options) -> dict:
    """Return dict(bleu, tokenised_bleu); options: a `GenerationConfig`."""
    return dict(
        bleu=bleu(hypotheses, references),
        tokenised_bleu=tokenised_bleu(hypotheses, references, options.tokenizer, options.compound_split),
    )


def check_gate_modes(model: nn.Module, modes: list[str]) -> None:
    """Raise ValueError for a mode that the encoder's gates of MAE lack."""
    routers = mae_routers(model.encoder) if hasattr(model, "encoder") else []
    for mode in modes:
        if mode != "soft" and not routers:
            raise ValueError(f"generate.gate_modes {mode}: the model's encoder has no gates of MAE; use [soft]")
        if mode == "argmax" and any(router.out is None for router in routers):
            raise ValueError(f"generate.gate_modes {mode}: UNI-MAE has no gate that prefers an expert; take random")


@contextlib.contextmanager
def gate_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Use the encoder's MAE gates in another mode, see `MAERouter` (Peng 2020, section 5.1 and table 5).

    The paper studies encoders alone. "soft" leaves the model as it is.
    """
    routers = mae_routers(model.encoder) if mode != "soft" else []
    before = [router.mode for router in routers]
    try:
        for router in routers:
            router.set_mode(mode)
        yield
    finally:
        for router, kept in zip(routers, before):
            router.set_mode(kept)
