import math
import random
from collections import Counter

import pytest

from moh_vision.language.evaluation.translation import (
    bleu,
    bleu_summary,
    split_compounds,
    tokenised_bleu,
)


def by_definition(hypotheses, references):
    """Papineni et al. 2002, on tokens separated by spaces: clipped precisions, geometric mean, brevity penalty."""
    logs = 0.0
    for n in range(1, 5):
        correct = total = 0
        for hypothesis, reference in zip(hypotheses, references):
            h = hypothesis.split()
            r = reference.split()
            grams = Counter(tuple(h[i : i + n]) for i in range(len(h) - n + 1))
            there = Counter(tuple(r[i : i + n]) for i in range(len(r) - n + 1))
            correct += sum(min(count, there[gram]) for gram, count in grams.items())
            total += sum(grams.values())
        if correct == 0:
            return 0.0
        logs += math.log(correct / total) / 4
    c = sum(len(h.split()) for h in hypotheses)
    r = sum(len(r.split()) for r in references)
    return 100 * math.exp(logs + min(0, 1 - r / c))


def corpus(seed, sentences=40, share=0.8):
    """References of a few words, hypotheses that keep most of them; lengths differ."""
    draw = random.Random(seed)
    words = [f"w{i}" for i in range(12)]
    references = [" ".join(draw.choices(words, k=draw.randint(4, 15))) for _ in range(sentences)]
    hypotheses = []
    for line in references:
        kept = []
        for word in line.split():
            if draw.random() < 0.97:
                kept.append(word if draw.random() < share else draw.choice(words))
        hypotheses.append(" ".join(kept))
    return hypotheses, references


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("swap", (False, True))
def test_tokenised_bleu_is_the_definition(seed, swap):
    hypotheses, references = corpus(seed)
    if swap:  # longer than the reference: no brevity penalty
        hypotheses, references = references, hypotheses
    scores = tokenised_bleu(hypotheses, references, tokenizer="given")
    assert 5 < scores["bleu"] < 95
    assert scores["bleu"] == pytest.approx(by_definition(hypotheses, references), rel=1e-9)
    assert (scores["brevity_penalty"] == 1) == swap
    assert scores["hypothesis_length"] == sum(len(h.split()) for h in hypotheses)


def test_no_smoothing_in_the_papers_form():
    """No four tokens in a row are right: 0 by the definition, and sacrebleu's default smooths it."""
    hypotheses = ["a b c x d e f"]
    references = ["a b c y d e f"]
    assert tokenised_bleu(hypotheses, references, "given")["bleu"] == 0
    assert by_definition(hypotheses, references) == 0
    assert bleu(hypotheses, references)["bleu"] > 20


def test_13a_is_applied_to_both_sides():
    hypotheses = ["The cat sat on the mat, quietly.", "He said: no (again)!"]
    references = ["The cat sat on a mat, quietly.", "She said: no (again)!"]
    tokens = [["The cat sat on the mat , quietly .", "He said : no ( again ) !"],
              ["The cat sat on a mat , quietly .", "She said : no ( again ) !"]]  # fmt: skip
    want = by_definition(*tokens)
    assert want > 40
    assert bleu(hypotheses, references)["bleu"] == pytest.approx(want)
    assert tokenised_bleu(hypotheses, references)["bleu"] == pytest.approx(want)
    given = tokenised_bleu(hypotheses, references, "given")["bleu"]
    assert given == pytest.approx(by_definition(hypotheses, references)) and given != pytest.approx(
        want
    )


def test_compound_split():
    assert split_compounds("text-to-speech - ein Film-") == (
        "text ##AT##-##AT## to ##AT##-##AT## speech - ein Film-"
    )
    assert (
        split_compounds("3-D-Film") == "3 ##AT##-##AT## D-Film"
    )  # perl -ple 's{(\S)-(\S)}{$1 ##AT##-##AT## $2}g'
    hypotheses = ["ein rich-text Format in der CD-ROM Datei"]
    references = ["das plain-text Format in der CD-ROM Datei"]
    whole = tokenised_bleu(hypotheses, references)
    split = tokenised_bleu(hypotheses, references, compound_split=True)
    parts = [line.replace("-", " ##AT##-##AT## ") for line in hypotheses + references]
    assert split["bleu"] == pytest.approx(by_definition(parts[:1], parts[1:]))
    assert split["bleu"] > whole["bleu"]


def test_signatures_tell_the_forms_apart():
    lines = ["a b c d e"]
    plain = bleu(lines, lines)
    papers = tokenised_bleu(lines, lines, compound_split=True)
    assert "tok:13a" in plain["signature"] and "smooth:exp" in plain["signature"]
    for part in ("tok:none", "smooth:none", "tokenised:13a", "compounds:split"):
        assert part in papers["signature"]
    assert "tokenised:given|compounds:whole" in tokenised_bleu(lines, lines, "given")["signature"]
    assert (
        bleu_summary(papers)
        == f"BLEU 100.00 (100.0/100.0/100.0/100.0, 5 of 5 tokens) {papers['signature']}"
    )
