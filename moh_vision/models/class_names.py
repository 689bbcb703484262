"""Names of the classes that weights were trained on."""

import json
from pathlib import Path
from typing import Any

from moh_vision.engine.commands import reason_of
from moh_vision.models.weight_files import read_safetensors


def listed(names: Any, where: str) -> list[str] | None:
    """Return class names in order, from a list or timm's mapping by number; None without names.

    Args:
        where: place of the names, for messages.
    """
    if isinstance(names, dict):
        names = [names.get(str(c)) for c in range(len(names))]
    if not names:
        return None
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{where} is no list of names")
    return list(names)


def saved_with(file: Path) -> list[str] | None:
    """Read the class names saved with weights by a run, timm or our pipeline; None without names."""
    if file.suffix == ".safetensors":
        names = read_safetensors(file, lambda name: False)[1].get("classes")
        if names:
            return listed(names, f"{file}: classes in its metadata")
    timms, pipeline = file.parent / "config.json", file.parent.parent / "model_index.json"
    names = listed(_read(timms).get("label_names"), f"{timms}: label_names")
    # diffusers' DiTPipeline names ImageNet's classes in its own words.
    if not names and "MoHDiTPipeline" in str(_read(pipeline).get("_class_name")):
        names = listed(_read(pipeline).get("id2label"), f"{pipeline}: id2label")
    return names


def _read(file: Path) -> dict:
    try:
        return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {reason_of(error)}") from None
