"""Translations of a test set by beam search, over processes, and their BLEU.

BLEU is computed in two forms, sacrebleu's default and that of the MAE and MoA papers. The two differ by more than a
point, so every result records its form.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from accelerate.utils import gather_object
from sacrebleu.metrics import BLEU
from torch import nn

from moh_vision.attention import Router
from moh_vision.attention.model_heads import routers_of
from moh_vision.common.seeds import derive_seed
from moh_vision.language.data.translation import ParallelTokens
from moh_vision.language.data.vocabulary import Vocabulary
from moh_vision.language.evaluation.words import tokenise_by


@torch.no_grad()
def translate(
    model,
    pairs: ParallelTokens,
    vocabulary: Vocabulary,
    options,
    accelerator,
    progress: Callable[[Iterable, str], Iterable],
    draw: int,
) -> list[str]:
    """Translate the source of every pair; all processes return the same list. The model is left in eval mode.

    Args:
        model: of a run that translates.
        pairs: only their sources are translated.
        vocabulary: of the target.
        options: the run's `GenerationConfig`.
        accelerator: its processes share the sentences.
        progress: shows a bar over an iterable, with a title.
        draw: seeds experts that are drawn at random.
    """
    model.eval()
    order = np.argsort(pairs.lengths[:, 0], kind="stable")
    groups = [
        order[i : i + options.batch_size].tolist() for i in range(0, len(order), options.batch_size)
    ]
    share = groups[accelerator.process_index :: accelerator.num_processes]
    texts = []
    for group in progress(share, "translating"):
        # The seed follows from the sentences, so that it does not depend on the number of processes.
        torch.manual_seed(derive_seed(draw, group[0]))
        batch = pairs.collate([pairs[index] for index in group])
        source = {
            name: batch[name].to(accelerator.device) for name in ("input_ids", "attention_mask")
        }
        with accelerator.autocast():
            ids = model.generate(
                **source,
                num_beams=options.beam,
                do_sample=False,
                length_penalty=options.length_penalty,
                max_new_tokens=source["input_ids"].shape[1] + options.max_length,
                synced_gpus=False,  # no weights are sharded, and processes have different numbers of batches
            )
        texts += [(index, vocabulary.decode(row)) for index, row in zip(group, ids.tolist())]
    return [text for _, text in sorted(gather_object(texts))]  # in the order of `pairs`


def check_gate_modes(model: nn.Module, modes: list[str]) -> None:
    """Raise ValueError for a mode that the encoder's gates lack."""
    routers = routers_with_modes(model.encoder) if hasattr(model, "encoder") else []
    for mode in modes:
        if mode == "soft":  # as they are
            continue
        if not routers:
            raise ValueError(
                f"generate.gate_modes {mode}: the model's encoder has no gates with modes, as MAE's; use [soft]"
            )
        for router in routers:
            if mode not in router.modes:
                raise ValueError(
                    f"generate.gate_modes {mode}: the encoder's gates have no such mode, but {', '.join(router.modes)}"
                )


def routers_with_modes(model: nn.Module) -> list[Router]:
    """Return the routers of a model whose gates have several modes, see `Router.set_mode`."""
    return [router for router in routers_of(model) if router.modes]


@contextlib.contextmanager
def gate_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Set the mode of the encoder's gates inside the context, of MAE in Peng 2020, section 5.1 and table 5.

    Gates of the decoder stay soft, because the paper studies encoders alone. "soft" changes nothing.
    """
    routers = []
    if mode != "soft":
        routers = routers_with_modes(model.encoder)
    before = [router.mode for router in routers]
    try:
        for router in routers:
            router.set_mode(mode)
        yield
    finally:
        for router, kept in zip(routers, before):
            router.set_mode(kept)


def bleu(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "13a") -> dict:
    """Return BLEU of plain (detokenised) sentences by one of sacrebleu's tokenizers; see `_score`."""
    return _score(BLEU(tokenize=tokenizer), hypotheses, references)


def tokenised_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenizer: str = "13a",
    compound_split: bool = False,
) -> dict:
    """Return BLEU of tokenised text without smoothing, as in multi-bleu.perl and the papers (Zhang 2022, 5.1).

    The papers tokenised with Moses. `tokenizer` is "given" for text that is in that form already, or else one of
    sacrebleu's, of which "13a" is close to Moses but not the same. `compound_split` then writes "rich-text" as
    "rich ##AT##-##AT## text" in hypotheses and references. It is for EN-DE only, as in both papers (Vaswani et al.
    2017), and worth up to about a point. The signature in the result names the tokenizer and the compounds.
    """
    tokenise = tokenise_by(tokenizer)

    def tokens(lines: Sequence[str]) -> list[str]:
        lines = [tokenise(line.rstrip()) for line in lines]
        if compound_split:
            lines = [split_compounds(line) for line in lines]
        return lines

    metric = BLEU(tokenize="none", force=True, smooth_method="none")
    result = _score(metric, tokens(hypotheses), tokens(references))
    compounds = "split" if compound_split else "whole"
    return dict(
        result, signature=f"{result['signature']}|tokenised:{tokenizer}|compounds:{compounds}"
    )


def split_compounds(line: str) -> str:
    """Make a hyphen between two non-space characters a token, as tensor2tensor's script does.

    As there, a character belongs to one match: only the first hyphen of "a-b-c" is split.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def bleu_summary(scores: dict) -> str:
    """Format a result of `bleu` or `tokenised_bleu` with its signature."""
    precisions = "/".join(f"{p:.1f}" for p in scores["precisions"])
    ratio = f"{scores['hypothesis_length']} of {scores['reference_length']} tokens"
    return f"BLEU {scores['bleu']:.2f} ({precisions}, {ratio}) {scores['signature']}"


def _score(metric: BLEU, hypotheses: Sequence[str], references: Sequence[str]) -> dict:
    """Return BLEU in 0..100, precisions of 1- to 4-grams in percent, and lengths in tokens."""
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return dict(
        bleu=score.score,
        precisions=list(score.precisions),
        brevity_penalty=score.bp,
        hypothesis_length=score.sys_len,
        reference_length=score.ref_len,
        sentences=len(hypotheses),
        signature=str(metric.get_signature()),
    )
