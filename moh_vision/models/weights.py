"""Models from runs, and weights for new runs."""

from __future__ import annotations

import argparse
import difflib
import json
import pickle
import re
from pathlib import Path
from typing import Callable, Dict, Optional, Tuple, Union

import timm
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moh_vision.models.moh_vit import MoHVisionTransformer, zero_missing_routers

STATE_KEYS = ("ema", "state_dict_ema", "model_ema", "state_dict", "model")  # in this order
# Tensors whose shape follows the class count or the image size; they start anew where the shape differs.
REMADE = ("head.", "y_embedder.", "pos_embed")


def create(name: str, kind: str, **arguments) -> nn.Module:
    """timm.create_model for models with head routing; a wrong name or argument is a ValueError that helps.

    `kind` is "classifier" or "diffusion".
    """
    if not timm.is_model(name.split(".")[0]):
        models = timm.list_models()
        near = [m for m in models if m.startswith(name)][:3] or difflib.get_close_matches(name, models, n=3)
        raise ValueError(
            f"model.name '{name}' is not a registered model" + (f", did you mean {' or '.join(near)}?" if near else "")
        )
    try:
        model = timm.create_model(name, **arguments)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise ValueError(f"{name}: {error}") from None
        raise
    if not hasattr(model, "forward_routed"):
        raise ValueError(f"model.name '{name}' has no head routing; a dense ViT is moh_vit_* with model.router dense")
    actual = "classifier" if hasattr(model, "get_classifier") else "diffusion"
    if actual != kind:
        raise ValueError(f"model.name '{name}' is a {actual} model, a {kind} model is needed")
    return model


def from_run(path: str, kind: str, weights: str = "ema") -> Tuple[nn.Module, dict]:
    """The model of a finished or running run, with its weights.

    Args:
        path: folder of a run, or a .safetensors file that a run wrote.
        kind: "classifier" or "diffusion"; the other is refused.
        weights: "ema" or "model"; where a run has no EMA, "ema" falls back to "model".

    Returns:
        (model in eval mode, metadata: architecture, arguments, classes, step, config, weights: the file)

    Raises:
        ValueError, FileNotFoundError: naming the file.
    """
    file = weights_file(path, weights)
    state, metadata = read_safetensors(file)
    if "architecture" not in metadata:
        raise ValueError(f"{file} was not written by a run (no architecture in its metadata)")
    try:
        model = create(metadata["architecture"], kind, **metadata["arguments"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    model.load_state_dict(state)
    return model.eval(), dict(metadata, weights=str(file))


def to_validate(path: str, name: str, arguments: dict, img_size: Optional[int] = None) -> Tuple[nn.Module, dict]:
    """The classifier that `path` means: that of a run, or model `name` with `arguments` and weights from there.

    Args:
        path: see `init_from`.
        img_size: another one than the run's; positions are resized.

    Returns:
        (model in eval mode, dict(name, arguments, classes or None, weights: the file))

    Raises:
        ValueError, FileNotFoundError: also where the source leaves a part of the model without weights.
    """
    about: dict = {}
    if Path(path).exists():
        path = str(weights_file(path))
        if path.endswith(".safetensors"):  # the only kind of file that says what it is
            about = read_safetensors(Path(path))[1]
    if "architecture" in about:
        name, arguments = about["architecture"], about["arguments"]
    arguments = {**arguments, **({"img_size": img_size} if img_size else {})}
    model = create(name, "classifier", **arguments)
    fresh: list = []
    try:
        init_from(model, path, fresh.append)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(str(error).replace("init_from", "--checkpoint", 1)) from None
    if fresh:
        raise ValueError(
            f"{path} does not hold all of {name}: {'; '.join(f.removeprefix('init_from: ') for f in fresh)}"
        )
    return model.eval(), dict(name=name, arguments=arguments, classes=about.get("classes"), weights=path)


def init_from(model: nn.Module, source: str, say: Callable[[str], None] = print) -> bool:
    """Load weights into a new model: a run, a file that `load_checkpoint` reads, or the pretrained weights of a timm name.

    The head or label table is made anew for another class count, position tables are resized or made anew for another
    image size, and routers start fresh where the source has none; each is named through `say`.

    Returns:
        whether routers start fresh.

    Raises:
        ValueError, FileNotFoundError: for a source that does not exist or does not fit.
    """
    if Path(source).exists():
        state = read_tensors(weights_file(source))
    elif timm.is_model(source.split(".")[0]):
        try:
            state = timm.create_model(source, pretrained=True).state_dict()
        except (RuntimeError, OSError) as error:  # no weights are named for it, or they cannot be fetched
            raise ValueError(f"init_from {source}: {str(error).splitlines()[0]}") from None
    else:
        raise FileNotFoundError(f"init_from {source}: neither a run, a file of weights, nor a registered model name")
    state = model.checkpoint_filter(state, model)
    own = model.state_dict()
    for name in [n for n in state if n in own and state[n].shape != own[n].shape]:
        if not name.startswith(REMADE):
            raise ValueError(
                f"init_from {source}: {name} has shape {list(state[name].shape)}, the model needs {list(own[name].shape)}"
            )
        say(f"init_from: {name} is made anew, {list(state[name].shape)} -> {list(own[name].shape)}")
        del state[name]
    missing, unexpected = model.load_state_dict(state, strict=False)
    lost = [n for n in missing if ".router." not in n and not n.startswith(REMADE)]
    if lost or unexpected:
        raise ValueError(f"init_from {source} does not fit: missing {lost[:5]}, unexpected {list(unexpected)[:5]}")
    routers = sum(".router." in n for n in missing)
    if routers:
        say(f"init_from: {routers} router tensors start fresh")
    return routers > 0


def load_checkpoint(model: nn.Module, path: Union[str, Path]) -> nn.Module:
    """Load published or own weights into a model, whatever their layout.

    Reads .safetensors, PyTorch's .pt, .pth and .bin (tensors and argparse.Namespace only, no other pickled objects), the
    .npz of the original ViTs, and the folder of a run, a diffusers model or a pipeline. An EMA is preferred where the file
    holds one. Layouts: ours; timm's ViTs; official TransNeXt and MoH-ViT; official DiT and MoH-DiT; diffusers' DiT, whose
    outputs a model with compat="diffusers" has. Weights of a dense model leave MoH's routers at zero.

    Returns:
        the model.

    Raises:
        FileNotFoundError, ValueError: naming the file, and what does not fit.
    """
    file = weights_file(str(path))
    if file.suffix == ".npz" and isinstance(model, MoHVisionTransformer) and file.is_file():
        model.load_pretrained(str(file))
        return model
    state = read_tensors(file)
    try:
        if hasattr(model, "checkpoint_filter"):
            state = zero_missing_routers(model.checkpoint_filter(state, model), model)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    own = model.state_dict()
    wrong = [n for n in state if n in own and state[n].shape != own[n].shape]
    if wrong:
        name = wrong[0]
        raise ValueError(f"{file}: {name} has shape {list(state[name].shape)}, the model needs {list(own[name].shape)}")
    missing, unexpected = [n for n in own if n not in state], [n for n in state if n not in own]
    if missing or unexpected:
        raise ValueError(
            f"{file} does not fit {type(model).__name__}: "
            f"{len(missing)} tensors are missing {missing[:3]}, {len(unexpected)} are unexpected {unexpected[:3]}"
        )
    model.load_state_dict(state)
    return model


def read_tensors(file: Path) -> Dict[str, Tensor]:
    """The state dict in a .safetensors, .pt or .pth file.

    Raises:
        ValueError, FileNotFoundError: naming the file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    return read_safetensors(file)[0] if file.suffix == ".safetensors" else read_pickled_tensors(file)


def read_pickled_tensors(file: Path) -> Dict[str, Tensor]:
    """The state dict in a .pt or .pth file; its EMA where it has one.

    Raises:
        ValueError: naming the file, if it holds anything but tensors, plain containers and argparse.Namespace.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{file}: not a readable file of tensors ({reason})") from None
    for key in STATE_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{file}: holds no state dict, neither itself nor under {', '.join(STATE_KEYS)}")
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in content.items()}


def weights_file(path: str, weights: str = "ema") -> Path:
    """The file that `path` means: itself, or in the folder of a run its EMA (where it has one) or its model.

    The folders of diffusers, of a model or a pipeline with a transformer, hold one kind of weights.

    Raises:
        FileNotFoundError: for a folder without them.
    """
    file = Path(path)
    if not file.is_dir():
        return file
    names = ["ema.safetensors", "model.safetensors"] if weights == "ema" else ["model.safetensors"]
    theirs = [
        f"{place}diffusion_pytorch_model.{kind}" for kind in ("safetensors", "bin") for place in ("", "transformer/")
    ]
    found = [file / n for n in [*names, *theirs] if (file / n).exists()]
    if not found:
        raise FileNotFoundError(f"{path} holds no {' or '.join(names)}; a run writes them at its checkpoints")
    return found[0]


def _json(text: str):
    """Ours is JSON, others' metadata are any strings."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_safetensors(file: Path) -> Tuple[Dict[str, Tensor], dict]:
    """Tensors and JSON metadata of a .safetensors file.

    Raises:
        ValueError, FileNotFoundError: naming the file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        with safe_open(file, "pt") as opened:
            state = {name: opened.get_tensor(name) for name in opened.keys()}
            metadata = {k: _json(v) for k, v in (opened.metadata() or {}).items()}
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file}: not a readable .safetensors file of a run ({error})") from None
    return state, metadata
