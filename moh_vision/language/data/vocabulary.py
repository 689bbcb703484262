"""Text to token ids and back, by a tokenizer.json of the package tokenizers.

BPE is byte-level (Radford et al. 2019; RoBERTa, whose vocabulary MoA's masked models use): no character is unknown,
and decoding restores the text exactly, so BLEU needs no post-processing. It separates punctuation, so raw text
can go in. Words, split at blanks as in WikiText and numbered by falling frequency, are for adaptive softmaxes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moh_vision.engine.commands import Progress, reason_of
from moh_vision.engine.io import write_whole
from moh_vision.engine.ranks import say

PAD, BOS, EOS, UNK, MASK = range(5)
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")  # the last for masked models only
UNKNOWN = SPECIALS[UNK]
BLANK = "\u0120"  # how byte-level BPE writes it
MAX_BYTES = 1 << 28  # of a tokenizer.json
FORMAT = "1"  # of cached vocabularies


class Vocabulary:
    """Turns text into token ids and back, by a tokenizer.json.

    Kind, tokens and merges are read from the file and checked, and a new tokenizer is built from them;
    nothing of the file is run as it is.

    Args:
        data: the file's bytes.
        where: its name, for messages.

    Attributes:
        kind: "bpe" or "word".
        lowercase: whether texts are.
        specials: ids below this are special: 4, or 5 with a mask.
        fingerprint: sha256 of the file, kept in checkpoints.
        bos, eos, pad: ids.
    """

    bos, eos, pad = BOS, EOS, PAD

    def __init__(self, data: bytes, where: str):
        self.data, self.fingerprint = data, hashlib.sha256(data).hexdigest()
        try:
            self.kind, self.lowercase, tokens, merges = _read(data)
            self._tokenizer = _build(self.kind, tokens, merges, self.lowercase)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"no entry {error}" if isinstance(error, KeyError) else reason_of(error)
            raise ValueError(f"{where}: not a tokenizer.json that this package wrote ({reason})") from None
        self._tokens = tokens
        self.specials = _specials(tokens)

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a tokenizer.json; raises FileNotFoundError, or ValueError that names the file."""
        return cls(read_json(path), str(path))

    def save(self, path: Path) -> None:
        """Write the file it came from."""
        write_whole(Path(path), self.data, shared=True)

    def __len__(self) -> int:
        return len(self._tokens)

    def __reduce__(self):
        return Vocabulary, (self.data, "tokenizer.json")

    def token(self, number: int) -> str:
        """A token as tokenizer.json writes it; in BPE, G with a dot is a blank."""
        return self._tokens[number]

    def encode(self, texts: Sequence[str]) -> List[List[int]]:
        """Encode texts without bos and eos. Special tokens but "<unk>" are read as text."""
        found = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        if self.kind == "word":  # a word "</s>" stands in the vocabulary under its own name
            found = [[i if i >= self.specials else UNK for i in ids] for ids in found]
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text, on one line; pad, bos, eos and mask are left out."""
        ids = [i for i in ids if i >= self.specials or i == UNK]
        tokens = [self._tokens[i] for i in ids]
        if self.kind == "word":
            return " ".join(tokens)
        tokens = [BLANK + t if i == UNK else t for i, t in zip(ids, tokens)]
        text = decoders.ByteLevel().decode(tokens)
        return text.replace("\r", " ").replace("\n", " ").strip()  # a model may write any byte


def read_json(path: Path) -> bytes:
    """Read a tokenizer.json or a file beside it; raises ValueError if it is far too large."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path}: more than {MAX_BYTES >> 20} MiB; not a tokenizer.json")
    return data


def train_bpe(
    texts: Iterable[str], merges: int, *, mask: bool = False, lowercase: bool = False, progress: bool = False
) -> Vocabulary:
    """Train byte-level BPE: special tokens, 256 bytes and at most `merges` tokens, fewer if no pair
    comes twice. A joint vocabulary takes the texts of both sides.
    """
    tokens = _first_tokens(mask)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _build("bpe", [*tokens, *alphabet], [], lowercase)
    trainer = trainers.BpeTrainer(
        vocab_size=len(tokens) + 256 + merges,
        min_frequency=2,
        show_progress=progress,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((text.replace(UNKNOWN, " ") for text in texts), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    ordered = sorted(model["vocab"], key=model["vocab"].get)
    # Build it anew: the trainer makes <unk> special, and encoding would read it as text.
    return _written(_build("bpe", ordered, [tuple(pair) for pair in model["merges"]], lowercase))


def count_words(
    texts: Iterable[str], *, max_words: Optional[int] = None, mask: bool = False, lowercase=False
) -> Vocabulary:
    """Number words by frequency, then alphabet; those beyond `max_words` are unknown."""
    counts: Counter = Counter()
    for text in texts:
        counts.update((text.lower() if lowercase else text).split())
    for special in SPECIALS:
        counts.pop(special, None)
    words = sorted(counts, key=lambda w: (-counts[w], w))
    return _written(_build("word", [*_first_tokens(mask), *words[:max_words]], [], lowercase))


def trained_vocabulary(
    texts: Sequence, cache_dir: str, kind: str, before: Callable = lambda: None, **options
) -> Vocabulary:
    """Return the vocabulary of the training texts (two for a joint one) from the cache, or call `before` and
    train it. `options` are for `train_bpe` or `count_words`. Caches are safe to delete: a run saves its
    vocabulary.
    """
    fingerprints = [text.fingerprint() for text in texts]
    made_from = json.dumps([FORMAT, kind, sorted(options.items()), fingerprints])
    digest = hashlib.sha256(made_from.encode()).hexdigest()
    place = Path(cache_dir, f"{kind}.{digest[:16]}.tokenizer.json")
    if place.exists():
        try:
            return Vocabulary.load(place)
        except ValueError as error:
            say(f"{error}; training it again")
    before()
    lines = Progress.over(chain(*texts), "reading", "line")
    if kind == "bpe":
        vocabulary = train_bpe(lines, progress=sys.stderr.isatty(), **options)
    else:
        vocabulary = count_words(lines, **options)
    vocabulary.save(place)
    return vocabulary


def _first_tokens(mask: bool) -> List[str]:
    return list(SPECIALS if mask else SPECIALS[:MASK])


def _specials(tokens: Sequence[str]) -> int:
    return MASK + (len(tokens) > MASK and tokens[MASK] == SPECIALS[MASK])


def _written(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary((tokenizer.to_str(pretty=True) + "\n").encode(), "the new vocabulary")


def _build(kind: str, tokens: Sequence[str], merges: List[Tuple[str, str]], lowercase: bool) -> Tokenizer:
    numbers = {token: number for number, token in enumerate(tokens)}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(numbers, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    for token in tokens[: _specials(tokens)]:
        if token != UNKNOWN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == "bpe":  # WikiText has it in its text; the blank before it belongs to it
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False, lstrip=True)])
    tokenizer.encode_special_tokens = True  # special tokens that stand in a text are text
    return tokenizer


def _read(data: bytes) -> Tuple[str, bool, List[str], List[Tuple[str, str]]]:
    """Return checked kind, lowercase, tokens by number and merges: tokenizers aborts on some."""
    content = json.loads(data)
    model = content["model"]
    kinds = {"BPE": ("bpe", "ByteLevel"), "WordLevel": ("word", "WhitespaceSplit")}
    if model.get("type") not in kinds:
        raise ValueError(f"its model is {model.get('type')!r}, allowed are {' and '.join(kinds)}")
    kind, splitter = kinds[model["type"]]
    normalizer = content.get("normalizer")
    if content["pre_tokenizer"]["type"] != splitter or normalizer not in (None, {"type": "Lowercase"}):
        raise ValueError("its normalizer or pre_tokenizer is another one")
    numbers: Dict[str, int] = model["vocab"]
    tokens = sorted(numbers, key=numbers.__getitem__)
    if any(type(n) is not int for n in numbers.values()) or [numbers[t] for t in tokens] != list(range(len(tokens))):
        raise ValueError("its tokens are not numbered from 0 on, each once")
    if tuple(tokens[:MASK]) != SPECIALS[:MASK]:
        raise ValueError(
            f"its first tokens are {', '.join(map(repr, tokens[:MASK]))}, not {', '.join(SPECIALS[:MASK])}"
        )
    if kind == "word":
        return kind, normalizer is not None, tokens, []
    if not numbers.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        raise ValueError("it has not all 256 bytes")
    merges = [tuple(pair) for pair in model["merges"]]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= numbers.keys():
            raise ValueError(f"its merge {pair!r} is not of two of its tokens to a third")
    return kind, normalizer is not None, tokens, merges
