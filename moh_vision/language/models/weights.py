"""Weights of earlier runs for new text models."""

from pathlib import Path
from typing import Callable, List

from torch import nn
from transformers import AutoConfig

from moh_vision.engine.io import run_of
from moh_vision.language.models.create import MODELS
from moh_vision.language.models.pretrained import model_as_saved
from moh_vision.models.weight_files import read_safetensors, weights_file


def text_from_run(file: Path) -> nn.Module:
    """The model of a run of train_text.py, in eval mode.

    Args:
        file: .safetensors of the run, or of one of its checkpoints.

    Raises:
        ValueError, FileNotFoundError: naming the file, for weights that are not of the model in the run's config.json.
    """
    run = run_of(file)
    about = AutoConfig.from_pretrained(run, trust_remote_code=False)
    model = MODELS[type(about)](about) if type(about) in MODELS else model_as_saved(run)
    fresh: List[str] = []
    init_text(model, str(file), read_safetensors(file, lambda name: False)[1]["vocabularies"], fresh.append)
    if fresh:
        raise ValueError(f"{file} does not hold all weights of the model in {run / 'config.json'}")
    return model.eval()


def init_text(model: nn.Module, source: str, vocabularies: List[str], say: Callable[[str], None] = print) -> None:
    """Load the weights of a run; routers start fresh where it has none.

    Args:
        model: a text model.
        source: folder of a run, or its .safetensors file.
        vocabularies: fingerprints of those the model is to be used with.
        say: told of what starts fresh.

    Raises:
        ValueError, FileNotFoundError: naming the file, for other shapes, or another vocabulary.
    """
    file = weights_file(source)
    state, about = read_safetensors(file)
    theirs = about.get("vocabularies")
    if theirs is not None and theirs != vocabularies:
        raise ValueError(
            f"init_from {source}: it was trained with another vocabulary; set data.tokenizer to that of the run"
        )
    own = model.state_dict()
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            raise ValueError(
                f"init_from {source}: {name} has shape {list(tensor.shape)}, the model needs {list(own[name].shape)}"
            )
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if name not in tied]
    lost = [name for name in missing if ".router." not in name]
    if lost or unexpected:
        raise ValueError(f"init_from {source} does not fit: missing {lost[:5]}, unexpected {unexpected[:5]}")
    if missing:
        say(f"init_from: {len(missing)} router tensors start fresh")
