"""Register our model families with timm; read the head budgets that were saved with pretrained weights."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timm.models import register_model, resolve_pretrained_cfg
from torch import nn

from moh_vision.models.head_budgets import recorded_budget, set_head_budget
from moh_vision.models.weight_files import read_metadata


def register_variants(
    module: str, create: Callable[..., nn.Module], variants: dict[str, tuple[str, dict]]
) -> None:
    """Register a family's models with timm, as functions of its module.

    If pretrained weights come with a recorded budget, the model is built with that budget, and the caller's
    head_budget, if any, is then set by `set_head_budget`.

    Args:
        module: name of the family's module; timm groups models by its last part.
        create: called with variant, pretrained, the variant's arguments, and the caller's keywords.
        variants: name -> (docstring, arguments).
    """

    def register(variant: str, description: str, arguments: dict) -> None:
        def entrypoint(pretrained: bool = False, **kwargs) -> nn.Module:
            trained = {}
            if pretrained:
                trained = trained_budget(variant, kwargs)
            if not trained:  # new weights, or weights without a recorded budget
                return create(variant, pretrained, arguments, **kwargs)
            wanted = {}
            for name in ("head_budget", "mlp_budget"):
                if name in trained and kwargs.get(name) not in (None, trained[name]):
                    wanted[name] = kwargs[name]
            model = create(variant, pretrained, arguments, **{**kwargs, **trained})
            if wanted:
                set_head_budget(model, wanted.get("head_budget"), mlp=wanted.get("mlp_budget"))
            return model

        entrypoint.__name__ = entrypoint.__qualname__ = variant
        entrypoint.__module__ = module
        entrypoint.__doc__ = description
        entrypoint.variant_arguments = arguments  # read by `creation.arguments_of`
        setattr(sys.modules[module], variant, register_model(entrypoint))

    for variant, (description, arguments) in variants.items():
        register(variant, description, arguments)


def image_cfg(**kwargs) -> dict:
    """Return a timm configuration for ImageNet, 224 x 224 images and 1000 classes; kwargs: other entries."""
    common = dict(
        num_classes=1000, input_size=(3, 224, 224), interpolation="bicubic", fixed_input_size=True
    )
    return dict(common, classifier="head", license="apache-2.0", **kwargs)


def trained_budget(variant: str, kwargs: dict) -> dict[str, Any]:
    """Return the head budget and its shape as recorded with a variant's pretrained weights; {} if not recorded.

    `timm.models.save_for_hf` records them in config.json, a run in the metadata of its files.

    kwargs: the keywords of the timm entrypoint, which may name other weights than the variant's.
    """
    saved = recorded_budget(kwargs.get("pretrained_model_args"))
    if saved:
        return saved
    cfg = resolve_pretrained_cfg(
        variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay")
    )
    if cfg.file is None or not str(cfg.file).endswith(".safetensors"):
        return {}
    metadata = read_metadata(Path(cfg.file))
    return recorded_budget(metadata.get("arguments"))
