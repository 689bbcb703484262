"""Vocabularies and encoded pairs of a run: made once, then found again by what they were made from."""

from __future__ import annotations

import hashlib
import json
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Callable, Sequence, Tuple

import numpy as np
from tqdm import tqdm

from moh_vision.language.data.sources import Lines, ParallelText
from moh_vision.language.data.token_cache import TokenCache, encoded
from moh_vision.language.data.vocabulary import Vocabulary, count_words, train_bpe

FORMAT = "1"


def trained_vocabulary(
    texts: Sequence[Lines],
    cache_dir: str,
    kind: str,
    say: Callable[[str], None] = print,
    before: Callable = lambda: None,
    **options,
) -> Vocabulary:
    """The vocabulary of some texts, trained where there is none yet.

    Args:
        texts: lines of the training split; two for a joint vocabulary.
        cache_dir: folder of caches, safe to delete; save the vocabulary with the run.
        kind: "bpe" or "word".
        say: told of one that is damaged and trained again.
        before: called before one is trained.
        options: of `train_bpe` (merges, mask, lowercase) or `count_words` (max_words, mask, lowercase).
    """
    made_from = json.dumps([FORMAT, kind, sorted(options.items()), [text.fingerprint() for text in texts]])
    place = Path(cache_dir, f"{kind}.{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.tokenizer.json")
    if place.exists():
        try:
            return Vocabulary.load(place)
        except ValueError as error:
            say(f"{error}; training it again")
    before()
    terminal = sys.stderr.isatty()
    with tqdm(chain(*texts), desc="reading", unit="line", disable=not terminal) as lines:
        vocabulary = train_bpe(lines, progress=terminal, **options) if kind == "bpe" else count_words(lines, **options)
    vocabulary.save(place)
    return vocabulary


def pair_vocabularies(
    pair: ParallelText,
    cache_dir: str,
    merges: Tuple[int, int],
    joint: bool,
    lowercase: bool = False,
    allow_empty: bool = False,
    say: Callable[[str], None] = print,
) -> Tuple[Vocabulary, Vocabulary]:
    """BPE vocabularies of source and target; joint: twice the same one, with merges[0].

    Args:
        pair: the training split.
        merges: for source and target.
        allow_empty: see `ParallelText.pairs`.

    Raises:
        ValueError: see `ParallelText.pairs`; found before anything is trained.
    """
    make = partial(
        trained_vocabulary, cache_dir=cache_dir, kind="bpe", say=say, before=partial(pair.check, allow_empty),
        lowercase=lowercase,
    )  # fmt: skip
    if joint:
        both = make(pair, merges=merges[0])
        return both, both
    source, target = (make([side], merges=count) for side, count in zip(pair, merges))
    return source, target


def encoded_pair(
    pair: ParallelText,
    vocabularies: Tuple[Vocabulary, Vocabulary],
    cache_dir: str,
    allow_empty: bool = False,
    say: Callable[[str], None] = print,
) -> Tuple[TokenCache, TokenCache]:
    """Token caches of source and target, with as many lines each.

    Args:
        vocabularies: of source and target.
        cache_dir: see `encoded`.
        allow_empty: see `ParallelText.pairs`.

    Raises:
        ValueError: see `ParallelText.pairs`.
    """
    source, target = (encoded(side, vocabulary, cache_dir, say=say) for side, vocabulary in zip(pair, vocabularies))
    # Only now, because it reads no text where both were encoded before.
    suspect = len(source) != len(target) or (np.minimum(source.lengths, target.lengths) < 2).any()
    if suspect:
        pair.check(allow_empty)
    return source, target
