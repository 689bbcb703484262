"""MAE's gates in a model, and which parameters to train (Peng 2020)."""

from torch import nn

from moh_vision.attention import HeadMixtureAttention
from moh_vision.attention.routers.mae import MAERouter


def mae_routers(model: nn.Module) -> list[MAERouter]:
    """Return all MAE routers in the order of `model.modules()`; often none."""
    return [module for module in model.modules() if isinstance(module, MAERouter)]


def train_only(model: nn.Module, which: str) -> None:
    """Freeze all parameters but a fine-tuning set (Peng 2020, section 5.2).

    Args:
        which: "all": nothing is frozen (FTALL); "gates" (FTG); or "gates_and_outputs": also the matrix (without
            bias) of every attention's output projection (FTG+).
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
