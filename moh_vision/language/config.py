"""A run on text: translation, masked and causal language models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Dict, List, Literal, Optional, Tuple

from moh_vision.engine.config import HeadBudgets, OptimConfig, RunConfig, check, plain, read_head_budget

GATE_MODES = ("soft", "argmax", "random")


@dataclass
class TextModelConfig:
    """The model; its name also says the task: mt_* translates, mlm_* fills in masked tokens, clm_* continues a text.

    Args:
        name: a preset of moh_vision.language.models.create.
        head_budget: of a model that routes its heads, as that of an image model: 0.75, "uniform:0.75", a list with one
            [shared, routed] per layer, or of LLaMA-style models "searched:FILE".
        kwargs: further arguments of the model, such as {encoder_layers: 2, hidden_size: 128}.
        pretrained: start from a pre-trained causal model of transformers' Llama or Qwen families: a folder, or its name
            on the Hugging Face hub. It brings its sizes, and name must be clm_pretrained. Its vocabulary grows to that
            of data.tokenizer.
        convert: arguments of moh_vision.convert for it, such as {router: query_norm}; left out: it stays
            as it is.
    """

    name: str = "mt_transformer_base"
    head_budget: Optional[HeadBudgets] = None
    kwargs: Optional[Dict[str, Any]] = None
    pretrained: Optional[str] = None
    convert: Optional[Dict[str, Any]] = None

    def __post_init__(self):
        self.head_budget = read_head_budget(self.head_budget)
        for place in ("kwargs", "convert"):
            if self.head_budget is not None and "head_budget" in (getattr(self, place) or {}):
                raise ValueError(f"model.head_budget and model.{place}.head_budget are the same thing: give one")
        if self.pretrained is None:
            return
        if self.name != "clm_pretrained":  # clm_moh_small_75, say, would have none of its routers
            raise ValueError(f"model.pretrained needs model.name clm_pretrained, not {self.name}: it brings its model")
        if self.kwargs:
            raise ValueError(
                f"model.kwargs {self.kwargs}: model.pretrained {self.pretrained} has its own; leave it out"
            )

    def arguments(self) -> Optional[dict]:
        """Arguments of the preset; with `pretrained` those of convert, None: it stays as it is."""
        own = self.kwargs if self.pretrained is None else self.convert
        return own if self.head_budget is None else dict(own or {}, head_budget=plain(self.head_budget))


@dataclass
class TextDataConfig:
    """The text and its vocabulary.

    Args:
        root: a folder with SPLIT.LANGUAGE[.gz] of both languages, line n of one being the translation of line n of the
            other, or with SPLIT.txt[.gz] for language models; or hfds/NAME[:CONFIG] for a Hugging Face data set. For causal
            language models also with token ids: SPLIT.bin, SPLIT.npy, or SPLIT-*.tar with one .npy a document.
        mixture: causal language models: what is trained on, a list of {root: FOLDER, weight: NUMBER, name: TEXT}: of every block
            drawn, a source has the share weight / sum of weights. A root that is not absolute is inside data.root, where
            val and test are.
        source: language translated from.
        target: language translated into.
        train: name of the training split.
        val: name of the one that is looked at while training.
        test: name of the one that is scored at the end too; left out: none.
        tokenizer: take the vocabulary of this run, or this tokenizer.json, instead of making one from the training split.
            Left out with init_from of a run: that run's. Causal language models also take a foreign tokenizer.json, or
            the folder of a transformers tokenizer.
        vocab_size: causal language models: tokens of the model; without data.tokenizer all that is known of token ids, with it
            at least as many as it has.
        bin_dtype: of SPLIT.bin files that have no SPLIT.json which says it.
        merges: of the byte-pair encoding: the vocabulary has 256 bytes and so many more tokens.
        target_merges: a vocabulary of its own for the target, with so many; left out: one for both languages.
        words: causal language models: the so many most frequent words instead of byte pairs, for an adaptive softmax; 0: all.
        lowercase: turn all text to lower case.
        allow_empty: leave pairs with an empty side out, instead of refusing the text.
        max_tokens: translation: largest size of a micro-batch, sentences times the tokens of the longest, of either side.
        max_length: translation: training pairs with more tokens on a side are left out.
        max_ratio: translation: as are those where one side has so many times more tokens; left out: none.
        share: of the training pairs, as for subsets of 5 to 100 % (Peng 2020, section 5.2).
        block: language models: tokens a block.
        context: causal language models: tokens of a validation window that are only seen; block - context are scored.
        mask_prob: masked language models: share of the tokens that are to be predicted.
        eval_batch_size: language models: blocks at a time in validation, on each process.
        workers: loader processes of each rank.
    """

    root: str = "data/text"
    mixture: Optional[List[Dict[str, Any]]] = None
    source: str = "en"
    target: str = "de"
    train: str = "train"
    val: str = "val"
    test: Optional[str] = None
    tokenizer: Optional[str] = None
    vocab_size: Optional[int] = None
    bin_dtype: Optional[Literal["uint16", "uint32"]] = None
    merges: int = 32000
    target_merges: Optional[int] = None
    words: Optional[int] = None
    lowercase: bool = False
    allow_empty: bool = False
    max_tokens: int = 4096
    max_length: int = 250
    max_ratio: Optional[float] = None
    share: float = 1.0
    block: int = 128
    context: int = 0
    mask_prob: float = 0.15
    eval_batch_size: int = 32
    workers: int = 0

    def __post_init__(self):
        for name, least in (("max_tokens", 8), ("max_length", 1), ("block", 3), ("eval_batch_size", 1)):
            check(f"data.{name}", getattr(self, name), getattr(self, name) >= least, f"at least {least}")
        for name in ("merges", "target_merges", "words"):
            value = getattr(self, name)
            check(f"data.{name}", value, value is None or value >= 0, "0 or more")
        check("data.vocab_size", self.vocab_size, self.vocab_size is None or self.vocab_size >= 2, "at least 2")
        if self.mixture is not None:
            self.mixture = checked_mixture(self.mixture)
        ratio = self.max_ratio
        check("data.max_ratio", ratio, ratio is None or ratio > 1, "above 1")
        check("data.share", self.share, 0 < self.share <= 1, "0 < share <= 1")
        check("data.context", self.context, 0 <= self.context < self.block, f"0 to data.block - 1, {self.block - 1}")
        check("data.mask_prob", self.mask_prob, 0 < self.mask_prob < 1, "between 0 and 1")
        check("data.workers", self.workers, self.workers >= 0, "0 or more")
        if self.max_length >= self.max_tokens:
            raise ValueError(
                f"data.max_length {self.max_length} and its end are more than data.max_tokens {self.max_tokens}: "
                "such a pair fits in no batch"
            )

    def source_root(self, root: str) -> str:
        """Where a source is: its root as it stands, or inside data.root."""
        return root if root.startswith("hfds/") else str(Path(self.root, root))


def checked_mixture(sources: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """data.mixture with a name for each: the last part of its root where it has none.

    Raises:
        ValueError: naming number and key.
    """
    if not sources:
        raise ValueError("data.mixture is empty; leave it out to train on data.root")
    found = []
    for number, source in enumerate(sources):
        where = f"data.mixture {number}"
        for key in source:
            if key not in ("root", "weight", "name"):
                raise ValueError(f"{where}: unknown key {key!r}; allowed are root, weight and name")
        root, weight = source.get("root"), source.get("weight")
        if not isinstance(root, str) or not root:
            raise ValueError(f"{where}: root {root!r}; expected a folder")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ValueError(f"{where}: weight {weight!r}; expected a number above 0")
        name = source.get("name", root.rstrip("/").rpartition("/")[2])
        if not isinstance(name, str) or name in [other["name"] for other in found]:
            raise ValueError(f"{where}: name {name!r}; expected a text that no other source has")
        found.append(dict(root=root, weight=weight, name=name))
    return found


@dataclass
class TextOptimConfig(OptimConfig):
    """Optimiser and schedule.

    Args:
        name: of timm's optimisers, such as adamw, or nesterov: SGD with Nesterov momentum, as Baevski and Auli 2019 train;
            "adam" is accepted for "adamw", as earlier versions called it.
        weight_decay: not applied to biases, norms and routers.
        momentum: of SGD, Muon and the like: 0.99 as for nesterov in Baevski and Auli 2019; 0.95 is usual with muon.
        batch_size: language models: blocks per step over all processes and accumulation. (Translation: data.max_tokens.)
        accumulation: micro-batches that make up a step, on each process.
        schedule: after the warm-up "inverse_sqrt" falls as 1 / sqrt(step), "linear" to min_lr at max_steps, "cosine" likewise,
            "constant" not at all.
        warmup_lr: where the warm-up begins.
        min_lr: end of the schedule.
    """

    lr: float = 7e-4
    weight_decay: float = 0.0
    betas: Optional[Tuple[float, float]] = (0.9, 0.98)
    eps: Optional[float] = 1e-9
    momentum: Optional[float] = 0.99
    batch_size: int = 32
    schedule: Literal["inverse_sqrt", "linear", "cosine", "constant"] = "inverse_sqrt"
    warmup_steps: int = 4000
    warmup_lr: float = 1e-7

    def __post_init__(self):
        if self.name == "adam":
            self.name = "adamw"
        super().__post_init__()
        check("optim.warmup_lr", self.warmup_lr, 0 <= self.warmup_lr <= self.lr, "from 0 to optim.lr")
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise ValueError(
                "optim.schedule inverse_sqrt starts from the end of a warm-up: it needs optim.warmup_steps"
            )


@dataclass
class GenerationConfig:
    """Beam search for BLEU.

    Args:
        beam: width; 1: greedy.
        length_penalty: the score of a hypothesis is divided by its length to this power.
        max_length: a translation has at most so many tokens more than its source.
        batch_size: sentences at a time.
        tokenizer: of the papers' BLEU: "13a", or "given" where the text is tokenised already, as with Moses.
        compound_split: there, split hyphenated words, as the papers do for WMT14 EN-DE.
        gate_modes: how the encoder's gates of MAE are used, one translation each (Peng 2020, table 5): "soft", the
            mixture; "argmax", the most probable expert alone; "random", a drawn one, five times.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_length: int = 50
    batch_size: int = 64
    tokenizer: Literal["13a", "given"] = "13a"
    compound_split: bool = False
    gate_modes: List[Literal["soft", "argmax", "random"]] = field(default_factory=lambda: ["soft"])

    def __post_init__(self):
        for name in ("beam", "max_length", "batch_size"):
            check(f"generate.{name}", getattr(self, name), getattr(self, name) >= 1, "at least 1")
        check("generate.length_penalty", self.length_penalty, self.length_penalty >= 0, "0 or more")
        check(
            "generate.gate_modes",
            self.gate_modes,
            len(self.gate_modes) >= 1,
            f"at least one of {', '.join(GATE_MODES)}",
        )


@dataclass
class LanguageConfig(RunConfig):
    """Text.

    Args:
        max_steps: optimiser steps; 0: the weights of init_from or model.pretrained are scored as they are.
        label_smoothing: of the cross-entropy, inside the task, so that the auxiliary losses stay.
        eval_every: steps between looks at the val split; 0: only at the end.
        patience: stop after so many of them in a row without a lower loss; 0: never.
        keep_weights_every: also keep the weights after every so many steps, in OUTPUT/weights/step_N, a folder that from_pretrained and
            moh_vision.language.evaluation.lm read; 0: none. keep_checkpoints keeps what a run goes on from.
        average: the final scores are those of the average of the last checkpoints' weights, so many; 1: with patience of the
            weights of lowest loss (best.safetensors), else of the last ones.
        generate: how test sentences are translated.
    """

    label_smoothing: float = 0.1
    eval_every: int = 0
    patience: int = 0
    keep_weights_every: int = 0
    average: int = 1
    model: TextModelConfig = field(default_factory=TextModelConfig)
    data: TextDataConfig = field(default_factory=TextDataConfig)
    optim: TextOptimConfig = field(default_factory=TextOptimConfig)
    generate: GenerationConfig = field(default_factory=GenerationConfig)
    least_steps: ClassVar[int] = 0

    def __post_init__(self):
        super().__post_init__()
        check("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "0 <= smoothing < 1")
        check("eval_every", self.eval_every, self.eval_every >= 0, "0 or more")
        check("patience", self.patience, self.patience >= 0, "0 or more")
        check("keep_weights_every", self.keep_weights_every, self.keep_weights_every >= 0, "0 or more")
        check("average", self.average, self.average >= 1, "at least 1")
        if self.average > self.keep_checkpoints:
            raise ValueError(
                f"average {self.average} needs as many checkpoints, keep_checkpoints is {self.keep_checkpoints}"
            )
        if self.model.name.endswith("nobcd") and self.block_descent.mode == "bcd":
            raise ValueError(f"model.name {self.model.name} is MAE without block descent: set block_descent.mode joint")

    def model_arguments(self, sizes: dict) -> dict:
        """Arguments of the model: `sizes`, which follow from the text, and those of its configuration.

        Raises:
            ValueError: for one of these in model.kwargs.
        """
        own = self.model.arguments() or {}
        for name, value in sizes.items():
            if name in own:
                raise ValueError(f"model.kwargs {name} {own[name]!r}: it follows from the text, {value}; leave it out")
        return {**sizes, **own}

    def check_model(self, model: Any) -> None:
        """Raise ValueError for what cannot be had with a model of this transformers config."""
        if self.label_smoothing and getattr(model, "adaptive_cutoffs", None):
            raise ValueError(
                f"label_smoothing {self.label_smoothing:g}: an adaptive softmax never computes all words, set it to 0"
            )
