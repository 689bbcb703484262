"""Find MAE's routers in a model, and freeze what a fine-tuning does not train (Peng 2020)."""

from torch import nn

from moh_vision.attention import HeadMixtureAttention
from moh_vision.attention.routers.mae import MAERouter


def mae_routers(model: nn.Module) -> list[MAERouter]:
    """Return all MAE routers of a model in the order of `model.modules()`; [] for other models."""
    return [module for module in model.modules() if isinstance(module, MAERouter)]


def train_only(model: nn.Module, which: str) -> None:
    """Freeze all parameters but a fine-tuning set (Peng 2020, section 5.2).

    Args:
        which: what stays trainable. "all": all parameters (FTALL); "gates": MAE's gates (FTG);
            "gates_and_outputs": also the weight, without bias, of every attention's output projection (FTG+).
    """
    if which == "all":
        return
    if not any(router.mode == "soft" for router in mae_routers(model)):
        raise ValueError(
            f"train_only {which}: the model has no gates of MAE; it needs router mae with mode soft"
        )
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, MAERouter):
            module.requires_grad_(True)
        elif isinstance(module, HeadMixtureAttention) and which == "gates_and_outputs":
            module.proj.weight.requires_grad_(True)
