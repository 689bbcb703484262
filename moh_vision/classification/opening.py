"""A classifier and what must be done to its images, for `moh_vision.export`."""

from pathlib import Path
from typing import Optional, Tuple

from timm.models._hub import load_model_config_from_path
from torch import nn

from moh_vision.classification.config import ClsConfig
from moh_vision.classification.predict import class_names
from moh_vision.classification.validate import open_classifier
from moh_vision.engine.command_line import parse_config
from moh_vision.engine.commands import reason_of
from moh_vision.models.weights import FETCHING, to_validate


def open_prepared(path: str, name: Optional[str] = None) -> Tuple[nn.Module, dict]:
    """The classifier that validate.py opens, and what it does to an image.

    Args:
        path: a run, or a folder that timm has saved; with a name other weights, or equal to it: those that timm has for it.
        name: of a model.

    Returns:
        (model in eval mode, dict(architecture, classes, weights, input_size [channels, height, width], mean, std, interpolation,
        crop_pct, crop_mode))

    Raises:
        ValueError, FileNotFoundError: in one line, see `open_classifier`.
    """
    if name is None and (Path(path) / "config.json").is_file():
        return _saved_by_timm(path)
    argv = ["--checkpoint", path, *(["--model.name", name] if name else [])]
    config, flags = parse_config(ClsConfig, argv, "export", to_validate=True)
    model, about = open_classifier(config, flags)
    size, options = [model.in_chans, *[about["img_size"]] * 2], config.data.eval_options(model.pretrained_cfg)
    return model, _prepared(model, about, model.pretrained_cfg, size, **options)


def _saved_by_timm(folder: str) -> Tuple[nn.Module, dict]:
    """`open_prepared` of what `timm.models.save_for_hf` wrote, as `moh_vision.publish` does."""
    try:
        cfg, name, arguments = load_model_config_from_path(folder)
        for key in FETCHING:
            if key in arguments:
                raise ValueError(f"{key} in its config.json would read other weights than its own")
        model, about = to_validate(folder, name, {"num_classes": cfg["num_classes"], **arguments})
        about["classes"] = cfg.get("label_names")
        return model, _prepared(model, about, cfg, list(cfg["input_size"]), cfg["crop_pct"], cfg["crop_mode"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # files of others may hold anything
        raise ValueError(f"{folder}: not a classifier that timm has saved ({reason_of(error)})") from None


def _prepared(model: nn.Module, about: dict, cfg: dict, input_size: list, crop_pct: float, crop_mode: str) -> dict:
    return dict(
        architecture=about["name"],
        classes=class_names(about["classes"], model.num_classes),
        weights=str(about["weights"]),
        input_size=input_size,
        mean=list(cfg["mean"][: model.in_chans]),
        std=list(cfg["std"][: model.in_chans]),
        interpolation=cfg["interpolation"],
        crop_pct=crop_pct,
        crop_mode=crop_mode,
    )
