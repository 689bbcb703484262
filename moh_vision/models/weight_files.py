"""Read files of weights as tensors, without running any code in them."""

import argparse
import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moh_vision.common.errors import message_of, quotable, reason_of
from moh_vision.common.io import WRAPPED, TensorFiles, by_age, tensor_files

# Keys of state dicts in pickled files, in the order in which they are looked for. JiT's training script keeps two EMAs,
# of decay 0.9999 and 0.9996, and evaluates the first.
EMA_KEYS = ("ema", "state_dict_ema", "model_ema", "model_ema1")
SECOND_EMA_KEYS = ("model_ema2",)
MODEL_KEYS = ("state_dict", "model")
# Which weights users ask for, None if they do not say it -> the keys under which they may be.
STATE_KEYS: dict[str | None, tuple[str, ...]] = {
    None: (*EMA_KEYS, *MODEL_KEYS),
    "ema": (*EMA_KEYS, *MODEL_KEYS),
    "ema2": SECOND_EMA_KEYS,
    "model": MODEL_KEYS,
}
# A router's linear layers: names in the published MoH code -> ours.
NAMES = {"wg": "routed", "wg_0": "balance", "wg_1": "shared"}
# Largest accepted ratio of unpacked to packed bytes: compression shrinks weights by a tenth only.
MAX_UNPACKED = 10


def weights_file(path: str, weights: str | None = None) -> Path:
    """Return the weights file of a path: a file itself, or in a folder the EMA (if any) or the model.

    The folders of timm and diffusers (of a model, or a pipeline with a transformer) hold one file of weights.

    Args:
        path: a file, or the folder of a run, checkpoint, timm model, diffusers model or pipeline.
        weights: "ema", "ema2" (of a file of JiT's training script), "model", or None: the weights that the run's results
            were computed with (see `scored_weights`), or "ema" if the folder has no results.
    """
    file = Path(path)
    if weights not in STATE_KEYS:
        known = ", ".join(filter(None, STATE_KEYS))
        raise ValueError(f"weights {weights!r} is not one of {known}")
    if weights == "ema2" and (file.is_dir() or file.suffix == ".safetensors"):
        raise ValueError(
            f"weights {weights}: {path} holds no second EMA, as files of JiT's training script do"
        )
    if not file.is_dir():
        return file
    if weights is None:
        scored = scored_weights(file)
        if scored:
            return scored
    names = ["model.safetensors"]
    if not weights or weights == "ema":
        names = ["ema.safetensors", "model.safetensors"]
    library_names = (
        "diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.bin",
        "transformer/diffusion_pytorch_model.bin",
        "pytorch_model.bin",
    )
    files = [file / name for name in (*names, *library_names) if (file / name).exists()]
    # A sharded run has written each file in parts.
    files += [file / name for name in names if tensor_files(file / name)]
    if not files:
        raise FileNotFoundError(
            f"{path} holds no {' or '.join(names)}; a run writes them at its checkpoints"
        )
    return files[0]


def scored_weights(run: Path) -> Path | None:
    """Return the weights file that a run's results.json was computed with; None: no results, or outdated ones."""
    try:
        results = json.loads((run / "results.json").read_text())
        # Classifiers write "ema" or "model", language models the path of the file.
        file = (run / Path(results["weights"]).name).with_suffix(".safetensors")
        step = results["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # the file is missing, damaged, or not written by a run
    newest = next((number for number, _ in by_age(run / "checkpoints")), step)
    if not file.is_file() or newest != step:
        return None
    return file


def said_of_first_weights(file: Path, metadata: dict) -> str:
    """Return a sentence on how much of an EMA is still the weights of step 1; "" for other files or a trace of it."""
    left = metadata.get("first_weights_left")
    if file.name != "ema.safetensors" or not isinstance(left, (int, float)):
        return ""
    return f"{file}: {left:.1%} of this EMA are still the weights of step 1; model.safetensors has the last weights"


def read_tensors(file: Path, weights: str | None = None) -> dict[str, Tensor]:
    """Read the state dict of a .safetensors or pickled file; `weights`: see `read_pickled_tensors`."""
    if file.suffix == ".safetensors":
        state = read_safetensors(file)[0]
    elif file.is_file():
        state = read_pickled_tensors(file, weights)
    else:
        raise FileNotFoundError(f"{file}: no such file")
    plain = {WRAPPED.sub("", name): tensor for name, tensor in state.items()}
    if len(plain) < len(state):
        raise ValueError(
            f"{file}: tensors have the same name with and without module. or _orig_mod."
        )
    return plain


def read_safetensors(
    file: Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Tensor], dict]:
    """Read the wanted tensors and the JSON metadata of a .safetensors file; see `TensorFiles`."""
    opened = _opened(file)
    try:
        state = {name: opened.read(name) for name in opened.shapes if wanted(name)}
    except Exception as error:
        raise ValueError(_not_readable(file, error)) from None
    return state, opened.metadata


def _opened(file: Path) -> TensorFiles:
    """Open a .safetensors file; no tensor is read."""
    if not tensor_files(file):
        raise FileNotFoundError(f"{file}: no such file")
    try:
        return TensorFiles(file)
    except Exception as error:  # a damaged header may raise any exception
        raise ValueError(_not_readable(file, error)) from None


def _not_readable(file: Path, error: Exception) -> str:
    return f"{file}: not a readable .safetensors file of a run ({reason_of(error)})"


def refuse_not_finite(named: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError, which begins with `named`, if tensors hold NaN or infinity: whatever they compute is no number."""
    broken = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if broken:
        raise ValueError(
            f"{named}: {len(broken)} of {len(tensors)} tensors hold NaN or infinity, first {broken[0][:100]}"
        )


def read_metadata(file: Path) -> dict:
    """Read the JSON metadata of a .safetensors file alone; see `read_safetensors`."""
    return _opened(file).metadata


def read_settings(file: Path) -> dict:
    """Return the mapping in a .json beside weights; {} if there is no such file."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not readable as JSON ({reason_of(error)})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: expected a mapping, found {type(settings).__name__}")
    return settings


def weights_said(file: str | Path, weights: str | None = None) -> str:
    """Return the name of a weights file, followed by the result of `kind_in` in brackets, if it has one.

    Of a file with two EMAs also say how to take the second.
    """
    file = Path(file)
    held = kind_in(file, weights)
    if held is None:
        return str(file)
    if held == "ema" and kind_in(file, "ema2"):
        held = "ema, the first of two; weights ema2 is the second"
    return f"{file} ({held})"


def kind_in(file: Path, weights: str | None = None) -> str | None:
    """Return which weights, a key of STATE_KEYS, `read_tensors` takes from a pickled file; None: the file does not say."""
    if file.suffix in (".safetensors", ".npz") or not file.is_file():
        return None
    key = _state_key(_unpickled(file, mmap=zipfile.is_zipfile(file)), weights)
    if key is None:
        return None
    if key in SECOND_EMA_KEYS:
        return "ema2"
    if key in EMA_KEYS:
        return "ema"
    return "model"


def shapes_in(file: Path, weights: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `read_tensors` would read, by name, without reading them."""
    if file.suffix == ".safetensors":
        return _opened(file).shapes
    content = _unpickled(file, mmap=zipfile.is_zipfile(file))
    key = _state_key(content, weights)
    if key is not None:
        content = content[key]
    if not _is_state_dict(content):
        return {}
    return {name: tuple(tensor.shape) for name, tensor in content.items()}


def _unpickled(file: Path, mmap: bool = False):
    refuse_unpacking(file)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged file may raise any exception
        raise ValueError(f"{file}: {unpickling_problem(error, file)}") from None


def unpickling_problem(error: Exception, file: Path) -> str:
    """Return why `torch.load` refused a file and what a user can do; torch's own advice is for programmers."""
    text = message_of(error)
    blocked = re.search(r"unsupported GLOBAL (\S+) whose module \S+ is blocked", text)
    if blocked:
        return f"would call {blocked[1]}, which no file of weights needs; it is not read, and may be an attack"
    other = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", text)
    if other:
        load = f"torch.load({str(file)!r}, weights_only=False)"
        return (
            f"holds a {other[1]} beside tensors, which is not read, because reading it may run any code. If you trust the "
            f'file, save its weights alone, by the key that they have in it: python -c "import torch; '
            f"torch.save({load}['model'], 'weights.pth')\""
        )
    reason = reason_of(error)
    inner = re.search(r"WeightsUnpickler error: (.*?)(?: Check the documentation|$)", text)
    if inner:
        reason = quotable(inner[1])
    return f"not a readable file of tensors ({reason})"


def _state_key(content: object, weights: str) -> str | None:
    """Return the key of a state dict in a pickled file's content; None: the content itself is one, or has none."""
    if not isinstance(content, dict):
        return None
    return next((key for key in STATE_KEYS[weights] if isinstance(content.get(key), dict)), None)


def read_pickled_tensors(file: Path, weights: str | None = None) -> dict[str, Tensor]:
    """Read a state dict from a pickled file (.pt, .pth, .bin).

    weights: "ema" (the model, if the file has no EMA), "ema2", "model", or None: as "ema", also of a file that does not
        say which weights it holds.
    """
    content = _unpickled(file)
    key = _state_key(content, weights)
    if weights is not None and key is None:
        held = _state_key(content, None) or "one kind of weights"
        needed = " or ".join(STATE_KEYS[weights])
        raise ValueError(f"{file}: weights {weights}: it holds {held}, and nothing under {needed}")
    if key is not None:
        content = content[key]
    if not _is_state_dict(content):
        raise ValueError(
            f"{file}: holds no state dict, neither itself nor under {', '.join(STATE_KEYS[None])}"
        )
    size = file.stat().st_size
    for name, tensor in content.items():
        is_plain = tensor.layout == torch.strided and not tensor.is_meta
        # With stride 0 one element can be expanded to any size; a copy of such a tensor would fill the memory.
        if not is_plain or math.prod(tensor.shape) * tensor.itemsize > size:
            described = f"{name[:100]} {list(tensor.shape)}"
            raise ValueError(f"{file}: {described} is not a plain tensor of a file of {size} bytes")
    return content


def _is_state_dict(content: object) -> bool:
    """Return whether the content of a file is a dict of tensors, with at least one."""
    if not isinstance(content, dict) or not content:
        return False
    return all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())


def refuse_unpacking(file: Path) -> None:
    """Refuse a zip file (.pt, .pth, .npz) that unpacks to more than ten times its size."""
    try:
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # a damaged archive may raise any exception
        raise ValueError(f"{file}: not a readable file of tensors ({reason_of(error)})") from None
    size = file.stat().st_size
    if unpacked > MAX_UNPACKED * size + 2**20:
        raise ValueError(
            f"{file}: would unpack from {size} to {unpacked} bytes; weights do not shrink like that"
        )


def rename_routers(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename attn.wg, attn.wg_0 and attn.wg_1 to attn.router.routed, .balance and .shared."""

    def ours(match: re.Match) -> str:
        return f".attn.router.{NAMES[match[1]]}."

    published = re.compile(r"\.attn\.(wg|wg_0|wg_1)\.")
    return {published.sub(ours, name): tensor for name, tensor in state_dict.items()}
