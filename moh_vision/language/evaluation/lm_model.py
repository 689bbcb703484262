"""Load causal language models, their tokenizers and texts for `moh_vision.language.evaluation.lm`.

It needs the packages of the extra "text".
"""

import contextlib
import gzip
import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

import moh_vision.language.models.create  # noqa: F401  registers our model types
from moh_vision.attention import attention_layers
from moh_vision.engine.commands import reason_of
from moh_vision.engine.io import sha256_of
from moh_vision.engine.logging import versions
from moh_vision.language.data.batches import load_batches
from moh_vision.language.data.blocks import CausalWindows
from moh_vision.language.data.sources import TextFile
from moh_vision.language.data.vocabulary import COMPANION, EOS, TOKENIZER, Vocabulary
from moh_vision.language.models.llama.attention import RoutedAttention
from moh_vision.language.models.llama.model import load_moh_llama3
from moh_vision.models.head_load import HeadLoad

TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
MOST_HASHED = 4 << 30  # bytes of weights; the sums of more take as long as a small evaluation
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)


def load_tokenizer(folder: str, text: bool):
    """Load the transformers tokenizer of a folder; for a running `text` of a run of train_text.py its `Vocabulary`."""
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"--model or --tokenizer {folder}: no such folder")
    if not any((place / name).is_file() for name in TOKENIZERS):
        raise ValueError(f"{folder}: no tokenizer ({', '.join(TOKENIZERS)}); give its folder as --tokenizer")
    if text and (place / TOKENIZER).is_file():
        try:
            return Vocabulary.load(place / TOKENIZER)
        except ValueError:
            if not (place / COMPANION).is_file():  # which other tokenizers need
                raise
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{folder}: its tokenizer cannot be read: {reason_of(error)}") from None
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise ValueError(f"{folder}: its tokenizer names neither an eos_token nor a bos_token; a text begins with one")
    return tokenizer


def load_model(folder: str, dtype: str, device: torch.device, tokenizer, released=False) -> tuple[nn.Module, dict]:
    """Load a causal language model in eval mode, and the facts needed to repeat its scores.

    It must have the tokens of `tokenizer`. `released`: laid out as MoH-LLaMA3-8B, see `load_moh_llama3`.
    """
    place = Path(folder)
    if not (place / "config.json").is_file():
        expected = "expected a folder that save_pretrained or train_text.py wrote"
        raise ValueError(f"--model {folder}: no config.json; {expected}")
    try:
        code = PreTrainedConfig.get_config_dict(folder)[0].get("auto_map", {})
        if "AutoModelForCausalLM" in code and not released:  # would run all heads
            raise ValueError(
                "its config.json has an auto_map to code of its own, which is not run; --moh-llama3 reads the released MoH-LLaMA3-8B, "
                "and without that entry it is what its model_type says"
            )
        load = load_moh_llama3 if released else AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    except UNREADABLE as error:
        raise ValueError(f"--model {folder}: not read as a causal language model: {reason_of(error)}") from None
    size = model.config.get_text_config().vocab_size
    if len(tokenizer) > size:
        sizes = f"{size} tokens, its tokenizer has {len(tokenizer)}"
        raise ValueError(f"--model {folder}: {sizes}: they do not belong together")
    weights = sorted([*place.glob("*.safetensors"), *place.glob("pytorch_model*.bin")])
    cheap = sum(file.stat().st_size for file in weights) <= MOST_HASHED
    circumstances = dict(
        model=str(place.resolve()),
        model_type=model.config.model_type,
        moh=getattr(model.config, "moh", None),
        weights={f.name: dict(bytes=f.stat().st_size, sha256=sha256_of(f) if cheap else None) for f in weights},
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        versions=versions(),
    )
    return model.to(device).eval(), circumstances


@contextlib.contextmanager
def counted(model: nn.Module, load: HeadLoad, group: int) -> Iterator[None]:
    """Add the heads that run in a model's forwards to one group of `load`, padding included."""

    def ask(layer: nn.Module, args: tuple, kwargs: dict):
        # It appends its statistics where as many entries are as layers before it.
        return (args, dict(kwargs, stats=[None] * layer.layer_idx)) if isinstance(layer, RoutedAttention) else None

    def add(number: int, layer: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        stats = kwargs["stats"][-1] if isinstance(layer, RoutedAttention) else output[1]
        load.add([stats], group, first=number)

    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(attention_layers(model)):
            hooks.enter_context(layer.register_forward_pre_hook(ask, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(partial(add, number), with_kwargs=True))
        yield


def read_text(path: Path, tokenizer) -> tuple[Tensor, dict]:
    """Encode a file: whole by transformers' tokenizers; by a `Vocabulary` line by line, each with eos.

    Returns int64 [tokens + 1], of which the first stands for what is before the text, and dict(words: separated by blanks,
    and one for each line's end, as WikiText counts; bytes in UTF-8, and their sha256).
    """
    lines = list(TextFile(path))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if isinstance(tokenizer, Vocabulary):
        ids = [EOS] + [i for row in tokenizer.encode(lines) for i in (*row, EOS)]
    else:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        encoded = tokenizer(data.decode("utf-8-sig"), add_special_tokens=False, verbose=False)
        ids = [first, *encoded["input_ids"]]
    words = sum(len(line.split()) + 1 for line in lines)
    return torch.tensor(ids), dict(words=words, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def sliding_windows(
    ids: Tensor, context: int, stride: int, batch_size: int = 1, process: int = 0, processes: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Yield this process's batches of windows of a text for `perplexity`, see `CausalWindows`.

    Every token of ids [n + 1] but the first is a label once; labels of all windows but the first have at least
    context - stride + 1 tokens before them in the window (Baevski and Auli 2019, section 4.3).
    """
    n = len(ids) - 1
    if not n:
        return iter(())
    text = SimpleNamespace(name="the text", ids=ids[1:].numpy())
    windows = CausalWindows(text, min(context, n), min(stride, n), eos=int(ids[0]))
    numbers = range(len(windows))
    # The first window labels all its tokens; alone in a batch it widens no other's logits.
    rest = (numbers[i : i + batch_size] for i in range(1, len(numbers), batch_size))
    batches = [numbers[:1], *rest][process::processes]
    return load_batches(windows, [[(number, number) for number in batch] for batch in batches])
