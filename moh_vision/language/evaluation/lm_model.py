"""Load causal language models and their tokenizers for `moh_vision.language.evaluation.lm`.

This module needs the packages of the extra "text".
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

import moh_vision.language.models.create  # noqa: F401  registers our model types
from moh_vision.attention import attention_layers
from moh_vision.common.errors import reason_of
from moh_vision.common.io import sha256_of
from moh_vision.engine.logging import versions
from moh_vision.language.models.llama.attention import RoutedAttention
from moh_vision.language.models.llama.model import load_moh_llama3
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weight_files import refuse_not_finite

TOKENIZERS = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
MOST_HASHED = 4 << 30  # bytes of weights; hashing more would take as long as a small evaluation
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)


def load_tokenizer(folder: str):
    """Load the transformers tokenizer of a folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"--model or --tokenizer {folder}: no such folder")
    if not any(Path(folder, name).is_file() for name in TOKENIZERS):
        raise ValueError(
            f"{folder}: no tokenizer ({', '.join(TOKENIZERS)}); give its folder as --tokenizer"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the package tokenizers raises plain Exception
        raise ValueError(f"{folder}: its tokenizer cannot be read: {reason_of(error)}") from None
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise ValueError(
            f"{folder}: its tokenizer names neither an eos_token nor a bos_token; a text begins with one"
        )
    return tokenizer


def load_model(
    folder: str, dtype: str, device: torch.device, tokenizer, released=False
) -> tuple[nn.Module, dict]:
    """Load a causal language model in eval mode, and the facts needed to repeat its scores.

    Args:
        folder: of the model.
        dtype: one of `DTYPES` of `moh_vision.language.evaluation.lm`.
        device: where the model goes.
        tokenizer: of transformers; the model must have its tokens.
        released: the folder is laid out as MoH-LLaMA3-8B, see `load_moh_llama3`.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        expected = "expected a folder that save_pretrained or train_text.py wrote"
        raise ValueError(f"--model {folder}: no config.json; {expected}")
    try:
        code = PreTrainedConfig.get_config_dict(folder)[0].get("auto_map", {})
        # transformers would ignore this code and run all heads.
        if "AutoModelForCausalLM" in code and not released:
            raise ValueError(
                "its config.json has an auto_map to code of its own, which is not run; --moh-llama3 reads the released MoH-LLaMA3-8B, "
                "and without that entry it is what its model_type says"
            )
        load = load_moh_llama3 if released else AutoModelForCausalLM.from_pretrained
        if dtype != "auto":
            dtype = getattr(torch, dtype)
        model = load(folder, dtype=dtype)
    except UNREADABLE as error:
        raise ValueError(
            f"--model {folder}: not read as a causal language model: {reason_of(error)}"
        ) from None
    size = model.config.get_text_config().vocab_size
    if len(tokenizer) > size:
        sizes = f"{size} tokens, its tokenizer has {len(tokenizer)}"
        raise ValueError(f"--model {folder}: {sizes}: they do not belong together")
    refuse_not_finite(f"--model {folder}", model.state_dict())
    circumstances = dict(
        model=str(path.resolve()),
        model_type=model.config.model_type,
        moh=getattr(model.config, "moh", None),
        weights=_described_weights(path),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        versions=versions(),
    )
    return model.to(device).eval(), circumstances


def _described_weights(folder: Path) -> dict[str, dict]:
    """Return size and SHA-256 of each file of weights; SHA-256 is None if all together exceed `MOST_HASHED` bytes."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    hashes = sum(file.stat().st_size for file in files) <= MOST_HASHED
    described = {}
    for file in files:
        sha256 = sha256_of(file) if hashes else None
        described[file.name] = dict(bytes=file.stat().st_size, sha256=sha256)
    return described


@contextlib.contextmanager
def counted(model: nn.Module, load: HeadLoad, group: int) -> Iterator[None]:
    """Inside the context, add the heads that run in a model's forwards to one group of `load`, padding included."""

    def ask(layer: nn.Module, args: tuple, kwargs: dict):
        """Pass a `RoutedAttention` a list for its statistics; other layers return theirs."""
        if not isinstance(layer, RoutedAttention):
            return None
        # Layer i appends its statistics only to a list of i entries.
        return args, dict(kwargs, stats=[None] * layer.layer_idx)

    def add(layer_index: int, layer: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        """Add the heads of layer `layer_index` to the load."""
        if isinstance(layer, RoutedAttention):
            stats = kwargs["stats"][-1]
        else:
            stats = output[1]
        load.add([stats], group, first=layer_index)

    with contextlib.ExitStack() as hooks:
        for layer_index, layer in enumerate(attention_layers(model)):
            hooks.enter_context(layer.register_forward_pre_hook(ask, with_kwargs=True))
            hooks.enter_context(
                layer.register_forward_hook(partial(add, layer_index), with_kwargs=True)
            )
        yield
