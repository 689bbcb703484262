"""Configuration of a run on text: translation, masked and causal language models."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moh_vision.engine.config import TRAINS, HeadBudgets, OptimConfig, RunConfig
from moh_vision.engine.keys import Section, key, plain

# Conditions under which a key has an effect (`needs`).
TRANSLATES = "model.name=mt_*"
CAUSAL = "model.name=clm_*"
READS_BLOCKS = "model.name=clm_* or model.name=mlm_*"
NEW_VOCABULARY = "not .tokenizer"
# Words of the source and of the target when the MACs of a translation are counted, as in Zhang 2022, table 1.
WORDS = 10


@dataclass
class TextModelConfig(Section, section="model"):
    """The model; its name also says the task: mt_* translates, mlm_* fills in masked tokens, clm_* continues a text."""

    name: str = key("mt_transformer_base")
    """A preset of moh_vision.language.models.create."""
    head_budget: HeadBudgets | None = key(None, ge=0)
    """Share of active heads, as for image models: 0.75, "uniform:0.75", or one [shared, routed] per layer."""
    kwargs: dict[str, Any] | None = key(None)
    """Further arguments of the model, such as {encoder_layers: 2, hidden_size: 128}."""
    pretrained: str | None = key(None)
    """Start from a causal model of transformers' Llama or Qwen families: a folder, or a name on the Hugging Face hub.
    model.name must be clm_pretrained. The model keeps its sizes, but its vocabulary grows to that of data.tokenizer."""
    convert: dict[str, Any] | None = key(None, needs=".pretrained")
    """Convert the pretrained model with these arguments of moh_vision.convert, such as {router: query_norm}; left out:
    it is not converted."""

    def agree(self) -> None:
        if not self.name.startswith(("mt_", "mlm_", "clm_")):
            raise ValueError(
                f"model.name {self.name!r} is no text model: they begin with mt_, mlm_ or clm_"
            )
        for name in ("kwargs", "convert"):
            if self.head_budget is not None and "head_budget" in (getattr(self, name) or {}):
                raise ValueError(
                    f"model.head_budget and model.{name}.head_budget are the same thing: give one"
                )
        if self.pretrained is None:
            return
        # A name such as clm_moh_small_75 would promise routers that the pretrained model lacks.
        if self.name != "clm_pretrained":
            raise ValueError(
                f"model.pretrained needs model.name clm_pretrained, not {self.name}: it brings its model"
            )
        if self.kwargs:
            raise ValueError(
                f"model.kwargs {self.kwargs}: model.pretrained {self.pretrained} has its own; leave it out"
            )

    def arguments(self) -> dict | None:
        """Return the arguments of the preset, or with `pretrained` those of convert (None: no conversion)."""
        arguments = self.kwargs
        if self.pretrained is not None:
            arguments = self.convert
        if self.head_budget is None:
            return arguments
        return dict(arguments or {}, head_budget=plain(self.head_budget))


@dataclass
class TextDataConfig(Section, section="data"):
    """The text and its vocabulary."""

    root: str = key("data/text")
    """A folder with SPLIT.LANGUAGE[.gz], line n of one language being the translation of line n of the other, or with
    SPLIT.txt[.gz] for language models; or hfds/NAME[:CONFIG] of a Hugging Face data set. Causal language models also read
    what tokenise wrote."""
    mixture: list[dict[str, Any]] | None = key(None, needs=CAUSAL)
    """Sources of the training text, a list of {root: FOLDER, weight: NUMBER, name: TEXT}. A source gives the share
    weight / (sum of weights) of the blocks. A relative root is inside data.root, which also holds val and test."""
    source: str = key("en", needs=TRANSLATES)
    """Language translated from."""
    target: str = key("de", needs=TRANSLATES)
    """Language translated into."""
    train: str = key("train")
    """Name of the training split."""
    val: str = key("val")
    """Name of the validation split, which is scored during training and at the end."""
    test: str | None = key(None, free=True)
    """Name of a split that is scored at the end as well; left out: none."""
    tokenizer: str | None = key(None)
    """Take the vocabulary of this run, or this tokenizer.json, instead of making one from the training split. Left out
    with init_from of a run: the vocabulary of that run. Causal language models also take the folder of a transformers
    tokenizer."""
    vocab_size: int | None = key(None, ge=2, needs=CAUSAL)
    """Vocabulary size of the model, at least that of its tokenizer; left out: that of its tokenizer."""
    merges: int = key(32000, ge=0, needs=f".words=null; {NEW_VOCABULARY}")
    """Merges of the byte-pair encoding: the vocabulary has a token for each of 256 bytes and for each merge."""
    target_merges: int | None = key(None, ge=0, needs=f"{TRANSLATES}; {NEW_VOCABULARY}")
    """Merges of the target's own vocabulary; left out: one vocabulary for both languages."""
    words: int | None = key(None, ge=0, needs=f"{READS_BLOCKS}; {NEW_VOCABULARY}")
    """Make a vocabulary of this many most frequent words instead of byte pairs, for an adaptive softmax; 0: all."""
    lowercase: bool = key(False, needs=NEW_VOCABULARY)
    """Turn all text to lower case."""
    allow_empty: bool = key(False, needs=TRANSLATES)
    """Leave out pairs with an empty side, instead of refusing the text."""
    max_tokens: int = key(4096, ge=8, needs=TRANSLATES)
    """Largest size of a micro-batch: sentences times the tokens of the longest one, source or target."""
    max_length: int = key(250, ge=1, needs=TRANSLATES)
    """Training pairs with more tokens on a side are left out."""
    max_ratio: float | None = key(None, gt=1, needs=TRANSLATES)
    """Training pairs in which one side has more than this many times the tokens of the other are not used; left out: no
    limit."""
    share: float = key(1.0, gt=0, le=1, needs=TRANSLATES)
    """Share of the training pairs that are used, as for subsets of 5 to 100 % (Peng 2020, section 5.2)."""
    block: int = key(128, ge=3, needs=READS_BLOCKS)
    """Tokens in a block."""
    context: int = key(0, ge=0, lt="block", needs=CAUSAL)
    """Tokens at the start of a validation window that are context only; the other block - context are scored."""
    mask_prob: float = key(0.15, gt=0, lt=1, needs="model.name=mlm_*")
    """Share of the tokens that are to be predicted."""
    eval_batch_size: int = key(32, ge=1, free=True, needs=READS_BLOCKS)
    """Blocks at a time in validation, on each process."""
    workers: int = key(0, ge=0, free=True)
    """Loader processes of each rank."""

    def agree(self) -> None:
        if self.mixture is not None:
            self.mixture = checked_mixture(self.mixture)
        if self.max_length >= self.max_tokens:
            raise ValueError(
                f"data.max_length {self.max_length} and its end are more than data.max_tokens {self.max_tokens}: "
                "such a pair fits in no batch"
            )

    def source_root(self, root: str) -> str:
        """Return where a source of data.mixture is: on the hub, or inside data.root."""
        if root.startswith("hfds/"):
            return root
        return str(Path(self.root, root))


def checked_mixture(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return data.mixture, checked, with unnamed sources named after the last part of their root."""
    checked = []
    for index, source in enumerate(sources):
        where = f"data.mixture {index}"
        for entry in source:
            if entry not in ("root", "weight", "name"):
                raise ValueError(
                    f"{where}: unknown key {entry!r}; allowed are root, weight and name"
                )
        root = source.get("root")
        if not isinstance(root, str) or not root:
            raise ValueError(f"{where}: root {root!r}; expected a folder")
        weight = source.get("weight")
        if not _is_weight(weight):
            raise ValueError(f"{where}: weight {weight!r}; expected a number above 0")
        name = source.get("name", root.rstrip("/").rpartition("/")[2])
        if not isinstance(name, str) or name in [earlier["name"] for earlier in checked]:
            raise ValueError(f"{where}: name {name!r}; expected a text that no other source has")
        checked.append(dict(root=root, weight=weight, name=name))
    return checked


def _is_weight(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < math.inf


@dataclass
class TextOptimConfig(OptimConfig):
    """Optimiser and schedule."""

    name: str = key("adamw")
    """One of timm's optimisers, such as adamw, or nesterov: SGD with Nesterov momentum, as in Baevski and Auli 2019."""
    lr: float = key(7e-4)
    weight_decay: float = key(0.0)
    """Weight decay, which is not applied to biases, norms and routers."""
    betas: tuple[float, float] | None = key((0.9, 0.98))
    eps: float | None = key(1e-9)
    momentum: float | None = key(0.99)
    """Momentum of SGD, Muon and the like: 0.99 as for nesterov in Baevski and Auli 2019; 0.95 is usual with muon."""
    batch_size: int = key(32, needs=READS_BLOCKS)
    """Blocks per step, over all processes and micro-batches. (Translation: data.max_tokens.)"""
    accumulation: int = key(1)
    """Micro-batches that make up a step, on each process. A load-balance loss counts the load of each, and is their mean."""
    schedule: Literal["inverse_sqrt", "linear", "cosine", "constant"] = key("inverse_sqrt")
    """After the warm-up: "inverse_sqrt", as 1 / sqrt(step); "linear" or "cosine", to min_lr at max_steps; "constant"."""
    warmup_steps: int = key(4000)
    warmup_lr: float = key(1e-7, ge=0, le="lr", needs=f"{TRAINS}; .warmup_steps")
    """Learning rate at which the warm-up begins."""
    min_lr: float = key(0.0)
    """Learning rate at the end of the schedule."""

    def agree(self) -> None:
        super().agree()
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise ValueError(
                "optim.schedule inverse_sqrt starts from the end of a warm-up: it needs optim.warmup_steps"
            )


@dataclass
class GenerationConfig(Section, section="generate", needs=TRANSLATES, free=True):
    """Beam search for BLEU."""

    beam: int = key(5, ge=1)
    """Width of the beam; 1: greedy."""
    length_penalty: float = key(1.0, ge=0, needs=".beam!=1")
    """The score of a hypothesis is divided by its length to this power."""
    max_length: int = key(50, ge=1)
    """A translation has at most this many tokens more than its source."""
    batch_size: int = key(64, ge=1)
    """Sentences at a time."""
    tokenizer: Literal["13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "given"] | None = key(
        None
    )
    """Tokenizer of BLEU, one of sacrebleu's; left out: sacrebleu's choice by data.target (zh, ja-mecab or ko-mecab, of
    which the last two need further packages; else 13a). "given" is for text that is tokenised already, as with Moses:
    the papers' form of BLEU scores this text as it is, and sacreBLEU's form takes sacrebleu's choice."""
    compound_split: bool = key(False)
    """Split hyphenated words in the papers' form of BLEU, as they do for WMT14 EN-DE."""
    gate_modes: list[Literal["soft", "argmax", "random"]] = key(["soft"])
    """Modes of the encoder's MAE gates; the split is translated once in each (Peng 2020, table 5): "soft", the mixture;
    "argmax", the likeliest expert; "random", an expert drawn at random, in five translations."""


@dataclass
class LanguageConfig(RunConfig):
    """Text."""

    kind: Literal["text"] = key("text")
    max_steps: int = key(1000, ge=0)
    """Optimiser steps; 0: the weights of init_from or model.pretrained are scored as they are."""
    label_smoothing: float = key(0.1, ge=0, lt=1)
    """Label smoothing of the cross-entropy; it does not change the auxiliary losses."""
    eval_every: int = key(0, ge=0, free=True)
    """Steps between validations; 0: only at the end."""
    patience: int = key(0, ge=0, free=True, needs="eval_every")
    """Stop after this many validations in a row without a lower loss; 0: never."""
    keep_weights_every: int = key(0, ge=0, free=True)
    """Steps between copies of the weights in OUTPUT/weights/step_N, which from_pretrained reads; 0: no copies."""
    average: int = key(1, ge=1, free=True)
    """Average the weights of this many last checkpoints for the final scores, unless the last weights (or with patience
    the best ones) have a lower validation loss. 1: score the best weights (best.safetensors) with patience, else the
    last ones."""
    model: TextModelConfig = field(default_factory=TextModelConfig)
    data: TextDataConfig = field(default_factory=TextDataConfig)
    optim: TextOptimConfig = field(default_factory=TextOptimConfig)
    generate: GenerationConfig = field(default_factory=GenerationConfig)

    def agree(self) -> None:
        super().agree()
        if self.average > self.keep_checkpoints:
            raise ValueError(
                f"average {self.average} needs as many checkpoints, keep_checkpoints is {self.keep_checkpoints}"
            )
        if self.model.name.endswith("nobcd") and self.block_descent.mode == "bcd":
            raise ValueError(
                f"model.name {self.model.name} is MAE without block descent: set block_descent.mode joint"
            )

    def routers(self) -> list[tuple[str, dict]]:
        """Return name and options of the routers that the model has, by its name and its arguments."""
        # Imported here, because it needs transformers.
        from moh_vision.language.models.create import preset_routers

        arguments = dict(self.model.arguments() or {})
        if self.model.name == "clm_pretrained":
            # The model may turn out to be one with routers also without model.convert.
            router = arguments.get("router") or "query_norm"
            return [(router, arguments.get("router_kwargs") or {})]
        arguments.pop("head_budget", None)  # whether it has an effect is what the routers say
        try:
            return preset_routers(self.model.name, **arguments)
        except ValueError:  # `create_text_model` refuses it
            return [(self.model.name, {})]

    def model_arguments(self, sizes: dict) -> dict:
        """Merge `sizes`, which follow from the text, with the configured arguments."""
        given = self.model.arguments() or {}
        for name, value in sizes.items():
            if name in given:
                raise ValueError(
                    f"model.kwargs {name} {given[name]!r}: it follows from the text, {value}; leave it out"
                )
        return {**sizes, **given}

    def check_model(self, model: Any) -> None:
        """Raise ValueError if a key does not go together with a model of this transformers config."""
        if self.label_smoothing and getattr(model, "adaptive_cutoffs", None):
            raise ValueError(
                f"label_smoothing {self.label_smoothing:g}: an adaptive softmax never computes all words, set it to 0"
            )
