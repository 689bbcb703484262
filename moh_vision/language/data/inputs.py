"""What a run on text reads, by its task: vocabularies, the batches of every step and of evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from torch import Tensor

from moh_vision.engine.io import write_whole
from moh_vision.language.data.buckets import TokenBatches, length_slices
from moh_vision.language.data.foreign import AnyVocabulary
from moh_vision.language.data.masked import EVALUATION_SEED, MaskedBlocks
from moh_vision.language.data.prepare import encoded_pair, pair_vocabularies, trained_vocabulary
from moh_vision.language.data.sources import find_lines, find_pairs
from moh_vision.language.data.stream import BlockBatches, block_slices, load_batches
from moh_vision.language.data.token_cache import encoded
from moh_vision.language.data.translation import ParallelTokens
from moh_vision.language.data.vocabulary import Vocabulary

TOKENIZER, TARGET_TOKENIZER, RECORD = "tokenizer.json", "target_tokenizer.json", "text.json"


class TextInputs:
    """What the tasks share.

    Args:
        data: a `TextDataConfig`.
        cache_dir: folder of caches.
        seed: of the run.
        tokenizer: run or tokenizer.json whose vocabularies are used; None: they are made from the training split.
        say: told what is used and what is made again.

    Attributes:
        vocabularies: of source and target, twice the same if there is one.
        train, val, test: data sets; test may be None.

    Raises:
        ValueError, FileNotFoundError: in one line, naming file or key.
    """

    vocabularies: Tuple[AnyVocabulary, AnyVocabulary]
    first: object  # what the data set calls its first sample
    load = staticmethod(Vocabulary.load)  # reads a tokenizer.json

    def __init__(self, data, cache_dir: str, seed: int, tokenizer: Optional[str], say: Callable[[str], None]):
        self.data, self.cache_dir, self.seed, self.tokenizer, self.say = data, cache_dir, seed, tokenizer, say
        self.vocabularies = self.find_vocabularies()
        self.train = self.dataset(data.train, training=True)
        self.val = self.dataset(data.val)
        self.test = self.dataset(data.test) if data.test else None

    def record(self, micro_batches: int) -> dict:
        """What a run must find again to go on: its text, and where a step's size follows from it its micro-batches."""
        return dict(train=self.fingerprint())

    def save(self, run: Path, micro_batches: int) -> None:
        """The vocabularies beside the weights, as `data.tokenizer` finds them, and the record.

        Args:
            micro_batches: of a step, over all processes.
        """
        source, target = self.vocabularies
        source.save(run / TOKENIZER)
        if target is not source:
            target.save(run / TARGET_TOKENIZER)
        write_whole(run / RECORD, json.dumps(self.record(micro_batches)) + "\n")

    def check(self, run: Path, micro_batches: int) -> None:
        """Raise ValueError, in one line, unless a run that goes on would go on with what it began with."""
        try:
            began = json.loads((run / RECORD).read_text())
        except (OSError, ValueError):
            raise ValueError(
                f"{run / RECORD}: not there or damaged; --fresh moves the run aside and starts over"
            ) from None
        now = self.record(micro_batches)
        if began.get("train") != now["train"]:
            raise ValueError(
                f"data.root {self.data.root}: the text of {self.data.train} is not the one that {run} began with; "
                "bring it back, or --fresh moves the run aside and starts over"
            )
        before = began.get("micro_batches")
        if before != now.get("micro_batches"):
            raise ValueError(
                f"{run} began with {before} micro-batches a step (processes x optim.accumulation), now there are "
                f"{micro_batches}: another step, and another order"
            )

    def example(self) -> Dict[str, Tensor]:
        """The model's inputs for one training sample."""
        batch = self.train.collate([self.train[self.first]])
        return {name: value for name, value in batch.items() if name != "labels"}

    def stream(self, batches) -> Iterator[Dict[str, Tensor]]:
        """The micro-batches of one rank, in order."""
        return load_batches(self.train, batches, self.data.workers)

    def eval_batches(self, dataset, rank: int, world: int) -> Iterable[Dict[str, Tensor]]:
        """This rank's share of a validation or test set, every label once over all."""
        return list(load_batches(dataset, self.slices(dataset, rank, world)))

    def given(self) -> Optional[Tuple[Vocabulary, Vocabulary]]:
        """The vocabularies of `tokenizer`."""
        if not self.tokenizer:
            return None
        place = Path(self.tokenizer)
        file = place / TOKENIZER if place.is_dir() else place
        if not file.is_file():
            raise FileNotFoundError(f"data.tokenizer {place}: no such file, or a folder without {TOKENIZER}")
        source, target = self.load(file), file.with_name(TARGET_TOKENIZER)
        return source, (self.load(target) if target.is_file() else source)


class TranslationInputs(TextInputs):
    """Pairs of sentences."""

    first = 0

    def open(self, split: str):
        return find_pairs(self.data.root, split, self.data.source, self.data.target)

    def find_vocabularies(self) -> Tuple[Vocabulary, Vocabulary]:
        d = self.data
        merges = (d.merges, d.merges if d.target_merges is None else d.target_merges)
        return self.given() or pair_vocabularies(
            self.open(d.train), self.cache_dir, merges, d.target_merges is None, d.lowercase, d.allow_empty, self.say
        )

    def dataset(self, split: str, training: bool = False) -> ParallelTokens:
        d = self.data
        tokens = encoded_pair(self.open(split), self.vocabularies, self.cache_dir, d.allow_empty, self.say)
        if not training:
            return ParallelTokens(*tokens)
        pairs = ParallelTokens(*tokens, max_length=d.max_length, max_ratio=d.max_ratio, share=d.share)
        self.say(f"{d.train}: {pairs.summary()}")
        return pairs

    def model_arguments(self) -> dict:
        """Sizes that the model must have."""
        source, target = self.vocabularies
        return dict(vocab_size=len(source), **({} if target is source else dict(target_vocab_size=len(target))))

    def batches(self, batch_size: int, **arguments) -> TokenBatches:
        """See `TokenBatches`: accumulation, rank, world, start, stop; as many sentences as data.max_tokens allows."""
        return TokenBatches(self.train.lengths, max_tokens=self.data.max_tokens, seed=self.seed, **arguments)

    def slices(self, dataset: ParallelTokens, rank: int, world: int) -> List[list]:
        return length_slices(dataset.lengths, self.data.max_tokens, rank, world)

    def fingerprint(self) -> str:
        """Of the training text."""
        return " ".join(side.fingerprint() for side in self.open(self.data.train))

    def record(self, micro_batches: int) -> dict:
        # How many sentences are in a step follows from its micro-batches; blocks are shared out among them instead.
        return dict(super().record(micro_batches), micro_batches=micro_batches)

    def references(self, split: str, pairs: ParallelTokens) -> List[str]:
        """The target's lines of a split's pairs, as they stand in the file, or in lower case if the vocabulary is."""
        lines = list(self.open(split).target)
        found = [lines[number] for number in pairs.numbers]
        return [line.lower() for line in found] if self.vocabularies[1].lowercase else found


class BlockInputs(TextInputs):
    """Running text, cut into blocks."""

    first = (0, 0)
    mask = False

    def training_texts(self) -> list:
        """The lines that a vocabulary is made from."""
        return [find_lines(self.data.root, self.data.train)]

    def find_vocabularies(self) -> Tuple[AnyVocabulary, AnyVocabulary]:
        d, given = self.data, self.given()
        if given:
            return given
        texts = self.training_texts()
        if d.words is None:
            options = dict(merges=d.merges, mask=self.mask, lowercase=d.lowercase)
            made = trained_vocabulary(texts, self.cache_dir, "bpe", self.say, **options)
        else:
            options = dict(max_words=d.words or None, mask=self.mask, lowercase=d.lowercase)
            made = trained_vocabulary(texts, self.cache_dir, "word", self.say, **options)
        return made, made

    def fingerprint(self) -> str:
        """Of the training text."""
        return find_lines(self.data.root, self.data.train).fingerprint()

    def tokens(self, root: str, split: str, skip_empty: bool):
        """The encoded text of a split."""
        lines = find_lines(root, split)
        return encoded(lines, self.vocabularies[0], self.cache_dir, skip_empty=skip_empty, say=self.say)

    def batches(self, batch_size: int, **arguments) -> BlockBatches:
        """See `BlockBatches`: accumulation, rank, world, start, stop; `batch_size` blocks a step."""
        return BlockBatches(len(self.train), batch_size=batch_size, seed=self.seed, **arguments)

    def slices(self, dataset, rank: int, world: int) -> List[list]:
        return block_slices(len(dataset), self.data.eval_batch_size, rank, world)


class MaskedInputs(BlockInputs):
    """For masked language models."""

    mask = True

    def dataset(self, split: str, training: bool = False) -> MaskedBlocks:
        d, seed = self.data, self.seed if training else EVALUATION_SEED
        tokens = self.tokens(d.root, split, skip_empty=True)
        return MaskedBlocks(tokens, d.block, self.vocabularies[0], seed, d.mask_prob)

    def model_arguments(self) -> dict:
        """Sizes that the model must have."""
        return dict(vocab_size=len(self.vocabularies[0]), max_position_embeddings=self.data.block + 2)
