"""Models of runs: presets, pre-trained ones of transformers' Llama and Qwen families, and those that runs wrote."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from moh_vision.common.errors import closest, reason_of
from moh_vision.common.io import run_of
from moh_vision.engine.ranks import say
from moh_vision.language.data.inputs import CausalInputs, TextInputs
from moh_vision.language.data.vocabulary import TOKENIZER, Vocabulary
from moh_vision.language.models.base import MODELS
from moh_vision.language.models.configs import MOH_FIELDS
from moh_vision.language.models.create import create_text_model, task_of
from moh_vision.language.models.llama.model import FAMILIES, convert_llama
from moh_vision.models.fitting import other_heads, refuse_other_shapes
from moh_vision.models.weights import OF_RUNS, Weights


def task_for(model) -> str:
    """Return the task of a `TextModelConfig`: "mt", "mlm" or "clm"."""
    if model.pretrained:
        return "clm"
    return task_of(model.name)


def build_model(config, text: TextInputs, resumed: bool) -> tuple[nn.Module, dict]:
    """Return the model of a run, and its arguments, which exported weights carry.

    If the run is `resumed`, the model has new weights, which the caller replaces by those of the checkpoint.
    """
    pretrained = config.model.pretrained
    sizes = text.model_arguments()
    if pretrained:
        convert = config.model.arguments()
        arguments = dict(pretrained=pretrained, convert=convert, **sizes)
        if resumed:
            model = as_saved(Path(config.output))
        else:
            check_same_tokens(text.vocabularies[0], config)
            model = pretrained_model(pretrained, convert, **sizes)
    else:
        arguments = config.model_arguments(sizes)
        model = create_text_model(config.model.name, **arguments)
    config.check_model(model.config)
    if isinstance(text, CausalInputs):
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and config.data.block > positions:
            raise ValueError(f"data.block {config.data.block}: the model has {positions} positions")
        for model_config in configs_of(model):
            for name, token_id in text.special_tokens().items():
                known = getattr(model_config, name, None)
                # A chat model may end at any of several tokens: keep them, and add the tokenizer's.
                if isinstance(known, list):
                    token_id = list(dict.fromkeys([*known, token_id]))
                setattr(model_config, name, token_id)
    if config.checkpointing:
        # Not reentrant, because reentrant checkpointing loses routing statistics. Older versions of transformers have
        # only gradient_checkpointing_enable.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable(dict(use_reentrant=False))
    return model, arguments


def check_same_tokens(vocabulary, config) -> None:
    """Raise ValueError if an id stands for another token than in the tokenizer.json of model.pretrained."""
    file = Path(config.model.pretrained, TOKENIZER)
    if not file.is_file():
        return
    learnt = Vocabulary.load(file, foreign=True)
    for token_id in range(min(len(vocabulary), len(learnt))):
        if vocabulary.token(token_id) != learnt.token(token_id):
            raise ValueError(
                f"data.tokenizer {config.data.tokenizer}: token {token_id} is {vocabulary.token(token_id)!r}, "
                f"in {file} {learnt.token(token_id)!r}; expected that one, or one that adds tokens behind it"
            )


def configs_of(model: nn.Module) -> list:
    """Return a model's config and, if it has one, generation_config."""
    configs = (model.config, getattr(model, "generation_config", None))
    return [config for config in configs if config is not None]


def pretrained_model(
    source: str | Path, convert: dict | None = None, vocab_size: int | None = None
) -> PreTrainedModel:
    """Load a LLaMA, Qwen2 or Qwen3 model, of transformers or ours, in float32.

    Args:
        source: a folder, or a name on the hub.
        convert: arguments of `convert_llama`; None: no conversion.
        vocab_size: a model with fewer tokens grows to this size: transformers draws the new rows of embedding and
            output from a normal distribution with the mean and covariance of the old rows.
    """
    for key in convert or {}:
        if key not in MOH_FIELDS:
            raise ValueError(f"model.convert: there is no {key!r}: {closest(key, MOH_FIELDS)}")
    config, ours = _config(source)
    try:
        with quiet():
            model, loading = ours.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model.pretrained {source}: {reason_of(error)}") from None
    lacking = sorted(name for name in loading["missing_keys"] if ".router." not in name)
    if not lacking:
        lacking = sorted(name for name, *_ in loading["mismatched_keys"])
    if lacking:
        raise ValueError(
            f"model.pretrained {source}: its weights do not have, or not in the right shape, {lacking[:5]}"
        )
    if convert is not None:
        if config.moh is not None:
            raise ValueError(
                f"model.convert: model.pretrained {source} has routed heads already; leave it out"
            )
        try:
            convert_llama(model, **convert)
        except (ValueError, TypeError) as error:
            raise ValueError(f"model.convert: {error}") from None
    had = model.get_input_embeddings().num_embeddings
    if vocab_size is not None and vocab_size > had:
        with quiet():
            model.resize_token_embeddings(vocab_size, mean_resizing=True)
        grown = "the embedding and of the output"
        if model.config.tie_word_embeddings:
            grown = "the embedding, which is the output too,"
        say(
            f"the vocabulary grows from {had:,} to {vocab_size:,} tokens: new rows of {grown} "
            "are drawn around the mean of the old ones"
        )
    return model


def saved_model(folder: str | Path) -> PreTrainedModel:
    """Load a model that `save_pretrained` wrote: one of ours, or one that `pretrained_model` takes."""
    ours = MODELS.get(type(config_in(Path(folder))))
    try:
        with quiet():
            if ours is None:
                return pretrained_model(folder)
            return ours.from_pretrained(folder)
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{folder}: {reason_of(error)}") from None


def config_in(folder: Path) -> PreTrainedConfig:
    """Read the config.json of a folder."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # files of others may hold anything
        raise ValueError(f"{folder / 'config.json'}: {reason_of(error)}") from None


def as_saved(run: Path) -> PreTrainedModel:
    """Build the model that the config.json of a run describes, with new weights."""
    config = config_in(run)
    if type(config) not in MODELS:
        raise ValueError(
            f"{run / 'config.json'}: its model_type {config.model_type!r} is none of a run"
        )
    return MODELS[type(config)](config)


def build_text(found: Weights, device: Any = None) -> PreTrainedModel:
    """Return the language model of weights, in eval mode: `Weights.build` for this wing."""
    if str(device) == "meta":
        with torch.device("meta"):
            return as_saved(folder_of(found)).eval()
    if found.form not in OF_RUNS:
        return saved_model(found.path).to(device or "cpu").eval()
    model = as_saved(folder_of(found))
    if start_text(model, found, found.metadata["vocabularies"]):
        raise ValueError(
            f"{found.file} does not hold all weights of the model in {folder_of(found) / 'config.json'}"
        )
    return model.to(device or "cpu").eval()


def folder_of(found: Weights) -> Path:
    """Return the folder whose config.json says of which model a run's weights are."""
    return run_of(found.file)


def start_text(model: nn.Module, found: Weights, vocabularies: list[str]) -> list[str]:
    """Load the weights of a run into a model; return lines on what differs: routers that they lack start fresh.

    Args:
        model: gets the weights.
        found: the weights.
        vocabularies: fingerprints that the run's vocabularies must have.
    """
    state = found.tensors()
    if found.metadata.get("vocabularies") not in (None, vocabularies):
        raise ValueError(
            f"{found.title}: it was trained with another vocabulary; set data.tokenizer to that of the run"
        )
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = every - {name for name, _ in model.named_parameters()}

    def may_lack(name: str) -> bool:
        return ".router." in name or name in tied

    refuse_other_shapes(found.title, state, model, may_lack)
    model.load_state_dict(state, strict=False)
    fresh = [name for name in model.state_dict() if name not in state and name not in tied]
    lines = []
    if fresh:
        lines.append(f"{len(fresh)} router tensors start fresh")
    trained = outline_of(found)
    if trained is not None:
        lines += other_heads(model, trained, found.source)
    return lines


def outline_of(found: Weights) -> PreTrainedModel | None:
    """Return the model of weights without values; None: no config.json beside them says which it is."""
    if not (folder_of(found) / "config.json").is_file():
        return None
    try:
        with torch.device("meta"):
            return as_saved(folder_of(found))
    except Exception:  # a file of others may hold anything
        return None


def _config(source: str | Path):
    """Return our config and our class for a model of transformers or of ours."""
    name = os.fspath(source)
    if os.path.isfile(name):
        raise ValueError(
            f"model.pretrained {source} is a file: give its folder; --init-from takes weights of a run alone"
        )
    # On the hub names are NAME or OWNER/NAME.
    if not os.path.isdir(name) and (name[:1] in "./~" or name.count("/") > 1):
        raise ValueError(f"model.pretrained {source}: no such folder")
    classes = {}  # model_type -> our class
    for theirs, ours in FAMILIES.items():
        classes[theirs.config_class.model_type] = ours
        classes[ours.config_class.model_type] = ours
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.pretrained {source}: {reason_of(error)}") from None
    ours = classes.get(config.model_type)
    if ours is None:
        raise ValueError(
            f"model.pretrained {source}: its model_type is {config.model_type!r}, allowed are {', '.join(classes)}"
        )
    if not isinstance(config, ours.config_class):
        # auto_map names code that our class makes unnecessary.
        dropped = ("model_type", "auto_map", "architectures", "transformers_version")
        fields = {name: value for name, value in config.to_dict().items() if name not in dropped}
        config = ours.config_class(**fields)
    return config, ours


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' warnings, because we give our own, and its progress bars if stderr is not a terminal."""
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
