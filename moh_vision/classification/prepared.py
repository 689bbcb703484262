"""What validation does to an image, in the pretrained_cfg of a classifier."""

from __future__ import annotations

from typing import Optional, Sequence

from torch import nn

from moh_vision.classification.config import EvalDataConfig
from moh_vision.engine.commands import reason_of


def prepare(model: nn.Module, data: EvalDataConfig, img_size: Optional[int], classes: Optional[Sequence[str]]) -> None:
    """Write what validation does to an image into the model's pretrained_cfg, which `validation_transform` reads.

    `img_size` or `classes` None: as the pretrained_cfg has them.
    """
    cfg, channels = dict(model.pretrained_cfg), model.in_chans
    side = [img_size] * 2 if img_size else cfg["input_size"][1:]
    cfg.update(num_classes=model.num_classes, input_size=(channels, *side), **data.eval_options(cfg))
    cfg.update(mean=tuple(cfg["mean"][:channels]), std=tuple(cfg["std"][:channels]))
    cfg["label_names"] = cfg.get("label_names") if classes is None else list(classes)
    model.pretrained_cfg = model.default_cfg = cfg


def prepared_as_trained(model: nn.Module, about: dict) -> nn.Module:
    """`prepare` the model of a run as its validation did when the weights were written.

    `about` is described at `models.weights.from_run`.
    """
    try:
        saved = about.get("config", {}).get("data", {})
        data = EvalDataConfig(**{name: saved[name] for name in ("augment", "crop_pct", "crop_mode") if name in saved})
        prepare(model, data, about["arguments"].get("img_size"), about.get("classes"))
    except (TypeError, ValueError, AttributeError) as error:  # files of others may hold anything
        raise ValueError(
            f"{about['weights']}: data in its metadata are not those of a run ({reason_of(error)})"
        ) from None
    return model
