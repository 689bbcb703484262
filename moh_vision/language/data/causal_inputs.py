"""What a causal language model reads: text or token ids, from one place or from weighted sources."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Tuple

from moh_vision.language.data.causal import CausalWindows
from moh_vision.language.data.foreign import (
    COMPANION,
    AnyVocabulary,
    NumberedVocabulary,
    load_vocabulary,
    write_companion,
)
from moh_vision.language.data.inputs import BlockInputs
from moh_vision.language.data.mixture import MixedBatches, MixedWindows, Mixture
from moh_vision.language.data.sources import find_lines, find_tokens, open_tokens
from moh_vision.language.data.token_files import TokenFiles
from moh_vision.language.data.token_shards import TokenShards
from moh_vision.language.data.vocabulary import EOS, PAD, SPECIALS, Vocabulary


class CausalInputs(BlockInputs):
    """For causal language models: text, or token ids; from one place, or from weighted sources."""

    load = staticmethod(load_vocabulary)

    def sources(self) -> List[Tuple[str, str, float]]:
        """(name, root, weight) of all that is trained on; data.root alone where there are no data.mixture."""
        d = self.data
        return [(s["name"], d.source_root(s["root"]), s["weight"]) for s in d.mixture or ()] or [("text", d.root, 1)]

    def training_texts(self) -> list:
        roots = [root for _, root, _ in self.sources()]
        for root in roots:
            if find_tokens(root, self.data.train):
                raise ValueError(
                    f"{root} holds {self.data.train} as token ids: data.tokenizer must say of which tokenizer, or "
                    "data.vocab_size how many tokens there are"
                )
        return [find_lines(root, self.data.train) for root in roots]

    def given(self) -> Optional[Tuple[AnyVocabulary, AnyVocabulary]]:
        size = self.data.vocab_size
        if size and not self.tokenizer:
            return (NumberedVocabulary(size),) * 2
        given = super().given()
        if given and size and size < len(given[0]):
            raise ValueError(f"data.vocab_size {size}: data.tokenizer {self.tokenizer} has {len(given[0])} tokens")
        return given

    def tokens(self, root: str, split: str, skip_empty: bool = False):
        vocabulary = self.vocabularies[0]
        files = find_tokens(root, split)
        if not files:
            return super().tokens(root, split, skip_empty)
        tokens = open_tokens(files, self.cache_dir, self.data.bin_dtype)
        strange = tokens.tokenizers - {vocabulary.fingerprint}
        if strange and not isinstance(vocabulary, NumberedVocabulary):
            raise ValueError(
                f"{tokens.name}: made with another tokenizer.json (sha256 {min(strange)[:12]}...) than data.tokenizer "
                f"({vocabulary.fingerprint[:12]}...)"
            )
        tokens.check_ids(self.size, self.cache_dir, self.say)
        return tokens

    @property
    def size(self) -> int:
        """Tokens of the model."""
        return self.data.vocab_size or len(self.vocabularies[0])

    def windows(self, root: str, split: str, stride: int) -> CausalWindows:
        tokens, vocabulary = self.tokens(root, split), self.vocabularies[0]
        eos = getattr(tokens, "eos", None) if vocabulary.eos is None else vocabulary.eos
        return CausalWindows(tokens, self.data.block, stride, eos, self.size)

    def dataset(self, split: str, training: bool = False):
        d = self.data
        if not training:
            return self.windows(d.root, split, d.block - d.context)
        if not d.mixture:
            return self.windows(d.root, split, d.block)
        names, roots, weights = zip(*self.sources())
        return MixedWindows([self.windows(root, split, d.block) for root in roots], names, weights)

    def batches(self, batch_size: int, **arguments):
        """See `BlockInputs`; with data.mixture a `MixedBatches`."""
        train = self.train
        if not isinstance(train, MixedWindows):
            return super().batches(batch_size, **arguments)
        mixture = Mixture(train.weights, [len(text) for text in train.texts], self.seed)
        made = MixedBatches(mixture, batch_size=batch_size, **arguments)
        for name, text, share, epochs in zip(train.names, train.texts, mixture.shares, made.epochs()):
            self.say(
                f"source {name}: {100 * float(share):.2f} %, {len(text.tokens.ids):,} tokens, {len(text):,} blocks; "
                f"{epochs:.2f} times in this run"
            )
        return made

    def fingerprint(self) -> str:
        texts = self.train.texts if isinstance(self.train, MixedWindows) else [self.train]
        found = []
        for (_, root, _), text in zip(self.sources(), texts, strict=True):
            # Of ids those that are open already; of text the text, for its cache is made from it.
            ids = isinstance(text.tokens, (TokenFiles, TokenShards))
            found.append((text.tokens if ids else find_lines(root, self.data.train)).fingerprint())
        return " ".join(found)

    def model_arguments(self) -> dict:
        """Sizes that the model must have."""
        return dict(vocab_size=self.size)

    def special_tokens(self) -> dict:
        """Ids by their names in a transformers config, of those that are known."""
        vocabulary = self.vocabularies[0]
        # Our own has a bos, which no text holds: eos is what stands before the first token.
        first = vocabulary.eos if isinstance(vocabulary, Vocabulary) else vocabulary.bos
        known = dict(bos_token_id=first, eos_token_id=vocabulary.eos, pad_token_id=vocabulary.pad)
        if known["eos_token_id"] is None:  # ids without a tokenizer may still say it
            known["eos_token_id"] = getattr(self.val.tokens, "eos", None)
        return {name: number for name, number in known.items() if number is not None}

    def save(self, run: Path, micro_batches: int) -> None:
        """Also what transformers' AutoTokenizer asks for."""
        super().save(run, micro_batches)
        if isinstance(self.vocabularies[0], Vocabulary):
            names = dict(bos_token=SPECIALS[EOS], eos_token=SPECIALS[EOS], pad_token=SPECIALS[PAD])
            write_companion(run / COMPANION, names)
