"""BLEU of translations: as sacrebleu defines it, and in the form of the papers of MAE and MoA.

The two differ by more than a point on one output, so every result carries what it was counted on.
"""

import re
from typing import Dict, List, Sequence

from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

TOKENIZERS = ("13a", "given")


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Dict:
    """BLEU of plain (detokenised) text, to compare with what others report today: sacrebleu's default, tokenizer 13a.

    Args:
        hypotheses, references: one sentence each, in the same order.

    Returns:
        dict(bleu in 0..100, precisions of 1 to 4 tokens in percent, brevity_penalty, hypothesis_length, reference_length
        in tokens, sentences, signature).
    """
    return _score(BLEU(tokenize="13a"), hypotheses, references)


def tokenised_bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: str = "13a", compound_split: bool = False
) -> Dict:
    """BLEU of tokenised text without smoothing, as multi-bleu.perl counts it: the papers' form (Zhang 2022, 5.1).

    The papers tokenised with Moses. Text that was (and whatever else its preprocessing did, such as replacing unicode
    punctuation) is scored with tokenizer "given"; then the number is theirs. "13a" is sacrebleu's own tokenizer, which
    is near to Moses' and not the same; the signature names which it was.

    Args:
        hypotheses, references: as for `bleu`.
        tokenizer: "13a", or "given": the text is tokenised already, tokens are separated by spaces.
        compound_split: after it, write "rich-text" as "rich ##AT##-##AT## text" on both sides. For EN-DE only, where
            both papers do so (Vaswani et al. 2017); worth up to about a point.

    Returns:
        as `bleu`; the signature ends with the tokenizer and the compounds.
    """
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer {tokenizer!r} is not one of {', '.join(TOKENIZERS)}")
    tokenise = Tokenizer13a() if tokenizer == "13a" else str

    def tokens(lines: Sequence[str]) -> List[str]:
        lines = [tokenise(line.rstrip()) for line in lines]
        return [split_compounds(line) for line in lines] if compound_split else lines

    metric = BLEU(tokenize="none", force=True, smooth_method="none")
    result = _score(metric, tokens(hypotheses), tokens(references))
    compounds = "split" if compound_split else "whole"
    return dict(result, signature=f"{result['signature']}|tokenised:{tokenizer}|compounds:{compounds}")


def split_compounds(line: str) -> str:
    """A hyphen between two characters that are no spaces becomes a token of its own, as in tensor2tensor's script.

    Like there, a character belongs to one match: of "a-b-c" only the first hyphen is split.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def summary(scores: Dict) -> str:
    """One line of what `bleu` or `tokenised_bleu` found, with the signature."""
    precisions = "/".join(f"{p:.1f}" for p in scores["precisions"])
    ratio = f"{scores['hypothesis_length']} of {scores['reference_length']} tokens"
    return f"BLEU {scores['bleu']:.2f} ({precisions}, {ratio}) {scores['signature']}"


def _score(metric: BLEU, hypotheses: Sequence[str], references: Sequence[str]) -> Dict:
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
