"""A classifier and what must be done to its images, for `moh_vision.export`."""

from typing import Optional, Tuple

from torch import nn

from moh_vision.classification.config import OpenedClsConfig
from moh_vision.classification.predict import class_names
from moh_vision.classification.validate import open_classifier
from moh_vision.engine.command_line import parse_config

PREPARED = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


def open_prepared(path: str, name: Optional[str] = None) -> Tuple[nn.Module, dict]:
    """Open the classifier that validate.py opens, in eval mode, and say how its images are prepared.

    `path` is a run or a folder that timm has saved; with a model's `name` other weights, or equal to
    it: those that timm has for it.
    """
    argv = ["--checkpoint", path, *(["--model.name", name] if name else [])]
    model, about = open_classifier(parse_config(OpenedClsConfig, argv, "export"))
    classes = class_names(about["classes"], model.num_classes)
    named = dict(architecture=about["name"], classes=classes, weights=str(about["weights"]))
    return model, {**named, **{key: model.pretrained_cfg[key] for key in PREPARED}}
