"""Vocabularies, training and evaluation batches of a run on text, by task."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from moh_vision.common.cli import refuse_missing_source
from moh_vision.common.io import run_of, write_whole
from moh_vision.data.order import PositionSampler, rank_slice
from moh_vision.data.records import check_sums
from moh_vision.engine.ranks import say
from moh_vision.language.data.batches import TokenSampler, length_slices, load_batches
from moh_vision.language.data.blocks import EVALUATION_SEED, CausalWindows, MaskedBlocks
from moh_vision.language.data.mixture import MixedWindows, Mixture, MixtureSampler
from moh_vision.language.data.sources import ParallelText, find_lines, find_pairs, find_tokens
from moh_vision.language.data.tokens import META, Tokens, encoded, sums_of
from moh_vision.language.data.translation import ParallelTokens
from moh_vision.language.data.vocabulary import (
    BOS,
    EOS,
    TARGET,
    TOKENIZER,
    TextForm,
    Vocabulary,
    find_tokenizer,
    trained_vocabulary,
)

RECORD = "text.json"


class TextInputs:
    """What a run on text reads: `vocabularies` (source and target, or the same twice), `train`, `val` and `test`.

    Args:
        data: the run's `TextDataConfig`.
        cache_dir: folder of encoded text and vocabularies.
        seed: of the run.
        tokenizer: a run or file with the vocabularies; None: they are made from the training split.
        training: open the training split; if False, the split may be missing.
    """

    first: object  # index of the data set's first sample
    form: TextForm  # of the saved tokenizers
    foreign = False  # whether foreign tokenizers are allowed

    def __init__(
        self, data, cache_dir: str, seed: int, tokenizer: str | None = None, training: bool = True
    ):
        self.data = data
        self.seed = seed
        self.cache_dir = cache_dir
        self.tokenizer = tokenizer
        self.vocabularies = self.given() or self.make_vocabularies()
        self.model_arguments()  # raises for a wrong data.vocab_size before any text is encoded
        self.train = None
        self.test = None
        if training:
            self.train = self.dataset(data.train, training=True)
        self.val = self.dataset(data.val)
        if data.test:
            self.test = self.dataset(data.test)

    def given(self) -> tuple[Vocabulary, Vocabulary] | None:
        """Load the vocabularies of `tokenizer`; None without one."""
        if not self.tokenizer:
            return None
        file = find_tokenizer("data.tokenizer", Path(self.tokenizer))
        source = Vocabulary.load(file, self.foreign)
        target_file = file.parent / TARGET / TOKENIZER
        if not target_file.is_file():
            return source, source
        return source, Vocabulary.load(target_file)

    def scored_files(self) -> str:
        """Return a line that names the files of data.val and data.test; raise ValueError if one is trained on."""
        data = self.data
        found = []
        trained = {path for tokens in self.train.stores for path in tokens.paths}
        for key, title, dataset in (("val", "validation", self.val), ("test", "test", self.test)):
            if dataset is None:
                continue
            for tokens in dataset.stores:
                if not trained.isdisjoint(tokens.paths):
                    raise ValueError(
                        f"data.{key} {getattr(data, key)} is {tokens.name}, which data.train {data.train} trains on: "
                        "give another split, for scores of text that the model has not learnt"
                    )
            found.append(f"{title}: {' and '.join(tokens.name for tokens in dataset.stores)}")
        return "; ".join(found)

    def scored_lines(self, count: int) -> list[str]:
        """Return the first `count` lines of data.test, or of data.val if there is no test; [] if it is token ids."""
        split = self.data.test or self.data.val
        if find_tokens(self.data.root, split):
            return []
        return list(islice(find_lines(self.data.root, split), count))

    def record(self, micro_batches: int) -> dict:
        """Return what a resumed run must match: the text, and for translation the micro-batches per step."""
        return dict(train=[tokens.fingerprint() for tokens in self.train.stores])

    def save(self, run: Path, micro_batches: int, longest: int | None) -> None:
        """Save the vocabularies, for `data.tokenizer` and transformers, and the record.

        Args:
            run: the run's folder.
            micro_batches: of a step on all processes.
            longest: see `Vocabulary.save`.
        """
        source, target = self.vocabularies
        source.save(run / TOKENIZER, self.form, longest)
        if target is not source:
            target.save(run / TARGET / TOKENIZER, self.form, longest)
        write_whole(run / RECORD, json.dumps(self.record(micro_batches)) + "\n")

    def check(self, run: Path, micro_batches: int) -> None:
        """Raise ValueError unless the record that `run` began with is also the present one."""
        try:
            began = dict(json.loads((run / RECORD).read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            raise ValueError(
                f"{run / RECORD}: not there or damaged; --fresh moves the run aside, starts over"
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

    def model_arguments(self) -> dict:
        """Return sizes that the model must have."""
        return dict(vocab_size=len(self.vocabularies[0]))

    def example(self) -> dict[str, Tensor]:
        """Return the model's inputs for one training sample."""
        batch = self.train.collate([self.train[self.first]])
        return {name: value for name, value in batch.items() if name != "labels"}

    def eval_batches(self, dataset, rank: int, world: int) -> Iterable[dict[str, Tensor]]:
        """Return this rank's batches of a validation or test set; all ranks together have every label once."""
        return list(load_batches(dataset, self.slices(dataset, rank, world)))

    def texts(self) -> list[tuple[str, object]]:
        """Return (name, data set) of each text whose head load is counted on its own, validation first."""
        return [(self.data.val, self.val)]


class TranslationInputs(TextInputs):
    """Inputs of translation models: pairs of sentences."""

    first = 0
    form = TextForm("$A </s>", bos=BOS)

    def pair(self, split: str) -> ParallelText:
        return find_pairs(self.data.root, split, self.data.source, self.data.target)

    def make_vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        data = self.data
        pair = self.pair(data.train)
        sides = [(pair, data.merges)]
        if data.target_merges is not None:
            sides = [([pair.source], data.merges), ([pair.target], data.target_merges)]

        def check_pair() -> None:
            pair.check(data.allow_empty)

        vocabularies = [
            trained_vocabulary(
                texts, self.cache_dir, check_pair, merges=merges, lowercase=data.lowercase
            )
            for texts, merges in sides
        ]
        return vocabularies[0], vocabularies[-1]

    def dataset(self, split: str, training: bool = False) -> ParallelTokens:
        data = self.data
        pair = self.pair(split)
        source = encoded(pair.source, self.vocabularies[0], self.cache_dir)
        target = encoded(pair.target, self.vocabularies[1], self.cache_dir)
        # Check pairs here, because cached encodings read no text.
        if len(source) != len(target) or (np.minimum(source.lengths, target.lengths) < 2).any():
            pair.check(data.allow_empty)
        if not training:
            return ParallelTokens(source, target)
        pairs = ParallelTokens(
            source, target, max_length=data.max_length, max_ratio=data.max_ratio, share=data.share
        )
        say(f"{data.train}: {pairs.summary()}")
        return pairs

    def scored_lines(self, count: int) -> list[str]:
        return list(islice(self.pair(self.data.test or self.data.val).target, count))

    def model_arguments(self) -> dict:
        source, target = self.vocabularies
        sizes = super().model_arguments()
        if target is not source:
            sizes["target_vocab_size"] = len(target)
        return sizes

    def sampler(self, batch_size: int, **arguments) -> TokenSampler:
        """Make the `TokenSampler` of training; data.max_tokens limits a batch, and `batch_size` has no effect."""
        return TokenSampler(
            self.train.lengths, max_tokens=self.data.max_tokens, seed=self.seed, **arguments
        )

    def slices(self, dataset: ParallelTokens, rank: int, world: int) -> list[list]:
        return length_slices(dataset.lengths, self.data.max_tokens, rank, world)

    def record(self, micro_batches: int) -> dict:
        # Each micro-batch adds sentences to a step. Blocks are different: micro-batches divide a fixed number of them.
        return dict(super().record(micro_batches), micro_batches=micro_batches)

    def references(self, split: str, pairs: ParallelTokens) -> list[str]:
        """Return the target lines of a split's pairs, in lower case if the target vocabulary is lower-cased."""
        targets = list(self.pair(split).target)
        chosen = [targets[line] for line in pairs.lines]
        if self.vocabularies[1].lowercase:
            return [line.lower() for line in chosen]
        return chosen


class BlockInputs(TextInputs):
    """Inputs of masked and causal language models: running text, cut into blocks."""

    first = (0, 0)
    mask = False

    def roots(self) -> list[str]:
        """Return the folders or hub data sets of the training text, one for each source."""
        if not self.data.mixture:
            return [self.data.root]
        return [self.data.source_root(source["root"]) for source in self.data.mixture]

    def make_vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        data = self.data
        lines = [find_lines(root, data.train) for root in self.roots()]
        if data.words is None:
            size = dict(merges=data.merges)
        else:
            size = dict(words=data.words or None)
        vocabulary = trained_vocabulary(
            lines, self.cache_dir, mask=self.mask, lowercase=data.lowercase, **size
        )
        return vocabulary, vocabulary

    def sampler(self, batch_size: int, **arguments) -> PositionSampler:
        """Make the `PositionSampler` of training, with `batch_size` blocks a step."""
        return PositionSampler(
            [len(self.train)], group=1, batch_size=batch_size, seed=self.seed, **arguments
        )

    def slices(self, dataset, rank: int, world: int) -> list[list]:
        batches = rank_slice(len(dataset), rank, world, self.data.eval_batch_size)
        # Masks depend on the position. The block's index stands for it, so the number of processes does not matter.
        return [[(block, block) for block in batch] for batch in batches]


class MaskedInputs(BlockInputs):
    """Inputs of masked language models."""

    form = TextForm("<s> $A </s>", bos=BOS, masks=True)
    mask = True

    def dataset(self, split: str, training: bool = False) -> MaskedBlocks:
        data = self.data
        vocabulary = self.vocabularies[0]
        seed = self.seed if training else EVALUATION_SEED
        lines = find_lines(data.root, split)
        tokens = encoded(lines, vocabulary, self.cache_dir, skip_empty=True)
        return MaskedBlocks(tokens, data.block, vocabulary, seed, data.mask_prob)

    def model_arguments(self) -> dict:
        return dict(super().model_arguments(), max_position_embeddings=self.data.block + 2)


class CausalInputs(BlockInputs):
    """Inputs of causal language models: text or token ids, of one source or several weighted."""

    # eos stands before the first text too. Padding on the left lets `generate` append right behind a text's last token.
    form = TextForm("</s> $A", bos=EOS, padding_side="left")
    foreign = True

    def make_vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        for root in self.roots():
            if find_tokens(root, self.data.train):
                raise ValueError(
                    f"{root} holds {self.data.train} as token ids: data.tokenizer must say of which tokenizer"
                )
        return super().make_vocabularies()

    def model_arguments(self) -> dict:
        """Return sizes that the model must have; data.vocab_size may exceed the tokens of the vocabulary."""
        asked = self.data.vocab_size
        vocabulary = self.vocabularies[0]
        if asked and asked < len(vocabulary):
            raise ValueError(
                f"data.vocab_size {asked}: {vocabulary.where} has {len(vocabulary)} tokens"
            )
        return dict(vocab_size=asked or len(vocabulary))

    def tokens(self, root: str, split: str) -> Tokens:
        """Open the ids of a split, or encode its text."""
        vocabulary = self.vocabularies[0]
        stores = find_tokens(root, split)
        if not stores:
            return encoded(find_lines(root, split), vocabulary, self.cache_dir)
        tokens = Tokens(stores)
        strange = {meta["tokenizer"] for meta in tokens.metas} - {vocabulary.fingerprint}
        if strange:
            raise ValueError(
                f"{tokens.name}: made with another tokenizer.json (sha256 {min(strange)[:12]}...) than data.tokenizer "
                f"({vocabulary.fingerprint[:12]}...)"
            )
        for store, meta in zip(stores, tokens.metas):
            check_sums(store / META, sums_of(store, meta))
        return tokens

    def windows(self, root: str, split: str, stride: int) -> CausalWindows:
        return CausalWindows(
            self.tokens(root, split), self.data.block, stride, self.vocabularies[0]
        )

    def dataset(self, split: str, training: bool = False):
        data = self.data
        if not training:
            return self.windows(data.root, split, data.block - data.context)
        if not data.mixture:
            return self.windows(data.root, split, data.block)
        texts = [self.windows(root, split, data.block) for root in self.roots()]
        names = [source["name"] for source in data.mixture]
        weights = [source["weight"] for source in data.mixture]
        return MixedWindows(texts, names, weights)

    def sampler(self, batch_size: int, **arguments):
        """Make the sampler of training, as `BlockInputs` does; with data.mixture a `MixtureSampler`."""
        train = self.train
        if not isinstance(train, MixedWindows):
            return super().sampler(batch_size, **arguments)
        mixture = Mixture(train.weights, [len(text) for text in train.datasets], self.seed)
        sampler = MixtureSampler(mixture, batch_size=batch_size, **arguments)
        for name, text, share, epochs in zip(
            train.names, train.datasets, mixture.shares, sampler.epochs()
        ):
            say(
                f"source {name}: {100 * float(share):.2f} %, {len(text.tokens.ids):,} tokens, {len(text):,} blocks; "
                f"{epochs:.2f} times in this run"
            )
        return sampler

    def texts(self) -> list[tuple[str, CausalWindows]]:
        """Return the texts of `TextInputs`, and with data.mixture the beginning of each source.

        A beginning has as many tokens as the validation set.
        """
        texts = super().texts()
        if isinstance(self.train, MixedWindows):
            for name, text in zip(self.train.names, self.train.datasets):
                length = max(len(self.val.tokens.ids), text.width)
                # Stands for a `Tokens` of this length.
                first = SimpleNamespace(name=name, ids=text.tokens.ids[:length])
                windows = CausalWindows(first, text.width, text.stride, self.vocabularies[0])
                texts.append((name, windows))
        return texts

    def special_tokens(self) -> dict:
        """Return the special tokens' ids that are known, by their names in a transformers config."""
        vocabulary = self.vocabularies[0]
        bos = vocabulary.bos if vocabulary.scheme == "foreign" else self.form.bos
        known = dict(bos_token_id=bos, eos_token_id=vocabulary.eos, pad_token_id=vocabulary.pad)
        return {name: token_id for name, token_id in known.items() if token_id is not None}


INPUTS = {"mt": TranslationInputs, "mlm": MaskedInputs, "clm": CausalInputs}  # by task


def tokenizer_of(config, run: str | None) -> str | None:
    """Return where to read a run's vocabulary; None: make it from the text.

    It is the first of these that is given: `run`, the folder of a run that resumes; data.tokenizer; the folder of the
    first weights (init_from or model.pretrained), if it has a tokenizer.json.
    """
    if run:
        return run
    tokenizer = config.data.tokenizer
    pretrained = config.model.pretrained
    first_weights = []
    if config.init_from:
        first_weights.append(run_of(config.init_from))
    if pretrained:
        first_weights.append(Path(pretrained))
    if not tokenizer:
        for folder in first_weights:
            if (folder / TOKENIZER).is_file():
                return str(folder)
    if pretrained:
        refuse_missing_source("model.pretrained", pretrained)
    if pretrained and not tokenizer:
        raise ValueError(
            f"model.pretrained {pretrained}: no folder with {TOKENIZER}, so data.tokenizer must say what its tokens are"
        )
    return tokenizer
