"""The gates of MAE in a model, and what is trained of it (Peng 2020)."""

from typing import List

from torch import nn

from moh_vision.attention import HeadMixtureAttention
from moh_vision.attention.routers.mae import MAERouter


def mae_routers(model: nn.Module) -> List[MAERouter]:
    """Those of all layers, in the order of `model.modules()`; empty for other models."""
    return [module for module in model.modules() if isinstance(module, MAERouter)]


def train_only(model: nn.Module, which: str) -> None:
    """Freeze all parameters but a fine-tuning set (Peng 2020, section 5.2).

    Args:
        which: "all": nothing is frozen (FTALL); "gates" (FTG); or "gates_and_outputs": with them the matrix of every
            attention's output projection, without its bias (FTG+).

    Raises:
        ValueError: for a model without gates, or whose gates are not used.
    """
    if which == "all":
        return
    if not any(router.mode == "soft" for router in mae_routers(model)):
        raise ValueError(f"train_only {which}: the model has no gates of MAE; it needs router mae with mode soft")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, MAERouter):
            module.requires_grad_(True)
        elif isinstance(module, HeadMixtureAttention) and which == "gates_and_outputs":
            module.proj.weight.requires_grad_(True)
