"""Freeze what a fine-tuning does not train (Peng 2020)."""

from torch import nn

from moh_vision.attention import HeadMixtureAttention
from moh_vision.attention.model_heads import routers_of


def train_only(model: nn.Module, which: str) -> None:
    """Freeze all parameters but a fine-tuning set (Peng 2020, section 5.2).

    Args:
        which: what stays trainable. "all": all parameters (FTALL); "gates": gates that learn in turns with the heads, as
            MAE's (FTG); "gates_and_outputs": also the weight, without bias, of every attention's output projection (FTG+).
    """
    if which == "all":
        return
    gates = [router for router in routers_of(model) if router.learns_in_turns]
    if not gates:
        raise ValueError(
            f"train_only {which}: the model has no gates that learn in turns, as MAE's do; it needs router mae with mode soft"
        )
    model.requires_grad_(False)
    for router in gates:
        router.requires_grad_(True)
    if which == "gates_and_outputs":
        for module in model.modules():
            if isinstance(module, HeadMixtureAttention):
                module.proj.weight.requires_grad_(True)
