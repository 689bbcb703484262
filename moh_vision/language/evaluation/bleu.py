"""BLEU of translations: sacrebleu's definition, and the form of the MAE and MoA papers.

The two differ by more than a point, so every result records how it was counted.
"""

import re
from collections.abc import Sequence

from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

TOKENIZERS = ("13a", "given")


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict:
    """Return BLEU of plain (detokenised) sentences, by sacrebleu's default, tokenizer 13a; see `_score`."""
    return _score(BLEU(tokenize="13a"), hypotheses, references)


def tokenised_bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "13a", compound_split: bool = False
) -> dict:
    """Return BLEU of tokenised text without smoothing, as in multi-bleu.perl and the papers (Zhang 2022, 5.1).

    The papers tokenised with Moses. Text in their form is scored with tokenizer "given"; "13a", sacrebleu's own, is near
    to Moses' but not the same. `compound_split` then writes "rich-text" as "rich ##AT##-##AT## text" on both sides: for
    EN-DE only, as in both papers (Vaswani et al. 2017); worth up to about a point. The signature names both.
    """
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer {tokenizer!r} is not one of {', '.join(TOKENIZERS)}")
    tokenise = Tokenizer13a() if tokenizer == "13a" else str

    def tokens(lines: Sequence[str]) -> list[str]:
        lines = [tokenise(line.rstrip()) for line in lines]
        return [split_compounds(line) for line in lines] if compound_split else lines

    metric = BLEU(tokenize="none", force=True, smooth_method="none")
    result = _score(metric, tokens(hypotheses), tokens(references))
    compounds = "split" if compound_split else "whole"
    return dict(result, signature=f"{result['signature']}|tokenised:{tokenizer}|compounds:{compounds}")


def split_compounds(line: str) -> str:
    """Make a hyphen between two non-space characters a token, as tensor2tensor's script does.

    As there, a character belongs to one match: only the first hyphen of "a-b-c" is split.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def summary(scores: dict) -> str:
    """Format a result of `bleu` or `tokenised_bleu` with its signature."""
    precisions = "/".join(f"{p:.1f}" for p in scores["precisions"])
    ratio = f"{scores['hypothesis_length']} of {scores['reference_length']} tokens"
    return f"BLEU {scores['bleu']:.2f} ({precisions}, {ratio}) {scores['signature']}"


def _score(metric: BLEU, hypotheses: Sequence[str], references: Sequence[str]) -> dict:
    """Return BLEU in 0..100, precisions of 1 to 4 tokens in percent, and lengths in tokens."""
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references: expected one for each")
    if not hypotheses:
        raise ValueError("there are no sentences to score")
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
