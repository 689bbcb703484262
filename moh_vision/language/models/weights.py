"""Trained text models: transformers' Llama and Qwen families, and runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Union

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from moh_vision.engine.commands import closest, reason_of
from moh_vision.engine.io import run_of
from moh_vision.engine.ranks import say
from moh_vision.language.models.create import MODELS
from moh_vision.language.models.llama.model import FAMILIES, convert_llama
from moh_vision.models.weight_files import read_safetensors, weights_file
from moh_vision.models.weights import refuse_other_shapes

CONVERT_KEYS = ("head_budget", "router", "executor", "router_kwargs", "group")


def pretrained_model(
    source: Union[str, Path],
    convert: Optional[dict] = None,
    vocab_size: Optional[int] = None,
) -> PreTrainedModel:
    """Load a model in float32, with at least the given number of tokens.

    Args:
        source: folder, or name on the hub, of a transformers LLaMA, Qwen2 or Qwen3 model or one of ours.
        convert: arguments of `convert_llama`; None: no conversion.
        vocab_size: tokens that it must have. A smaller model grows, as by transformers' `resize_token_embeddings`:
            new rows of embedding and output are drawn from the normal distribution with the old rows' mean and
            covariance. A larger model stays.
    """
    for key in convert or {}:
        if key not in CONVERT_KEYS:
            raise ValueError(f"model.convert: there is no {key!r}: {closest(key, CONVERT_KEYS)}")
    config, ours = _config(source)
    try:
        with quiet():
            model, found = ours.from_pretrained(
                source, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model.pretrained {source}: {reason_of(error)}") from None
    lost = sorted(name for name in found["missing_keys"] if ".router." not in name)
    if lost or found["mismatched_keys"]:
        wrong = lost or sorted(name for name, *_ in found["mismatched_keys"])
        raise ValueError(f"model.pretrained {source}: its weights do not have, or not in the right shape, {wrong[:5]}")
    if convert is not None:
        if config.moh is not None:
            raise ValueError(f"model.convert: model.pretrained {source} has routed heads already; leave it out")
        try:
            convert_llama(model, **convert)
        except (ValueError, TypeError) as error:
            raise ValueError(f"model.convert: {error}") from None
    had = model.get_input_embeddings().num_embeddings
    if vocab_size is not None and vocab_size > had:
        with quiet():
            model.resize_token_embeddings(vocab_size, mean_resizing=True)
        tied = model.config.tie_word_embeddings
        say(
            f"the vocabulary grows from {had:,} to {vocab_size:,} tokens: new rows of the embedding"
            f"{', which is the output too,' if tied else ' and of the output'} are drawn around the mean of the old ones"
        )
    return model


def saved_model(folder: Union[str, Path]) -> PreTrainedModel:
    """Load a model that `save_pretrained` wrote, of ours or as `pretrained_model` takes it."""
    try:
        kind = MODELS.get(type(AutoConfig.from_pretrained(folder, trust_remote_code=False)))
        if kind is None:
            return pretrained_model(folder)
        with quiet():
            return kind.from_pretrained(folder)
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{folder}: {reason_of(error)}") from None


def model_as_saved(source: Union[str, Path]) -> PreTrainedModel:
    """Build a folder's model with new float32 weights, to load a checkpoint into."""
    config, ours = _config(source)
    config.dtype = torch.float32
    return ours(config)


def text_from_run(file: Path) -> nn.Module:
    """Load a model in eval mode from a .safetensors of a train_text.py run or checkpoint."""
    run = run_of(file)
    about = AutoConfig.from_pretrained(run, trust_remote_code=False)
    model = MODELS[type(about)](about) if type(about) in MODELS else model_as_saved(run)
    if init_text(model, str(file), read_safetensors(file, lambda name: False)[1]["vocabularies"]):
        raise ValueError(f"{file} does not hold all weights of the model in {run / 'config.json'}")
    return model.eval()


def init_text(model: nn.Module, source: str, vocabularies: List[str]) -> List[str]:
    """Load the weights of a run, a folder or .safetensors, whose vocabularies must have the fingerprints
    `vocabularies`. Return the router tensors that the run lacks; they stay as they are.
    """
    file = weights_file(source)
    state, about = read_safetensors(file)
    if about.get("vocabularies") not in (None, vocabularies):
        raise ValueError(
            f"init_from {source}: it was trained with another vocabulary; set data.tokenizer to that of the run"
        )
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = every - {name for name, _ in model.named_parameters()}
    refuse_other_shapes(f"init_from {source}", state, model, lambda name: ".router." in name or name in tied)
    model.load_state_dict(state, strict=False)
    return [name for name in model.state_dict() if name not in state and name not in tied]


def _config(source: Union[str, Path]):
    """(config, class) of a model, both ours."""
    name = os.fspath(source)
    if os.path.isfile(name):
        raise ValueError(
            f"model.pretrained {source} is a file: give its folder; --init-from takes weights of a run alone"
        )
    if not os.path.isdir(name) and (name[:1] in "./~" or name.count("/") > 1):  # on the hub: NAME or OWNER/NAME
        raise ValueError(f"model.pretrained {source}: no such folder")
    classes: Dict[str, type] = {}
    for theirs, ours in FAMILIES.items():
        classes[theirs.config_class.model_type] = classes[ours.config_class.model_type] = ours
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
        about = config.to_dict()
        for name in ("model_type", "auto_map", "architectures", "transformers_version"):
            about.pop(name, None)  # auto_map names code, which is not needed
        config = ours.config_class(**about)
    return config, ours


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' bars where nobody sees them, and warnings that we give ourselves."""
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
