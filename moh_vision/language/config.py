"""A run on text: translation, masked and causal language models."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moh_vision.engine.config import TRAINS, HeadBudgets, OptimConfig, RunConfig
from moh_vision.engine.keys import Section, key, plain

TRANSLATES = "model.name=mt_*"
CAUSAL = "model.name=clm_*"
MODELS = "model.name=clm_* or model.name=mlm_*"
OWN_WORDS = "not .tokenizer"
WORDS = 10  # of source and target for counting a translation, as in Zhang 2022, table 1


@dataclass
class TextModelConfig(Section, section="model"):
    """The model; its name also says the task: mt_* translates, mlm_* fills in masked tokens, clm_* continues a text."""

    name: str = key("mt_transformer_base")
    """A preset of moh_vision.language.models.create."""
    head_budget: HeadBudgets | None = key(None, ge=0)
    """Share of active heads, as of an image model: 0.75, "uniform:0.75", one [shared, routed] per layer."""
    kwargs: dict[str, Any] | None = key(None)
    """Further arguments of the model, such as {encoder_layers: 2, hidden_size: 128}."""
    pretrained: str | None = key(None)
    """Start from a causal model of transformers' Llama or Qwen families: a folder, or its name on the Hugging Face hub. It
    brings its sizes, and name must be clm_pretrained. Its vocabulary grows to that of data.tokenizer."""
    convert: dict[str, Any] | None = key(None, needs=".pretrained")
    """Arguments of moh_vision.convert for it, such as {router: query_norm}; left out: it stays as it is."""

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
        if self.name != "clm_pretrained":  # clm_moh_small_75, say, would have none of its routers
            raise ValueError(
                f"model.pretrained needs model.name clm_pretrained, not {self.name}: it brings its model"
            )
        if self.kwargs:
            raise ValueError(
                f"model.kwargs {self.kwargs}: model.pretrained {self.pretrained} has its own; leave it out"
            )

    def arguments(self) -> dict | None:
        """Return arguments of the preset, or with `pretrained` of convert (None: unchanged)."""
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
    """What is trained on, a list of {root: FOLDER, weight: NUMBER, name: TEXT}: of the blocks drawn, a source has the share
    weight / sum of weights. A relative root is inside data.root, where val and test are."""
    source: str = key("en", needs=TRANSLATES)
    """Language translated from."""
    target: str = key("de", needs=TRANSLATES)
    """Language translated into."""
    train: str = key("train")
    """Name of the training split."""
    val: str = key("val")
    """Name of the split that is looked at while training."""
    test: str | None = key(None, free=True)
    """Name of the split that is scored at the end too; left out: none."""
    tokenizer: str | None = key(None)
    """Take the vocabulary of this run, or this tokenizer.json, instead of making one from the training split; left out with
    init_from of a run: that run's. Causal language models also take the folder of a transformers tokenizer."""
    vocab_size: int | None = key(None, ge=2, needs=CAUSAL)
    """Tokens of the model, at least as many as its tokenizer has; left out: as many."""
    merges: int = key(32000, ge=0, needs=f".words=null; {OWN_WORDS}")
    """Merges of the byte-pair encoding: the vocabulary has 256 bytes and so many more tokens."""
    target_merges: int | None = key(None, ge=0, needs=f"{TRANSLATES}; not .tokenizer")
    """Merges of the target's own vocabulary; left out: one vocabulary for both languages."""
    words: int | None = key(None, ge=0, needs=f"{MODELS}; {OWN_WORDS}")
    """Number of the most frequent words that the vocabulary has instead of byte pairs, for an adaptive softmax; 0: all."""
    lowercase: bool = key(False, needs=OWN_WORDS)
    """Turn all text to lower case."""
    allow_empty: bool = key(False, needs=TRANSLATES)
    """Leave pairs with an empty side out, instead of refusing the text."""
    max_tokens: int = key(4096, ge=8, needs=TRANSLATES)
    """Largest size of a micro-batch, sentences times the tokens of the longest, of either side."""
    max_length: int = key(250, ge=1, needs=TRANSLATES)
    """Training pairs with more tokens on a side are left out."""
    max_ratio: float | None = key(None, gt=1, needs=TRANSLATES)
    """Training pairs where one side has more than so many times the tokens of the other stay out; left out: no limit."""
    share: float = key(1.0, gt=0, le=1, needs=TRANSLATES)
    """Share of the training pairs that are used, as for subsets of 5 to 100 % (Peng 2020, section 5.2)."""
    block: int = key(128, ge=3, needs=MODELS)
    """Tokens in a block."""
    context: int = key(0, ge=0, lt="block", needs=CAUSAL)
    """Tokens of a validation window that are only seen; block - context are scored."""
    mask_prob: float = key(0.15, gt=0, lt=1, needs="model.name=mlm_*")
    """Share of the tokens that are to be predicted."""
    eval_batch_size: int = key(32, ge=1, free=True, needs=MODELS)
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
    """Check data.mixture, and name unnamed sources after the last part of their root."""
    checked = []
    for number, source in enumerate(sources):
        where = f"data.mixture {number}"
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
    """One of timm's optimisers, such as adamw, or nesterov: SGD with Nesterov momentum, as Baevski and Auli 2019 train."""
    lr: float = key(7e-4)
    weight_decay: float = key(0.0)
    """Weight decay, which is not applied to biases, norms and routers."""
    betas: tuple[float, float] | None = key((0.9, 0.98))
    eps: float | None = key(1e-9)
    momentum: float | None = key(0.99)
    """Momentum of SGD, Muon and the like: 0.99 as for nesterov in Baevski and Auli 2019; 0.95 is usual with muon."""
    batch_size: int = key(32, needs=MODELS)
    """Blocks per step over all processes and accumulation. (Translation: data.max_tokens.)"""
    accumulation: int = key(1)
    """Micro-batches that make up a step, on each process."""
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
    """A translation has at most so many tokens more than its source."""
    batch_size: int = key(64, ge=1)
    """Sentences at a time."""
    tokenizer: Literal["13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "given"] | None = key(
        None
    )
    """Tokenizer of BLEU, one of sacrebleu's; or "given" for text that is tokenised already, as with Moses: it is then scored as it
    stands, and in sacreBLEU's form as without. Left out: sacrebleu's choice by data.target (zh, ja-mecab or ko-mecab, the
    last two by packages of their own; else 13a)."""
    compound_split: bool = key(False)
    """In that BLEU, split hyphenated words, as the papers do for WMT14 EN-DE."""
    gate_modes: list[Literal["soft", "argmax", "random"]] = key(["soft"])
    """How the encoder's gates of MAE are used, one translation each (Peng 2020, table 5): "soft", the mixture; "argmax",
    the likeliest expert; "random", a drawn one, five times."""


@dataclass
class LanguageConfig(RunConfig):
    """Text."""

    kind: Literal["text"] = key("text")
    max_steps: int = key(1000, ge=0)
    """Optimiser steps; 0: the weights of init_from or model.pretrained are scored as they are."""
    label_smoothing: float = key(0.1, ge=0, lt=1)
    """Label smoothing of the cross-entropy, inside the task, so that the auxiliary losses stay."""
    eval_every: int = key(0, ge=0, free=True)
    """Steps between looks at the val split; 0: only at the end."""
    patience: int = key(0, ge=0, free=True, needs="eval_every")
    """Stop after so many looks at the val split in a row without a lower loss; 0: never."""
    keep_weights_every: int = key(0, ge=0, free=True)
    """Also keep the weights after every so many steps, in OUTPUT/weights/step_N, which from_pretrained reads; 0: none."""
    average: int = key(1, ge=1, free=True)
    """The final scores are of the mean of so many last checkpoints' weights, or of the last ones (with
    patience also the best ones) if their validation loss is lower; 1: with patience of the weights of lowest loss (best.safetensors), else of the last ones."""
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

    def routers(self) -> set[str]:
        """Return the routers that the name and the arguments of the model mention."""
        preset = self.model.name.replace("nobcd", "mae").replace("uni_mae", "")
        text = f"{preset} {self.model.kwargs}"
        routers = {router for router in ("moh", "moa", "mae", "query_norm") if router in text}
        if self.model.name == "clm_pretrained":
            routers.add("query_norm")
        return routers

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
        """Raise ValueError for what cannot be had with a model of this transformers config."""
        if self.label_smoothing and getattr(model, "adaptive_cutoffs", None):
            raise ValueError(
                f"label_smoothing {self.label_smoothing:g}: an adaptive softmax never computes all words, set it to 0"
            )
